"""Flags of ``tercet sim``, and the simulation that they describe."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from tercet.cli.flag_records import refuse
from tercet.cli.setting_flags import ProgramArg
from tercet.cli.terminal import require_folder
from tercet.protocol import BadRequest
from tercet.settings import key_values
from tercet.settings.declaration import complaint
from tercet_lab.bench.drawing import require_drawing
from tercet_lab.bench.simulated import MovingSettings, PlannedWorkload, Simulation, SyntheticWorkload
from tercet_lab.bench.summary import Slo
from tercet_lab.commands.bench_options import limits_of
from tercet_lab.commands.planned_runs import require_planned_run

DEFAULT_PROFILE = "llama-3.1-8b-h100-tp1"
MOVING = MovingSettings()
MOST_SEEDS = 10_000
DEFAULT_RATE, DEFAULT_REQUESTS = "4", 1000
Deviation = Annotated[float, typer.Option(help="Standard deviation of the length (tokens).")]
# Parameters that a workload of `tercet bench` has itself.
LENGTHS = ("input_mean", "input_dev", "output_mean", "output_dev", "prefixes", "prefix", "lengths")
# Parameters that a sweep refuses, and parameters of a sweep only.
NOT_SWEPT, SWEPT = ("goodput", "label", "record", "watch"), ("x", "y", "plot", "seeds")


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
            "YAML file. Engines of one HOST slow one another, as their profile says."
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
    label: Annotated[
        str | None, typer.Option(help="Name of this run in figures. Without it, the program's name is used.")
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of the run; the same seed gives the same report, byte for byte.")] = 0
    result_filename: Annotated[
        Path | None, typer.Option(help="JSON file for the report, for `tercet bench report`; `-` is standard output.")
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
            help="Sweep a setting: `fleet`, `profile`, `program`, `request-rate`, an engine option, a setting of moves "
            "(such as `reschedule-threshold`) or a program's parameter; repeatable.",
        ),
    ] = None
    x: Annotated[
        str,
        typer.Option(
            "--x", help="First metric of a sweep: ttft, tpot or e2el, a dot, then mean, p50, p90 or p99; needs --over."
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
            min=1, max=MOST_SEEDS, help="Number of runs of each setting, with seeds from --seed on; needs --over."
        ),
    ] = 1
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
    if given.over:
        refuse({f"--{name}": _is_given(context, name) for name in NOT_SWEPT}, "cannot be combined with --over")
    else:
        refuse({f"--{name}": _is_given(context, name) for name in SWEPT}, "needs --over")
    if given.plot is not None:
        require_folder(given.plot, "--plot")
        require_drawing(given.plot, "--plot")
    if given.record is not None and not 0 < given.record < math.inf:
        raise BadRequest(f"--record: must be a positive number of seconds, is {given.record:g}", "--record")
    if given.planner_figure is not None or given.planner_regret:
        require_planned_run(given.moving, given.over, given.planner_figure)


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def simulation_of(context: typer.Context, given: SimFlags) -> Simulation:
    """Return the simulation that a command's parameters describe; missing parameters keep their defaults."""
    return Simulation(
        program=given.program,
        program_args=key_values(given.program_arg, "--program-arg"),
        fleet=given.fleet,
        profile=given.profile,
        options=key_values(given.option, "--option"),
        workload=_workload_of(context, given),
        seed=given.seed,
        slo=slo_of(given.goodput),
        scheduling=given.scheduling,
        moving=given.moving,
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
        raise BadRequest(f"--request-rate: {given!r} is not R[,R...]", "--request-rate") from error
    if not all(rate > 0 for rate in rates):
        raise BadRequest(f"--request-rate: each rate must be greater than 0, is {given!r}", "--request-rate")
    return rates


def slo_of(given: list[str] | None) -> Slo | None:
    """Return ``NAME:MS`` items as bounds; raise :class:`~tercet.protocol.BadRequest`."""
    if not given:
        return None
    limits = limits_of(given)
    try:
        return msgspec.convert(limits, Slo, strict=False)
    except msgspec.ValidationError as error:
        raise complaint("--goodput", Slo, limits, error) from error
