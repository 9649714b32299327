"""The results of a simulation at one or several rates, and their report. Equal seeds give equal bytes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tercet import __version__
from tercet.router.page.records import Frame
from tercet_lab.bench.results import (
    BenchResult,
    Distribution,
    Point,
    Summary,
    achieved,
    enough,
    summarize,
    three_digits,
)
from tercet_lab.bench.simulated.moving_fleet import MoveTotals, VirtualFlip
from tercet_lab.bench.simulated.virtual_run import Outcome, PlannedRun
from tercet_lab.sim.kv_usage import KVImbalance
from tercet_lab.slo import Slo
from tercet_lab.tables import Requests


class SimulatedPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one run: the metrics of ``tercet bench``, and the engines' counters.

    ``rate`` is in requests per second; None means a trace with its recorded times. ``fallbacks`` counts requests that
    one engine served after their program had failed; ``retries`` counts all attempts after a failure, fallbacks
    included, as the router's metrics do. ``busy`` is the share of the engines' time in which a step ran; ``counts`` are
    sums over all engines. ``imbalance`` is None without samples. ``engine_hours`` is the time for which engines were
    paid.
    """

    rate: float | None
    summary: Summary
    fallbacks: int
    retries: int
    busy: float
    counts: dict[str, int]
    moves: MoveTotals
    imbalance: KVImbalance | None
    flips: tuple[VirtualFlip, ...] = ()
    timeline: tuple[Frame, ...] = ()
    planned: PlannedRun | None = None
    engine_hours: float = 0.0
    classes: dict[str, float] = {}

    def metrics(self) -> dict[str, float | int | None]:
        """Return all values by name: those of :meth:`Summary.flat`, and the engines' counters."""
        engines: dict[str, float] = {"busy": self.busy, "fallbacks": self.fallbacks, "retries": self.retries}
        engines |= self.counts
        engines |= {f"attainment_{name}": share for name, share in self.classes.items()}
        if self.flips:
            engines["role_flips"] = len(self.flips)
            engines["engines_flipped"] = sum(len(each.engines) for each in self.flips)
        if self.planned is not None:
            summary = self.summary
            engines |= self.planned.flat(round((summary.attainment or 0.0) * (summary.completed + summary.failed)))
        engines |= self.moves.flat() | (self.imbalance.flat() if self.imbalance is not None else {})
        return {**self.summary.flat(), **engines}


