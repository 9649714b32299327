"""Which software, on which machine: what a number needs to be compared with another one."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from tercet import __version__

PACKAGES = ("aiohttp", "msgspec", "numpy", "uvloop", "tokenizers", "transformers")


def versions() -> dict[str, str]:
    """Tercet, Python and the libraries that take part in a measurement."""
    found = {"tercet": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def command_line(argv: Sequence[str], secret: Sequence[str]) -> tuple[str, ...]:
    """``argv`` with the values of ``secret`` headers left out."""
    found: list[str] = []
    for word in argv:
        flag = "--header=" if word.startswith("--header=") else ""
        key, equals, _ = word.removeprefix(flag).partition("=")
        found.append(f"{flag}{key}=..." if equals and key.lower() in secret else word)
    return tuple(found)


def machine() -> dict[str, Any]:
    """The measuring machine: CPU, cores, memory (GiB), system and how loaded it was (1-minute average)."""
    return {
        "cpu": _first_field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "system": platform.platform(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def now() -> str:
    """The time of day, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _memory_gib() -> float | None:
    total = _first_field("/proc/meminfo", "MemTotal")
    return round(int(total.split()[0]) / 2**20, 1) if total else None


def _first_field(file: str, name: str) -> str | None:
    try:
        lines = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)
