"""``tercet status``: show a running router on one screen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from tercet.cli.engines import classes_in_words, engine_in_words, objectives_in_words, show_moves
from tercet.cli.engines import in_words as move_in_words
from tercet.cli.program import state_in_words
from tercet.cli.router_calls import Json, RunningRouter, show_answer, understood
from tercet.cli.setting_flags import flags_as_records
from tercet.protocol import BadRequest


@flags_as_records
def status(
    sequences: Annotated[
        bool,
        typer.Option(
            "--sequences",
            help="Show running sequences instead: id, engine, tokens of prompt and output, seconds, program.",
        ),
    ] = False,
    moves: Annotated[bool, typer.Option("--moves", help="Show moves instead, oldest first: one line each.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Show new moves too, until Ctrl-C; needs --moves.")] = False,
    *,
    router: RunningRouter,
    as_json: Json = False,
) -> None:
    """Show a running router: model, program, engines and their load, and moves.

    An engine's line has its name, role, state, number of sequences, URL, and the last report of its load. The exit code
    is 0 if the router can serve, 1 if it cannot or does not answer, and 2 for wrong options. A move's line has its
    sequence, source, destination, reason, outcome, stages, and the pause of its client.

    Examples:
    - `tercet status`
    - `tercet status --sequences`
    - `tercet status --moves --follow`
    """
    if sequences and moves:
        raise BadRequest("--moves: cannot be combined with --sequences", "--moves")
    if follow and not moves:
        raise BadRequest("--follow: needs --moves", "--follow")
    if moves:
        show_moves(router, follow, as_json)
        return
    if sequences:
        show_answer(router.ask("GET", "/sequences"), as_json, _sequences_in_words)
        return
    found: dict[str, Any] = router.ask("GET", "/status")
    show_answer(found, as_json, lambda found: _in_words(router.url, found))
    with understood():
        serves = bool(found["serving"])
    if not serves:
        raise typer.Exit(1)


def _sequences_in_words(found: list[dict[str, Any]]) -> Iterator[str]:
    for each in found:
        yield (
            f"{each['seq_id']}  {each['engine'] or '-'}  {each['prompt_tokens']} + {each['tokens']} tokens  "
            f"{each['seconds']:.1f} s  {each['program']}"
        )


def _in_words(url: str, found: dict[str, Any]) -> Iterator[str]:
    yield f"{url}: {'serves' if found['serving'] else 'does not serve'} {', '.join(found['models'])}"
    if found["why"]:
        yield f"  {found['why']}"
    yield from state_in_words(found["program"])
    yield f"{objectives_in_words(found['objectives'])}; roles: {found['roles']}"
    yield from classes_in_words(found["objectives"])
    engines = found["engines"]
    width = max((len(engine["name"]) for engine in engines), default=0)
    yield f"{len(engines)} engines, {sum(engine['in_flight'] for engine in engines)} sequences on them"
    yield from (f"  {engine_in_words(engine, width)}" for engine in engines)
    yield f"{len(found['moves'])} running moves"
    yield from (move_in_words(move) for move in found["moves"])
