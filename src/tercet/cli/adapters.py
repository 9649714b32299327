"""``tercet adapters``: the LoRA adapters of a running router's fleet, shown and changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any
from urllib.parse import quote

import typer

from tercet.cli.fleet_commands import HERE, AdminKey, Json, Url, ask, show_answer
from tercet.cli.given_names import given_as
from tercet.cli.terminal import say
from tercet.protocol import BadRequest

adapters = typer.Typer(
    name="adapters", no_args_is_help=True, help="Show, load, replace and unload LoRA adapters of a running fleet."
)


@adapters.command("list")
def list_adapters(url: Url = HERE, admin_key: AdminKey = None, as_json: Json = False) -> None:
    """Name, digest of its contents, path, and the engines that have it, of each adapter."""
    show_answer(ask(url, admin_key, "GET", "/adapters"), as_json, _in_words)


@adapters.command()
def load(
    adapter: Annotated[
        str, typer.Argument(metavar="NAME=PATH", help="Name of the adapter, and its path on every engine.")
    ],
    url: Url = HERE,
    admin_key: AdminKey = None,
) -> None:
    """Load an adapter on every engine that takes adapters, or on none; then requests may name it as their model.

    Engines must have been started with `--enable-lora`, and allow it (`VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`).

    Example: `tercet adapters load sql=/models/adapters/sql-v3`
    """
    name, path = _name_and_path(adapter)
    with given_as({"name": "NAME", "path": "PATH"}):
        found = ask(url, admin_key, "POST", "/adapters", {"name": name, "path": path})
    show_answer([found], False, _in_words)


@adapters.command()
def replace(
    adapter: Annotated[
        str, typer.Argument(metavar="NAME=PATH", help="Name of the adapter, and the path of the new one.")
    ],
    url: Url = HERE,
    admin_key: AdminKey = None,
) -> None:
    """Have a name stand for what is at PATH now, on every engine or on none; not while requests use what it stood for.

    Example: `tercet adapters replace sql=/models/adapters/sql-v4`
    """
    name, path = _name_and_path(adapter)
    with given_as({"name": "NAME", "path": "PATH"}):
        found = ask(url, admin_key, "PUT", f"/adapters/{quote(name, safe='')}", {"path": path})
    show_answer([found], False, _in_words)


@adapters.command()
def unload(
    name: Annotated[str, typer.Argument(help="The adapter's name.")], url: Url = HERE, admin_key: AdminKey = None
) -> None:
    """Take no more requests for an adapter; what runs with it goes on, on the engine where it runs."""
    with given_as({"name": "NAME"}):
        ask(url, admin_key, "DELETE", f"/adapters/{quote(name, safe='')}")
    say(f"{name} is served no more")


def _name_and_path(adapter: str) -> tuple[str, str]:
    name, equals, path = adapter.partition("=")
    if not (name and equals and path):
        raise BadRequest(f"NAME=PATH: {adapter!r} has not both; such as sql=/models/adapters/sql-v3", "NAME=PATH")
    return name, path


def _in_words(found: list[dict[str, Any]]) -> Iterator[str]:
    width = max((len(each["name"]) for each in found), default=0)
    for each in found:
        where = ", ".join(each["engines"]) or "no engine"
        yield f"{each['name']:{width}}  {each['digest']}  {each['path']}  on {where}"
