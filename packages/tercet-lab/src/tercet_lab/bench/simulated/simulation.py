"""A simulation that is described in text and numbers, and its report. Equal seeds give equal bytes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tercet import __version__
from tercet.decisions.scheduling import load_scheduling
from tercet.programs import load_program
from tercet.protocol import BadRequest
from tercet.router.page.records import Frame
from tercet.settings import encode_settings
from tercet_lab.bench.results import (
    BenchResult,
    Distribution,
    Point,
    Slo,
    Summary,
    achieved,
    enough,
    summarize,
    three_digits,
)
from tercet_lab.bench.simulated.moving_fleet import MoveTotals, MovingSettings, VirtualFlip
from tercet_lab.bench.simulated.scenario import (
    PlannedWorkload,
    SyntheticWorkload,
    parse_fleet,
    slo_of_class,
)
from tercet_lab.bench.simulated.virtual_run import Outcome, PlannedRun, run_once
from tercet_lab.planning.planner_settings import NO_PLANNER
from tercet_lab.sim import EngineOptions, load_profile, options_from
from tercet_lab.sim.kv_usage import KVImbalance


class SimulatedPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one run: the metrics of ``tercet bench``, and the engines' counters.

    ``rate`` is in requests per second; None means a trace with its recorded times. ``fallbacks`` counts requests that
    one engine served after their program had failed; ``retries`` counts all attempts after a failure, fallbacks
    included, as the router's metrics do. ``busy`` is the share of the engines' time in which a step ran; ``counts`` are
    sums over all engines. ``imbalance`` is None without samples.
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
    classes: dict[str, float] = {}

    @property
    def _met(self) -> int:
        """Number of requests that met the objectives."""
        return round((self.summary.attainment or 0.0) * (self.summary.completed + self.summary.failed))

    def metrics(self) -> dict[str, float | int | None]:
        """Return all values by name: those of :meth:`Summary.flat`, and the engines' counters."""
        engines: dict[str, float] = {"busy": self.busy, "fallbacks": self.fallbacks, "retries": self.retries}
        engines |= self.counts
        engines |= {f"attainment_{name}": share for name, share in self.classes.items()}
        if self.flips:
            engines["role_flips"] = len(self.flips)
            engines["engines_flipped"] = sum(len(each.engines) for each in self.flips)
        if self.planned is not None:
            engines |= self.planned.flat(self._met)
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
        result = BenchResult(
            source="sim",
            created="simulation",
            config=self.arguments,
            seed=self.seed,
            versions={"tercet": __version__},
            target={"model": self.model},
            points=tuple(self._bench_point(point) for point in self.points),
        )
        text = msgspec.json.format(msgspec.json.encode(result, order="sorted"), indent=1)
        timelines = {_run_name(point): point.timeline for point in self.points if point.timeline}
        if timelines:  # a timeline has many numbers, so it is written on one line
            text = text.removesuffix(b"\n}") + b',\n "timelines": ' + msgspec.json.encode(timelines) + b"\n}"
        return text + b"\n"

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


def _run_name(point: SimulatedPoint) -> str:
    """Return the name of a run on the web page."""
    return f"{_shown(point.rate)} requests/s" if point.rate is not None else _shown(None)


def point_of(rate: float | None, outcome: Outcome, slo: Slo | None) -> SimulatedPoint:
    """Return the results of one run; ``slo`` (None: no limits) defines goodput."""
    samples = outcome.samples()
    summary = summarize(samples, slo)
    return SimulatedPoint(
        rate=rate, summary=summary, fallbacks=outcome.fallbacks, retries=outcome.retries, busy=outcome.busy,
        counts=outcome.counts, moves=outcome.moves, imbalance=outcome.imbalance,
        flips=tuple(outcome.flips), timeline=tuple(outcome.timeline),
        classes=samples.attainment(slo) if slo is not None and outcome.objectives.classes else {},
    )  # fmt: skip


def _made_good(outcome: Outcome) -> str:
    """Return a warning about retries: without it, readers would think that the program served all requests."""
    requests, retries, fallbacks = len(outcome.ended), outcome.retries, outcome.fallbacks
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
    return [[*_counts(point), *figures_of([point], report.points)] for point in report.points]


def _counts(point: SimulatedPoint) -> list[str]:
    summary = point.summary
    made_good = (str(point.retries), str(point.fallbacks))
    rate = three_digits(achieved(summary.flat(), "throughput") or 0.0)
    return [_shown(point.rate), str(summary.completed), str(summary.failed), *made_good, rate]


