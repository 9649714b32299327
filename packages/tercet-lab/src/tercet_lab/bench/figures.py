"""The figure of results: latencies and rates over the load, with a line for each program."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tercet_lab.bench.bench_report import (
    ARRIVALS,
    FLEET,
    MACHINE,
    MODEL,
    OPEN_LOOP,
    SOURCE,
    WORKLOAD,
    Figure,
    FigureLine,
    LinePoint,
)
from tercet_lab.bench.results import REQUESTS_NEEDED, Ratio, enough
from tercet_lab.bench.simulated.grid import Standing, pareto, sign_of
from tercet_lab.bench.simulated.sweep import SweepReport, Trial
from tercet_lab.drawing import Box, Picture, draw_frontier, label_points, picture, steps_of

LATENCIES = (("TTFT", "ttft"), ("TPOT", "tpot"), ("JCT", "e2el"))
TAILS = ("p99", "p90")
WIDTH, HEIGHT = 7.0, 8.4
Unit = Literal["ms", "s"]
PER_MS: Mapping[Unit, float] = {"ms": 1.0, "s": 0.001}
# From this value on, seconds are easier to read than milliseconds.
MANY_MS = 1000.0
HEADROOM = 1.04
# Distance of lines with error bars, as a part of a panel's width.
APART = 0.008
# For a single load, as parts of it: the extent of panels to both sides, and the distance of lines.
BESIDE, APART_ALONE = 0.5, 0.1
# Approximate number of characters that fit on one line above the panels.
LEGEND_WIDTH = 110


def draw(figure: Figure, file: Path, title: str | None = None, *, log: bool = False) -> None:
    """Write the figure to ``file``, whose suffix decides the format. ``log`` makes the axes of latencies logarithmic.

    Raise :class:`~tercet.protocol.BadRequest` if the file cannot be written.
    """
    with picture(file, "--figure", WIDTH, HEIGHT) as drawn:
        axes: Any = drawn.canvas.subplots(len(LATENCIES) + 1, 2, sharex=True, squeeze=False)
        tail = _tail(figure)
        for row, (name, metric) in enumerate(LATENCIES):
            unit = _unit(_all_drawn(figure, metric, ("mean", tail)))
            for axis, statistic in zip(axes[row], ("mean", tail), strict=True):
                _latencies(drawn, axis, figure, f"{statistic}_{metric}_ms", unit)
                axis.set_title(f"{statistic if statistic == 'mean' else statistic.upper()} {name}")
                axis.set_ylabel(unit)
                _scale(drawn, axis, log=log)
        _rates(drawn, axes[-1], figure)
        if len(loads := _loads(figure)) == 1:
            axes[0][0].set_xlim(loads[0] * (1 - BESIDE), loads[0] * (1 + BESIDE))
            axes[0][0].set_xticks(loads, [f"{loads[0]:.3g}"])
        for axis in axes[-1]:
            axis.set_xlabel("offered load, requests/s" if figure.x_label == OPEN_LOOP else figure.x_label)
        _legend(drawn, axes[0][0], [looks["label"] for _, looks in _looks(drawn, figure)], title or _title(figure))
        drawn.footer("\n".join(_footer(figure, tail)))


def _tail(figure: Figure) -> str:
    """Return the highest percentile for which all points have enough requests, or else the lowest percentile."""
    fewest, _ = figure.requests
    return next((statistic for statistic in TAILS if enough(fewest, statistic)), TAILS[-1])


def _looks(drawn: Picture, figure: Figure) -> Iterator[tuple[FigureLine, dict[str, Any]]]:
    series = 0
    for line in figure.lines:
        if line.is_baseline:
            yield line, {**drawn.baseline(), "label": f"{line.label} (baseline)"}
        else:
            yield line, {**drawn.series(series), "label": line.label}
            series += 1


def _latencies(drawn: Picture, axis: Any, figure: Figure, key: str, unit: Unit) -> None:
    """Draw a line for each program, in ``unit``, with the computed intervals as error bars."""
    statistic, metric, _ = key.split("_")
    in_unit = PER_MS[unit]
    for shift, (line, looks) in zip(_shifts(figure), _looks(drawn, figure), strict=True):
        points = [point for point in line.points if _is_drawn(point, key, statistic)]
        bars = [_bars(point.ratios.get(f"{statistic} {metric.upper()}"), in_unit * 1000) for point in points]
        values = [_value(point, key) * in_unit for point in points]
        _line(axis, [point.x + shift for point in points], values, bars, looks)


def _loads(figure: Figure) -> list[float]:
    return sorted({point.x for line in figure.lines for point in line.points})


def _shifts(figure: Figure) -> list[float]:
    """Return the shift of each line along x, so that error bars of one load do not overlap.

    With a single load, lines have one mark each: all marks are drawn side by side.
    """
    loads, count = _loads(figure), len(figure.lines)
    if len(loads) == 1:
        step = loads[0] * min(APART_ALONE, BESIDE / count)
    else:
        step = APART * (loads[-1] - loads[0]) if any(_ratios(figure)) else 0.0
    return [(index - (count - 1) / 2) * step for index in range(count)]


def _line(
    axis: Any, x: Sequence[float], y: Sequence[float], bars: Sequence[tuple[float, float] | None],
    looks: Mapping[str, Any],
) -> None:  # fmt: skip
    """Draw one line, with the intervals of its points as error bars."""
    if not any(bars):
        axis.plot(x, y, **looks)
        return
    below = [max(0.0, at - bar[0]) if bar else 0.0 for at, bar in zip(y, bars, strict=True)]
    above = [max(0.0, bar[1] - at) if bar else 0.0 for at, bar in zip(y, bars, strict=True)]
    axis.errorbar(x, y, yerr=(below, above), elinewidth=0.8, **looks)


def _bars(ratio: Ratio | None, scale: float) -> tuple[float, float] | None:
    """Return the interval of a ratio times the baseline's value. ``scale`` converts seconds to the axis' unit."""
    return (ratio.low * ratio.baseline_value * scale, ratio.high * ratio.baseline_value * scale) if ratio else None


def _is_drawn(point: LinePoint, key: str, statistic: str) -> bool:
    return point.metrics.get(key) is not None and enough(int(point.metrics.get("completed") or 0), statistic)


def _all_drawn(figure: Figure, metric: str, statistics: Sequence[str]) -> Iterator[float]:
    """Yield all drawn values of a metric, in milliseconds."""
    for statistic in statistics:
        key = f"{statistic}_{metric}_ms"
        points = (point for line in figure.lines for point in line.points)
        yield from (_value(point, key) for point in points if _is_drawn(point, key, statistic))


def _value(point: LinePoint, key: str) -> float:
    return float(point.metrics.get(key) or 0.0)


def _unit(milliseconds: Iterable[float]) -> Unit:
    return "s" if max(milliseconds, default=0.0) > MANY_MS else "ms"


def _scale(drawn: Picture, axis: Any, *, log: bool) -> None:
    if log:
        drawn.logarithmic(axis)
    else:
        axis.set_ylim(0, HEADROOM * axis.get_ylim()[1])


def _ratios(figure: Figure) -> Iterator[Ratio]:
    return (ratio for line in figure.lines for point in line.points for ratio in point.ratios.values())


def _rates(drawn: Picture, axes: Sequence[Any], figure: Figure) -> None:
    has_goodput = any(
        point.metrics.get("achieved_goodput") is not None for line in figure.lines for point in line.points
    )
    shifts = _shifts(figure) if len(_loads(figure)) == 1 else [0.0] * len(figure.lines)
    second = ("goodput", "achieved_goodput", "requests/s")
    if not has_goodput:
        second = ("output", "output_throughput", "tokens/s")
    for axis, (name, key, unit) in zip(
        axes, (("achieved rate", "achieved_throughput", "requests/s"), second), strict=True
    ):
        for shift, (line, looks) in zip(shifts, _looks(drawn, figure), strict=True):
            points = [point for point in line.points if point.metrics.get(key) is not None]
            axis.plot([point.x + shift for point in points], [_value(point, key) for point in points], **looks)
        if figure.x_label == OPEN_LOOP and unit == "requests/s":
            _offered(drawn, axis, figure)
        axis.set_title(name)
        axis.set_ylabel(unit)
        axis.set_ylim(0, HEADROOM * axis.get_ylim()[1])


def _offered(drawn: Picture, axis: Any, figure: Figure) -> None:
    """Draw the line on which the achieved rate equals the offered load."""
    loads = _loads(figure)
    ends = [loads[0], loads[-1]]
    at = [loads[0] * (1 - BESIDE), loads[0] * (1 + BESIDE)] if len(loads) == 1 else ends
    axis.plot(at, ends, color=drawn.palette.faint, linewidth=0.8, linestyle=":", zorder=1)
    axis.annotate("offered", (at[1], ends[1]), xytext=(-2, 2), textcoords="offset points", color=drawn.palette.faint,
                  fontsize=6.5, horizontalalignment="right")  # fmt: skip


def _legend(drawn: Picture, axis: Any, labels: Sequence[str], title: str) -> None:
    """Draw the legend in the order of the lines; matplotlib's order puts lines with error bars last."""
    handles, drawn_labels = axis.get_legend_handles_labels()
    found = dict(zip(drawn_labels, handles, strict=True))
    longest = max(len(label) for label in labels) + 6
    columns = max(1, min(len(labels), LEGEND_WIDTH // longest))
    drawn.canvas.legend(
        [found[label] for label in labels], labels, loc="outside upper center", ncols=columns, title=title
    )


def _title(figure: Figure) -> str:
    told = [figure.common.get(name) for name in (MODEL, WORKLOAD, ARRIVALS)]
    return " · ".join(each for each in told if each) or "Load, latency and rate"


def _footer(figure: Figure, tail: str) -> Iterator[str]:
    fewest, most = figure.requests
    count = f"n = {fewest}" if fewest == most else f"n = {fewest} to {most}"
    told = [f"{count} requests per point"]
    told += [f"{name} {value}" for name in (FLEET, MACHINE) if (value := figure.common.get(name))]
    told += [value for name in (SOURCE,) if (value := figure.common.get(name))]
    told += [" to ".join(dict.fromkeys((figure.days[0], figure.days[-1])))] if figure.days else []
    if version := figure.common.get("tercet"):
        told.append(f"Tercet {version}")
    yield " · ".join(told)
    needed = [f"{each.upper()} needs {REQUESTS_NEEDED[each]}" for each in TAILS[: TAILS.index(tail) + 1]
              if not enough(fewest, each)]  # fmt: skip
    if needed:
        yield f"{' and '.join(needed)} requests per point; points with fewer are not drawn."
    if one := next(_ratios(figure), None):
        yield (
            f"Bars: {one.confidence:.0%} bootstrap intervals of the ratio to {one.baseline} over {one.rounds} rounds, "
            f"times the value of {one.baseline}."
        )


SWEEP_WIDTH, SWEEP_HEIGHT = 6.0, 4.4
ORDER: tuple[Standing, ...] = ("best", "near", "beaten")
# From this value on, seconds are easier to read than milliseconds.
MANY_SECONDS = 1.0
METRICS = {"ttft": "TTFT", "tpot": "TPOT", "e2el": "JCT"}


def plot_sweep(report: SweepReport, file: Path) -> None:
    """Draw every trial to ``file``. Raise :class:`~tercet.protocol.BadRequest` if it cannot be written."""
    trials = sorted(
        (trial for trial in report.trials if math.isfinite(trial.x.mean) and math.isfinite(trial.y.mean)),
        key=lambda trial: ORDER.index(trial.standing),
    )
    with picture(file, "--plot", SWEEP_WIDTH, SWEEP_HEIGHT) as drawn:
        axis: Any = drawn.canvas.add_subplot()
        metrics = (report.x, report.y)
        means = [[each.mean for each in side] for side in _sides(trials)]
        units = [_unit_of(metric, side) for metric, side in zip(metrics, means, strict=True)]
        points = [(trial.x.mean * units[0][1], trial.y.mean * units[1][1]) for trial in trials]
        for standing, looks in _standing_looks(drawn, report).items():
            _trials(axis, [each for each in zip(trials, points, strict=True) if each[0].standing == standing], units,
                    looks)  # fmt: skip
        best = _on_frontier(points, metrics)
        draw_frontier(drawn, axis, best)
        axis.margins(0.12)
        axis.set_xlabel(f"{_in_words(report.x)}{units[0][0]}")
        axis.set_ylabel(f"{_in_words(report.y)}{units[1][0]}")
        drawn.canvas.legend(loc="outside upper center", ncols=4, title=_sweep_title(report))
        drawn.footer("\n".join(_sweep_footer(report, len(report.trials) - len(trials))))
        label_points(drawn, axis, [", ".join(trial.settings.values()) for trial in trials], points,
                [*_error_bars(trials, units), *steps_of(best)])  # fmt: skip


def _standing_looks(drawn: Picture, report: SweepReport) -> Mapping[Standing, dict[str, Any]]:
    palette = drawn.palette
    looks: dict[Standing, dict[str, Any]] = {
        "best": {"color": palette.series[0], "marker": "o", "label": "no setting beats these"},
        "near": {"color": palette.series[1], "marker": "D", "markerfacecolor": palette.page,
                 "label": "on or off the line by chance"},
        "beaten": {"color": palette.faint, "marker": "s", "label": "beaten"},
    }  # fmt: skip
    present = {trial.standing for trial in report.trials}
    return {standing: look for standing, look in looks.items() if standing in present}


def _trials(
    axis: Any, found: Sequence[tuple[Trial, tuple[float, float]]], units: Sequence[tuple[str, float]],
    looks: Mapping[str, Any],
) -> None:  # fmt: skip
    if not found:
        return
    errors = [[(each.half or 0.0) * scale for each in side]
              for side, (_, scale) in zip(_sides([trial for trial, _ in found]), units, strict=True)]  # fmt: skip
    bars = {"xerr": errors[0], "yerr": errors[1]} if any(errors[0] + errors[1]) else {}
    axis.errorbar([x for _, (x, _) in found], [y for _, (_, y) in found], linestyle="", elinewidth=0.7, zorder=3,
                  **bars, **looks)  # fmt: skip


def _on_frontier(points: Sequence[tuple[float, float]], metrics: tuple[str, str]) -> list[tuple[float, float]]:
    signs = sign_of(metrics[0]), sign_of(metrics[1])
    return sorted(points[index] for index in pareto([(x * signs[0], y * signs[1]) for x, y in points]))


def _error_bars(trials: Sequence[Trial], units: Sequence[tuple[str, float]]) -> Iterator[Box]:
    """Yield the error bars as boxes without area, in the axes' units."""
    for trial in trials:
        (x, dx), (y, dy) = (
            (each.mean * scale, (each.half or 0.0) * scale)
            for each, (_, scale) in zip((trial.x, trial.y), units, strict=True)
        )
        yield Box(x - dx, y, x + dx, y)
        yield Box(x, y - dy, x, y + dy)


def _sides(trials: Sequence[Trial]) -> Iterator[list[Any]]:
    yield [trial.x for trial in trials]
    yield [trial.y for trial in trials]


def _unit_of(metric: str, means: Sequence[float]) -> tuple[str, float]:
    if metric.partition(".")[0] not in METRICS:
        return "", 1.0
    return (", s", 1.0) if max(means, default=0.0) > MANY_SECONDS else (", ms", 1000.0)


def _in_words(metric: str) -> str:
    name, _, statistic = metric.partition(".")
    if not statistic:
        return metric.replace("_", " ")
    return f"{statistic if statistic == 'mean' else statistic.upper()} {METRICS[name]}"


def _sweep_title(report: SweepReport) -> str:
    varied = report.arguments["over"]
    fixed = [str(report.arguments[name]) for name in ("program", "fleet", "profile") if name not in varied]
    at = report.arguments["rate"]
    rate = [] if "request-rate" in varied else ["all at once" if at == "inf" else f"{at:g} requests/s"]
    return " · ".join((*fixed, *rate))


def _sweep_footer(report: SweepReport, undrawn: int) -> Iterator[str]:
    seeds = len(report.seeds)
    requests = report.arguments["workload"].get("requests")
    told = [f"labels: {', '.join(report.arguments['over'])}", "simulated"]
    told += [f"n = {requests} requests" + (f" x {seeds} seeds" if seeds > 1 else "")] if requests else []
    yield " · ".join((*told, f"Tercet {report.version}"))
    if seeds > 1:
        tested = f"{report.comparisons} comparisons, Holm-corrected"
        yield f"Bars: 95% intervals over seeds. Settings are compared seed by seed: {tested}."
    if undrawn:
        yield f"{undrawn} settings are not drawn: some of their requests failed."
