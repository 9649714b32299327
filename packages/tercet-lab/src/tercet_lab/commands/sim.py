"""``tercet sim``: run a program over simulated engines in virtual time; :mod:`.sim_runs` does so with its flags.

A simulation has the modules of a router, NumPy and SciPy: what needs them is imported after the flags were checked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from tercet.cli.setting_flags import ProgramArg, flags_as_records, given_as, refuse, with_flags_of
from tercet.cli.terminal import require_folder
from tercet.protocol import BadRequest
from tercet_lab import DEFAULT_PROFILE
from tercet_lab.drawing import require_drawing
from tercet_lab.planner_settings import NO_PLANNER, MovingSettings

MOVING = MovingSettings()
MOST_SEEDS = 10_000
DEFAULT_RATE, DEFAULT_REQUESTS = "4", 1000
FIGURE, REGRET = "--planner-figure", "--planner-regret"
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
        from tercet_lab.tables import require_table_file

        require_folder(given.records, "--records")
        require_table_file(given.records, "--records")
    if given.max_rate is not None:
        others = {f"--{name}": is_given(context, name.replace("-", "_")) for name in NOT_SEARCHED}
        refuse(others, "cannot be combined with --max-rate")
    elif given.over:
        refuse({f"--{name}": is_given(context, name) for name in NOT_SWEPT}, "cannot be combined with --over")
    else:
        refuse({f"--{name}": is_given(context, name) for name in SWEPT}, "needs --over")
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


def is_given(context: typer.Context, name: str) -> bool:
    """Return True if the parameter was given on the command line or by a variable."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


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
    from tercet_lab.commands import sim_runs

    simulation = sim_runs.experiment_of(context, given)
    if given.max_rate is not None:
        sim_runs.search(simulation, given, given.max_rate)
        return
    if given.over:
        sim_runs.run_sweep(simulation, given)
        return
    recorded = sim_runs.run(simulation, given)
    if given.watch:
        from tercet_lab.commands.run_page import show_run  # imports a server, which other runs do not need

        show_run(recorded)
