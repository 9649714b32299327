"""Figures for papers: distributions, goodput over the load, two metrics against each other, bars, and a run over time.

Each function takes runs, draws into ``file`` (PDF with embedded fonts, SVG with text, or PNG) and returns matplotlib's
figure. ``width`` is that of a ``column`` or of the whole ``text`` of a page with two columns, or a number of inches.

Runs are given as one run, several, or a mapping from labels to one or several runs; runs of one label differ in their
seeds or rates. Figures of metrics also take a grid, which has a label for each cell. The path of a saved run or grid
stands for it, so a figure is drawn again from files. Metrics are those of
:data:`~tercet_lab.bench.simulated.run_metrics.METRICS`; intervals are Student's at 95% over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tercet.protocol import BadRequest
from tercet.settings.declaration import near
from tercet_lab.bench.simulated.experiment import Run
from tercet_lab.bench.simulated.grid import Estimate, Grid, Standing, in_words, plain_name
from tercet_lab.bench.simulated.grid import pareto as frontier_of
from tercet_lab.bench.simulated.run_metrics import LATENCIES, Metric, metric_of
from tercet_lab.bench.simulated.simulation import SimulatedPoint
from tercet_lab.bench.simulated.sweep import SweepReport
from tercet_lab.drawing import Box, Picture, label_points, picture
from tercet_lab.run_files import load
from tercet_lab.tables import Requests

One = Run | Requests | str | Path
Runs = One | Sequence[One] | Mapping[str, One | Sequence[One]]
Measured = Run | SimulatedPoint
Width = Literal["column", "text"] | float
INCHES: Mapping[str, float] = {"column": 3.35, "text": 7.0}
FLAT = 0.66
"""Height of a figure as a part of its width, but at most :data:`TALLEST` inches."""
TALLEST = 3.2
MOST_STEPS = 2_000
"""Most steps of a drawn distribution; more would make a large file and no other picture."""
MOST_TAIL = 200
"""Number of the largest values of which each has its step."""
MOST_LINES = 6
"""Most engines that have a line each; more are drawn as a range and a mean."""
FLAG = "file"
SWEEP_INCHES = (6.0, 4.4)


# ---- runs, labels and the figure -----------------------------------------------------------------------------


def runs_of(given: Runs) -> dict[str, list[Run]]:
    """Return runs by label. Without labels, a run has its program, its fleet and its policies, as far as they differ.

    Raise :class:`~tercet.protocol.BadRequest` if there is no run, or a file cannot be read.
    """
    if isinstance(given, Mapping):
        found = {label: [_run_of(each) for each in _several(of)] for label, of in given.items()}
    else:
        found, each = dict[str, list[Run]](), _several(given)
        runs = [_run_of(one) for one in each]
        for label, run in zip(_labels_of(each, runs), runs, strict=True):
            found.setdefault(label, []).append(run)
    if not any(found.values()):
        raise BadRequest("runs: there are none; give at least one run", "runs")
    return found


def _several(given: One | Sequence[One]) -> Sequence[One]:
    return [given] if isinstance(given, Run | Requests | str | Path) else given


def _run_of(given: One) -> Run:
    if isinstance(given, Run):
        return given
    found = Run(requests=given) if isinstance(given, Requests) else load(given)
    if isinstance(found, Grid):
        raise BadRequest(f"runs: {given} is a sweep, which has no requests; give saved runs", "runs")
    return found


@dataclass(frozen=True)
class _Mark:
    """What is drawn at one place of a figure: runs that differ only in their seeds. ``load`` is that of a grid."""

    label: str
    x: str
    load: object
    runs: Sequence[Measured]

    def estimate(self, metric: Metric, scale: float = 1.0) -> Estimate:
        return Estimate.of([metric.value(run) for run in self.runs]).times(scale)


def _marks(given: Runs | Grid, x: str | None = None) -> list[_Mark]:
    """Return what is drawn, in order: ``x`` is the axis of a grid that does not belong to the labels, or ``rate``."""
    found = load(given) if isinstance(given, str | Path) else given
    if not isinstance(found, Grid):
        if x not in (None, "rate"):
            raise BadRequest(f"x: runs have no axis {x}; give a grid, or x='rate'", "x")
        several = runs_of(found)
        if x is None:
            return [_Mark(label, "", None, of) for label, of in several.items()]
        rates = {label: [_rate_of(run) for run in of] for label, of in several.items()}
        return [
            _Mark(label, f"{rate:g}", None, [run for run, its in zip(of, rates[label], strict=True) if its == rate])
            for label, of in several.items()
            for rate in sorted(set(rates[label]))
        ]
    same = {plain_name(name): name for name in found.axes}
    axis = None if x is None else same.get(plain_name(x))
    if x is not None and axis is None and x != "rate":
        raise BadRequest(f"x: there is no axis {x}; {near(x, found.axes)}", "x")
    cells = [{name: in_words(value) for name, value in each.items()} for each in found.settings]
    varied = [name for name in found.axes if name != axis and len({cell[name] for cell in cells}) > 1]
    fixed = str(found.arguments.get("program") or "all cells")
    marks = list[_Mark]()
    for index, cell in enumerate(cells):
        at = cell[axis] if axis else "" if x is None else f"{_rate_of(found.points[index][0]):g}"
        label = ", ".join(cell[name] for name in varied) or fixed
        marks.append(_Mark(label, at, found.load_of(index), found.points[index]))
    return marks


def _labels_of(given: Sequence[One], runs: Sequence[Run]) -> list[str]:
    """Return a label for each run: what differs between the experiments, or the name of the file."""
    described = list[list[str]]()  # the program, the fleet and the policies of each run; nothing if they are unknown
    for run in runs:
        moving: dict[str, Any] = run.about.get("moving") or {}
        policies: list[str] = moving.get("reschedule") or []
        described.append([str(each) for each in (run.about.get("program"), run.about.get("fleet"), *policies) if each])
    common = set(described[0]).intersection(*described) if described else set[str]()
    found = list[str]()
    for number, (one, parts) in enumerate(zip(given, described, strict=True), 1):
        if parts:
            found.append(", ".join([each for each in parts if each not in common] or parts[:1]))
        else:
            found.append(Path(one).stem if isinstance(one, str | Path) else f"run {number}")
    return found


@contextmanager
def _figure(file: str | Path | None, width: Width, height: float | None, title: str | None) -> Generator[Picture]:
    """Yield an empty figure, and write it to ``file`` at the end."""
    if isinstance(width, str) and width not in INCHES:
        raise BadRequest(f"width: is {width!r}; choose {', '.join(INCHES)}, or a number of inches", "width")
    inches = INCHES[width] if isinstance(width, str) else float(width)
    if not 0 < inches < math.inf or (height is not None and not 0 < height < math.inf):
        raise BadRequest("width, height: must be positive numbers of inches", "width")
    path = None if file is None else Path(file).expanduser()
    with picture(path, FLAG, inches, height or min(TALLEST, FLAT * inches)) as drawn:
        if title:
            drawn.canvas.suptitle(title)
        yield drawn


def _legend(drawn: Picture, axis: Any, number: int) -> None:
    if number > 1:
        drawn.canvas.legend(*axis.get_legend_handles_labels(), loc="outside upper center", ncols=min(number, 2))


def _scaled(metric: Metric, marks: Iterable[_Mark]) -> tuple[str, float]:
    """Return the unit of a metric's axis, and the factor of its values."""
    if metric.unit == "share":
        return "%", 100.0
    return _unit(each.estimate(metric).mean for each in marks) if metric.unit == "s" else (metric.unit, 1.0)


