"""``tercet moves``: sequences of a running router on their way from engine to engine."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Annotated, Any
from urllib.parse import quote

import typer

from tercet.cli.fleet_commands import HERE, AdminKey, Json, Url, ask, understood
from tercet.cli.terminal import say

POLL_SECONDS = 0.5

moves = typer.Typer(name="moves", no_args_is_help=True, help="Show moves of running sequences, and ask for them.")


@moves.command("list")
def list_moves(
    follow: Annotated[bool, typer.Option("--follow", help="Go on with those to come, until Ctrl-C.")] = False,
    url: Url = HERE,
    admin_key: AdminKey = None,
    as_json: Json = False,
) -> None:
    """What moved, from where to where, why, in how many stages, and for how long its client waited; a line each."""
    with understood():
        for move in _moves(url, admin_key, follow):
            say(json.dumps(move) if as_json else in_words(move))


@moves.command()
def sequences(url: Url = HERE, admin_key: AdminKey = None, as_json: Json = False) -> None:
    """What runs now: id, engine, tokens of its prompt and of its output so far, seconds, program."""
    found: list[dict[str, Any]] = ask(url, admin_key, "GET", "/sequences")
    with understood():
        for each in found:
            line = (
                f"{each['seq_id']}  {each['engine'] or '-'}  {each['prompt_tokens']} + {each['tokens']} tokens  "
                f"{each['seconds']:.1f} s  {each['program']}"
            )
            say(json.dumps(each) if as_json else line)


@moves.command()
def start(
    seq_id: Annotated[str, typer.Argument(help="The sequence's id, as `tercet moves sequences` shows it.")],
    destination: Annotated[str, typer.Argument(help="The engine that shall go on with it.")],
    url: Url = HERE,
    admin_key: AdminKey = None,
) -> None:
    """Move one sequence, and say how that went.

    Example: `tercet moves start cmpl-8d1f-0 decode-1`
    """
    path = f"/sequences/{quote(seq_id, safe='')}/move"
    answer = ask(url, admin_key, "POST", path, {"destination": destination})
    with understood():
        passed_on = "accepted" in answer
        say("passed on to the router that runs it, which has it on record" if passed_on else in_words(answer))


def _moves(url: str, admin_key: str | None, follow: bool) -> Iterator[dict[str, Any]]:
    """The moves in the order in which they began; those under way are waited for if others are to follow."""
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
    """One move, in a line."""
    line = (
        f"{move['number']:5}  {move['seq_id']}  {move['source']} -> {move['destination']}  {move['reason']}  "
        f"{move['outcome']}"
    )
    stages = f"{len(move['stages'])} stage{'' if len(move['stages']) == 1 else 's'}"
    size = f"{stages}, {move['bytes'] / 1e6:.1f} MB"
    if move["error"]:
        return f"{line}: {move['error']}" + (f"; sent until then: {size}" if move["stages"] else "")
    pause = "" if move["pause"] is None else f", pause {move['pause'] * 1000:.0f} ms"
    return f"{line}  {move['tokens']} tokens, {size}, {move['recomputed']} tokens recomputed{pause}"
