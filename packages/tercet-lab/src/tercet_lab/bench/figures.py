"""The figure of results: latencies and rates over the load, with a line for each program."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tercet.protocol import BadRequest
from tercet.protocol.entry_points import import_extra
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
from tercet_lab.bench.simulated.sweep import Standing, SweepReport, Trial, pareto
from tercet_lab.bench.simulated.virtual_run import FleetSample, PlannedRun

FORMATS = (".png", ".svg", ".pdf")
DARK_SUFFIX = "-dark"
MARKERS = "osD^vPX*"
DASHES = ("-", "--", ":", "-.")
DOTS_PER_INCH = 200
# A logarithmic axis that spans less than this factor may have fewer than three round numbers.
NARROW = 6.0


@dataclass(frozen=True)
class Palette:
    """The colours of figures on one kind of page.

    ``series`` are from the eight colours of Okabe and Ito, which people with any kind of colour blindness can
    distinguish. ``ink`` is for text and the baseline, ``faint`` for frames and grids.
    """

    page: str
    ink: str
    faint: str
    series: Sequence[str]


LIGHT = Palette(
    "#ffffff", "#1a1a1a", "#8c8c8c", ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
)  # fmt: skip
DARK = Palette(
    "#14171c", "#e8e8e8", "#8c8c8c", ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#D55E00")
)  # fmt: skip


@dataclass(frozen=True)
class Picture:
    """A matplotlib figure that is being drawn, with its palette."""

    canvas: Any
    palette: Palette

    def series(self, index: int) -> dict[str, Any]:
        """Return colour, marker and dashes of series ``index``. The first 24 series all differ."""
        colors = self.palette.series
        return {
            "color": colors[index % len(colors)],
            "marker": MARKERS[index % len(MARKERS)],
            "linestyle": DASHES[index // len(colors) % len(DASHES)],
        }

    def baseline(self) -> dict[str, Any]:
        """Return the style of the baseline."""
        return {"color": self.palette.ink, "marker": "o", "linestyle": "--", "zorder": 5}

    def logarithmic(self, axis: Any) -> None:
        """Make the vertical axis logarithmic, with plain numbers at its ticks, at least three."""
        ticker: Any = import_module("matplotlib.ticker")
        axis.set_yscale("log")
        low, high = axis.get_ylim()
        narrow = high < NARROW * low
        axis.yaxis.set_major_locator(ticker.MaxNLocator(5) if narrow else ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_locator(ticker.NullLocator())

    def footer(self, text: str) -> None:
        """Add small text below the figure."""
        self.canvas.supxlabel(text, fontsize=6.5, color=self.palette.faint, x=0.01, horizontalalignment="left")


def require_drawing(file: Path, flag: str) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` if the format of ``file`` is unknown or matplotlib is missing."""
    if file.suffix.lower() not in FORMATS:
        raise BadRequest(f"{flag}: {file} must end with one of {', '.join(FORMATS)}", flag)
    import_extra("matplotlib.figure", f"{flag} {file}")


@contextmanager
def picture(file: Path, flag: str, width: float, height: float) -> Generator[Picture]:
    """Yield an empty figure of this size in inches, and write it to ``file`` at the end.

    The file's suffix decides the format. Raise :class:`~tercet.protocol.BadRequest` that names ``flag``.
    """
    require_drawing(file, flag)
    palette = DARK if file.stem.endswith(DARK_SUFFIX) else LIGHT
    # matplotlib is optional and only partly typed.
    library: Any = import_module("matplotlib")
    with library.rc_context():
        library.rcdefaults()
        library.rcParams.update(_settings(palette))
        canvas = import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")
        yield Picture(canvas, palette)
        try:
            canvas.savefig(file, metadata={"Date": None} if file.suffix.lower() == ".svg" else None)
        except OSError as error:
            raise BadRequest(f"{flag}: {file} cannot be written: {error.strerror}", flag) from error


def _settings(palette: Palette) -> dict[str, Any]:
    ink = ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.labelcolor", "ytick.labelcolor")
    return {
        **dict.fromkeys(ink, palette.ink),
        **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), palette.faint),
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), palette.page),
        "font.size": 8,
        "axes.titlesize": 8.5,
        "axes.labelsize": 8,
        "legend.fontsize": 7.5,
        "legend.frameon": False,
        "legend.title_fontsize": 9.5,
        "lines.linewidth": 1.2,
        "lines.markersize": 4,
        "errorbar.capsize": 2,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.alpha": 0.25,
        "grid.linewidth": 0.5,
        "savefig.dpi": DOTS_PER_INCH,
        # SVG keeps text as text, and equal numbers give equal files.
        "svg.fonttype": "none",
        "svg.hashsalt": "tercet",
        "pdf.fonttype": 42,
    }


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


DISTANCES = (1.0, 1.8, 3.0, 4.5, 6.5)
# Degrees. A reader looks next to a point first: right, left, above, below, then diagonally.
ANGLES = (0, 180, 90, 270, 45, 315, 135, 225, 22, 338, 158, 202, 67, 293, 113, 247)


