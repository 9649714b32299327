"""Draws seed 1's figure: rate on x; TTFT, TPOT and JCT on y, mean and P99 beside each other; a line per program."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from tercet.bench.report import Figure, Metrics
from tercet.protocol import BadRequest

PANELS = (("TTFT", "ttft"), ("TPOT", "tpot"), ("JCT", "e2el"))
STATISTICS = (("mean", "mean"), ("P99", "p99"))
MARKERS = "osD^vP*X"
FORMATS = (".png", ".svg", ".pdf")
HEADROOM = 1.1


def require_drawing(file: Path) -> None:
    """Raises :class:`~tercet.protocol.BadRequest` when ``file`` cannot be drawn: its format, or no matplotlib."""
    if file.suffix.lower() not in FORMATS:
        raise BadRequest(f"--figure {file}: must end with {', '.join(FORMATS)}", "figure")
    try:
        import_module("matplotlib.figure")
    except ImportError as error:
        why = "figures need matplotlib, which is not installed; install it with: pip install 'tercet[plot]'"
        raise BadRequest(f"--figure {file}: {why}", "figure") from error


def draw(figure: Figure, file: Path, title: str | None = None) -> None:
    """Write the figure; the file's suffix decides the format. Raises :class:`~tercet.protocol.BadRequest`."""
    require_drawing(file)
    # Optional, and only partly typed.
    library: Any = import_module("matplotlib")
    canvas_type: Any = import_module("matplotlib.figure").Figure

    # Text stays text in SVG, and the same numbers give the same file.
    with library.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tercet"}):
        canvas = canvas_type(figsize=(9, 9), layout="constrained")
        axes: Any = canvas.subplots(len(PANELS), len(STATISTICS), sharex=True, squeeze=False)
        for row, (name, metric) in enumerate(PANELS):
            for column, (statistic, key) in enumerate(STATISTICS):
                _panel(axes[row][column], figure, f"{statistic} {name}", f"{key}_{metric}_ms")
        for axis in axes[-1]:
            axis.set_xlabel(figure.x_label)
        handles, labels = axes[0][0].get_legend_handles_labels()
        columns = min(4, max(1, len(labels)))
        canvas.legend(
            handles,
            labels,
            loc="outside upper center",
            ncols=columns,
            frameon=False,
            title=title,
            title_fontsize="large",
        )
        try:
            canvas.savefig(file, dpi=150, metadata={"Date": None} if file.suffix.lower() == ".svg" else None)
        except OSError as error:
            raise BadRequest(f"--figure {file}: {error.strerror}", "figure") from error


def _panel(axis: Any, figure: Figure, title: str, metric: str) -> None:
    highest = 0.0
    for index, line in enumerate(figure.lines):
        drawn = [(x, found) for x, metrics in line.points if (found := _seconds(metrics, metric)) is not None]
        axis.plot([x for x, _ in drawn], [y for _, y in drawn], marker=MARKERS[index % len(MARKERS)], label=line.label)
        highest = max([highest, *(y for _, y in drawn)])
    axis.set_title(title, fontsize="medium")
    axis.set_ylabel("ms" if "tpot" in metric else "s")
    axis.set_ylim(0, HEADROOM * highest if highest else 1)
    axis.grid(visible=True, alpha=0.3)


def _seconds(metrics: Metrics, name: str) -> float | None:
    """The value in the panel's unit: milliseconds for TPOT, seconds for the others."""
    value = metrics.get(name)
    if value is None:
        return None
    return float(value) if "tpot" in name else float(value) / 1000
