"""What ``tercet sim`` runs: an experiment at one or several rates, a sweep of it, or the search of its largest rate."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import typer

from tercet.cli.setting_flags import refuse
from tercet.cli.terminal import note, show_table, write_file
from tercet.protocol import BadRequest
from tercet.protocol.entry_points import PARTS, provided
from tercet.settings import key_values
from tercet.settings.declaration import complaint
from tercet_lab.bench.results import three_digits
from tercet_lab.bench.simulated import (
    Experiment,
    Fleet,
    PlannedWorkload,
    Record,
    Run,
    SimulationReport,
    SyntheticWorkload,
    table,
)
from tercet_lab.bench.simulated.capacity import capacity_of
from tercet_lab.bench.simulated.recording import OFTEN_S
from tercet_lab.bench.simulated.simulation import headings as headings_of_run
from tercet_lab.bench.simulated.sweep import headings, parse_axis, rows, sweep
from tercet_lab.commands.sim import DEFAULT_RATE, DEFAULT_REQUESTS, FIGURE, LENGTHS, SimFlags, is_given
from tercet_lab.plot import plot_sweep
from tercet_lab.run_files import RECORD_COLUMNS, add_records
from tercet_lab.slo import Goodput, Slo, limits_of
from tercet_lab.tables import Table


def experiment_of(context: typer.Context, given: SimFlags) -> Experiment:
    """Return the experiment that a command's parameters describe; missing parameters keep their defaults."""
    options = key_values(given.option, "--option")
    return Experiment(
        program=given.program,
        args=key_values(given.program_arg, "--program-arg"),
        fleet=Fleet.parse(given.fleet, given.profile, options),
        work=_workload_of(context, given),
        seed=given.seed,
        slo=_slo_of(given.goodput),
        scheduling=given.scheduling,
        moves=given.moving,
        record=Record(frames_every=given.record or (OFTEN_S if given.watch else None)),
        steady=given.steady,
        predict_error=given.predict_error,
    )


def _workload_of(context: typer.Context, given: SimFlags) -> SyntheticWorkload | PlannedWorkload:
    kind = PlannedWorkload if given.workload else SyntheticWorkload
    if given.burstiness != 1.0 and given.arrival != "gamma":
        raise BadRequest("--burstiness: needs --arrival gamma", "--burstiness")
    traffic: dict[str, Any] = {name: getattr(given, name) for name in kind.__struct_fields__ if hasattr(given, name)}
    # Each run has its own rate.
    traffic |= {"rate": 1.0, "arrivals": given.arrival, "warm_up": given.num_warmups}
    measured = DEFAULT_REQUESTS if given.num_prompts is None else given.num_prompts
    if measured < 1:
        raise BadRequest(f"--num-prompts: must be at least 1, is {measured}", "--num-prompts")
    requests = measured + given.num_warmups
    if kind is SyntheticWorkload:
        if given.arrival == "trace":
            raise BadRequest("--arrival: trace needs recorded requests; give a trace with --workload", "--arrival")
        return SyntheticWorkload(**traffic, requests=requests)
    lengths = {"--" + name.replace("_", "-"): is_given(context, name) for name in LENGTHS}
    refuse(lengths, "cannot be combined with --workload; set its lengths there, such as input_len=512")
    traffic["workload"] = tuple(given.workload or ())
    planned = PlannedWorkload(**traffic)
    all_of_it = planned.finite and given.num_prompts is None
    return planned if all_of_it else msgspec.structs.replace(planned, requests=requests)


def rates_of(given: str) -> list[float]:
    """Return ``R[,R...]`` as requests per second, infinity for `inf`; raise :class:`~tercet.protocol.BadRequest`."""
    try:
        rates = [float(rate) for rate in given.split(",")]
    except ValueError as error:
        raise BadRequest(
            f"--request-rate: {given!r} is not a number, or several with commas", "--request-rate"
        ) from error
    if not all(rate > 0 for rate in rates):
        raise BadRequest(f"--request-rate: each rate must be greater than 0, is {given!r}", "--request-rate")
    return rates


def _slo_of(given: list[str] | None) -> Slo | None:
    if not given:
        return None
    limits = limits_of(given)
    try:
        return msgspec.convert(limits, Goodput, strict=False).slo
    except msgspec.ValidationError as error:
        raise complaint("--goodput", Goodput, limits, error) from error