def _named(metric: Metric, unit: str) -> str:
    return f"{metric.words}, {unit}" if unit else metric.words


def _unit(seconds: Iterable[float]) -> tuple[str, float]:
    """Return the unit in which a reader sees these seconds best, and its factor."""
    finite = [each for each in seconds if math.isfinite(each)]
    return ("s", 1.0) if max(finite, default=0.0) > 1.0 else ("ms", 1e3)


# ---- the figures ---------------------------------------------------------------------------------------------


def cdf(
    runs: Runs, metric: str = "ttft", file: str | Path | None = None, *, log: bool = False, tail: bool = False,
    width: Width = "column", height: float | None = None, title: str | None = None,
) -> Any:  # fmt: skip
    """Draw the distribution of a latency over all requests: ``ttft``, ``tpot``, ``e2el``, ``itl`` or a column of times.

    A line ends below 1 by the share of requests without the value: those that failed. ``log``: a logarithmic axis of
    values. ``tail``: the share of requests with at least this value, on a logarithmic axis. Runs of one label are
    pooled.
    """
    found = {label: [_values(run, metric) for run in of] for label, of in runs_of(runs).items()}
    pooled = {label: np.concatenate(each) for label, each in found.items()}
    unit, scale = _unit(float(np.nanmax(each)) for each in pooled.values() if np.isfinite(each).any())
    with _figure(file, width, height, title) as drawn:
        axis: Any = drawn.canvas.add_subplot()
        for index, (label, values) in enumerate(pooled.items()):
            known, number = np.sort(values[np.isfinite(values)]), max(1, len(values))
            ranks = np.arange(len(known))
            shares = 1 - ranks / number if tail else (ranks + 1) / number
            kept = np.union1d(
                np.linspace(0, len(known) - 1, min(len(known), MOST_STEPS)).astype(int), ranks[-MOST_TAIL:]
            )
            looks = {**drawn.series(index), "marker": "", "linestyle": ("-", "--", "-.", ":")[index % 4]}
            style = "steps-pre" if tail else "steps-post"
            axis.plot(known[kept] * scale, shares[kept], drawstyle=style, label=label, **looks)
        if log:
            axis.set_xscale("log")
        else:
            axis.set_xlim(left=0)
        if tail:
            axis.set_yscale("log")
        else:
            axis.set_ylim(0, 1.02)
        axis.set_xlabel(f"{LATENCIES.get(metric, metric)}, {unit}")
        axis.set_ylabel("share of requests" + (", at least" if tail else ""))
        _legend(drawn, axis, len(pooled))
    return drawn.canvas


