"""The sweep of a simulation over settings, each with one or more seeds, and the settings that no other setting beats.

Trials have the same seeds, so the same arrivals and lengths. They are compared seed by seed, which cancels the common
effect of a seed.
"""

from __future__ import annotations

import inspect
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, Literal

import msgspec

from tercet import __version__
from tercet.lab.bench.digits import three_digits
from tercet.lab.bench.results import BenchResult, Point
from tercet.lab.bench.simulated.moving_fleet import MovingSettings
from tercet.lab.bench.simulated.simulation import NONE, SimulatedPoint, Simulation, figure_headings, figures_of
from tercet.lab.sim import EngineOptions, load_profile
from tercet.programs import load_program
from tercet.protocol import BadRequest
from tercet.settings import Source, declared, decode_settings, encode_settings
from tercet.settings.declaration import near

MOVING = {each.key for each in declared(MovingSettings)}
OWN = ("request-rate", "fleet", "profile", "program")
LATENCIES = ("ttft", "tpot", "e2el")
FIGURES = ("mean", "p50", "p90", "p99")
CONFIDENCE = 0.95
SUMMED = ("completed", "failed", "interrupted", "fallbacks", "retries")


class Axis(msgspec.Struct, frozen=True):
    """One axis of a sweep: a setting and its values.

    The setting is ``fleet``, ``profile``, ``program``, ``request-rate``, an engine option, a setting of moves without
    leading dashes (``reschedule-threshold``), or a parameter of a program.
    """

    name: str
    values: tuple[str, ...]


Standing = Literal["best", "near", "beaten"]
MARKS: Mapping[Standing, str] = {"best": "*", "near": "~", "beaten": ""}


class Estimate(msgspec.Struct, frozen=True):
    """The mean of a metric over seeds, in seconds; ``half`` is half the width of its 95% interval.

    ``half`` is None for a single seed, and if all seeds gave the same value, which says nothing about chance.
    """

    mean: float
    half: float | None

    @staticmethod
    def of(values: Sequence[float]) -> Estimate:
        """Return the mean with Student's interval. The mean is infinite if the value of any seed is."""
        mean = statistics.fmean(values)
        if len(set(values)) < 2 or not math.isfinite(mean):
            return Estimate(mean, None)
        # Imported here: commands that do not need it start faster.
        student: Any = import_module("scipy.special")
        error = statistics.stdev(values) / math.sqrt(len(values))
        return Estimate(mean, error * float(student.stdtrit(len(values) - 1, 0.5 + CONFIDENCE / 2)))

    @property
    def is_above_zero(self) -> bool:
        """True if the whole interval is above zero."""
        return self.mean - (self.half or 0.0) > 0

    @property
    def is_below_zero(self) -> bool:
        """True if the whole interval is below zero."""
        return self.mean + (self.half or 0.0) < 0


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One combination of the axes' values, run once for each seed.

    ``standing``: ``best`` trials are on the frontier of means, where no other trial is as good in both metrics and
    better in one; ``beaten`` trials are not. For ``near`` trials, the variation between seeds is too large to decide.
    """

    settings: dict[str, str]
    points: tuple[SimulatedPoint, ...]
    x: Estimate
    y: Estimate
    standing: Standing


class SweepReport(msgspec.Struct, frozen=True, kw_only=True):
    """All trials of a sweep. ``x`` and ``y`` are the names of the two compared metrics; smaller is better."""

    kind: str = "simulated sweep"
    version: str = __version__
    arguments: dict[str, Any]
    seeds: tuple[int, ...]
    x: str
    y: str
    trials: tuple[Trial, ...]

    def to_json(self) -> bytes:
        """Return the report as a file for ``tercet bench report``, with one line of means over seeds for each trial.

        All other results are under ``sweep`` in its config.
        """
        arguments = dict(self.arguments)
        told = {"kind": self.kind, "seeds": self.seeds, "x": self.x, "y": self.y, "trials": self.trials}
        result = BenchResult(
            source="sim",
            created="simulation",
            config={**arguments, "sweep": told},
            seed=self.seeds[0],
            versions={"tercet": self.version},
            target={"model": load_profile(arguments["profile"]).name} if "profile" in arguments else {},
            points=tuple(self._bench_point(trial) for trial in self.trials),
        )
        return msgspec.json.format(msgspec.json.encode(result, order="sorted"), indent=1) + b"\n"

    def _bench_point(self, trial: Trial) -> Point:
        runs = [point.metrics() for point in trial.points]
        errors = Counter[str]()
        for point in trial.points:
            errors.update(point.summary.errors)
        return Point(
            label=", ".join(f"{name}={value or 'none'}" for name, value in trial.settings.items()),
            program=trial.settings.get("program", self.arguments.get("program")),
            request_rate=trial.points[0].rate,
            metrics={name: _over_seeds(name, [run.get(name) for run in runs]) for name in runs[0]},
            errors=errors,
        )


def _over_seeds(name: str, values: Sequence[float | int | None]) -> float | int | None:
    """Return the sum over seeds for counts of requests, else the mean; None unless each seed has a value."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return sum(known) if name in SUMMED else statistics.fmean(known)


