"""One simulation at many settings, which of them no other one beats, and their picture."""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tercet import __version__
from tercet.bench.simulated.moving_fleet import MovingSettings
from tercet.bench.simulated.simulation import SimulatedPoint, Simulation, figure_headings, figures_of
from tercet.programs import load_program
from tercet.protocol import BadRequest
from tercet.settings import Source, declared, decode_settings, encode_settings
from tercet.settings.declaration import near
from tercet.sim import EngineOptions

MOVING = {each.key for each in declared(MovingSettings)}
OWN = ("rate", "fleet", "profile", "program")
LATENCIES = ("ttft", "tpot", "e2el")
FIGURES = ("mean", "p50", "p90", "p99")
SUFFIXES = (".png", ".svg", ".pdf")


class Axis(msgspec.Struct, frozen=True):
    """What varies, and the values it takes.

    That is ``fleet``, ``profile``, ``program``, ``rate``, an engine option, a setting of moves without its dashes
    (``reschedule-threshold``), or a program's parameter.
    """

    name: str
    values: tuple[str, ...]


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One setting of all axes. ``efficient``: no other trial is as good in both metrics and better in one."""

    settings: dict[str, str]
    point: SimulatedPoint
    efficient: bool


class SweepReport(msgspec.Struct, frozen=True, kw_only=True):
    """All trials of a sweep; ``x`` and ``y`` name the two metrics (the smaller the better) that were weighed."""

    kind: str = "simulated sweep"
    version: str = __version__
    arguments: dict[str, Any]
    x: str
    y: str
    trials: tuple[Trial, ...]

    def to_json(self) -> bytes:
        """The report as indented JSON with a newline at its end."""
        return msgspec.json.format(msgspec.json.encode(self, order="sorted"), indent=2) + b"\n"


def parse_axis(given: str) -> Axis:
    """``NAME=VALUE,VALUE,...``; raises :class:`~tercet.protocol.BadRequest`."""
    name, _, values = given.partition("=")
    found = tuple(value for value in values.split(",") if value)
    if not name or not found:
        raise BadRequest(f"--over: {given!r} is not NAME=VALUE[,VALUE...]", "--over")
    return Axis(name, found)


def sweep(
    base: Simulation, rate: float, axes: Sequence[Axis], x: str, y: str, note: Callable[[str], None] = lambda _: None
) -> SweepReport:
    """Run every combination of the axes' values at ``rate``, which an axis may replace."""
    for metric in (x, y):
        check_metric(metric)
    _require_known(base, axes)
    found: list[tuple[dict[str, str], SimulatedPoint]] = []
    for settings in _settings(axes):
        simulation, at = _with(base, settings, rate)
        note(", ".join(f"{name}={value}" for name, value in settings.items()))
        found.append((settings, simulation.point(at, note)))
    efficient = pareto([(value_of(point, x), value_of(point, y)) for _, point in found])
    trials = tuple(
        Trial(settings=settings, point=point, efficient=index in efficient)
        for index, (settings, point) in enumerate(found)
    )
    arguments = {**base.arguments(), "rate": rate, "over": {axis.name: list(axis.values) for axis in axes}}
    return SweepReport(arguments=arguments, x=x, y=y, trials=trials)


def _settings(axes: Sequence[Axis]) -> Iterator[dict[str, str]]:
    names = [axis.name for axis in axes]
    if len(set(names)) < len(names):
        raise BadRequest("--over: a setting has one axis", "--over")
    for values in itertools.product(*(axis.values for axis in axes)):
        yield dict(zip(names, values, strict=True))


def _with(base: Simulation, settings: dict[str, str], rate: float) -> tuple[Simulation, float]:
    changed = base
    for name, value in settings.items():
        if name == "rate":
            rate = _rate(value)
        elif name in OWN:
            changed = msgspec.structs.replace(changed, **{name: value})
        elif name in EngineOptions.__struct_fields__:
            changed = msgspec.structs.replace(changed, options={**changed.options, name: value})
        elif name in MOVING:
            given = Source({**encode_settings(changed.moving), name: value}, names={name: f"--over {name}"})
            changed = msgspec.structs.replace(changed, moving=decode_settings(MovingSettings, given))
        else:
            changed = msgspec.structs.replace(changed, program_args={**changed.program_args, name: value})
    return changed, rate


