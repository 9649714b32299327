"""Figures for papers: distributions, goodput over the load, two metrics against each other, and a run over time.

Each function takes runs, draws into ``file`` (PDF with embedded fonts, SVG with text, or PNG) and returns matplotlib's
figure. ``width`` is that of a ``column`` or of the whole ``text`` of a page with two columns, or a number of inches.

Runs are given as one run, several, or a mapping from labels to one or several runs; runs of one label differ in their
seeds or rates. The path of a saved run stands for the run, so a figure is drawn again from files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tercet.protocol import BadRequest
from tercet_lab.bench.results import achieved, enough
from tercet_lab.bench.simulated.experiment import Run
from tercet_lab.bench.simulated.grid import Estimate
from tercet_lab.bench.simulated.grid import pareto as frontier_of
from tercet_lab.drawing import Box, Picture, draw_frontier, label_points, picture, steps_of
from tercet_lab.run_files import load
from tercet_lab.tables import Requests

One = Run | Requests | str | Path
Runs = One | Sequence[One] | Mapping[str, One | Sequence[One]]
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
LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "e2el": "JCT", "itl": "ITL"}


# ---- metrics of runs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metric:
    """A metric of a run: its name on an axis, its unit, whether more is better, and its value."""

    words: str
    unit: str
    more: bool
    of: Callable[[Run], float]


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


METRICS: Mapping[str, Metric] = {
    "goodput": Metric("goodput", "requests/s", True, lambda run: _number(run.goodput)),
    "throughput": Metric(
        "completed", "requests/s", True, lambda run: _number(achieved(run.summary.flat(), "throughput"))
    ),
    "attainment": Metric("SLO attainment", "%", True, lambda run: 100 * _number(run.attainment)),
    "engine_hours": Metric("engine-hours", "", False, lambda run: run.engine_hours),
    "imbalance": Metric(
        "imbalance of KV usage", "%", False,
        lambda run: math.nan if run.point is None or run.point.imbalance is None else 100 * run.point.imbalance.mean,
    ),
}  # fmt: skip


def metric_of(name: str) -> Metric:
    """Return the metric of a name such as ``ttft.p99``, ``goodput`` or ``engine_hours``; latencies are in seconds.

    Raise :class:`~tercet.protocol.BadRequest` for an unknown name.
    """
    latency, _, figure = name.partition(".")
    if latency in LATENCIES and figure in ("mean", "p50", "p90", "p99"):
        words = f"{figure if figure == 'mean' else figure.upper()} {LATENCIES[latency]}"
        return Metric(words, "s", False, lambda run: _latency(run, latency, figure))
    if name not in METRICS:
        known = f"{', '.join(METRICS)}, or one of {', '.join(LATENCIES)} with .mean, .p50, .p90 or .p99"
        raise BadRequest(f"metric: {name!r} is unknown; choose {known}", "metric")
    return METRICS[name]


def _latency(run: Run, latency: str, figure: str) -> float:
    """Return a latency in seconds; infinite if a request failed, NaN if there are too few requests for it."""
    found = getattr(run.summary, latency)
    if run.summary.failed:
        return math.inf
    return math.nan if found is None or not enough(found.count, figure) else float(getattr(found, figure))


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
    return Run(requests=given) if isinstance(given, Requests) else load(given)


def _labels_of(given: Sequence[One], runs: Sequence[Run]) -> list[str]:
    """Return a label for each run: what differs between the experiments, or the name of the file."""
    told = [_parts_of(run.about) for run in runs]
    common = set(told[0]).intersection(*told) if told else set[str]()
    found = list[str]()
    for number, (one, parts) in enumerate(zip(given, told, strict=True), 1):
        if parts:
            found.append(", ".join([each for each in parts if each not in common] or parts[:1]))
        else:
            found.append(Path(one).stem if isinstance(one, str | Path) else f"run {number}")
    return found


def _parts_of(about: Mapping[str, Any]) -> list[str]:
    """Return the program, the fleet and the policies of a run; nothing if they are unknown."""
    moving: Mapping[str, Any] = about.get("moving") or {}
    policies: Sequence[str] = moving.get("reschedule") or ()
    return [str(each) for each in (about.get("program"), about.get("fleet"), *policies) if each]


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
    runs: Runs, file: str | Path | None = None, *, y: str = "goodput", at: float | None = None,
    width: Width = "column", height: float | None = None, title: str | None = None,
) -> Any:  # fmt: skip
    """Draw a metric over the offered load, one line for each label; ``y`` as in :func:`pareto`.

    A point is the mean over seeds, with Student's 95% interval. A dotted line shows the offered load, or the value
    ``at``, such as 90 for an attainment of 90%.
    """
    found, metric = runs_of(runs), metric_of(y)
    rates = {label: sorted({_rate_of(run) for run in of}) for label, of in found.items()}
    with _figure(file, width, height, title) as drawn:
        axis: Any = drawn.canvas.add_subplot()
        means = {
            label: [Estimate.of([metric.of(run) for run in of if _rate_of(run) == rate]) for rate in rates[label]]
            for label, of in found.items()
        }
        unit, scale = metric.unit, 1.0
        if unit == "s":
            unit, scale = _unit(each.mean for of in means.values() for each in of)
        for index, label in enumerate(found):
            values = [each.mean * scale if math.isfinite(each.mean) else math.nan for each in means[label]]
            bars = [(each.half or 0.0) * scale for each in means[label]]
            errors = {"yerr": bars, "elinewidth": 0.8} if any(bars) else {}
            axis.errorbar(rates[label], values, label=label, **errors, **drawn.series(index))
        every = [rate for of in rates.values() for rate in of]
        faint = {"color": drawn.palette.faint, "linewidth": 0.8, "linestyle": ":", "zorder": 1}
        if at is not None:
            axis.axhline(at, **faint)
        elif metric.unit == "requests/s":
            axis.plot([min(every), max(every)], [min(every), max(every)], **faint)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("offered load, requests/s")
        axis.set_ylabel(f"{metric.words}, {unit}" if unit else metric.words)
        _legend(drawn, axis, len(found))
    return drawn.canvas


def _rate_of(run: Run) -> float:
    rate = run.about.get("rate")
    if not isinstance(rate, int | float):
        raise BadRequest("runs: a run has no offered rate; give simulated runs at a rate", "runs")
    return float(rate)


def pareto(
    runs: Runs, x: str, y: str, file: str | Path | None = None, *,
    width: Width = "column", height: float | None = None, title: str | None = None,
) -> Any:  # fmt: skip
    """Draw one labelled point for each label, and the frontier of those that no other point beats in both metrics.

    Metrics are ``goodput``, ``throughput``, ``attainment``, ``engine_hours``, ``imbalance``, and ``ttft``, ``tpot``,
    ``e2el`` or ``itl`` with ``.mean``, ``.p50``, ``.p90`` or ``.p99``. A point is the mean over seeds, with Student's
    95% intervals; a point without a value is left out.
    """
    found, metrics = runs_of(runs), (metric_of(x), metric_of(y))
    means = {label: [Estimate.of([metric.of(run) for run in of]) for metric in metrics] for label, of in found.items()}
    means = {label: both for label, both in means.items() if all(math.isfinite(each.mean) for each in both)}
    if not means:
        raise BadRequest(f"runs: no run has a value of both {x} and {y}", "runs")
    units = [
        _unit(both[side].mean for both in means.values()) if metric.unit == "s" else (metric.unit, 1.0)
        for side, metric in enumerate(metrics)
    ]
    points = [(both[0].mean * units[0][1], both[1].mean * units[1][1]) for both in means.values()]
    signs = [-1.0 if metric.more else 1.0 for metric in metrics]
    best = sorted(points[index] for index in frontier_of([(px * signs[0], py * signs[1]) for px, py in points]))
    halves = [[(both[side].half or 0.0) * units[side][1] for both in means.values()] for side in (0, 1)]
    with _figure(file, width, height, title) as drawn:
        axis: Any = drawn.canvas.add_subplot()
        bars = {"xerr": halves[0], "yerr": halves[1]} if any(halves[0] + halves[1]) else {}
        axis.errorbar(
            [px for px, _ in points], [py for _, py in points], linestyle="", marker="o", elinewidth=0.7, zorder=3,
            color=drawn.palette.series[0], **bars,
        )  # fmt: skip
        draw_frontier(drawn, axis, best)
        axis.margins(0.15)
        for name, metric, (unit, _) in zip(("x", "y"), metrics, units, strict=True):
            better = "more is better" if metric.more else "less is better"
            getattr(axis, f"set_{name}label")(f"{metric.words}{', ' + unit if unit else ''} ({better})")
        boxes = [Box(px - dx, py - dy, px + dx, py + dy) for (px, py), dx, dy in zip(points, *halves, strict=True)]
        label_points(drawn, axis, list(means), points, [*boxes, *steps_of(best)])
    return drawn.canvas


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
    requests, engines = found.requests, found.engines
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
            for at in found.plans["at"].tolist():
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
