"""Figures of simulations: a sweep's trials with the frontier of the best, and a planned run over time.

Labels are placed next to points so that no label covers another one or a point; this uses no I/O, and any unit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tercet_lab.bench.drawing import Picture, picture
from tercet_lab.bench.simulated.outcome import FleetSample, PlannedRun
from tercet_lab.bench.simulated.sweep import Standing, SweepReport, Trial, pareto

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


WIDTH, HEIGHT = 6.0, 4.4
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
    with picture(file, "--plot", WIDTH, HEIGHT) as drawn:
        axis: Any = drawn.canvas.add_subplot()
        units = [_unit([each.mean for each in side]) for side in _sides(trials)]
        points = [(trial.x.mean * units[0][1], trial.y.mean * units[1][1]) for trial in trials]
        for standing, looks in _looks(drawn, report).items():
            _trials(axis, [each for each in zip(trials, points, strict=True) if each[0].standing == standing], units,
                    looks)  # fmt: skip
        _frontier(drawn, axis, _on_frontier(points))  # fmt: skip
        axis.margins(0.12)
        axis.set_xlabel(f"{_in_words(report.x)}, {units[0][0]}")
        axis.set_ylabel(f"{_in_words(report.y)}, {units[1][0]}")
        drawn.canvas.legend(loc="outside upper center", ncols=4, title=_title(report))
        drawn.footer("\n".join(_footer(report, len(report.trials) - len(trials))))
        _labels(drawn, axis, [", ".join(trial.settings.values()) for trial in trials], points,
                [*_bars(trials, units), *_steps(_on_frontier(points))])  # fmt: skip


def _looks(drawn: Picture, report: SweepReport) -> Mapping[Standing, dict[str, Any]]:
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


def _bars(trials: Sequence[Trial], units: Sequence[tuple[str, float]]) -> Iterator[Box]:
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


def _unit(seconds: Sequence[float]) -> tuple[str, float]:
    return ("s", 1.0) if max(seconds, default=0.0) > MANY_SECONDS else ("ms", 1000.0)


def _in_words(metric: str) -> str:
    name, _, statistic = metric.partition(".")
    return f"{statistic if statistic == 'mean' else statistic.upper()} {METRICS[name]}"


def _title(report: SweepReport) -> str:
    varied = report.arguments["over"]
    fixed = [str(report.arguments[name]) for name in ("program", "fleet", "profile") if name not in varied]
    at = report.arguments["rate"]
    rate = [] if "request-rate" in varied else ["all at once" if at == "inf" else f"{at:g} requests/s"]
    return " · ".join((*fixed, *rate))


def _footer(report: SweepReport, undrawn: int) -> Iterator[str]:
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
