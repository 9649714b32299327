"""The picture of a sweep. Needs matplotlib, which Tercet does not require: ``pip install 'tercet[plot]'``."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from tercet.bench.simulated.sweep import SweepReport, value_of
from tercet.protocol import BadRequest

SUFFIXES = (".png", ".svg", ".pdf")


def plot_sweep(report: SweepReport, path: Path) -> None:
    """Draw every trial by its two metrics, and a line through those that no other one beats."""
    require_suffix(path)
    figure, axes = _canvas()
    points = [(value_of(trial.point, report.x) * 1e3, value_of(trial.point, report.y) * 1e3) for trial in report.trials]
    axes.scatter([x for x, _ in points], [y for _, y in points], color="tab:gray", label="settings")
    front = sorted(point for point, trial in zip(points, report.trials, strict=True) if trial.efficient)
    axes.plot([x for x, _ in front], [y for _, y in front], "o-", color="tab:blue", label="no setting beats these")
    for point, trial in zip(points, report.trials, strict=True):
        label = ", ".join(f"{name}={value}" for name, value in trial.settings.items())
        axes.annotate(label, point, fontsize=7, xytext=(4, 4), textcoords="offset points")
    axes.set_xlabel(f"{report.x}, ms")
    axes.set_ylabel(f"{report.y}, ms")
    axes.legend()
    try:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise BadRequest(f"--plot: {path} cannot be written: {error.strerror}", "--plot") from error


def require_suffix(path: Path) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for a file that is no picture."""
    if path.suffix not in SUFFIXES:
        raise BadRequest(f"--plot: {path} must end with one of {', '.join(SUFFIXES)}", "--plot")


def _canvas() -> tuple[Any, Any]:
    try:
        module: Any = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise BadRequest("--plot: needs matplotlib: pip install 'tercet[plot]'", "--plot") from error
    figure = module.Figure(figsize=(7, 5), layout="constrained")
    return figure, figure.add_subplot()