class SimulationReport(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of one program at several rates. ``arguments`` has everything that the numbers depend on."""

    label: str
    program: str
    arguments: dict[str, Any]
    seed: int
    model: str
    points: tuple[SimulatedPoint, ...]

    def to_json(self) -> bytes:
        """Return the report as a file for ``tercet bench report``, which draws it alone or together with real runs.

        It contains no time of day, so the same simulation gives the same bytes.
        """
        points = tuple(self._bench_point(point) for point in self.points)
        text = bench_file(self.arguments, self.seed, __version__, {"model": self.model}, points)
        # By the name of each run on the web page.
        timelines = {
            shown(point.rate) + ("" if point.rate is None else " requests/s"): point.timeline
            for point in self.points
            if point.timeline
        }
        if timelines:  # a timeline has many numbers, so it is written on one line
            text = text.removesuffix(b"\n}\n") + b',\n "timelines": ' + msgspec.json.encode(timelines) + b"\n}\n"
        return text

    def _bench_point(self, point: SimulatedPoint) -> Point:
        at_once = point.rate is not None and math.isinf(point.rate)  # JSON has no infinity
        return Point(
            label=self.label,
            program=self.program,
            request_rate=None if at_once else point.rate,
            concurrency=point.summary.completed + point.summary.failed if at_once else None,
            metrics=point.metrics(),
            errors=point.summary.errors,
        )


def bench_file(
    config: Mapping[str, Any], seed: int, version: str, target: Mapping[str, Any], points: tuple[Point, ...]
) -> bytes:
    """Return a simulation's file for ``tercet bench report``."""
    result = BenchResult(
        source="sim", created="simulation", config=config, seed=seed, versions={"tercet": version}, target=target,
        points=points,
    )  # fmt: skip
    return msgspec.json.format(msgspec.json.encode(result, order="sorted"), indent=1) + b"\n"


def point_of(rate: float | None, outcome: Outcome, slo: Slo | None, samples: Requests | None = None) -> SimulatedPoint:
    """Return the results of one run; ``slo`` (None: no limits) defines goodput, over ``samples`` of its requests."""
    samples = outcome.requests if samples is None else samples
    summary = summarize(samples, slo)
    return SimulatedPoint(
        rate=rate, summary=summary, fallbacks=outcome.fallbacks, retries=outcome.retries, busy=outcome.busy,
        counts=outcome.counts, moves=outcome.moves, imbalance=outcome.imbalance,
        flips=tuple(outcome.flips), timeline=tuple(outcome.timeline),
        classes=samples.attainment(slo) if slo is not None and outcome.objectives.classes else {},
    )  # fmt: skip


def made_good(outcome: Outcome) -> str:
    """Return a warning about retries: without it, readers would think that the program served all requests."""
    requests, retries, fallbacks = len(outcome.requests), outcome.retries, outcome.fallbacks
    said = f"warning: {retries} attempts after failures; one engine served {fallbacks} of {requests} requests, because "
    return f"{said}their program had failed; the first failure: {outcome.first_retried}"


FIGURE_HEADINGS = ["TTFT, ms", "P99, ms", "TPOT, ms", "P99, ms", "JCT, s", "P99, s", "busy"]
MOVE_HEADINGS = ["preempted", "imbalance", "P95", "moved", "pause, ms", "P99, ms"]
NONE = "-"


def headings(report: SimulationReport) -> list[str]:
    """Return the headings of the columns of :func:`table`."""
    return ["rate", "done", "failed", "retries", "fallbacks", "requests/s", *figure_headings(report.points)]


def figure_headings(points: Sequence[SimulatedPoint]) -> list[str]:
    """Return the headings for :func:`figures_of`; columns of moves only if a point has moves."""
    return FIGURE_HEADINGS + (MOVE_HEADINGS if _any_moves(points) else [])


def _any_moves(points: Sequence[SimulatedPoint]) -> bool:
    return any(point.moves.outcomes for point in points)


def table(report: SimulationReport) -> list[list[str]]:
    """Return a row for each point: means and 99th percentiles."""
    rows = list[list[str]]()
    for point in report.points:
        counts = (point.summary.completed, point.summary.failed, point.retries, point.fallbacks)
        rate = three_digits(achieved(point.summary.flat(), "throughput") or 0.0)
        rows.append([shown(point.rate), *map(str, counts), rate, *figures_of([point], report.points)])
    return rows


def shown(rate: float | None) -> str:
    """Return a rate as tables show it."""
    return "recorded" if rate is None else f"{rate:g}"


def figures_of(runs: Sequence[SimulatedPoint], beside: Sequence[SimulatedPoint]) -> list[str]:
    """Return the means over runs that differ only in their seeds, one per heading of :func:`figure_headings`.

    ``beside`` are all runs of the table, which decide the columns. A percentile is not shown if a run has too few
    requests for it.
    """
    cells = list[str]()
    for name, scale in (("ttft", 1e3), ("tpot", 1e3), ("e2el", 1.0)):
        found: list[Distribution | None] = [getattr(run.summary, name) for run in runs]
        cells.append(_mean([each.mean * scale if each else None for each in found]))
        cells.append(_mean([each.p99 * scale if each and enough(each.count, "p99") else None for each in found]))
    cells.append(f"{statistics.fmean(run.busy for run in runs):.0%}")
    if not _any_moves(beside):
        return cells
    cells.append(_mean([run.counts["preemptions"] for run in runs]))
    cells.append(_mean([run.imbalance.mean if run.imbalance else None for run in runs]))
    cells.append(_mean([run.imbalance.p95 if run.imbalance else None for run in runs]))
    cells.append(_mean([run.moves.moved for run in runs]))
    pauses = [(run.moves.pause_p50, run.moves.pause_p99) for run in runs]
    return cells + [
        _mean([None if each is None else each * 1e3 for each in side]) for side in zip(*pauses, strict=True)
    ]


def _mean(values: Sequence[float | None]) -> str:
    """Return the mean with three significant figures; :data:`NONE` unless all runs have a value.

    A whole number of a single run is unchanged.
    """
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return NONE
    return str(known[0]) if len(known) == 1 and isinstance(known[0], int) else three_digits(statistics.fmean(known))
