"""Further results of ``tercet sim --planner``: a figure, and the comparison with the oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from tercet.cli.terminal import require_folder
from tercet.protocol import BadRequest
from tercet_lab.bench.drawing import require_drawing
from tercet_lab.bench.simulated import MovingSettings, Simulation, SimulationReport
from tercet_lab.planning.planner_settings import NO_PLANNER

FIGURE, REGRET = "--planner-figure", "--planner-regret"


def require_planned_run(moving: MovingSettings, over: Sequence[str] | None, figure: Path | None) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` unless there is one planned run, and the figure can be drawn."""
    flag = REGRET if figure is None else FIGURE
    if moving.planner == NO_PLANNER:
        raise BadRequest(f"{flag}: needs --planner", flag)
    if over:
        raise BadRequest(f"{flag}: cannot be combined with --over", flag)
    if figure is not None:
        require_folder(figure, FIGURE)
        require_drawing(figure, FIGURE)


def draw_planned_run(simulation: Simulation, report: SimulationReport, file: Path) -> None:
    """Draw the first run of ``report`` into ``file``; do nothing if it was not planned."""
    from tercet_lab.planning.run_figure import plot_planned_run  # matplotlib comes with an extra

    (point, *_), wanted = report.points, simulation.moving.objectives
    if point.planned is None:
        return
    title = (
        f"{simulation.program} from {simulation.fleet}, {simulation.profile}; TTFT {wanted.ttft:g} s, TPOT "
        f"{(wanted.tpot or 0) * 1e3:g} ms: {point.summary.attainment or 0:.2%}"
    )
    plot_planned_run(point.planned, wanted.share, title, file)


def say_regret(simulation: Simulation, report: SimulationReport, note: Callable[[str], None]) -> None:
    """Simulate the same load with the oracle, and print the regret: the share of goodput per engine-hour it gains."""
    moving = msgspec.structs.replace(simulation.moving, planner="oracle")
    oracle = msgspec.structs.replace(simulation, moving=moving)
    for point in report.points:
        ours = point.metrics()["goodput_per_engine_hour"] or 0.0
        best = oracle.point(point.rate, note).metrics()["goodput_per_engine_hour"] or 0.0
        note(f"regret: goodput per engine-hour {ours:.0f}, oracle {best:.0f}, {1 - ours / best if best else 0:.1%}")