def _values(run: Run, metric: str) -> NDArray[np.float64]:
    requests = run.requests
    if metric in LATENCIES:
        return np.asarray(getattr(requests, metric), dtype=np.float64)
    if requests.columns.get(metric) != "time":
        times = ", ".join(name for name, kind in requests.columns.items() if kind == "time")
        raise BadRequest(f"metric: {metric!r} is not {', '.join(LATENCIES)} or one of {times}", "metric")
    return np.asarray(requests[metric], dtype=np.float64)


def goodput(
    runs: Runs | Grid, file: str | Path | None = None, *, y: str = "goodput", x: str = "rate", at: float | None = None,
    width: Width = "column", height: float | None = None, title: str | None = None,
) -> Any:  # fmt: skip
    """Draw a metric ``y`` over the offered load, or over another axis ``x`` of a grid, with a line for each label.

    A point is the mean over seeds, with its interval. A dotted line shows the offered load, or the value ``at`` of the
    metric, such as 0.9 for an attainment of 90%.
    """
    metric, marks = metric_of(y), _marks(runs, x)
    unit, scale = _scaled(metric, marks)
    if metric.unit == "share" and at is not None and at > 1:
        raise BadRequest(f"at: is {at:g}, and {y} is a share between 0 and 1; give {at / 100:g}", "at")
    lines = dict[str, list[tuple[float, Estimate]]]()
    for mark in marks:
        lines.setdefault(mark.label, []).append((_number(mark.x, x), mark.estimate(metric, scale)))
    with _figure(file, width, height, title) as drawn:
        axis: Any = drawn.canvas.add_subplot()
        for index, (label, points) in enumerate(lines.items()):
            points.sort(key=lambda each: each[0])
            values = [each.mean if math.isfinite(each.mean) else math.nan for _, each in points]
            bars = [each.half or 0.0 for _, each in points]
            errors = {"yerr": bars, "elinewidth": 0.8} if any(bars) else {}
            axis.errorbar([at for at, _ in points], values, label=label, **errors, **drawn.series(index))
        every = [at for points in lines.values() for at, _ in points]
        faint = {"color": drawn.palette.faint, "linewidth": 0.8, "linestyle": ":", "zorder": 1}
        if at is not None:
            axis.axhline(at * scale, **faint)
        elif metric.unit == "requests/s" and plain_name(x) == "rate":
            axis.plot([min(every), max(every)], [min(every), max(every)], **faint)
        axis.set_ylim(bottom=0)
        axis.set_xlabel(_axis_of(x))
        axis.set_ylabel(_named(metric, unit))
        _legend(drawn, axis, len(lines))
    return drawn.canvas


