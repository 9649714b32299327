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
from tercet.programs import load_program
from tercet.protocol import BadRequest
from tercet.settings import Source, declared, decode_settings, encode_settings
from tercet.settings.declaration import near
from tercet_lab.bench.results import BenchResult, Point, enough, three_digits
from tercet_lab.bench.simulated.experiment import Experiment, Fleet
from tercet_lab.bench.simulated.moving_fleet import MovingSettings
from tercet_lab.bench.simulated.simulation import NONE, SimulatedPoint, figure_headings, figures_of
from tercet_lab.sim import EngineOptions, load_profile

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
    """All trials of a sweep. ``x`` and ``y`` are the names of the two compared metrics; smaller is better.

    ``comparisons`` is the number of differences that were tested for the marks.
    """

    kind: str = "simulated sweep"
    version: str = __version__
    arguments: dict[str, Any]
    seeds: tuple[int, ...]
    x: str
    y: str
    trials: tuple[Trial, ...]
    comparisons: int = 0

    def to_json(self) -> bytes:
        """Return the report as a file for ``tercet bench report``, with one line of means over seeds for each trial.

        All other results are under ``sweep`` in its config.
        """
        arguments = dict(self.arguments)
        told = {
            "kind": self.kind, "seeds": self.seeds, "x": self.x, "y": self.y, "trials": self.trials,
            "comparisons": self.comparisons,
        }  # fmt: skip
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
    base: Experiment,
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
    measured = (base.work.requests or math.inf) - base.work.warm_up
    for option, metric in (("--x", x), ("--y", y)):
        check_metric(metric)
        if not enough(measured, metric.partition(".")[2]):
            less = f"{measured:g} requests are too few for this percentile"
            raise BadRequest(f"{option} {metric}: {less}; set --num-prompts, or compare {metric[:-3]}mean", option)
    _require_known(base, axes)
    used = tuple(range(base.seed, base.seed + seeds))
    found: list[tuple[dict[str, str], tuple[SimulatedPoint, ...]]] = []
    for settings in _settings(axes):
        simulation, at = _with(base, settings, rate)
        note(", ".join(f"{name}={value}" for name, value in settings.items()))
        runs = (msgspec.structs.replace(simulation, seed=seed).point(at, note) for seed in used)
        found.append((settings, tuple(runs)))
    standings, comparisons = standings_of(
        [([value_of(p, x) for p in runs], [value_of(p, y) for p in runs]) for _, runs in found],
        [settings.get("request-rate") for settings, _ in found],
    )
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
    return SweepReport(arguments=arguments, seeds=used, x=x, y=y, trials=trials, comparisons=comparisons)


def alike(runs: Sequence[SimulatedPoint]) -> bool:
    """True if runs with several seeds are equal."""
    return all(run == runs[0] for run in runs)


def standings_of(
    trials: Sequence[tuple[Sequence[float], Sequence[float]]], loads: Sequence[object] = ()
) -> tuple[list[Standing], int]:
    """Return the standing of each trial, and the number of comparisons that decided them.

    A trial is given by the values of its two metrics, one value per seed. Only trials of an equal load compete:
    ``loads`` has the load of each trial, and is empty if all are equal. A difference counts if Holm's step-down
    procedure over all comparisons rejects its t-test, so that all trials of equal settings stand unbeaten in 95% of
    sweeps, however many there are (S. Holm, "A simple sequentially rejective multiple test procedure", 1979).
    """
    groups: dict[object, list[int]] = {}
    for index in range(len(trials)):
        groups.setdefault(loads[index] if loads else None, []).append(index)
    frontier, beaten, chances = set[int](), set[int](), dict[tuple[int, int, int], float]()
    for group in groups.values():
        means = [(statistics.fmean(trials[index][0]), statistics.fmean(trials[index][1])) for index in group]
        frontier |= {group[each] for each in pareto(means)}
        measured = [index for index in group if all(map(math.isfinite, itertools.chain(*trials[index])))]
        if measured:
            beaten |= set(group) - set(measured)  # requests failed, and another trial has no failure
        for one, other in itertools.combinations(measured, 2):
            for metric in (0, 1):
                chances[one, other, metric] = _chance_of(trials[one][metric], trials[other][metric])
    real = _rejected(chances)
    for one, other in {(one, other) for one, other, _ in real}:
        for winner, loser in ((one, other), (other, one)):
            gains = [statistics.fmean(trials[loser][at]) - statistics.fmean(trials[winner][at]) for at in (0, 1)]
            wins = any(gains[at] > 0 and (one, other, at) in real for at in (0, 1))
            # A loss counts without the correction: it only keeps a mark back.
            loses = any(gains[at] < 0 and chances[one, other, at] < 1 - CONFIDENCE for at in (0, 1))
            if wins and not loses:
                beaten.add(loser)
    return [_standing(index in frontier, index in beaten) for index in range(len(trials))], len(chances)


def _chance_of(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the probability of such a mean difference, seed by seed, if there is none: Student's paired test."""
    differences = [theirs - ours for ours, theirs in zip(one, other, strict=True)]
    mean = statistics.fmean(differences)
    if len(set(differences)) < 2:  # one seed, or no chance at work
        return 1.0 if mean == 0 else 0.0
    student: Any = import_module("scipy.special")
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return 2 * float(student.stdtr(len(differences) - 1, -abs(mean) / error))


def _rejected(chances: Mapping[tuple[int, int, int], float]) -> set[tuple[int, int, int]]:
    """Return the comparisons whose difference is not chance, by Holm's procedure at the level of one in twenty."""
    found = set[tuple[int, int, int]]()
    for rank, (each, chance) in enumerate(sorted(chances.items(), key=lambda item: item[1])):
        if chance * (len(chances) - rank) >= 1 - CONFIDENCE:
            break
        found.add(each)
    return found


def _standing(on_frontier: bool, beaten: bool) -> Standing:
    if on_frontier == beaten:
        return "near"
    return "beaten" if beaten else "best"


def _settings(axes: Sequence[Axis]) -> Iterator[dict[str, str]]:
    names = [axis.name for axis in axes]
    if len(set(names)) < len(names):
        raise BadRequest("--over: two axes have the same setting; give all its values in one", "--over")
    for values in itertools.product(*(axis.values for axis in axes)):
        yield dict(zip(names, values, strict=True))


def _with(base: Experiment, settings: dict[str, str], rate: float) -> tuple[Experiment, float]:
    changed, fleet = base, base.fleet
    text, profile, options = fleet.text or "", fleet.profile, dict(fleet.options)
    for name, value in settings.items():
        if name == "request-rate":
            rate = _rate(value)
        elif name == "fleet":
            text = value
        elif name == "profile":
            profile = value
        elif name == "program":
            changed = msgspec.structs.replace(changed, program=value)
        elif name in EngineOptions.__struct_fields__:
            options[name] = value
        elif name in MOVING:
            of = {**encode_settings(changed.moves), name: value}
            if not value:
                del of[name]  # an empty value means that the setting is not given
            given = Source(of, names={name: f"--over {name}"})
            changed = msgspec.structs.replace(changed, moves=decode_settings(MovingSettings, given))
        else:
            changed = msgspec.structs.replace(changed, args={**changed.args, name: value})
    return msgspec.structs.replace(changed, fleet=Fleet.parse(text, profile, options)), rate


def _require_known(base: Experiment, axes: Sequence[Axis]) -> None:
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
