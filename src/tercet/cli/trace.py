"""``tercet trace``: draw the steps of a request as lanes over time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any
from urllib.parse import quote

import typer

from tercet.cli.flag_records import flags_as_records
from tercet.cli.router_calls import Json, RunningRouter, show_answer, understood
from tercet.cli.terminal import console, say
from tercet.cli.trace_drawing import drawn, head_of
from tercet.protocol import BadRequest

# Characters of a chart that is not written to a terminal.
FILE_WIDTH = 160


@flags_as_records
def trace(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="ID", show_default=False,
            help="Id: the request's `x-request-id`, the `id` of its answer, or the id of its distributed trace.",
        ),
    ] = None,
    slowest: Annotated[
        int | None, typer.Option("--slowest", min=1, max=100, help="Number of slowest requests to list.")
    ] = None,
    *,
    router: RunningRouter,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Draw the steps of a request: a lane for the router and for each engine, with a bar for each step.

    Steps are the wait for admission, picks with their scores, calls of verbs, the first token, failures, retries, and
    moves. Routers keep the latest and the slowest requests. Without an ID the latest requests are listed.

    Examples:
    - `tercet trace --slowest 5`
    - `tercet trace cmpl-8d1f`
    """
    if name is None:
        which = "newest=20" if slowest is None else f"slowest={slowest}"
        show_answer(router.ask("GET", f"/traces?{which}"), as_json, _listed)
        return
    if slowest is not None:
        raise BadRequest("--slowest: cannot be combined with an ID", "--slowest")
    if not name.strip():
        raise BadRequest("ID: must not be empty", "ID")
    found = router.ask("GET", f"/traces/{quote(name, safe='')}")
    if as_json:
        say(json.dumps(found))
        return
    with understood():
        for index, each in enumerate(found):
            if index:
                say("")
            _draw(each)


def _draw(found: dict[str, Any]) -> None:
    for line in head_of(found):
        say(line)
    for line in drawn(found, console.width if console.is_terminal else FILE_WIDTH):
        console.print(line, no_wrap=True, crop=False)


def _listed(found: list[dict[str, Any]]) -> Iterator[str]:
    if not found:
        yield "no requests yet"
    for each in found:
        tokens = sum(sequence["output_tokens"] for sequence in each["sequences"])
        prompt = sum(sequence["prompt_tokens"] for sequence in each["sequences"])
        programs = ", ".join(dict.fromkeys(sequence["program"] for sequence in each["sequences"])) or "-"
        yield (
            f"{each['request_id']}  {each['seconds']:8.3f} s  {each['outcome']}  {prompt} + {tokens} tokens  "
            f"{programs}  {_engines(each)}"
        )


def _engines(found: dict[str, Any]) -> str:
    calls = (event for sequence in found["sequences"] for event in (*sequence["events"], *sequence["failed"]))
    return ", ".join(dict.fromkeys(event["engine"] for event in calls if event.get("engine"))) or "-"
