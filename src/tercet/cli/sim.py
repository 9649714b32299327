"""``tercet sim``: a program over simulated engines, in virtual time."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from tercet.cli.bench_options import limits_of
from tercet.cli.given_names import given_as
from tercet.cli.setting_flags import ProgramArg, with_flags_of
from tercet.cli.terminal import note, require_folder, show_table, write_file
from tercet.lab.bench.drawing import require_drawing
from tercet.lab.bench.simulated import MovingSettings, PlannedWorkload, Simulation, SyntheticWorkload, table
from tercet.lab.bench.simulated.simulation import headings as headings_of_run
from tercet.lab.bench.simulated.sweep import headings, parse_axis, rows, sweep
from tercet.lab.bench.simulated.sweep_figure import plot_sweep
from tercet.lab.bench.summary import Slo
from tercet.protocol import BadRequest
from tercet.settings import key_values
from tercet.settings.declaration import complaint

sim = typer.Typer(name="sim", rich_markup_mode="markdown")

DEFAULT_PROFILE = "llama-3.1-8b-h100-tp1"
MOVING = MovingSettings()
MOST_SEEDS = 10_000
DEFAULT_RATE, DEFAULT_REQUESTS = "4", 1000
Program = Annotated[str, typer.Option(help="A built-in program, or your own: `file.py:function`.")]
Fleet = Annotated[
    str,
    typer.Option(
        help="`ROLE=COUNT[@HOST][,...]` with roles prefill, decode, both; such as `2P6D`; or a YAML file. Engines of "
        "one HOST slow one another, as their profile says."
    ),
]
ProfileName = Annotated[str, typer.Option(help="A profile that `tercet profile list` shows, or a JSON file.")]
Scheduling = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="A scheduling file; picks go by its profiles (`--program-arg pick=scheduled`)."),
]
Option = Annotated[
    list[str] | None, typer.Option(metavar="KEY=VALUE", help="A setting of every engine; repeatable. See the docs.")
]
Rates = Annotated[
    str | None,
    typer.Option(
        metavar="R[,R...]",
        help="Requests per second, `inf` for all at once; one run for each. Stretches a trace.",
        show_default="4; a trace's own",
    ),
]
NumPrompts = Annotated[
    int | None,
    typer.Option(help="Requests of each run.", show_default=f"{DEFAULT_REQUESTS}; all of a trace"),
]
NumWarmups = Annotated[int, typer.Option(min=0, help="Requests before those that are measured, at the same load.")]
InputMean = Annotated[float, typer.Option(help="Prompt length, tokens.")]
OutputMean = Annotated[float, typer.Option(help="Output length, tokens.")]
Deviation = Annotated[float, typer.Option(help="Standard deviation of that length.")]
Lengths = Annotated[
    Literal["normal", "lognormal"], typer.Option(help="Distribution of lengths; `lognormal` has a long tail.")
]
Workload = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KIND[,KEY=VALUE...]",
        help="A workload of `tercet bench`, instead of the lengths and prefixes below; repeatable.",
    ),
]
# What a workload of `tercet bench` says itself.
LENGTHS = ("input_mean", "input_dev", "output_mean", "output_dev", "prefixes", "prefix", "lengths")
Arrival = Annotated[
    Literal["poisson", "constant", "gamma", "trace"],
    typer.Option(help="Arrival process; `trace`: at the times of the workload's trace."),
]
Burstiness = Annotated[
    float, typer.Option(help="Shape of --arrival gamma. Below 1 is bursty, 1 is Poisson.", show_default="1")
]
Prefixes = Annotated[int, typer.Option(help="Number of prefixes that prompts share; 0 for none.")]
Prefix = Annotated[int, typer.Option(help="Length of the shared beginnings, tokens.")]
Goodput = Annotated[
    list[str] | None, typer.Option(metavar="NAME:MS[,...]", help="The SLO, as in `ttft:500,tpot:50,e2el:5000`.")
]
Seed = Annotated[int, typer.Option(help="The same seed gives the same report, byte for byte.")]
ResultFilename = Annotated[
    Path | None, typer.Option(help="The JSON file to write, for `tercet bench report`; `-` is standard output.")
]


# By which names things are checked where they are used.
NAMES = {
    **{name: f"--{name}" for name in ("program", "fleet", "profile", "scheduling", "reschedule")},
    "args": "--program-arg", "engine options": "--option",
}  # fmt: skip


@sim.callback(invoke_without_command=True)
@with_flags_of(MovingSettings)
@given_as(NAMES)
def simulate(
    context: typer.Context,
    program: Program = "data_parallel",
    program_arg: ProgramArg = None,
    fleet: Fleet = "both=2",
    profile: ProfileName = DEFAULT_PROFILE,
    request_rate: Rates = None,
    num_prompts: NumPrompts = None,
    workload: Workload = None,
    num_warmups: NumWarmups = 0,
    input_mean: InputMean = 512,
    input_dev: Deviation = 0,
    output_mean: OutputMean = 128,
    output_dev: Deviation = 0,
    lengths: Lengths = "normal",
    arrival: Arrival = "poisson",
    burstiness: Burstiness = 1.0,
    prefixes: Prefixes = 0,
    prefix: Prefix = 0,
    option: Option = None,
    scheduling: Scheduling = None,
    goodput: Goodput = None,
    label: Annotated[str | None, typer.Option(help="Name of this line in figures; the program, if not given.")] = None,
    seed: Seed = 0,
    result_filename: ResultFilename = None,
    moving: MovingSettings = MOVING,
) -> None:
    """Run a program over simulated engines in virtual time, at one or several rates.

    Prints means and 99th percentiles; the report has more.

    Examples:
    - `tercet sim --program disaggregated --fleet 1P1D --request-rate 2,4,8`
    - `tercet sim --fleet both=1000 --request-rate 2000 --num-prompts 20000`
    - `tercet sim --fleet both=64 --workload mooncake,path=trace.jsonl --arrival trace`
    - `tercet sim --fleet both=16 --request-rate 60 --option total_blocks=2000 --reschedule neutral_load`
    - `tercet sim --fleet both=8 --prefixes 40 --prefix 256 --scheduling mine.yaml --program-arg pick=scheduled`
    - `tercet sim sweep --program balanced --fleet 1P1D --over balance_ratio=0,0.1,0.2,0.3`
    """
    if context.invoked_subcommand is not None:
        return
    require_folder(result_filename, "--result-filename")
    simulation = simulation_of(context, locals())
    rates = rates_of(request_rate or DEFAULT_RATE) if request_rate or arrival != "trace" else [None]
    report = simulation.report(rates, label or program, note)
    _write_out(result_filename, report.to_json())
    if str(result_filename) != "-":
        show_table(f"{program} on {fleet}, {profile}", headings_of_run(report), table(report))


@sim.command("sweep")
@with_flags_of(MovingSettings)
@given_as(NAMES)
def sweep_command(
    context: typer.Context,
    over: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=V[,V...]",
            help="`fleet`, `profile`, `program`, `request-rate`, an engine option, a setting of moves (such as "
            "`reschedule-threshold`) or a program's parameter; repeatable.",
        ),
    ],
    program: Program = "data_parallel",
    program_arg: ProgramArg = None,
    fleet: Fleet = "both=2",
    profile: ProfileName = DEFAULT_PROFILE,
    request_rate: Annotated[float, typer.Option(help="Requests per second; `inf` for all at once.")] = 4,
    num_prompts: NumPrompts = None,
    workload: Workload = None,
    num_warmups: NumWarmups = 0,
    input_mean: InputMean = 512,
    input_dev: Deviation = 0,
    output_mean: OutputMean = 128,
    output_dev: Deviation = 0,
    lengths: Lengths = "normal",
    arrival: Arrival = "poisson",
    burstiness: Burstiness = 1.0,
    option: Option = None,
    scheduling: Scheduling = None,
    x: Annotated[
        str, typer.Option("--x", help="A metric to weigh: ttft, tpot or e2el, a dot, mean, p50, p90 or p99.")
    ] = "ttft.mean",
    y: Annotated[str, typer.Option("--y", help="The other one.")] = "tpot.mean",
    plot: Annotated[
        Path | None, typer.Option(help="Draw the trials here (.png, .svg, .pdf); needs matplotlib.")
    ] = None,
    seed: Seed = 0,
    seeds: Annotated[
        int, typer.Option(min=1, max=MOST_SEEDS, help="Runs of each setting, with seeds from --seed on.")
    ] = 1,
    result_filename: ResultFilename = None,
    moving: MovingSettings = MOVING,
) -> None:
    """Simulate every combination of some settings, and star those that no other one beats in two metrics.

    With `--seeds` each is run several times: figures are means, with 95% intervals, and `~` marks what is beaten by no
    more than seeds differ in.

    Examples:
    - `tercet sim sweep --program balanced --fleet 1P1D --request-rate 8 --over balance_ratio=0,0.1,0.2,0.3`
    - `tercet sim sweep --program disaggregated --request-rate 40 --over fleet=2P6D,3P5D --seeds 5 --plot sweep.png`
    - `tercet sim sweep --fleet both=16 --request-rate 60 --reschedule neutral_load --over reschedule-threshold=0.1,0.5`
    """
    require_folder(result_filename, "--result-filename")
    if plot is not None:
        require_folder(plot, "--plot")
        require_drawing(plot, "--plot")
    simulation = simulation_of(context, locals())
    axes = [parse_axis(given) for given in over]
    report = sweep(simulation, request_rate, axes, x, y, seeds, note)
    _write_out(result_filename, report.to_json())
    if plot is not None:
        plot_sweep(report, plot)
    if str(result_filename) != "-":
        load = "all at once" if math.isinf(request_rate) else f"{request_rate:g} requests/s"
        show_table(f"{program}, {load}; starred by {x} and {y}", headings(report), rows(report))


def simulation_of(context: typer.Context, given: Mapping[str, Any]) -> Simulation:
    """The simulation that a command's parameters describe; those that it does not have are left at their defaults."""
    return Simulation(
        program=given["program"],
        program_args=key_values(given["program_arg"], "--program-arg"),
        fleet=given["fleet"],
        profile=given["profile"],
        options=key_values(given["option"], "--option"),
        workload=_workload_of(context, given),
        seed=given["seed"],
        slo=slo_of(given.get("goodput")),
        scheduling=given["scheduling"],
        moving=given["moving"],
    )


