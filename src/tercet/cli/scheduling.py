"""``tercet scheduling``: the scheduling file of a running front door."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tercet.cli.front_door import HERE, ApiKey, Json, Url, ask, say

scheduling = typer.Typer(no_args_is_help=True, help="Show and change how a running front door chooses engines.")


@scheduling.command()
def show(url: Url = HERE, api_key: ApiKey = None, as_json: Json = False) -> None:
    """The file in use and its profiles."""
    _print(ask(url, api_key, "GET", "/scheduling"), as_json)


@scheduling.command("set")
def set_file(
    file: Annotated[str, typer.Argument(help="A scheduling file on the front door's machine.")],
    url: Url = HERE,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Use another file for picks from now on, or the same one anew; what does not load changes nothing.

    Example: `tercet scheduling set scheduling.yaml`
    """
    here = Path(file).expanduser()
    path = str(here.absolute()) if here.is_file() else file
    _print(ask(url, api_key, "PUT", "/scheduling", {"file": path}), as_json)


def _print(state: dict[str, Any], as_json: bool) -> None:
    if as_json:
        say(json.dumps(state, indent=2))
        return
    say(state["file"] or "no scheduling file")
    for name, profile in state["profiles"].items():
        roles = [role for role, used in state["by_role"].items() if used == name]
        scorers = [f"{scorer} x {weight:g}" for scorer, weight in profile["scorers"].items()]
        parts = [*profile["filters"], *scorers, profile["picker"]]
        say(f"  {name} ({', '.join(roles) or 'no role'}): {', '.join(parts)}")