def parse_axis(given: str) -> Axis:
    """Return the axis of a text ``NAME=VALUE,VALUE,...``. Raise :class:`~tercet.protocol.BadRequest` if invalid."""
    name, _, values = given.partition("=")
    found = tuple(values.split(","))  # an empty value counts: reschedule=,neutral_load is without and with a policy
    if not name or not values:
        raise BadRequest(f"--over: {given!r} is not NAME=VALUE[,VALUE...]", "--over")
    return Axis(name, found)


def sweep(
    base: Simulation,
    rate: float,
    axes: Sequence[Axis],
    x: str,
    y: str,
    seeds: int = 1,
    note: Callable[[str], None] = lambda _: None,
) -> SweepReport:
    """Run every combination of the axes' values at ``rate``, which an axis may replace, with ``seeds`` seeds each.

    ``x`` and ``y`` are metrics such as ``ttft.p99``; ``note`` gets lines about progress. Raise
    :class:`~tercet.protocol.BadRequest` for an unknown metric or setting.
    """
    for metric in (x, y):
        check_metric(metric)
    _require_known(base, axes)
    used = tuple(range(base.seed, base.seed + seeds))
    found: list[tuple[dict[str, str], tuple[SimulatedPoint, ...]]] = []
    for settings in _settings(axes):
        simulation, at = _with(base, settings, rate)
        note(", ".join(f"{name}={value}" for name, value in settings.items()))
        runs = (msgspec.structs.replace(simulation, seed=seed).point(at, note) for seed in used)
        found.append((settings, tuple(runs)))
    standings = standings_of([([value_of(p, x) for p in runs], [value_of(p, y) for p in runs]) for _, runs in found])
    if seeds > 1 and all(alike(runs) for _, runs in found):
        note(f"warning: all {seeds} seeds gave the same results: a trace with its recorded times has no randomness")
    trials = tuple(
        Trial(
            settings=settings,
            points=runs,
            x=Estimate.of([value_of(point, x) for point in runs]),
            y=Estimate.of([value_of(point, y) for point in runs]),
            standing=standing,
        )
        for (settings, runs), standing in zip(found, standings, strict=True)
    )
    # JSON has no number for infinity.
    load = {"rate": "inf" if math.isinf(rate) else rate, "over": {axis.name: list(axis.values) for axis in axes}}
    arguments = {**base.arguments(), **load}
    return SweepReport(arguments=arguments, seeds=used, x=x, y=y, trials=trials)


def alike(runs: Sequence[SimulatedPoint]) -> bool:
    """True if runs with several seeds are equal."""
    return all(run == runs[0] for run in runs)


def standings_of(trials: Sequence[tuple[Sequence[float], Sequence[float]]]) -> list[Standing]:
    """Return the standing of each trial. A trial is given by the values of its two metrics, one value per seed."""
    frontier = pareto([(statistics.fmean(x), statistics.fmean(y)) for x, y in trials])
    return [
        _standing(index in frontier, any(_beats(one, trial) for one in trials)) for index, trial in enumerate(trials)
    ]


def _standing(on_frontier: bool, beaten: bool) -> Standing:
    if on_frontier == beaten:
        return "near"
    return "beaten" if beaten else "best"


def _beats(one: tuple[Sequence[float], Sequence[float]], other: tuple[Sequence[float], Sequence[float]]) -> bool:
    """True if ``one`` is better than ``other`` in a metric and not worse in any, beyond the variation between seeds."""
    if not all(map(math.isfinite, (*one[0], *one[1]))):
        return False
    if not all(map(math.isfinite, (*other[0], *other[1]))):
        return True
    gains = [
        Estimate.of([theirs - ours for ours, theirs in zip(*side, strict=True)])
        for side in zip(one, other, strict=True)
    ]
    return any(gain.is_above_zero for gain in gains) and not any(gain.is_below_zero for gain in gains)


