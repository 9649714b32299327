"""Moves of a running router: ``tercet engines move`` makes one, ``tercet status --moves`` lists them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Annotated, Any
from urllib.parse import quote

import typer

from tercet.cli.flag_records import flags_as_records
from tercet.cli.router_calls import Json, RunningRouter, understood
from tercet.cli.terminal import say

POLL_SECONDS = 0.5


@flags_as_records
def move(
    seq_id: Annotated[str, typer.Argument(help="Id of a running sequence; `tercet status --sequences` lists ids.")],
    destination: Annotated[str, typer.Argument(help="Engine to which the sequence is moved.")],
    router: RunningRouter,
    as_json: Json = False,
) -> None:
    """Move a running sequence to another engine, with its KV; see `tercet status --moves`.

    Example: `tercet engines move cmpl-8d1f-0 decode-1`
    """
    path = f"/sequences/{quote(seq_id, safe='')}/move"
    answer = router.ask("POST", path, {"destination": destination})
    with understood():
        passed_on = "accepted" in answer
        told = "forwarded to the router that runs the sequence, which lists the move" if passed_on else in_words(answer)
        say(json.dumps(answer) if as_json else told)


def show_moves(router: RunningRouter, follow: bool, as_json: bool) -> None:
    """Print the moves of a running router; with ``follow``, new ones too, until Ctrl-C."""
    with understood():
        for each in _moves(router, follow):
            say(json.dumps(each) if as_json else in_words(each))


def _moves(router: RunningRouter, follow: bool) -> Iterator[dict[str, Any]]:
    """Yield moves in the order in which they began; with ``follow``, wait for the end of each running move."""
    last = 0
    while True:
        for move in router.ask("GET", f"/moves?since={last}"):
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
