"""``tercet program``: show and change the programs and the scheduling file of a running router."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from tercet.cli.flag_records import flags_as_records
from tercet.cli.program_change import ProgramChange, send_sources
from tercet.cli.program_in_words import scheduling_in_words, state_in_words
from tercet.cli.router_calls import Json, RunningRouter, show_answer, text_of
from tercet.protocol import BadRequest


@flags_as_records
def program(
    change: ProgramChange,
    scheduling: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Scheduling file to use or reload; on this machine, or on the router's machine.",
        ),
    ] = None,
    by_path: Annotated[
        bool,
        typer.Option(
            "--by-path", help="Send a file's path instead of its text: the router reads it, below its `--admin-folder`."
        ),
    ] = False,
    *,
    router: RunningRouter,
    as_json: Json = False,
) -> None:
    """Show or change the program of a running router, and its scheduling file.

    Without PROGRAM, `--plan` and `--scheduling` the command shows both. A running request keeps its program until its
    end. The text of a file that exists here is sent; the program gets the name that you write. If a file does not load,
    nothing changes. The router's machine must have the plugins that a scheduling file names.

    Examples:
    - `tercet program`
    - `tercet program balanced --program-arg balance_ratio=0.2`
    - `tercet program mine.py:split`
    - `tercet program disaggregated=90 balanced=10`
    - `tercet program disaggregated=1 mine.py:split=1 --program-arg mine.py:split:share=0.8 --sticky x-user`
    - `tercet program disaggregated=1 --by-header x-team=search,data_parallel`
    - `tercet program --plan plan.yaml`
    - `tercet program --scheduling scheduling.yaml`
    """
    body = change.body()
    if by_path and body is None and scheduling is None:
        raise BadRequest("--by-path: needs PROGRAM, --plan or --scheduling", "--by-path")
    if body is not None and not by_path:
        send_sources(body)
    answers: dict[str, Any] = {}
    if scheduling is not None:
        answers["scheduling"] = router.ask("PUT", "/scheduling", _file(scheduling, by_path))
    if body is not None:
        answers["program"] = router.ask("PUT", "/program", body)
    if not answers:
        answers = {part: router.ask("GET", f"/{part}") for part in ("program", "scheduling")}
    show_answer(answers, as_json, _in_words)


def _file(name: str, by_path: bool) -> dict[str, Any]:
    """Return the path of a scheduling file, and its text if the file exists on this machine."""
    here = Path(name).expanduser()
    body = {"file": str(here.absolute()) if here.is_file() else name}
    if here.is_file() and not by_path:
        body["content"] = text_of(here, "--scheduling")
    return body


def _in_words(answers: dict[str, Any]) -> Iterator[str]:
    if "program" in answers:
        yield from state_in_words(answers["program"])
    if "scheduling" in answers:
        yield from scheduling_in_words(answers["scheduling"])
