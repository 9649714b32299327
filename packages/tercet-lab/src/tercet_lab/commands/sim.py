"""``tercet sim``: run a program over simulated engines in virtual time."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from tercet.cli.flag_records import flags_as_records
from tercet.cli.given_names import given_as
from tercet.cli.setting_flags import with_flags_of
from tercet.cli.terminal import note, show_table, write_file
from tercet.protocol import BadRequest
from tercet_lab.bench.simulated import MovingSettings, Simulation, table
from tercet_lab.bench.simulated.simulation import headings as headings_of_run
from tercet_lab.bench.simulated.sweep import SweepReport, headings, parse_axis, rows, sweep
from tercet_lab.bench.simulated.sweep_figure import plot_sweep
from tercet_lab.bench.simulated.timeline import OFTEN_S
from tercet_lab.commands.planned_runs import draw_planned_run, say_regret
from tercet_lab.commands.sim_flags import DEFAULT_RATE, SimFlags, rates_of, require_consistent, simulation_of

# Flags of parts that are checked later, under these names.
NAMES = {
    **{name: f"--{name}" for name in ("program", "fleet", "profile", "scheduling", "reschedule")},
    "args": "--program-arg", "engine options": "--option",
}  # fmt: skip


@with_flags_of(MovingSettings)
@given_as(NAMES)
@flags_as_records
def sim(context: typer.Context, given: SimFlags) -> None:
    """Run a program over simulated engines in virtual time, at one or several rates, or for a sweep of settings.

    Prints means and 99th percentiles; the report has more. With `--over` every combination of some settings is
    simulated, and a star marks those that no other one beats in two metrics. With `--seeds` each combination runs
    several times: results are means with 95% intervals, and `~` marks one that is beaten by less than the spread of
    the seeds.

    Examples:
    - `tercet sim --program disaggregated --fleet 1P1D --request-rate 2,4,8`
    - `tercet sim --fleet both=1000 --request-rate 2000 --num-prompts 20000`
    - `tercet sim --fleet 2P4D --program disaggregated --watch`
    - `tercet sim --fleet both=64 --workload mooncake,path=trace.jsonl --arrival trace`
    - `tercet sim --fleet both=16 --request-rate 60 --option total_blocks=2000 --reschedule neutral_load`
    - `tercet sim --fleet both=8 --prefixes 40 --prefix 256 --scheduling mine.yaml --program-arg pick=scheduled`
    - `tercet sim --program balanced --fleet 1P1D --request-rate 8 --over balance_ratio=0,0.1,0.2,0.3`
    - `tercet sim --program disaggregated --request-rate 40 --over fleet=2P6D,3P5D --seeds 5 --plot sweep.png`
    - `tercet sim --fleet both=16 --request-rate 60 --reschedule neutral_load --over reschedule-threshold=0.1,0.5`
    - `tercet sim --fleet 2P2D --program disaggregated --objective-ttft 1 --objective-tpot 0.025 --planner simulate`
    """
    require_consistent(context, given)
    simulation = simulation_of(context, given)
    if given.over:
        _run_sweep(simulation, given)
        return
    recorded = _run(simulation, given)
    if given.watch:
        from tercet.cli.run_page import show_run  # imports a server, which other runs do not need

        show_run(recorded)


def _run_sweep(simulation: Simulation, given: SimFlags) -> None:
    """Simulate each combination of settings; write and draw the report, and print its table."""
    report = _sweep(simulation, given)
    _write_out(given.result_filename, report.to_json())
    if given.plot is not None:
        plot_sweep(report, given.plot)
    title = f"{simulation.program}, {_load_of(given.request_rate)}; starred by {given.x} and {given.y}"
    if len(report.seeds) > 1:
        title += f" ({report.comparisons} comparisons, Holm)"
    _show(given, title, headings(report), rows(report))


def _run(simulation: Simulation, given: SimFlags) -> bytes:
    """Simulate each rate; write the report, print its table, and return the report in JSON."""
    rate = given.request_rate
    rates = rates_of(rate or DEFAULT_RATE) if rate or given.arrival != "trace" else [None]
    often = given.record or (OFTEN_S if given.watch else None)
    found = simulation.report(rates, given.label or simulation.program, note, often)
    if given.planner_regret:
        say_regret(simulation, found, note)
    if given.planner_figure is not None:
        draw_planned_run(simulation, found, given.planner_figure)
    recorded = found.to_json()
    _write_out(given.result_filename, recorded)
    title = f"{simulation.program} on {given.fleet}, {given.profile}"
    _show(given, title, headings_of_run(found), table(found))
    return recorded


def _show(given: SimFlags, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, unless the report itself goes to standard output."""
    if str(given.result_filename) != "-":
        show_table(title, headings, rows)


def _sweep(simulation: Simulation, given: SimFlags) -> SweepReport:
    rates = rates_of(given.request_rate or DEFAULT_RATE)
    if len(rates) > 1:
        raise BadRequest(
            "--request-rate: give one rate with --over; for several use --over request-rate=R,R", "--request-rate"
        )
    axes = [parse_axis(each) for each in given.over or ()]
    return sweep(simulation, rates[0], axes, given.x, given.y, given.seeds, note)


def _load_of(request_rate: str | None) -> str:
    (rate,) = rates_of(request_rate or DEFAULT_RATE)
    return "all at once" if math.isinf(rate) else f"{rate:g} requests/s"


def _write_out(path: Path | None, data: bytes) -> None:
    """Write a report to a file, or to standard output for ``-``."""
    if str(path) == "-":
        sys.stdout.buffer.write(data)
    elif path is not None:
        write_file(path, data, "--result-filename")
