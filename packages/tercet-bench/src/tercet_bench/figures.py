"""The figure of results: latencies and rates over the load, with a line for each program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tercet_bench.bench_report import (
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
from tercet_lab.drawing import Picture, picture

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
        # The highest percentile for which all points have enough requests, or else the lowest percentile.
        tail = next((statistic for statistic in TAILS if enough(figure.requests[0], statistic)), TAILS[-1])
        points = [point for line in figure.lines for point in line.points]
        for row, (name, metric) in enumerate(LATENCIES):
            keys = {statistic: f"{statistic}_{metric}_ms" for statistic in ("mean", tail)}
            values = (_value(p, key) for each, key in keys.items() for p in points if _is_drawn(p, key, each))
            unit: Unit = "s" if max(values, default=0.0) > MANY_MS else "ms"
            for axis, (statistic, key) in zip(axes[row], keys.items(), strict=True):
                _latencies(drawn, axis, figure, key, unit)
                axis.set_title(f"{statistic if statistic == 'mean' else statistic.upper()} {name}")
                axis.set_ylabel(unit)
                if log:
                    drawn.logarithmic(axis)
                else:
                    axis.set_ylim(0, HEADROOM * axis.get_ylim()[1])
        _rates(drawn, axes[-1], figure)
        if len(loads := _loads(figure)) == 1:
            axes[0][0].set_xlim(loads[0] * (1 - BESIDE), loads[0] * (1 + BESIDE))
            axes[0][0].set_xticks(loads, [f"{loads[0]:.3g}"])
        for axis in axes[-1]:
            axis.set_xlabel("offered load, requests/s" if figure.x_label == OPEN_LOOP else figure.x_label)
        _legend(drawn, axes[0][0], [looks["label"] for _, looks in _looks(drawn, figure)], title or _title(figure))
        drawn.footer("\n".join(_footer(figure, tail)))


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
        # The interval of a ratio times the baseline's value, which is in seconds.
        ratios = [point.ratios.get(f"{statistic} {metric.upper()}") for point in points]
        scale = in_unit * 1000
        bars = [each and (each.low * each.baseline_value * scale, each.high * each.baseline_value * scale)
                for each in ratios]  # fmt: skip
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


def _is_drawn(point: LinePoint, key: str, statistic: str) -> bool:
    return point.metrics.get(key) is not None and enough(int(point.metrics.get("completed") or 0), statistic)


def _value(point: LinePoint, key: str) -> float:
    return float(point.metrics.get(key) or 0.0)


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
    names = [figure.common.get(name) for name in (MODEL, WORKLOAD, ARRIVALS)]
    return " · ".join(each for each in names if each) or "Load, latency and rate"


def _footer(figure: Figure, tail: str) -> Iterator[str]:
    fewest, most = figure.requests
    count = f"n = {fewest}" if fewest == most else f"n = {fewest} to {most}"
    parts = [f"{count} requests per point"]
    parts += [f"{name} {value}" for name in (FLEET, MACHINE) if (value := figure.common.get(name))]
    parts += [value for name in (SOURCE,) if (value := figure.common.get(name))]
    parts += [" to ".join(dict.fromkeys((figure.days[0], figure.days[-1])))] if figure.days else []
    if version := figure.common.get("tercet"):
        parts.append(f"Tercet {version}")
    yield " · ".join(parts)
    needed = [f"{each.upper()} needs {REQUESTS_NEEDED[each]}" for each in TAILS[: TAILS.index(tail) + 1]
              if not enough(fewest, each)]  # fmt: skip
    if needed:
        yield f"{' and '.join(needed)} requests per point; points with fewer are not drawn."
    if one := next(_ratios(figure), None):
        yield (
            f"Bars: {one.confidence:.0%} bootstrap intervals of the ratio to {one.baseline} over {one.rounds} rounds, "
            f"times the value of {one.baseline}."
        )