def _axis_of(x: str) -> str:
    plain = plain_name(x)
    return "offered load, requests/s" if plain == "rate" else plain.replace("_", " ")


def _number(text: str, x: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise BadRequest(f"x: {x} has the value {text!r}, which is not a number; draw bars", "x") from None


def _rate_of(run: Measured) -> float:
    rate = run.rate if isinstance(run, SimulatedPoint) else run.about.get("rate")
    if not isinstance(rate, int | float):
        raise BadRequest("runs: a run has no offered rate; give simulated runs at a rate", "runs")
    return float(rate)


def bars(
    runs: Runs | Grid, metric: str = "goodput", file: str | Path | None = None, *, by: str | None = None,
    width: Width = "column", height: float | None = None, title: str | None = None,
) -> Any:  # fmt: skip
    """Draw a metric as a bar for each label, with its interval; ``by`` makes a group of bars of each value of an axis.

    ``by`` is an axis of a grid, or ``rate``. A label without a value has no bar.
    """
    found, marks = metric_of(metric), _marks(runs, by)
    unit, scale = _scaled(found, marks)
    labels, groups = (list(dict.fromkeys(names)) for names in ([m.label for m in marks], [m.x for m in marks]))
    means = {(mark.label, mark.x): mark.estimate(found, scale) for mark in marks}
    with _figure(file, width, height, title) as drawn:
        axis: Any = drawn.canvas.add_subplot()
        wide = 0.8 / len(labels) if by else 0.7
        for index, label in enumerate(labels):
            here = [(at, means[label, group]) for at, group in enumerate(groups) if (label, group) in means]
            here = [(at, each) for at, each in here if math.isfinite(each.mean)]
            shift = (index - (len(labels) - 1) / 2) * wide if by else float(index)
            halves = [each.half or 0.0 for _, each in here]
            axis.bar(
                [at + shift for at, _ in here], [each.mean for _, each in here], wide, label=label,
                color=drawn.palette.series[index % len(drawn.palette.series) if by else 0],
                yerr=halves if any(halves) else None, error_kw={"elinewidth": 0.8, "ecolor": drawn.palette.ink},
            )  # fmt: skip
        names = groups if by else labels
        axis.set_xticks(range(len(names)), names)
        axis.grid(visible=False, axis="x")
        axis.set_ylabel(_named(found, unit))
        if by:
            axis.set_xlabel(_axis_of(by))
            _legend(drawn, axis, len(labels))
    return drawn.canvas


def pareto(
    runs: Runs | Grid, x: str, y: str, file: str | Path | None = None, *,
    width: Width = "column", height: float | None = None, title: str | None = None,
) -> Any:  # fmt: skip
    """Draw one labelled point for each label, and the frontier of those that no other point beats in both metrics.

    A point is the mean over seeds, with its intervals; one without a value is left out. Each load of a grid has a
    frontier.
    """
    metrics, marks = (metric_of(x), metric_of(y)), _marks(runs)
    marks = [mark for mark in marks if all(math.isfinite(mark.estimate(metric).mean) for metric in metrics)]
    if not marks:
        raise BadRequest(f"runs: no run has a value of both {x} and {y}", "runs")
    units = [_scaled(metric, marks) for metric in metrics]
    both = [[mark.estimate(metric, scale) for metric, (_, scale) in zip(metrics, units, strict=True)] for mark in marks]
    with _figure(file, width, height, title) as drawn:
        axis: Any = drawn.canvas.add_subplot()
        looks = {"marker": "o", "color": drawn.palette.series[0]}
        points, taken = _scatter(
            drawn, axis, metrics, both, [(looks, range(len(marks)))], [mark.load for mark in marks]
        )
        axis.margins(0.15)
        for name, metric, (unit, _) in zip(("x", "y"), metrics, units, strict=True):
            better = "more is better" if metric.more else "less is better"
            getattr(axis, f"set_{name}label")(f"{_named(metric, unit)} ({better})")
        label_points(drawn, axis, [mark.label for mark in marks], points, taken)
    return drawn.canvas


def _scatter(
    drawn: Picture, axis: Any, metrics: Sequence[Metric], both: Sequence[Sequence[Estimate]],
    groups: Iterable[tuple[Mapping[str, Any], Sequence[int]]], loads: Sequence[object],
) -> tuple[list[tuple[float, float]], list[Box]]:  # fmt: skip
    """Draw a point for each pair of estimates, and the frontier of each load; return the points, and what is taken.

    ``groups`` are the looks of points, with their indices. What is above a frontier or to the right of it has means
    that another point beats.
    """
    points = [(ours.mean, theirs.mean) for ours, theirs in both]
    halves = [(ours.half or 0.0, theirs.half or 0.0) for ours, theirs in both]
    for looks, chosen in groups:
        if chosen:
            (x, y), (dx, dy) = (zip(*(of[index] for index in chosen), strict=True) for of in (points, halves))
            bars = {"xerr": dx, "yerr": dy} if any(dx + dy) else {}
            axis.errorbar(x, y, linestyle="", elinewidth=0.7, zorder=3, **bars, **looks)
    taken = list[Box]()
    for (x, y), (dx, dy) in zip(points, halves, strict=True):
        taken += [Box(x - dx, y, x + dx, y), Box(x, y - dy, x, y + dy)]
    for own in dict.fromkeys(loads):
        here = [point for point, of in zip(points, loads, strict=True) if of == own]
        best = sorted(here[at] for at in frontier_of([(x * metrics[0].sign, y * metrics[1].sign) for x, y in here]))
        axis.plot(*zip(*best, strict=True), drawstyle="steps-post", color=drawn.palette.series[0], linewidth=0.9,
                  alpha=0.6, zorder=2)  # fmt: skip
        for (x, y), (next_x, next_y) in pairwise(best):
            taken += [Box(x, y, next_x, y), Box(next_x, next_y, next_x, y)]
    return points, taken


def timeline(
    run: One, file: str | Path | None = None, *, every: float = 1.0,
    width: Width = "column", height: float | None = None, title: str | None = None,
) -> Any:  # fmt: skip
    """Draw one run over time: the rates of arrivals and of good requests, each TTFT, and the KV usage of engines.

    Rates are over ``every`` seconds. The usage needs ``record=lab.Record(engines_every=...)``. Ticks are moves; dotted
    lines are changes of the fleet by a planner.
    """
    (found,) = runs_of(run).popitem()[1]
    if not 0 < every < math.inf:
        raise BadRequest(f"every: is {every:g}, and must be a positive number of seconds", "every")
    requests, engines, plans = found.requests, found.engines, found.plans
    changed = plans["at"][plans["flipped"] + plans["started"] + plans["stopped"] > 0]
    with _figure(file, width, height or 3.2, title) as drawn:
        rows: Any = drawn.canvas.subplots(2 + bool(len(engines)), 1, sharex=True)
        colors = drawn.palette.series
        _rates(rows[0], requests, every, "goodput" if found.slo else "completed", colors)
        rows[0].legend(loc="upper left", ncols=2)
        ttft = requests.ttft_scheduled
        unit, scale = _unit(ttft.tolist())
        rows[1].plot(requests["scheduled"], ttft * scale, ".", markersize=2, color=colors[0])
        rows[1].set_ylabel(f"TTFT, {unit}")
        rows[1].set_ylim(bottom=0)
        if len(engines):
            _usage(drawn, rows[2], found)
        moved = found.moves["at"][np.array(found.moves["outcome"], dtype=object) == "moved"] if len(found.moves) else ()
        if len(moved):
            rows[-1].plot(moved, np.full(len(moved), 1.0), "|", color=drawn.palette.ink, markersize=4,
                          transform=rows[-1].get_xaxis_transform(), clip_on=False)  # fmt: skip
        for axis in rows:
            for at in changed.tolist():
                axis.axvline(at, color=drawn.palette.faint, linewidth=0.7, linestyle=":")
        rows[-1].set_xlabel("time, s")
    return drawn.canvas


def _rates(axis: Any, requests: Requests, every: float, good: str, colors: Sequence[str]) -> None:
    """Draw arrivals, and good requests by the time of their end, per second."""
    ended, met = requests["ended"], requests["ok"]
    if good == "goodput":
        met = np.array([bool(each) for each in requests["met_slo"]])
    edges = np.arange(0.0, float(np.nanmax(ended)) + every, every)
    for index, (name, times) in enumerate((("arrivals", requests["scheduled"]), (good, ended[met]))):
        counts, _ = np.histogram(times, edges)
        axis.plot(edges[:-1], counts / every, color=colors[index], linewidth=0.9, label=name)
    axis.set_ylabel("requests/s")
    axis.set_ylim(0, 1.35 * axis.get_ylim()[1])


def _usage(drawn: Picture, axis: Any, run: Run) -> None:
    """Draw the KV usage of each engine; of many, the range and the mean."""
    at, names = run.engines["at"], run.engines["engine"]
    usage = 100 * run.engines["kv_usage"]
    known = list(dict.fromkeys(names))
    if len(known) <= MOST_LINES:
        for index, name in enumerate(known):
            own = np.array([each == name for each in names])
            axis.plot(at[own], usage[own], linewidth=0.8, color=drawn.palette.series[index % 6])
    else:
        times = np.unique(at[np.isfinite(usage)])
        rows: list[Any] = [usage[(at == time) & np.isfinite(usage)] for time in times]
        low, high = [float(min(row)) for row in rows], [float(max(row)) for row in rows]
        mean = [float(sum(row) / len(row)) for row in rows]
        axis.fill_between(times, low, high, color=drawn.palette.series[0], alpha=0.25, linewidth=0)
        axis.plot(times, mean, linewidth=0.9, color=drawn.palette.series[0])
    axis.set_ylabel("KV usage, %")
    axis.set_ylim(0, 103)


# ---- the figure of `tercet sim --plot` -----------------------------------------------------------------------


def plot_sweep(report: SweepReport, file: Path) -> None:
    """Draw every trial to ``file``. Raise :class:`~tercet.protocol.BadRequest` if it cannot be written."""
    metrics, trials = (metric_of(report.x), metric_of(report.y)), report.trials
    pairs = [(each.x, each.y) for each in trials]
    kept = [index for index, pair in enumerate(pairs) if all(math.isfinite(each.mean) for each in pair)]
    units = [
        _unit(pairs[index][side].mean for index in kept) if metric.unit == "s" else ("", 1.0)
        for side, metric in enumerate(metrics)
    ]
    both = [[each.times(scale) for each, (_, scale) in zip(pairs[index], units, strict=True)] for index in kept]
    with picture(file, "--plot", *SWEEP_INCHES) as drawn:
        axis: Any = drawn.canvas.add_subplot()
        palette = drawn.palette
        looks_of: Mapping[Standing, dict[str, Any]] = {
            "best": {"color": palette.series[0], "marker": "o", "label": "no setting beats these"},
            "near": {"color": palette.series[1], "marker": "D", "markerfacecolor": palette.page,
                     "label": "on or off the line by chance"},
            "beaten": {"color": palette.faint, "marker": "s", "label": "beaten"},
        }  # fmt: skip
        groups = [
            (looks, [at for at, index in enumerate(kept) if trials[index].standing == standing])
            for standing, looks in looks_of.items()
        ]
        points, taken = _scatter(drawn, axis, metrics, both, groups, [None] * len(kept))
        axis.margins(0.12)
        axis.set_xlabel(_named(metrics[0], units[0][0]))
        axis.set_ylabel(_named(metrics[1], units[1][0]))
        varied, at = report.arguments["over"], report.arguments["rate"]
        fixed = [str(report.arguments[name]) for name in ("program", "fleet", "profile") if name not in varied]
        if "request-rate" not in varied:
            fixed.append("all at once" if at == "inf" else f"{at:g} requests/s")
        drawn.canvas.legend(loc="outside upper center", ncols=4, title=" · ".join(fixed))
        drawn.footer("\n".join(_sweep_footer(report, len(trials) - len(kept))))
        label_points(drawn, axis, [", ".join(trials[index].settings.values()) for index in kept], points, taken)


def _sweep_footer(report: SweepReport, undrawn: int) -> Iterator[str]:
    seeds = len(report.seeds)
    requests = report.arguments["workload"].get("requests")
    parts = [f"labels: {', '.join(report.arguments['over'])}", "simulated"]
    parts += [f"n = {requests} requests" + (f" x {seeds} seeds" if seeds > 1 else "")] if requests else []
    yield " · ".join((*parts, f"Tercet {report.version}"))
    if seeds > 1:
        tested = f"{report.comparisons} comparisons, Holm-corrected"
        yield f"Bars: 95% intervals over seeds. Settings are compared seed by seed: {tested}."
    if undrawn:
        yield f"{undrawn} settings are not drawn: some of their requests failed."
