"""What a simulation reports: one entry per rate, byte for byte the same for the same arguments and seed."""

from __future__ import annotations

from typing import Any

import msgspec

from tercet import __version__
from tercet.bench.simulated.run import Outcome
from tercet.bench.summary import Slo, Summary, summarize


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One run: ``rate`` in requests per second, the figures that ``tercet bench`` has, and what the engines did.

    ``fallbacks`` counts requests that one engine served after their program had failed, ``busy`` is the share of the
    engines' time in which a step ran, and ``counts`` are sums over all engines.
    """

    rate: float
    summary: Summary
    fallbacks: int
    busy: float
    counts: dict[str, int]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Runs of one program that differ in their rate. ``arguments`` repeat everything that the numbers depend on."""

    kind: str = "simulation"
    version: str = __version__
    program: str
    arguments: dict[str, Any]
    points: tuple[Point, ...]

    def to_json(self) -> bytes:
        """The report as indented JSON with a newline at its end."""
        return msgspec.json.format(msgspec.json.encode(self, order="sorted"), indent=2) + b"\n"


def point_of(rate: float, outcome: Outcome, slo: Slo | None) -> Point:
    """One run's figures."""
    summary = summarize(outcome.samples(), slo)
    return Point(
        rate=rate, summary=summary, fallbacks=outcome.fallbacks, busy=outcome.busy, counts=outcome.counts
    )  # fmt: skip


HEADINGS = ["rate", "done", "failed", "req/s", "TTFT ms", "p99", "TPOT ms", "p99", "JCT s", "p99", "busy"]


def table(report: Report) -> list[list[str]]:
    """A row for each point, under :data:`HEADINGS`: means and 99th percentiles."""
    return [_row(point) for point in report.points]


def _row(point: Point) -> list[str]:
    summary = point.summary
    cells = [f"{point.rate:g}", str(summary.completed), str(summary.failed), f"{summary.request_throughput:.2f}"]
    for found, scale, digits in ((summary.ttft, 1e3, 1), (summary.tpot, 1e3, 2), (summary.e2el, 1.0, 3)):
        cells += [f"{value * scale:.{digits}f}" for value in (found.mean, found.p99)] if found else ["-", "-"]
    return [*cells, f"{point.busy:.0%}"]
