"""The figure of a planned run in virtual time: load, engines, waiting prefill and attainment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tercet_lab.bench.simulated.experiment import Experiment
from tercet_lab.bench.simulated.simulation import SimulationReport
from tercet_lab.bench.simulated.virtual_run import FleetSample, PlannedRun
from tercet_lab.drawing import Picture, picture

RUN_WIDTH, RUN_HEIGHT = 6.4, 6.0
FLAG = "--planner-figure"
SMOOTH_S = 10
"""Samples over which arrivals and attainment are means."""


def draw_planned_run(simulation: Experiment, report: SimulationReport, file: Path) -> None:
    """Draw the first run of ``report`` into ``file``; do nothing if it was not planned."""
    (point, *_), wanted = report.points, simulation.moves.objectives
    if point.planned is None:
        return
    title = (
        f"{simulation.name} from {simulation.fleet}, {simulation.fleet.profile}; TTFT {wanted.ttft:g} s, TPOT "
        f"{(wanted.tpot or 0) * 1e3:g} ms: {point.summary.attainment or 0:.2%}"
    )
    plot_planned_run(point.planned, wanted.share, title, file)


def plot_planned_run(run: PlannedRun, share: float, title: str, file: Path) -> None:
    """Draw a run to ``file``, with a line at ``share``, the wanted share of requests within the objectives.

    Raises :class:`~tercet.protocol.BadRequest` if the figure cannot be drawn.
    """
    times = [each.at for each in run.samples]
    with picture(file, FLAG, RUN_WIDTH, RUN_HEIGHT) as drawn:
        load, engines, line, met = drawn.canvas.subplots(4, 1, sharex=True)
        colors = drawn.palette.series
        windows = [run.samples[max(0, end - SMOOTH_S) : end] for end in range(1, len(run.samples) + 1)]
        load.plot(times, [sum(each.rate for each in part) / len(part) for part in windows], color=colors[0])
        load.set_ylabel("requests/s")
        _engines(drawn, engines, run.samples, times)
        line.plot(times, [each.waiting_s for each in run.samples], color=colors[3])
        line.set_ylabel("prefill in\nline, s")
        counts = ((sum(each.met for each in part), sum(each.ended for each in part)) for part in windows)
        met.plot(times, [100 * good / ended if ended else float("nan") for good, ended in counts], color=colors[2])
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
