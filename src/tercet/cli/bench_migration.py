"""``tercet bench migration``: what moving a running request costs its client."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tercet.bench.moving import WAYS, MoveCost, measure_moves
from tercet.bench.results import machine
from tercet.cli.terminal import note, say, show_table, write_file
from tercet.protocol import BadRequest
from tercet.settings import MoveSettings


def migration(
    source: Annotated[str, typer.Argument(metavar="SOURCE_URL", help="The engine that sequences begin on.")],
    destination: Annotated[str, typer.Argument(metavar="DESTINATION_URL", help="The engine that they are moved to.")],
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts, with commas.")] = "256,512,1024,1900",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; every way once in each, in turn.")] = 5,
    stages: Annotated[int, typer.Option(min=1, help="Stages of a live move at most.")] = MoveSettings().stages,
    tail: Annotated[int, typer.Option(min=0, help="Tokens that the last stage may leave behind.")] = (
        MoveSettings().tail
    ),
    json: Annotated[Path | None, typer.Option(help="Write every move here, too.")] = None,
) -> None:
    """Move running sequences between two engines: live, by a blocking copy, and by computing them anew.

    `pause` is the longest gap between two tokens around the move, less the median gap before it; `bystander` by how
    much the decode steps of another sequence on the source grow while the move is under way. Cells are medians.

    Example: `tercet bench migration http://127.0.0.1:8001 http://127.0.0.1:8002`
    """
    costs = asyncio.run(
        measure_moves(source, destination, _lengths(lengths), rounds, MoveSettings(stages=stages, tail=tail), note)
    )
    headings = ["way", "tokens", "pause, ms", "in steps", "step, ms", "stages", "MB", "bystander"]
    show_table("moves of a running sequence", headings, _rows(costs))
    say("live: stages while the source decodes; blocking: stop, copy, go on; recompute: stop, compute all anew")
    if json is not None:
        report = {"machine": msgspec.to_builtins(machine()), "moves": msgspec.to_builtins(costs)}
        write_file(json, msgspec.json.format(msgspec.json.encode(report)), "--json")


def _lengths(text: str) -> list[int]:
    try:
        found = [int(item) for item in text.split(",")]
    except ValueError:
        raise BadRequest(f"--lengths: {text!r} is not a list of numbers", "--lengths") from None
    if any(length < 1 for length in found):
        raise BadRequest("--lengths: must be at least 1", "--lengths")
    return found


def _rows(costs: list[MoveCost]) -> Iterator[list[str]]:
    for length in sorted({cost.length for cost in costs}):
        for way in WAYS:
            found = [cost for cost in costs if (cost.way, cost.length) == (way, length)]
            pause, step = (statistics.median(getattr(cost, name) for cost in found) for name in ("pause", "step"))
            sent = statistics.median(sum(stage.bytes for stage in cost.stages) for cost in found) / 1e6
            beside = [cost.bystander for cost in found if cost.bystander is not None]
            slowed = f"x {statistics.median(beside):.2f}" if beside else "-"
            stages = f"{statistics.median(len(cost.stages) for cost in found):g}"
            yield [
                way, str(length), f"{pause * 1000:.0f}", f"{pause / step:.1f}", f"{step * 1000:.0f}", stages,
                f"{sent:.1f}", slowed,
            ]  # fmt: skip
