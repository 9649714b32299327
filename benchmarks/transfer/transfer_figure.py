"""The figure of a transfer run: rate over chunk size, with a row for each kind of way and a column for each total."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.transfer.cases import KIB, MIB, Case, Table
from benchmarks.transfer.measurement import BACKENDS

from tercet_lab.drawing import Picture, picture

COLUMN, ROW, MARGIN, NARROWEST = 1.55, 1.65, 1.4, 4.2
LIMIT = "memcpy"
SOCKETS, OURS, DIRECT = "plain sockets", "whole sends of Tercet", "libraries alone"


def draw_transfer(table: Table, file: Path, measured: str) -> None:
    """Draw medians and quartiles over the rounds.

    ``measured`` is the text at the bottom, with machine and date. Raise :class:`~tercet.protocol.BadRequest` if
    ``file`` cannot be written.
    """
    kinds = _by_kind(table)
    totals = sorted({case.total_bytes for case in table.cases})
    with picture(file, "--plot", max(NARROWEST, MARGIN + COLUMN * len(totals)), 1.0 + ROW * len(kinds)) as drawn:
        panels: Any = drawn.canvas.subplots(len(kinds), len(totals), sharex=True, sharey=True, squeeze=False)
        for row, (kind, ways) in zip(panels, kinds.items(), strict=True):
            for panel, total in zip(row, totals, strict=True):
                _panel(drawn, panel, table, [LIMIT, *ways], total)
            row[0].set_ylabel("GB/s")
            handles, labels = row[0].get_legend_handles_labels()
            row[-1].legend(handles, labels, title=kind, loc="center left", bbox_to_anchor=(1.02, 0.5),
                           alignment="left", title_fontsize=7.5)  # fmt: skip
        drawn.logarithmic(panels[0][0])
        for panel, total in zip(panels[0], totals, strict=True):
            panel.set_title(f"{total / MIB:g} MiB in all")
        for panel in panels[-1]:
            panel.set_xlabel("chunk, KiB")
        drawn.canvas.suptitle("KV from one process to another: rate by size of chunks", fontsize=9.5)
        rounds = max((len(found.seconds) for found in table.results.values()), default=0)
        drawn.footer(f"Medians of {rounds} rounds; bars: quartiles. GB/s: 10^9 bytes per second.\n{measured}")


def _by_kind(table: Table) -> Mapping[str, Sequence[str]]:
    """Return the measured ways by kind, without the upper limit and without empty kinds."""
    kinds: dict[str, list[str]] = {SOCKETS: [], OURS: [], DIRECT: []}
    for way in table.ways:
        if way != LIMIT and any(table.rate(way, case) is not None for case in table.cases):
            kinds[_kind(way)].append(way)
    return {kind: ways for kind, ways in kinds.items() if ways} or {SOCKETS: []}


def _kind(way: str) -> str:
    return DIRECT if way.endswith(" direct") else OURS if way in BACKENDS else SOCKETS


def _panel(drawn: Picture, panel: Any, table: Table, ways: Sequence[str], total: int) -> None:
    cases = sorted((case for case in table.cases if case.total_bytes == total), key=lambda case: case.chunk_bytes)
    for index, way in enumerate(ways):
        found = [(case, rates) for case in cases if (rates := _rates(table, way, case))]
        if not found:
            continue
        middle = [statistics.median(rates) for _, rates in found]
        errors = [[at - _quartiles(rates)[0] for at, (_, rates) in zip(middle, found, strict=True)],
                  [_quartiles(rates)[1] - at for at, (_, rates) in zip(middle, found, strict=True)]]  # fmt: skip
        panel.errorbar([case.chunk_bytes / KIB for case, _ in found], middle, yerr=errors, elinewidth=0.7, label=way,
                       **_looks(drawn, way, index))  # fmt: skip
    panel.set_xscale("log", base=2)
    chunks = sorted({case.chunk_bytes / KIB for case in table.cases})
    panel.set_xticks(chunks, [f"{chunk:g}" for chunk in chunks], fontsize=7)
    panel.minorticks_off()


def _looks(drawn: Picture, way: str, index: int) -> dict[str, Any]:
    """Return the style of a way. A library that is called directly has the style of the backend that uses it."""
    if way == LIMIT:
        return {"color": drawn.palette.faint, "linestyle": "--", "marker": ""}
    name = way.removesuffix(" direct")
    return drawn.series(BACKENDS.index(name) if name in BACKENDS else index - 1)


def _rates(table: Table, way: str, case: Case) -> list[float]:
    """Return the rates of a way, one for each round, in 10^9 bytes per second."""
    found = table.results.get((way, case))
    return [case.moved_bytes / seconds / 1e9 for seconds in found.seconds] if found is not None else []


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high
