"""The one way to draw: a matplotlib figure in Tercet's style, and labels that find a free place near their points."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from tercet.protocol import BadRequest
from tercet.protocol.entry_points import import_extra

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


def require_drawing(file: Path | None, flag: str) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` if the format of ``file`` is unknown or matplotlib is missing."""
    if file is not None and file.suffix.lower() not in FORMATS:
        raise BadRequest(f"{flag}: {file} must end with one of {', '.join(FORMATS)}", flag)
    import_extra("matplotlib.figure", f"{flag} {file or 'a figure'}")


@contextmanager
def picture(file: Path | None, flag: str, width: float, height: float) -> Generator[Picture]:
    """Yield an empty figure of this size in inches, and write it to ``file`` at the end, unless it is None.

    The file's suffix decides the format. Raise :class:`~tercet.protocol.BadRequest` that names ``flag``.
    """
    require_drawing(file, flag)
    palette = DARK if file is not None and file.stem.endswith(DARK_SUFFIX) else LIGHT
    # matplotlib is optional and only partly typed.
    library: Any = import_module("matplotlib")
    with library.rc_context():
        library.rcdefaults()
        library.rcParams.update(_settings(palette))
        canvas = import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")
        yield Picture(canvas, palette)
        if file is None:
            return
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
        across = self.left < other.right and other.left < self.right
        return across and self.bottom < other.top and other.bottom < self.top

    def within(self, other: Box) -> bool:
        """True if this box is inside ``other``."""
        inside = other.left <= self.left and self.right <= other.right
        return inside and other.bottom <= self.bottom and self.top <= other.top

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


MARKER_POINTS, GAP_POINTS, LEADER_POINTS, LABEL_SIZE = 6.0, 4.5, 8.0, 7.0


def label_points(
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