def _workload_of(context: typer.Context, given: Mapping[str, Any]) -> SyntheticWorkload | PlannedWorkload:
    kind = PlannedWorkload if given["workload"] else SyntheticWorkload
    if given["burstiness"] != 1.0 and given["arrival"] != "gamma":
        raise BadRequest("--burstiness: belongs to --arrival gamma", "--burstiness")
    traffic: dict[str, Any] = {name: given[name] for name in kind.__struct_fields__ if name in given}
    # Each run has its own rate.
    traffic |= {"rate": 1.0, "arrivals": given["arrival"], "warm_up": given["num_warmups"]}
    measured = DEFAULT_REQUESTS if given["num_prompts"] is None else given["num_prompts"]
    if measured < 1:
        raise BadRequest(f"--num-prompts: must be at least 1, is {measured}", "--num-prompts")
    requests = measured + given["num_warmups"]
    if kind is SyntheticWorkload:
        if given["arrival"] == "trace":
            raise BadRequest("--arrival: trace needs a --workload that is a trace", "--arrival")
        return SyntheticWorkload(**traffic, requests=requests)
    for name in LENGTHS:
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            flag = "--" + name.replace("_", "-")
            raise BadRequest(f"{flag}: --workload has its own lengths and prefixes, such as input_len=512", flag)
    traffic["workload"] = tuple(given["workload"])
    planned = PlannedWorkload(**traffic)
    all_of_it = planned.finite and given["num_prompts"] is None
    return planned if all_of_it else msgspec.structs.replace(planned, requests=requests)


def rates_of(given: str) -> list[float]:
    """``R[,R...]`` as numbers, infinity for all at once; raises :class:`~tercet.protocol.BadRequest`."""
    try:
        rates = [float(rate) for rate in given.split(",")]
    except ValueError as error:
        raise BadRequest(f"--request-rate: {given!r} is not R[,R...]", "--request-rate") from error
    if not all(rate > 0 for rate in rates):
        raise BadRequest(f"--request-rate: {given!r} has a rate that is not positive", "--request-rate")
    return rates


def slo_of(given: list[str] | None) -> Slo | None:
    """``NAME:MS`` items as bounds; raises :class:`~tercet.protocol.BadRequest`."""
    if not given:
        return None
    limits = limits_of(given)
    try:
        return msgspec.convert(limits, Slo, strict=False)
    except msgspec.ValidationError as error:
        raise complaint("--goodput", Slo, limits, error) from error


def _write_out(path: Path | None, data: bytes) -> None:
    """Write a report to a file, or to standard output for ``-``."""
    if str(path) == "-":
        sys.stdout.buffer.write(data)
    elif path is not None:
        write_file(path, data, "--result-filename")