class Box(NamedTuple):
    """A rectangle."""

    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: Box) -> bool:
        """True if this box and ``other`` have more than an edge in common."""
        return (
            self.left < other.right and other.left < self.right and self.bottom < other.top and other.bottom < self.top
        )

    def within(self, other: Box) -> bool:
        """True if this box is inside ``other``."""
        return (
            self.left >= other.left
            and self.bottom >= other.bottom
            and self.right <= other.right
            and self.top <= other.top
        )

    def distance(self, x: float, y: float) -> float:
        """Return the distance from a point to the box; 0 for a point inside it."""
        return math.hypot(max(self.left - x, 0.0, x - self.right), max(self.bottom - y, 0.0, y - self.top))

    @staticmethod
    def around(x: float, y: float, width: float, height: float) -> Box:
        """Return the box with this center."""
        return Box(x - width / 2, y - height / 2, x + width / 2, y + height / 2)


def place(
    points: Sequence[tuple[float, float]], sizes: Sequence[tuple[float, float]], taken: Sequence[Box], frame: Box,
    gap: float,
) -> list[Box | None]:  # fmt: skip
    """Return a box for each point's label, in order, or None if there is no room near the point.

    The boxes are inside the frame, and overlap neither each other nor the boxes ``taken``. ``gap`` is the least
    distance of a label from its point.
    """
    placed: list[Box | None] = []
    occupied = list(taken)
    for point, size in zip(points, sizes, strict=True):
        free = (
            box
            for box in _candidates(point, size, gap)
            if box.within(frame) and not any(box.overlaps(other) for other in occupied)
        )
        found = next(free, None)
        placed.append(found)
        if found is not None:
            occupied.append(found)
    return placed


def _candidates(point: tuple[float, float], size: tuple[float, float], gap: float) -> Iterator[Box]:
    for distance in DISTANCES:
        for angle in ANGLES:
            across, up = math.cos(math.radians(angle)), math.sin(math.radians(angle))
            # The label's near edge, not its middle, is at this distance.
            x = point[0] + across * (gap * distance + size[0] / 2)
            y = point[1] + up * (gap * distance + size[1] / 2)
            yield Box.around(x, y, *size)


SWEEP_WIDTH, SWEEP_HEIGHT = 6.0, 4.4
ORDER: tuple[Standing, ...] = ("best", "near", "beaten")
MARKER_POINTS, GAP_POINTS, LEADER_POINTS, LABEL_SIZE = 6.0, 4.5, 8.0, 7.0
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
        units = [_unit_of([each.mean for each in side]) for side in _sides(trials)]
        points = [(trial.x.mean * units[0][1], trial.y.mean * units[1][1]) for trial in trials]
        for standing, looks in _standing_looks(drawn, report).items():
            _trials(axis, [each for each in zip(trials, points, strict=True) if each[0].standing == standing], units,
                    looks)  # fmt: skip
        _frontier(drawn, axis, _on_frontier(points))  # fmt: skip
        axis.margins(0.12)
        axis.set_xlabel(f"{_in_words(report.x)}, {units[0][0]}")
        axis.set_ylabel(f"{_in_words(report.y)}, {units[1][0]}")
        drawn.canvas.legend(loc="outside upper center", ncols=4, title=_sweep_title(report))
        drawn.footer("\n".join(_sweep_footer(report, len(report.trials) - len(trials))))
        _labels(drawn, axis, [", ".join(trial.settings.values()) for trial in trials], points,
                [*_error_bars(trials, units), *_steps(_on_frontier(points))])  # fmt: skip


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


def _on_frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return sorted(points[index] for index in pareto(points))


def _frontier(drawn: Picture, axis: Any, best: Sequence[tuple[float, float]]) -> None:
    """Draw the frontier: trials above it or to the right of it have means that another trial beats."""
    axis.plot([x for x, _ in best], [y for _, y in best], drawstyle="steps-post", color=drawn.palette.series[0],
              linewidth=0.9, alpha=0.6, zorder=2)  # fmt: skip


def _error_bars(trials: Sequence[Trial], units: Sequence[tuple[str, float]]) -> Iterator[Box]:
    """Yield the error bars as boxes without area, in the axes' units."""
    for trial in trials:
        (x, dx), (y, dy) = (
            (each.mean * scale, (each.half or 0.0) * scale)
            for each, (_, scale) in zip((trial.x, trial.y), units, strict=True)
        )
        yield Box(x - dx, y, x + dx, y)
        yield Box(x, y - dy, x, y + dy)


def _steps(frontier: Sequence[tuple[float, float]]) -> Iterator[Box]:
    """Yield the segments of the frontier as boxes without area."""
    for (x, y), (next_x, next_y) in pairwise(frontier):
        yield Box(x, y, next_x, y)
        yield Box(next_x, next_y, next_x, y)