def _settings(axes: Sequence[Axis]) -> Iterator[dict[str, str]]:
    names = [axis.name for axis in axes]
    if len(set(names)) < len(names):
        raise BadRequest("--over: two axes have the same setting; give all its values in one", "--over")
    for values in itertools.product(*(axis.values for axis in axes)):
        yield dict(zip(names, values, strict=True))


def _with(base: Simulation, settings: dict[str, str], rate: float) -> tuple[Simulation, float]:
    changed = base
    for name, value in settings.items():
        if name == "request-rate":
            rate = _rate(value)
        elif name in OWN:
            changed = msgspec.structs.replace(changed, **{name: value})
        elif name in EngineOptions.__struct_fields__:
            changed = msgspec.structs.replace(changed, options={**changed.options, name: value})
        elif name in MOVING:
            of = {**encode_settings(changed.moving), name: value}
            if not value:
                del of[name]  # an empty value means that the setting is not given
            given = Source(of, names={name: f"--over {name}"})
            changed = msgspec.structs.replace(changed, moving=decode_settings(MovingSettings, given))
        else:
            changed = msgspec.structs.replace(changed, program_args={**changed.program_args, name: value})
    return changed, rate


def _require_known(base: Simulation, axes: Sequence[Axis]) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for an axis whose name is not a setting."""
    programs = next((axis.values for axis in axes if axis.name == "program"), (base.program,))
    arguments = {name for program in programs for name in inspect.signature(load_program(program)).parameters}
    known = [*OWN, *EngineOptions.__struct_fields__, *sorted(MOVING), *sorted(arguments - {"request", "fleet"})]
    for axis in axes:
        if axis.name not in known:
            raise BadRequest(f"--over: {axis.name} is not a setting; {near(axis.name, known)}", "--over")


def _rate(value: str) -> float:
    try:
        rate = float(value)
    except ValueError:
        rate = -1.0
    if not rate > 0:
        raise BadRequest(f"--over: request-rate={value} is not a positive number", "--over")
    return rate


def check_metric(metric: str) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` unless it has a form such as ``ttft.p99``."""
    latency, _, figure = metric.partition(".")
    if latency not in LATENCIES or figure not in FIGURES:
        known = f"one of {', '.join(LATENCIES)}, a dot, and one of {', '.join(FIGURES)}"
        raise BadRequest(f"metric: {metric!r} is not {known}", "metric")


def value_of(point: SimulatedPoint, metric: str) -> float:
    """Return a metric of a point in seconds; infinite if a request failed or no request has the metric."""
    latency, _, figure = metric.partition(".")
    found = getattr(point.summary, latency)
    return float("inf") if found is None or point.summary.failed else float(getattr(found, figure))


def pareto(values: Sequence[tuple[float, float]]) -> set[int]:
    """Return the indices of the pairs that no other pair beats, by one smaller value and no larger one."""
    efficient: set[int] = set()
    best = float("inf")
    in_order = sorted(range(len(values)), key=lambda index: values[index])
    for index in in_order:
        x, y = values[index]
        twin = any(values[other] == (x, y) for other in efficient)
        if (y < best or twin) and x < float("inf") and y < float("inf"):
            efficient.add(index)
            best = min(best, y)
    return efficient


def headings(report: SweepReport) -> list[str]:
    """Return the headings of the columns of :func:`rows`."""
    spread = [f"{metric}, ms" for metric in (report.x, report.y)] if len(report.seeds) > 1 else []
    return [*report.trials[0].settings, "failed", "fallbacks", *figure_headings(_points(report)), *spread, "best"]


def rows(report: SweepReport) -> list[list[str]]:
    """Return a row for each trial: settings, means over seeds with intervals, and a mark (``*``: best, ``~``: near)."""
    points = _points(report)
    return [
        [
            *trial.settings.values(),
            *_failures(trial),
            *figures_of(trial.points, points),
            *_spread(trial),
            MARKS[trial.standing],
        ]
        for trial in report.trials
    ]


def _failures(trial: Trial) -> list[str]:
    runs = trial.points
    return [str(sum(run.summary.failed for run in runs)), str(sum(run.fallbacks for run in runs))]


def _spread(trial: Trial) -> list[str]:
    if len(trial.points) < 2:
        return []
    return [
        NONE if each.half is None else f"{three_digits(each.mean * 1e3)} ± {three_digits(each.half * 1e3)}"
        for each in (trial.x, trial.y)
    ]


def _points(report: SweepReport) -> list[SimulatedPoint]:
    return [point for trial in report.trials for point in trial.points]
