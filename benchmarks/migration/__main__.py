"""``python -m benchmarks.migration``: the cost of a move of a running request for its client."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from benchmarks.command_line import names_in, numbers_in, run
from benchmarks.migration.moving import WAYS, MoveCost, measure_moves
from benchmarks.migration.moving_figure import plot_pauses
from benchmarks.migration.moving_report import NEIGHBOURS, PAUSES, neighbour_rows, pause_rows

from tercet.cli.setting_flags import given_as
from tercet.cli.terminal import note, require_folder, say, show_table, write_file
from tercet.settings import MoveSettings, require_url
from tercet_lab.bench.results import machine, where_and_when
from tercet_lab.drawing import require_drawing


def migration(
    source: Annotated[str, typer.Argument(metavar="SOURCE_URL", help="URL of the engine on which sequences begin.")],
    destination: Annotated[
        str, typer.Argument(metavar="DESTINATION_URL", help="URL of the engine to which they are moved.")
    ],
    lengths: Annotated[
        str, typer.Option(help="Lengths of the prompts in tokens, separated by commas.")
    ] = "256,512,1024,1900",
    ways: Annotated[str, typer.Option(help="Ways to move, separated by commas.")] = ",".join(WAYS),
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds. Each round has every way once.")] = 5,
    stages: Annotated[int, typer.Option(min=1, help="Maximum of stages in a live move.")] = MoveSettings().stages,
    tail: Annotated[int, typer.Option(min=0, help="Tokens that the last stage may leave to the cut-over.")] = (
        MoveSettings().tail
    ),
    portion: Annotated[int, typer.Option(min=1, help="Tokens that a live move sends before each pause.")] = (
        MoveSettings().portion
    ),
    share: Annotated[
        float, typer.Option(max=1, help="Share of a stage's time in which KV is sent; 1: no pauses.")
    ] = MoveSettings().share,
    result_filename: Annotated[Path | None, typer.Option(help="JSON file for all moves.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="File for a figure of the pauses (.png, .svg, .pdf); needs matplotlib.")
    ] = None,
) -> None:
    """Move running sequences between two engines: live, by a blocking copy, and by recomputing them.

    Prompts of 8,000 tokens need engines with `--max-model-len 8192`. Ctrl-C reports what has been measured so far.

    `pause` is the longest gap between two tokens around the move, minus the median gap before it; cells are medians.
    Other sequences stay on both engines. The second table has the mean growth of their decode steps: from the begin of
    a move to its cut-over, compared with the steps before; and after the cut-over, compared with the steps of `there`,
    which has the sequence at the destination from the begin. `stay` moves nothing: it shows the noise.

    Example: `python -m benchmarks.migration http://127.0.0.1:8001 http://127.0.0.1:8002`
    """
    require_url(source, "SOURCE_URL")
    require_url(destination, "DESTINATION_URL")
    if plot is not None:
        require_folder(plot, "--plot")
        require_drawing(plot, "--plot")
    require_folder(result_filename, "--result-filename")
    prompts, chosen = numbers_in("--lengths", lengths), names_in("--ways", ways, WAYS)
    with given_as({"move-share": "--share"}):
        settings = MoveSettings(stages=stages, tail=tail, portion=portion, share=share)
    costs = list[MoveCost]()

    async def measure() -> None:
        moves = measure_moves(source, destination, prompts, chosen, rounds, settings, note)
        async with aclosing(moves):
            async for cost in moves:
                costs.append(cost)

    interrupted = False
    try:
        asyncio.run(measure())
    except KeyboardInterrupt:
        interrupted = True
        if not costs:
            raise
        note("interrupted; these are the results until then")
    show_table("moves of a running sequence", PAUSES, pause_rows(costs))
    say("live: stages while the source decodes; blocking: stop, copy, continue; recompute: stop, compute all KV again")
    show_table("decode steps of other sequences, relative to steps without a move", NEIGHBOURS, neighbour_rows(costs))
    if result_filename is not None:
        report = {"machine": msgspec.to_builtins(machine()), "moves": msgspec.to_builtins(costs)}
        write_file(result_filename, msgspec.json.format(msgspec.json.encode(report)), "--result-filename")
    if plot is not None:
        plot_pauses(costs, plot, where_and_when())
    if interrupted:
        raise typer.Exit(130)


if __name__ == "__main__":
    run(migration, "benchmarks.migration")