def _require_known(base: Simulation, axes: Sequence[Axis]) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for an axis that is no setting of anything."""
    programs = next((axis.values for axis in axes if axis.name == "program"), (base.program,))
    arguments = {name for program in programs for name in inspect.signature(load_program(program)).parameters}
    known = [*OWN, *EngineOptions.__struct_fields__, *sorted(MOVING), *sorted(arguments - {"request", "fleet"})]
    for axis in axes:
        if axis.name not in known:
            raise BadRequest(f"--over: there is no setting {axis.name}; {near(axis.name, known)}", "--over")


def _rate(value: str) -> float:
    try:
        rate = float(value)
    except ValueError:
        rate = -1.0
    if not 0 < rate < float("inf"):
        raise BadRequest(f"--over: rate={value} is no positive number", "--over")
    return rate


def check_metric(metric: str) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` unless it is such as ``ttft.p99``."""
    latency, _, figure = metric.partition(".")
    if latency not in LATENCIES or figure not in FIGURES:
        known = f"one of {', '.join(LATENCIES)}, a dot, and one of {', '.join(FIGURES)}"
        raise BadRequest(f"metric: {metric!r} is not {known}", "metric")


def value_of(point: SimulatedPoint, metric: str) -> float:
    """A point's metric in seconds; infinite if no request got that far or some failed."""
    latency, _, figure = metric.partition(".")
    found = getattr(point.summary, latency)
    return float("inf") if found is None or point.summary.failed else float(getattr(found, figure))


def pareto(values: Sequence[tuple[float, float]]) -> set[int]:
    """Indices of the pairs that no other pair beats: as small in both places, and smaller in one."""
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
    """The headings of :func:`rows`."""
    return [*report.trials[0].settings, *figure_headings(_points(report)), "efficient"]


def rows(report: SweepReport) -> list[list[str]]:
    """A row for each trial: its settings, means and 99th percentiles, and a star if nothing beats it."""
    points = _points(report)
    return [
        [*trial.settings.values(), *figures_of(trial.point, points), "*" if trial.efficient else ""]
        for trial in report.trials
    ]


def _points(report: SweepReport) -> list[SimulatedPoint]:
    return [trial.point for trial in report.trials]


def plot_sweep(report: SweepReport, path: Path) -> None:
    """Draw every trial by its two metrics, and a line through those that no other one beats."""
    require_suffix(path)
    figure, axes = empty_plot()
    points = [(value_of(trial.point, report.x) * 1e3, value_of(trial.point, report.y) * 1e3) for trial in report.trials]
    axes.scatter([x for x, _ in points], [y for _, y in points], color="tab:gray", label="settings")
    front = sorted(point for point, trial in zip(points, report.trials, strict=True) if trial.efficient)
    axes.plot([x for x, _ in front], [y for _, y in front], "o-", color="tab:blue", label="no setting beats these")
    for point, trial in zip(points, report.trials, strict=True):
        label = ", ".join(f"{name}={value}" for name, value in trial.settings.items())
        axes.annotate(label, point, fontsize=7, xytext=(4, 4), textcoords="offset points")
    axes.set_xlabel(f"{report.x}, ms")
    axes.set_ylabel(f"{report.y}, ms")
    axes.legend()
    save_plot(figure, path)


def save_plot(figure: Any, path: Path) -> None:
    """Write a figure; raises :class:`~tercet.protocol.BadRequest` if that is impossible."""
    try:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise BadRequest(f"--plot: {path} cannot be written: {error.strerror}", "--plot") from error


def require_suffix(path: Path) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for a file that is no picture."""
    if path.suffix not in SUFFIXES:
        raise BadRequest(f"--plot: {path} must end with one of {', '.join(SUFFIXES)}", "--plot")


def empty_plot() -> tuple[Any, Any]:
    """A figure and its axes; raises :class:`~tercet.protocol.BadRequest` without matplotlib."""
    try:
        module: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise BadRequest("--plot: needs matplotlib: pip install 'tercet[plot]'", "--plot") from error
    figure = module.Figure(figsize=(7, 5), layout="constrained")
    return figure, figure.add_subplot()
