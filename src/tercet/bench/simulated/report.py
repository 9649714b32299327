"""What a simulation reports: one point per rate, byte for byte the same for the same arguments and seed."""

from __future__ import annotations

from typing import Any

import msgspec

from tercet import __version__
from tercet.bench.result import BenchResult
from tercet.bench.result import Point as BenchPoint
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

    label: str
    program: str
    arguments: dict[str, Any]
    seed: int
    model: str
    points: tuple[Point, ...]

    def to_json(self) -> bytes:
        """The report as a file that ``tercet bench report`` draws, beside real runs or alone.

        It carries no time of day, so that the same simulation gives the same bytes.
        """
        result = BenchResult(
            source="sim",
            created="simulation",
            config=self.arguments,
            seed=self.seed,
            versions={"tercet": __version__},
            target={"model": self.model},
            points=tuple(self._bench_point(point) for point in self.points),
        )
        return msgspec.json.format(msgspec.json.encode(result, order="sorted"), indent=1) + b"\n"

    def _bench_point(self, point: Point) -> BenchPoint:
        engines = {"busy": point.busy, "fallbacks": point.fallbacks, **point.counts}
        return BenchPoint(
            label=self.label,
            program=self.program,
            request_rate=point.rate,
            metrics={**point.summary.flat(), **engines},
            errors=point.summary.errors,
        )


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