def _shown(rate: float | None) -> str:
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


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """All arguments of a run except its rate. The rate of ``workload`` is ignored."""

    program: str
    program_args: dict[str, str]
    fleet: str
    profile: str
    options: dict[str, str]
    workload: SyntheticWorkload | PlannedWorkload
    seed: int = 0
    slo: Slo | None = None
    scheduling: str | None = None
    moving: MovingSettings = MovingSettings()

    def point(
        self, rate: float | None, note: Callable[[str], None] = lambda _: None, record_s: float | None = None
    ) -> SimulatedPoint:
        """Run the simulation at a rate (requests per second; None: a trace's times) and return the results.

        ``note`` gets lines of text about the run, such as its speed. With ``record_s``, a timeline is recorded, with a
        frame every ``record_s`` virtual seconds. Raise :class:`~tercet.protocol.BadRequest` for invalid arguments, and
        the program's ``BadRequest`` if it refuses every request.
        """
        program, spec = load_program(self.program, self.program_args), parse_fleet(self.fleet)
        options = options_from(EngineOptions(), self.options)
        workload = msgspec.structs.replace(self.workload, rate=rate)
        # Loaded for each run: its plugins remember requests.
        scheduling = None if self.scheduling is None else load_scheduling(Path(self.scheduling).expanduser())
        began, worked = time.perf_counter(), time.process_time()
        # Imported here: the planner imports this module.
        from tercet_lab.planning.simulated_planning import planning_of

        planning = planning_of(self, rate) if self.moving.planner != NO_PLANNER else None
        if planning is not None:
            spec = planning.with_spare(spec)
        outcome = run_once(
            program, spec, self.profile, options, workload, self.seed, scheduling, self.moving, record_s,
            None if planning is None else planning.companion,
        )  # fmt: skip
        took, cpu = time.perf_counter() - began, time.process_time() - worked
        simulated = max(outcome.ended, default=0.0)
        pace = f"{simulated / took:.1f} times real time, {simulated / cpu:.1f} by CPU time"
        note(f"rate {_shown(rate)}: {simulated:.1f} s in {took:.1f} s ({cpu:.1f} s of CPU): {pace}")
        if len(set(outcome.input_tokens)) > 1 or len(set(outcome.output_tokens)) > 1:
            tokens = (
                f"{np.mean(each):.4g} ± {np.std(each):.3g}" for each in (outcome.input_tokens, outcome.output_tokens)
            )
            note(f"rate {_shown(rate)}: tokens of the requests (mean ± deviation): {' in, '.join(tokens)} out")
        point = point_of(rate, outcome, self.slo or self._objectives())
        if planning is not None:
            point = msgspec.structs.replace(point, planned=planning.result(simulated))
            for line in planning.said(point.metrics()):
                note(f"rate {_shown(rate)}: {line}")
        for flip in point.flips:
            note(f"rate {_shown(rate)}: {flip.at:.1f} s: {', '.join(flip.engines)} -> {flip.role}: {flip.reason}")
        if point.summary.attainment is not None:
            note(f"rate {_shown(rate)}: {point.summary.attainment:.2%} of the requests met the SLO")
        for name, share in point.classes.items():
            note(f"rate {_shown(rate)}: {share:.2%} of class {name} met its objectives")
        if outcome.retries:
            note(f"rate {_shown(rate)}: {_made_good(outcome)}")
        if outcome.first_error is not None:
            if isinstance(outcome.first_error, BadRequest) and not point.summary.completed:
                raise outcome.first_error
            note(f"rate {_shown(rate)}: {point.summary.failed} requests failed; the first error: {outcome.first_error}")
        return point

    def _objectives(self) -> Slo | None:
        """Return the router's objectives in milliseconds, or None without objectives."""
        wanted = self.moving.objectives
        return slo_of_class(wanted) if wanted.any or wanted.classes else None

    def report(
        self,
        rates: Sequence[float | None],
        label: str,
        note: Callable[[str], None] = lambda _: None,
        record_s: float | None = None,
    ) -> SimulationReport:
        """Run the simulation at each rate, as :meth:`point` does. ``label`` is the name of its line in figures."""
        model = load_profile(self.profile).name
        points = tuple(self.point(rate, note, record_s) for rate in rates)
        return SimulationReport(
            label=label, program=self.program, arguments=self.arguments(), seed=self.seed, model=model, points=points
        )

    def arguments(self) -> dict[str, Any]:
        """Return everything that the numbers depend on, except the rate."""
        given = msgspec.to_builtins(self)
        del given["workload"]["rate"]
        return {**given, "moving": encode_settings(self.moving)}
