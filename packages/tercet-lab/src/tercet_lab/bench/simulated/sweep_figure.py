"""The figure of a sweep: its trials by the two compared metrics, and the frontier of the best trials."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from tercet_lab.bench.drawing import Picture, picture
from tercet_lab.bench.label_placement import Box, place
from tercet_lab.bench.simulated.sweep import Standing, SweepReport, Trial, pareto

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
