"""``tercet sim``: run a program over simulated engines in virtual time.

The flags and the simulation that they describe come first; then the further results of ``--planner`` (a figure, and the
comparison with the oracle), and the command.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from tercet.cli.setting_flags import ProgramArg, flags_as_records, given_as, refuse, with_flags_of
from tercet.cli.terminal import note, require_folder, show_table, write_file
from tercet.protocol import BadRequest
from tercet.protocol.entry_points import PARTS, provided
from tercet.settings import key_values
from tercet.settings.declaration import complaint
from tercet_lab import DEFAULT_PROFILE
from tercet_lab.bench.results import three_digits
from tercet_lab.bench.simulated import (
    Experiment,
    Fleet,
    MovingSettings,
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
from tercet_lab.drawing import require_drawing
from tercet_lab.planner_settings import NO_PLANNER
from tercet_lab.plot import plot_sweep
from tercet_lab.run_files import RECORD_COLUMNS, add_records
from tercet_lab.tables import Goodput, Slo, Table, limits_of, require_table_file

MOVING = MovingSettings()
MOST_SEEDS = 10_000
DEFAULT_RATE, DEFAULT_REQUESTS = "4", 1000
Deviation = Annotated[float, typer.Option(help="Standard deviation of the length (tokens).")]
# Parameters that a workload of `tercet bench` has itself.
LENGTHS = ("input_mean", "input_dev", "output_mean", "output_dev", "prefixes", "prefix", "lengths")
# Parameters that a sweep refuses, and parameters of a sweep only.
NOT_SWEPT, SWEPT = ("label", "record", "watch"), ("x", "y", "plot", "seeds", "jobs")


# Parameters that the search of a rate refuses.
NOT_SEARCHED = (
    "over", "x", "y", "plot", "label", "record", "records", "watch", "result-filename", "planner-figure",
    "planner-regret", "jobs",
)  # fmt: skip


@dataclass(frozen=True)
class SimFlags:
    """A simulation, the rates or settings at which it runs, and the files and figures of its results."""

    program: Annotated[str, typer.Option(help="Program: a built-in one, or your own: `file.py:function`.")] = (
        "data_parallel"
    )
    program_arg: ProgramArg = None
    fleet: Annotated[
        str,
        typer.Option(
            help="Fleet: `ROLE=COUNT[@HOST][,...]` with the roles prefill, decode and both, or short as `2P6D`, or a "
            "YAML file. Engines of one HOST slow one another, as their profile says. `store=TOKENS[+TOKENS]` adds a "
            "store, with room in memory and on disk, such as `both=8,store=8M+100M`."
        ),
    ] = "both=2"
    profile: Annotated[str, typer.Option(help="Profile: a name that `tercet bench profile` lists, or a JSON file.")] = (
        DEFAULT_PROFILE
    )
    request_rate: Annotated[
        str | None,
        typer.Option(
            metavar="R[,R...]",
            help="Request rates (requests per second), one run for each; `inf`: all at once. A rate stretches a trace.",
            show_default="4; for a trace its rate",
        ),
    ] = None
    num_prompts: Annotated[
        int | None,
        typer.Option(help="Number of requests of each run.", show_default=f"{DEFAULT_REQUESTS}; all of a trace"),
    ] = None
    workload: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND[,KEY=VALUE...]",
            help="Workload of `tercet bench`, instead of the lengths and prefixes below. Repeatable.",
        ),
    ] = None
    num_warmups: Annotated[
        int, typer.Option(min=0, help="Number of requests before the measured ones, at the same load.")
    ] = 0
    input_mean: Annotated[float, typer.Option(help="Mean prompt length (tokens).")] = 512
    input_dev: Deviation = 0
    output_mean: Annotated[float, typer.Option(help="Mean output length (tokens).")] = 128
    output_dev: Deviation = 0
    lengths: Annotated[
        Literal["normal", "lognormal"], typer.Option(help="Distribution of lengths; `lognormal` has a long tail.")
    ] = "normal"
    arrival: Annotated[
        Literal["poisson", "constant", "gamma", "trace"],
        typer.Option(help="Arrival process; `trace`: at the times of the workload's trace."),
    ] = "poisson"
    burstiness: Annotated[
        float, typer.Option(help="Shape of `--arrival gamma`: below 1 is bursty, 1 is Poisson.", show_default="1")
    ] = 1.0
    prefixes: Annotated[int, typer.Option(help="Number of prefixes that prompts share; 0: none.")] = 0
    prefix: Annotated[int, typer.Option(help="Length of each shared prefix (tokens).")] = 0
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Option of every engine, such as `total_blocks=2000`. Repeatable."),
    ] = None
    predict_error: Annotated[
        float | None,
        typer.Option(
            metavar="SIGMA",
            help="Error of predicted answer lengths: the deviation of the logarithm of predicted / true. Programs read "
            "the header `x-predicted-tokens`; `auto` uses it. Without it `auto` knows each length.",
        ),
    ] = None
    scheduling: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Scheduling file; its profiles are used with `--program-arg pick=scheduled`."
        ),
    ] = None
    goodput: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME:MS[,...]", help="SLO in milliseconds, as in `ttft:500,tpot:50,e2el:5000`."),
    ] = None
    steady: Annotated[
        bool, typer.Option("--steady", help="Leave the warm-up that MSER-5 finds out of rates, means and shares.")
    ] = False
    label: Annotated[
        str | None, typer.Option(help="Name of this run in figures. Without it, the program's name is used.")
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of the run; the same seed gives the same report, byte for byte.")] = 0
    result_filename: Annotated[
        Path | None, typer.Option(help="JSON file for the report, for `tercet bench report`; `-` is standard output.")
    ] = None
    records: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File for one row for each request of all runs (.csv, or .parquet), with a column for each `--over`.",
        ),
    ] = None
    record: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Interval of frames (seconds of virtual time) of a timeline that is recorded into "
            "`--result-filename`.",
        ),
    ] = None
    watch: Annotated[
        bool, typer.Option("--watch", help="Record, then show the run in a browser, on this machine, until Ctrl-C.")
    ] = False
    over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=V[,V...]",
            help="Sweep a setting: `fleet`, `profile`, `program`, `scheduling`, one of the workload (such as "
            "`request-rate`, `output-dev`), an engine option, a setting of moves (such as `reschedule-threshold`) or a "
            "program's parameter; repeatable. Values with commas are separated by `;`.",
        ),
    ] = None
    x: Annotated[
        str,
        typer.Option(
            "--x",
            help="First metric of a sweep: ttft, tpot or e2el, a dot, then mean, p50, p90 or p99; or attainment, "
            "goodput, throughput, engine_hours, imbalance and others; needs --over.",
        ),
    ] = "ttft.mean"
    y: Annotated[str, typer.Option("--y", help="Second metric of a sweep; needs --over.")] = "tpot.mean"
    plot: Annotated[
        Path | None,
        typer.Option(help="File for a figure of the trials (.png, .svg, .pdf); needs --over and the extra `lab`."),
    ] = None
    seeds: Annotated[
        int,
        typer.Option(
            min=1,
            max=MOST_SEEDS,
            help="Number of runs of each setting, with seeds from --seed on; needs --over or --max-rate.",
        ),
    ] = 1
    jobs: Annotated[int, typer.Option(min=1, help="Number of processes that simulate at once; needs --over.")] = 1
    max_rate: Annotated[
        str | None,
        typer.Option(
            metavar="attainment=SHARE",
            help="Search the largest rate at which this share of the requests meets the SLO, such as `attainment=0.9`; "
            "needs --goodput. --request-rate is where the search begins, --seeds the number of searches.",
        ),
    ] = None
    planner_figure: Annotated[
        Path | None,
        typer.Option(
            help="File for a figure of load, engines and attainment over time; needs --planner and the extra `lab`."
        ),
    ] = None
    planner_regret: Annotated[
        bool,
        typer.Option("--planner-regret", help="Simulate the oracle too, and print what it gains; needs --planner."),
    ] = False
    moving: MovingSettings = MOVING


def require_consistent(context: typer.Context, given: SimFlags) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for parameters that exclude one another, before anything runs."""
    require_folder(given.result_filename, "--result-filename")
    if given.records is not None:
        require_folder(given.records, "--records")
        require_table_file(given.records, "--records")
    if given.max_rate is not None:
        others = {f"--{name}": _is_given(context, name.replace("-", "_")) for name in NOT_SEARCHED}
        refuse(others, "cannot be combined with --max-rate")
    elif given.over:
        refuse({f"--{name}": _is_given(context, name) for name in NOT_SWEPT}, "cannot be combined with --over")
    else:
        refuse({f"--{name}": _is_given(context, name) for name in SWEPT}, "needs --over")
    if given.plot is not None:
        require_folder(given.plot, "--plot")
        require_drawing(given.plot, "--plot")
    if given.record is not None and not 0 < given.record < math.inf:
        raise BadRequest(f"--record: must be a positive number of seconds, is {given.record:g}", "--record")
    if given.planner_figure is not None or given.planner_regret:
        flag = REGRET if given.planner_figure is None else FIGURE
        if given.moving.planner == NO_PLANNER:
            raise BadRequest(f"{flag}: needs --planner", flag)
        if given.over:
            raise BadRequest(f"{flag}: cannot be combined with --over", flag)
        if given.planner_figure is not None:
            require_folder(given.planner_figure, FIGURE)
            require_drawing(given.planner_figure, FIGURE)


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


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
    lengths = {"--" + name.replace("_", "-"): _is_given(context, name) for name in LENGTHS}
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


