"""``tercet advise``: the fleet and the program for a recorded load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from tercet.cli.terminal import progress, say, show_table
from tercet.protocol import BadRequest
from tercet.settings import key_values
from tercet_lab import DEFAULT_PROFILE
from tercet_lab.slo import Goodput, limits_of


def advise(
    trace: Annotated[Path, typer.Option(metavar="FILE", help="Recorded requests, with their times.")],
    slo: Annotated[
        list[str], typer.Option(metavar="NAME:MS[,...]", help="Limits in milliseconds, such as `ttft:500,tpot:50`.")
    ],
    kind: Annotated[
        Literal["mooncake", "azure", "burstgpt"], typer.Option(help="Format of the trace, as in `tercet bench`.")
    ] = "mooncake",
    profile: Annotated[
        str, typer.Option(help="Engine: a name that `tercet bench profile` lists, or a JSON file.")
    ] = DEFAULT_PROFILE,
    attainment: Annotated[float, typer.Option(help="Share of the requests that must meet the limits.")] = 0.9,
    max_engines: Annotated[int, typer.Option(min=1, max=1000, help="Most engines.")] = 16,
    request_rate: Annotated[
        float | None, typer.Option(help="Mean rate (requests per second) to which the trace is stretched.")
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="Use only the first requests of the trace.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Option of every engine, as of `tercet sim`. Repeatable."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the simulations.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Find the smallest fleet, and its program, for a recorded load: by simulations of the whole trace.

    Compares engines that do both (`data_parallel`) with engines that split (`disaggregated`), of 1 to `--max-engines`.
    Prints each fleet that was simulated, the best one, and the commands that repeat and start it. The exit code is 1
    if no fleet is enough.

    Examples:
    - `tercet advise --trace trace.jsonl --slo ttft:2000,tpot:50`
    - `tercet advise --trace trace.jsonl --slo ttft:500 --request-rate 20 --num-prompts 2000 --max-engines 32`
    """
    if not trace.is_file():
        raise BadRequest(f"--trace: there is no file {trace}", "--trace")
    try:
        limits = msgspec.convert(limits_of(slo), Goodput, strict=False).slo
    except msgspec.ValidationError as error:
        raise BadRequest(f"--slo: {error}; the limits are ttft, tpot and e2el", "--slo") from error
    from tercet_lab.advice import HEADINGS, rows_of
    from tercet_lab.advice import advise as advise_on
    from tercet_lab.bench.simulated.works import Trace

    work = Trace(trace, kind, rate=request_rate, requests=num_prompts)
    with progress("simulating fleets") as update:
        advice = advise_on(
            work, limits, profile=profile, most=max_engines, attainment=attainment, seed=seed, note=update,
            **key_values(option, "--option"),
        )  # fmt: skip
    best = advice.best
    repeat = best.experiment.command()
    if as_json:
        found = {
            "program": best.program, "args": dict(best.experiment.args), "fleet": best.fleet, "engines": best.engines,
            "attainment": best.attainment, "goodput_per_engine": best.goodput_per_engine, "enough": advice.is_enough,
            "sim": repeat, "up": best.up,
        }  # fmt: skip
        typer.echo(msgspec.json.format(msgspec.json.encode(found)))
    else:
        show_table("fleets that were simulated", HEADINGS, rows_of(advice))
        say(f"{best.program} on {best.fleet}: {best.attainment:.1%} of the requests within the limits")
        if not advice.is_enough:
            say(
                f"no fleet of at most {max_engines} engines serves {attainment:.0%}; raise --max-engines, or the limits"
            )
        say(f"repeat it: {repeat}")
        say(f"start it:  {best.up}")
    if not advice.is_enough:
        raise typer.Exit(1)
