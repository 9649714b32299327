"""``tercet engines adapters``: show and change the LoRA adapters of a running router's fleet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any
from urllib.parse import quote

import typer

from tercet.cli.flag_records import flags_as_records
from tercet.cli.given_names import given_as
from tercet.cli.router_calls import Json, RunningRouter, show_answer
from tercet.cli.terminal import say
from tercet.protocol import BadRequest


@flags_as_records
def adapters(
    adapter: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME=PATH",
            help="Adapter to load: its name, and its path on every engine. With `--unload`: NAME only.",
            show_default=False,
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Load the files at PATH again for an adapter that is loaded.")
    ] = False,
    unload: Annotated[bool, typer.Option("--unload", help="Refuse new requests for the adapter.")] = False,
    *,
    router: RunningRouter,
    as_json: Json = False,
) -> None:
    """Show, load, replace or unload LoRA adapters of a running fleet.

    Without NAME=PATH the command lists each adapter: name, digest of its contents, path, and the engines that have it.
    An adapter is loaded on every engine that accepts adapters, or on none; then requests may name it as their model.
    Start engines with `--enable-lora` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`. An adapter is not replaced while
    requests use it; running requests of an unloaded adapter continue on their engine.

    Examples:
    - `tercet engines adapters`
    - `tercet engines adapters sql=/models/adapters/sql-v3`
    - `tercet engines adapters sql=/models/adapters/sql-v4 --replace`
    - `tercet engines adapters sql --unload`
    """
    if replace and unload:
        raise BadRequest("--unload: cannot be combined with --replace", "--unload")
    if adapter is None:
        if replace or unload:
            flag = "--replace" if replace else "--unload"
            raise BadRequest(f"{flag}: needs an adapter; give its NAME", flag)
        show_answer(router.ask("GET", "/adapters"), as_json, _in_words)
        return
    with given_as({"name": "NAME", "path": "PATH"}):
        if unload:
            router.ask("DELETE", f"/adapters/{quote(adapter, safe='')}")
            say(f"{adapter} is unloaded")
            return
        name, path = _name_and_path(adapter)
        if replace:
            found = router.ask("PUT", f"/adapters/{quote(name, safe='')}", {"path": path})
        else:
            found = router.ask("POST", "/adapters", {"name": name, "path": path})
    show_answer([found], as_json, _in_words)


def _name_and_path(adapter: str) -> tuple[str, str]:
    name, equals, path = adapter.partition("=")
    if not (name and equals and path):
        raise BadRequest(
            f"NAME=PATH: {adapter!r} must have a name and a path, such as sql=/models/adapters/sql-v3", "NAME=PATH"
        )
    return name, path


def _in_words(found: list[dict[str, Any]]) -> Iterator[str]:
    width = max((len(each["name"]) for each in found), default=0)
    for each in found:
        where = ", ".join(each["engines"]) or "no engine"
        yield f"{each['name']:{width}}  {each['digest']}  {each['path']}  on {where}"