def _labels(
    drawn: Picture, axis: Any, texts: Sequence[str], points: Sequence[tuple[float, float]], lines: Sequence[Box]
) -> None:
    """Add labels with the settings next to the points; a line joins a label to its point if it is farther away."""
    notes = [
        axis.annotate(
            text, point, xytext=(0, 0), textcoords="offset points", fontsize=LABEL_SIZE, annotation_clip=False,
            horizontalalignment="center", verticalalignment="center_baseline",
            arrowprops={"arrowstyle": "-", "color": drawn.palette.faint, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 2},
        )
        for text, point in zip(texts, points, strict=True)
    ]  # fmt: skip
    for note in notes:
        note.set_in_layout(False)
    # Text's method gives the size without the arrow; an annotation includes the arrow.
    Text: Any = import_module("matplotlib.text").Text
    # Only this makes the positions of points on the page known.
    drawn.canvas.draw_without_rendering()
    pixels = drawn.canvas.dpi / 72
    at = [(float(x), float(y)) for x, y in axis.transData.transform(points)]
    extents = [Text.get_window_extent(note) for note in notes]
    sizes = [(extent.width + 2 * pixels, extent.height) for extent in extents]
    taken = [Box.around(x, y, MARKER_POINTS * pixels, MARKER_POINTS * pixels) for x, y in at]
    corners = axis.transData.transform([corner for line in lines for corner in (line[:2], line[2:])]).reshape(-1, 4)
    taken += [Box(left - pixels, low - pixels, right + pixels, high + pixels) for left, low, right, high in corners]
    frame = Box(*axis.get_window_extent().extents)
    for note, (x, y), box in zip(notes, at, place(at, sizes, taken, frame, GAP_POINTS * pixels), strict=True):
        if box is None:
            note.remove()
            continue
        note.arrow_patch.set_visible(box.distance(x, y) > LEADER_POINTS * pixels)
        note.set_position((((box.left + box.right) / 2 - x) / pixels, ((box.bottom + box.top) / 2 - y) / pixels))


def _sides(trials: Sequence[Trial]) -> Iterator[list[Any]]:
    yield [trial.x for trial in trials]
    yield [trial.y for trial in trials]


def _unit_of(seconds: Sequence[float]) -> tuple[str, float]:
    return ("s", 1.0) if max(seconds, default=0.0) > MANY_SECONDS else ("ms", 1000.0)


def _in_words(metric: str) -> str:
    name, _, statistic = metric.partition(".")
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


RUN_WIDTH, RUN_HEIGHT = 6.4, 6.0
FLAG = "--planner-figure"
SMOOTH_S = 10
"""Samples over which arrivals and attainment are means."""


def plot_planned_run(run: PlannedRun, share: float, title: str, file: Path) -> None:
    """Draw a run to ``file``, with a line at ``share``, the wanted share of requests within the objectives.

    Raises :class:`~tercet.protocol.BadRequest` if the figure cannot be drawn.
    """
    times = [each.at for each in run.samples]
    with picture(file, FLAG, RUN_WIDTH, RUN_HEIGHT) as drawn:
        load, engines, line, met = drawn.canvas.subplots(4, 1, sharex=True)
        colors = drawn.palette.series
        load.plot(times, _means([each.rate for each in run.samples]), color=colors[0])
        load.set_ylabel("requests/s")
        _engines(drawn, engines, run.samples, times)
        line.plot(times, [each.waiting_s for each in run.samples], color=colors[3])
        line.set_ylabel("prefill in\nline, s")
        met.plot(times, _attainment(run.samples), color=colors[2])
        met.axhline(100 * share, color=drawn.palette.faint, linewidth=0.8, linestyle="--")
        met.set_ylabel("within\nSLO, %")
        met.set_ylim(-3, 103)
        met.set_xlabel("seconds")
        for axis in (load, engines, line, met):
            for change in run.changes:
                axis.axvline(change.at, color=drawn.palette.faint, linewidth=0.7, linestyle=":")
        load.set_ylim(bottom=0)
        drawn.canvas.suptitle(title, fontsize=8.5)
        drawn.footer(f"dotted: {len(run.changes)} changes; {run.engine_seconds / 3600:.2f} engine-hours; simulated")


def _engines(drawn: Picture, axis: Any, samples: Sequence[FleetSample], times: Sequence[float]) -> None:
    colors = drawn.palette.series
    stacks = ([each.prefill for each in samples], [each.decode for each in samples],
              [each.starting for each in samples])  # fmt: skip
    axis.stackplot(times, *stacks, step="post", colors=[colors[1], colors[5], drawn.palette.faint], alpha=0.75,
                   labels=["prefill", "decode", "starting"])  # fmt: skip
    axis.set_ylabel("engines")
    axis.legend(loc="upper left", ncols=3)
    axis.set_ylim(0, 1.35 * max((each.prefill + each.decode + each.starting for each in samples), default=1))


def _means(values: Sequence[float]) -> list[float]:
    return [sum(part) / len(part) for part in _windows(values)]


def _attainment(samples: Sequence[FleetSample]) -> list[float]:
    found = list[float]()
    for part in _windows(samples):
        ended = sum(each.ended for each in part)
        found.append(100 * sum(each.met for each in part) / ended if ended else float("nan"))
    return found


def _windows(values: Sequence[Any]) -> list[Sequence[Any]]:
    return [values[max(0, end - SMOOTH_S) : end] for end in range(1, len(values) + 1)]