FIGURE, REGRET = "--planner-figure", "--planner-regret"


def say_regret(simulation: Experiment, report: SimulationReport) -> None:
    """Simulate the same load with the oracle, and print the regret: the share of goodput per engine-hour it gains."""
    moving = msgspec.structs.replace(simulation.moves, planner="oracle")
    oracle = msgspec.structs.replace(simulation, moves=moving)
    for point in report.points:
        ours = point.metrics()["goodput_per_engine_hour"] or 0.0
        best = oracle.point(point.rate, note).metrics()["goodput_per_engine_hour"] or 0.0
        note(f"regret: goodput per engine-hour {ours:.0f}, oracle {best:.0f}, {1 - ours / best if best else 0:.1%}")


# Flags of parts that are checked later, under these names.
NAMES = {
    **{name: f"--{name}" for name in ("program", "fleet", "profile", "scheduling", "reschedule")},
    "args": "--program-arg", "engine options": "--option", "predict_error": "--predict-error",
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
    - `tercet sim --fleet 2P2D --program disaggregated --goodput ttft:400,tpot:50 --max-rate attainment=0.9 --seeds 3`
    - `tercet sim --fleet 2P2D --program disaggregated --objective-ttft 1 --objective-tpot 0.025 --planner simulate`
    """
    require_consistent(context, given)
    simulation = experiment_of(context, given)
    if given.max_rate is not None:
        _run_search(simulation, given, given.max_rate)
        return
    if given.over:
        _run_sweep(simulation, given)
        return
    recorded = _run(simulation, given)
    if given.watch:
        from tercet_lab.commands.run_page import show_run  # imports a server, which other runs do not need

        show_run(recorded)


def _run_search(simulation: Experiment, given: SimFlags, wanted: str) -> None:
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


def _run_sweep(simulation: Experiment, given: SimFlags) -> None:
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


def _run(simulation: Experiment, given: SimFlags) -> bytes:
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