def say_regret(simulation: Experiment, report: SimulationReport) -> None:
    """Simulate the same load with the oracle, and print the regret: the share of goodput per engine-hour it gains."""
    moving = msgspec.structs.replace(simulation.moves, planner="oracle")
    oracle = msgspec.structs.replace(simulation, moves=moving)
    for point in report.points:
        ours = point.metrics()["goodput_per_engine_hour"] or 0.0
        best = oracle.point(point.rate, note).metrics()["goodput_per_engine_hour"] or 0.0
        note(f"regret: goodput per engine-hour {ours:.0f}, oracle {best:.0f}, {1 - ours / best if best else 0:.1%}")


def search(simulation: Experiment, given: SimFlags, wanted: str) -> None:
    """Search the largest rate within the SLO, and print it for each seed."""
    name, _, text = wanted.partition("=")
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if name != "attainment" or not 0 < share < 1:
        why = "is not attainment=SHARE with a share between 0 and 1, such as attainment=0.9"
        raise BadRequest(f"--max-rate: {wanted!r} {why}", "--max-rate")
    if simulation.limits is None:
        raise BadRequest("--max-rate: needs --goodput, such as --goodput ttft:400,tpot:50", "--max-rate")
    rates = rates_of(given.request_rate or DEFAULT_RATE)
    if len(rates) > 1 or math.isinf(rates[0]):
        raise BadRequest("--request-rate: give one rate with --max-rate, where the search begins", "--request-rate")
    found = capacity_of(simulation.at(rates[0]), share, seeds=given.seeds, note=note)
    rows = [[str(seed), three_digits(rate)] for seed, rate in found.by_seed.items()]
    between = "" if found.interval is None else f" ({' to '.join(map(three_digits, found.interval))})"
    rows.append(["mean (95% interval)", f"{three_digits(found.rate)}{between}"])
    title = (
        f"{simulation.name} on {given.fleet}, {given.profile}: largest rate with {share:.3g} of the requests in the SLO"
    )
    show_table(title, ["seed", "requests/s"], rows)


def run_sweep(simulation: Experiment, given: SimFlags) -> None:
    """Simulate each combination of settings; write and draw the report, and print its table."""
    rates = rates_of(given.request_rate or DEFAULT_RATE)
    if len(rates) > 1:
        said = "--request-rate: give one rate with --over; for several use --over request-rate=R,R"
        raise BadRequest(said, "--request-rate")
    axes = [parse_axis(each) for each in given.over or ()]
    report = sweep(simulation, rates[0], axes, given.x, given.y, given.seeds, note, given.jobs, given.records)
    _write_out(given.result_filename, report.to_json())
    if given.plot is not None:
        plot_sweep(report, given.plot)
    load = "all at once" if math.isinf(rates[0]) else f"{rates[0]:g} requests/s"
    title = f"{simulation.name}, {load}; starred by {given.x} and {given.y}"
    if len(report.seeds) > 1:
        title += f" ({report.comparisons} comparisons, Holm)"
    _show(given, title, headings(report), rows(report))


def run(simulation: Experiment, given: SimFlags) -> bytes:
    """Simulate each rate; write the report, print its table, and return the report in JSON."""
    rate = given.request_rate
    rates = rates_of(rate or DEFAULT_RATE) if rate or given.arrival != "trace" else [None]
    label, records = given.label or simulation.name, Table(RECORD_COLUMNS)

    def keep(run: Run) -> None:
        if given.records is not None and run.experiment is not None:
            add_records(records, run.requests, label, run.experiment.work.rate, run.experiment.seed)

    found = simulation.report(rates, label, note, keep)
    if given.planner_regret:
        say_regret(simulation, found)
    if given.planner_figure is not None:
        provided(PARTS, "planned-figure", "planner", FIGURE)(simulation, found, given.planner_figure)
    recorded = found.to_json()
    _write_out(given.result_filename, recorded)
    if given.records is not None:
        records.write(given.records)
    title = f"{simulation.name} on {given.fleet}, {given.profile}"
    _show(given, title, headings_of_run(found), table(found))
    return recorded


def _show(given: SimFlags, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, unless the report itself goes to standard output."""
    if str(given.result_filename) != "-":
        show_table(title, headings, rows)


def _write_out(path: Path | None, data: bytes) -> None:
    """Write a report to a file, or to standard output for ``-``."""
    if str(path) == "-":
        sys.stdout.buffer.write(data)
    elif path is not None:
        write_file(path, data, "--result-filename")
