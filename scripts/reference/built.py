"""``docs/reference``: git does not keep its pages; they are built again after each change of what they are made from."""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "reference"
NAMES = ("commands.md", "settings.md", "files.md", "environment.md", "http.md", "metrics.md", "llm-d.md")
SOURCES = ("src", "packages", "scripts/reference")


def built() -> Path:
    """Return the folder, with pages that are up to date. Processes that ask at the same time build once."""
    FOLDER.mkdir(exist_ok=True)
    stamp = FOLDER / ".built-from"
    with (FOLDER / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        now = state_of_sources()
        whole = stamp.exists() and all((FOLDER / name).exists() for name in NAMES)
        if not whole or stamp.read_text(encoding="utf-8") != now:
            # In its own process: metrics of all commands cannot be registered in one that runs tests of them.
            subprocess.run([sys.executable, "-m", "scripts.reference"], cwd=ROOT, check=True, capture_output=True)
            stamp.write_text(now, encoding="utf-8")
    return FOLDER


def page(name: str) -> str:
    """Return the text of a page that is up to date."""
    return (built() / name).read_text(encoding="utf-8")


def state_of_sources(root: Path = ROOT) -> str:
    """Return a digest of the paths, sizes and times of the files that declare what pages list."""
    found = sorted(path for folder in SOURCES for path in (root / folder).rglob("*.py"))
    states = ((path, path.stat()) for path in found)
    return hashlib.sha256(repr([(str(path), at.st_size, at.st_mtime_ns) for path, at in states]).encode()).hexdigest()
