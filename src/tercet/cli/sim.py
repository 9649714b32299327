"""``tercet sim``: a program over simulated engines, in virtual time."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from tercet.bench.simulated import Report, SyntheticWorkload, options_from, parse_fleet, point_of, run_once, table
from tercet.bench.simulated.report import HEADINGS, Point
from tercet.bench.summary import Slo
from tercet.cli.options import ProgramArg, key_values
from tercet.programs import load_program
from tercet.protocol import BadRequest
from tercet.sim import EngineOptions

app = typer.Typer(rich_markup_mode="markdown")

Program = Annotated[str, typer.Option(help="A built-in program, or your own: `file.py:function`.")]
Fleet = Annotated[str, typer.Option(help="`ROLE=COUNT[,...]` with roles prefill, decode, both; or a YAML file.")]
ProfileName = Annotated[
    str, typer.Option(help="A profile that `tercet profile list` shows, or a JSON file.", show_default=True)
]
Option = Annotated[
    list[str] | None, typer.Option(metavar="KEY=VALUE", help="A setting of every engine; repeatable. See the docs.")
]
Rates = Annotated[str, typer.Option(metavar="R[,R...]", help="Requests per second; one run for each.")]
DEFAULT_PROFILE = "llama-3.1-8b-h100-tp1"


@app.callback(invoke_without_command=True)
def sim(
    context: typer.Context,
    program: Program = "data_parallel",
    program_arg: ProgramArg = None,
    fleet: Fleet = "both=2",
    profile: ProfileName = DEFAULT_PROFILE,
    rate: Rates = "4",
    requests: Annotated[int, typer.Option(help="Requests of each run, warm-up included.")] = 1000,
    warm_up: Annotated[int, typer.Option(help="First requests that count in no metric.")] = 0,
    input_mean: Annotated[float, typer.Option(help="Prompt length, tokens.")] = 512,
    input_dev: Annotated[float, typer.Option(help="Its standard deviation.")] = 0,
    output_mean: Annotated[float, typer.Option(help="Output length, tokens.")] = 128,
    output_dev: Annotated[float, typer.Option(help="Its standard deviation.")] = 0,
    arrivals: Annotated[Literal["poisson", "constant", "gamma"], typer.Option(help="How requests arrive.")] = "poisson",
    burstiness: Annotated[float, typer.Option(help="Coefficient of variation of gamma arrivals.")] = 2.0,
    prefixes: Annotated[int, typer.Option(help="Number of prefixes that prompts share; 0 for none.")] = 0,
    prefix: Annotated[int, typer.Option(help="Their length, tokens.")] = 0,
    option: Option = None,
    slo: Annotated[
        list[str] | None, typer.Option(metavar="METRIC=MS", help="Bound of ttft, tpot or e2el; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same report, byte for byte.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write the report here; `-` is standard output.")] = None,
) -> None:
    """Simulate a program at one or several rates, and print means and 99th percentiles.

    Examples:
    - `tercet sim --program disaggregated --fleet prefill=1,decode=1 --rate 2,4,8`
    - `tercet sim --fleet both=1000 --rate 2000 --requests 20000`
    """
    if context.invoked_subcommand is not None:
        return
    workload = SyntheticWorkload(
        rate=1.0,
        requests=requests,
        warm_up=warm_up,
        input_mean=input_mean,
        input_dev=input_dev,
        output_mean=output_mean,
        output_dev=output_dev,
        arrivals=arrivals,
        burstiness=burstiness,
        prefixes=prefixes,
        prefix=prefix,
    )
    simulation = Simulation(
        program=program,
        program_args=key_values(program_arg, "--program-arg"),
        fleet=fleet,
        profile=profile,
        options=key_values(option, "--option"),
        seed=seed,
        slo=slo_of(slo),
    )
    report = simulation.report(workload, rates_of(rate))
    write_out(json, report.to_json())
    if str(json) != "-":
        show(f"{program} on {fleet}, {profile}", HEADINGS, table(report))


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """All arguments of a simulation but its traffic."""

    program: str
    program_args: dict[str, str]
    fleet: str
    profile: str
    options: dict[str, str]
    seed: int
    slo: Slo | None

    def report(self, workload: SyntheticWorkload, rates: list[float]) -> Report:
        """Run it at each rate; says on standard error how fast that went."""
        points = tuple(self._point(msgspec.structs.replace(workload, rate=rate)) for rate in rates)
        traffic = msgspec.to_builtins(workload)
        del traffic["rate"]
        arguments: dict[str, Any] = {**msgspec.to_builtins(self), "workload": traffic}
        return Report(program=self.program, arguments=arguments, points=points)

    def _point(self, workload: SyntheticWorkload) -> Point:
        program, spec = load_program(self.program, self.program_args), parse_fleet(self.fleet)
        options = options_from(EngineOptions(), self.options)
        began = time.perf_counter()
        outcome = run_once(program, spec, self.profile, options, workload, self.seed)
        took, simulated = time.perf_counter() - began, max(outcome.ended, default=0.0)
        speed = f"{simulated:.1f} s in {took:.1f} s, {simulated / took:.1f} times real time"
        typer.echo(f"rate {workload.rate:g}: {speed}", err=True)
        return point_of(workload.rate, outcome, self.slo)


def rates_of(given: str) -> list[float]:
    """``R[,R...]`` as numbers; raises :class:`~tercet.protocol.BadRequest`."""
    try:
        rates = [float(rate) for rate in given.split(",")]
    except ValueError as error:
        raise BadRequest(f"--rate: {given!r} is not R[,R...]", "--rate") from error
    if not all(0 < rate < float("inf") for rate in rates):
        raise BadRequest(f"--rate: {given!r} has a rate that is not positive", "--rate")
    return rates


def slo_of(given: list[str] | None) -> Slo | None:
    """``METRIC=MS`` items as bounds; raises :class:`~tercet.protocol.BadRequest`."""
    if not given:
        return None
    try:
        return msgspec.convert(key_values(given, "--slo"), Slo, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(f"--slo: {error}", "--slo") from error


def write_out(path: Path | None, data: bytes) -> None:
    """Write a report to a file, or to standard output for ``-``."""
    if path is None:
        return
    if str(path) == "-":
        sys.stdout.buffer.write(data)
        return
    try:
        path.write_bytes(data)
    except OSError as error:
        raise BadRequest(f"--json: {path} cannot be written: {error.strerror}", "--json") from error


def show(title: str, headings: list[str], rows: list[list[str]]) -> None:
    """A table on standard output."""
    drawn = Table(title=title, title_justify="left")
    for index, heading in enumerate(headings):
        drawn.add_column(heading, justify="right" if index or heading == "rate" else "left")
    for row in rows:
        drawn.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 140).print(drawn)
