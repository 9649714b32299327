"""``tercet moves``: show the moves of a running router, and move a sequence."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Annotated, Any
from urllib.parse import quote

import typer

from tercet.cli.fleet_commands import HERE, AdminKey, Json, Url, ask, understood
from tercet.cli.terminal import say
from tercet.protocol import BadRequest

POLL_SECONDS = 0.5


def moves(
    seq_id: Annotated[
        str | None,
        typer.Argument(help="Id of a sequence to move; `tercet status --sequences` lists ids.", show_default=False),
    ] = None,
    destination: Annotated[
        str | None, typer.Argument(help="Engine to which the sequence is moved.", show_default=False)
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Show new moves too, until Ctrl-C.")] = False,
    url: Url = HERE,
    admin_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """Show the moves of a running router, or move one sequence.

    Each move is one line: sequence, source, destination, reason, outcome, stages, and the pause of its client.

    Examples:
    - `tercet moves --follow`
    - `tercet moves cmpl-8d1f-0 decode-1`
    """
    if seq_id is not None:
        if destination is None:
            raise BadRequest("DESTINATION: is required; give the engine to which the sequence is moved", "DESTINATION")
        if follow:
            raise BadRequest("--follow: cannot be combined with a sequence", "--follow")
        _move(url, admin_key, seq_id, destination, as_json)
        return
    with understood():
        for move in _moves(url, admin_key, follow):
            say(json.dumps(move) if as_json else in_words(move))


def _move(url: str, admin_key: str | None, seq_id: str, destination: str, as_json: bool) -> None:
    path = f"/sequences/{quote(seq_id, safe='')}/move"
    answer = ask(url, admin_key, "POST", path, {"destination": destination})
    with understood():
        passed_on = "accepted" in answer
        told = "forwarded to the router that runs the sequence, which lists the move" if passed_on else in_words(answer)
        say(json.dumps(answer) if as_json else told)


def _moves(url: str, admin_key: str | None, follow: bool) -> Iterator[dict[str, Any]]:
    """Yield moves in the order in which they began; with ``follow``, wait for the end of each running move."""
    last = 0
    while True:
        for move in ask(url, admin_key, "GET", f"/moves?since={last}"):
            if follow and move["outcome"] == "under_way":
                break
            last = move["number"]
            yield move
        if not follow:
            return
        time.sleep(POLL_SECONDS)


def in_words(move: dict[str, Any]) -> str:
    """Return one move as a line."""
    line = (
        f"{move['number']:5}  {move['seq_id']}  {move['source']} -> {move['destination']}  {move['reason']}  "
        f"{move['outcome']}"
    )
    stages = f"{len(move['stages'])} stage{'' if len(move['stages']) == 1 else 's'}"
    size = f"{stages}, {move['bytes'] / 1e6:.1f} MB"
    if move["error"]:
        return f"{line}: {move['error']}" + (f"; sent before: {size}" if move["stages"] else "")
    pause = "" if move["pause"] is None else f", pause {move['pause'] * 1000:.0f} ms"
    return f"{line}  {move['tokens']} tokens, {size}, {move['recomputed']} tokens recomputed{pause}"
