"""Results as a table, a file, and a picture."""

from __future__ import annotations

import importlib
import os
import platform
from pathlib import Path
from typing import Any

import msgspec

from tercet import __version__
from tercet.bench.transfer.cases import KIB, MIB, Case, Result, Table
from tercet.bench.transfer.interference import Interference


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """One run: where it ran, and what was found. Times in seconds, ``idle_cores`` in cores."""

    version: str
    machine: str
    cpus: int
    results: list[Result]
    idle_cores: dict[str, float | str]
    interference: dict[str, Interference | str] = {}

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self)))


def report(table: Table, idle: dict[str, float | str], interference: dict[str, Interference | str]) -> Report:
    """Put a run together."""
    results = list(table.results.values())
    machine = f"{platform.system()} {platform.release()} {platform.machine()}, {_processor()}"
    return Report(__version__, machine, os.cpu_count() or 1, results, idle, interference)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"


def rows(table: Table) -> tuple[list[str], list[list[str]]]:
    """The table's head, and a line for each case: GB/s of every way."""
    head = ["chunk", "total", *table.ways]
    return head, [[*_label(case), *(_cell(table, way, case) for way in table.ways)] for case in table.cases]


def failures(table: Table) -> dict[str, str]:
    """Why ways could not be measured."""
    return {way: found.error for (way, _), found in table.results.items() if found.error is not None}


def _label(case: Case) -> tuple[str, str]:
    return f"{case.chunk_bytes / KIB:g} KiB", f"{case.total_bytes / MIB:g} MiB"


def _cell(table: Table, way: str, case: Case) -> str:
    rate = table.rate(way, case)
    return "-" if rate is None else f"{rate:.2f}"


def draw(table: Table, path: Path) -> None:
    """A panel for each total: size of chunks against rate, a line for each way.

    Raises ``ImportError`` without matplotlib.
    """
    importlib.import_module("matplotlib").use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")  # untyped, and an extra
    totals = sorted({case.total_bytes for case in table.cases})
    figure, panels = pyplot.subplots(1, len(totals), figsize=(4.5 * len(totals), 4), sharey=True, squeeze=False)
    for panel, total in zip(panels[0], totals, strict=True):
        _panel(panel, table, total)
    panels[0][0].set_ylabel("GB/s")
    panels[0][-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def _panel(panel: Any, table: Table, total: int) -> None:
    for way in table.ways:
        found = [(case, table.rate(way, case)) for case in table.cases if case.total_bytes == total]
        points = [(case.chunk_bytes / KIB, rate) for case, rate in found if rate is not None]
        if points:
            panel.plot(*zip(*points, strict=True), marker="o", label=way)
    panel.set_xscale("log", base=2)
    panel.set_xlabel("chunk, KiB")
    panel.set_title(f"{total / MIB:g} MiB in all")
    panel.grid(alpha=0.3)
