"""``tercet engines``: the members of a running front door's fleet."""

from __future__ import annotations

import json
from typing import Annotated, Any
from urllib.parse import quote

import typer

from tercet.cli.front_door import HERE, ApiKey, Json, Url, ask, say
from tercet.protocol import Role

engines = typer.Typer(no_args_is_help=True, help="Show and change the engines of a running front door.")
Name = Annotated[str, typer.Argument(help="The engine's name in the fleet.")]


@engines.command("list")
def list_engines(url: Url = HERE, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Name, role, state, sequences under way, URL, and last report of its load, of each engine."""
    found: list[dict[str, Any]] = ask(url, api_key, "GET", "/engines")
    if as_json:
        say(json.dumps(found, indent=2))
        return
    width = max((len(engine["name"]) for engine in found), default=0)
    for engine in found:
        say(_line(engine, width))


@engines.command()
def add(
    name: Name,
    engine_url: Annotated[str, typer.Argument(metavar="ENGINE_URL", help="Its server's base URL.")],
    role: Annotated[Role, typer.Option(help="What the front door takes it for.")] = "both",
    url: Url = HERE,
    api_key: ApiKey = None,
) -> None:
    """Add an engine that runs already; it must serve the fleet's model, and as long a context.

    Example: `tercet engines add decode-2 http://10.0.0.7:8001 --role decode`
    """
    say(_line(ask(url, api_key, "POST", "/engines", {"name": name, "url": engine_url.rstrip("/"), "role": role})))


@engines.command()
def drain(
    name: Name,
    undo: Annotated[bool, typer.Option("--undo", help="Let it be picked again.")] = False,
    url: Url = HERE,
    api_key: ApiKey = None,
) -> None:
    """Start nothing new on an engine; what runs on it finishes."""
    say(_line(ask(url, api_key, "DELETE" if undo else "POST", f"{_path(name)}/drain")))


@engines.command()
def remove(name: Name, url: Url = HERE, api_key: ApiKey = None) -> None:
    """Forget an engine at once; what runs on it finishes. The engine's process is left alone."""
    gone = ask(url, api_key, "DELETE", _path(name))
    say(f"{name} removed; sequences that still run on it: {gone['in_flight']}")


@engines.command("role")
def set_role(
    name: Name,
    role: Annotated[Role, typer.Argument(help="What the front door takes it for from now on.")],
    url: Url = HERE,
    api_key: ApiKey = None,
) -> None:
    """Give an engine another role."""
    say(_line(ask(url, api_key, "PUT", f"{_path(name)}/role", {"role": role})))


def _path(name: str) -> str:
    return f"/engines/{quote(name, safe='')}"


def _line(engine: dict[str, Any], width: int = 0) -> str:
    state = "draining" if engine["draining"] else "serving" if engine["reachable"] else "unreachable"
    return (
        f"{engine['name']:{width}}  {engine['role']:7}  {state:11}  {engine['in_flight']:4}  {engine['url']}  "
        f"{_report(engine['report'])}"
    )


def _report(report: dict[str, Any] | None) -> str:
    if report is None:
        return "no report"
    busy = f"{report['running']} running, {report['waiting']} waiting"
    return f"{busy}, KV {report['kv_usage']:.0%} ({report['age']:.1f} s ago)"
