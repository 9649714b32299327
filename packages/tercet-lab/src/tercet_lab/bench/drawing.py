"""The style of all figures: a palette for light pages and one for dark pages, both safe for colour blindness.

A file whose name ends with ``-dark``, such as ``rates-dark.svg``, is drawn for a dark page.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

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
