"""``tercet engines``: change the engines of a running router, their LoRA adapters, and where sequences run."""

from __future__ import annotations

import time
from typing import Annotated, Any
from urllib.parse import quote

import typer

from tercet.cli.adapters import adapters
from tercet.cli.given_names import given_as
from tercet.cli.moves import move
from tercet.cli.roles_in_words import roles_in_words
from tercet.cli.router_calls import HERE, AdminKey, Json, Url, ask, show_answer, understood
from tercet.cli.terminal import say
from tercet.protocol import BadRequest, Role
from tercet.settings import require_engine_url

POLL_SECONDS = 0.5

engines = typer.Typer(
    name="engines",
    no_args_is_help=True,
    help="Change the engines of a running router, their LoRA adapters, and where sequences run; see `tercet status`.",
)
Name = Annotated[str, typer.Argument(help="Name of the engine in the fleet.")]


@engines.command()
def add(
    name: Name,
    engine_url: Annotated[str, typer.Argument(metavar="ENGINE_URL", help="Base URL of the engine's server.")],
    role: Annotated[Role, typer.Option(help="Role of the engine in this fleet.")] = "both",
    url: Url = HERE,
    admin_key: AdminKey = None,
) -> None:
    """Add a running engine; it must serve the fleet's model, with the same context length.

    Example: `tercet engines add decode-2 http://10.0.0.7:8001 --role decode`
    """
    require_engine_url(engine_url, "ENGINE_URL", "http://10.0.0.7:8001")
    body = {"name": name, "url": engine_url.rstrip("/"), "role": role}
    with given_as({"url": "ENGINE_URL", "name": "NAME"}):
        added = ask(url, admin_key, "POST", "/engines", body)
    with understood():
        say(engine_in_words(added))


@engines.command()
def drain(
    name: Name,
    undo: Annotated[bool, typer.Option("--undo", help="Pick the engine again.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the engine has no running sequences.")] = False,
    url: Url = HERE,
    admin_key: AdminKey = None,
) -> None:
    """Drain an engine: it gets no new requests, and its running sequences move to other engines with their KV.

    A sequence that cannot be moved finishes on the engine.
    """
    if undo and wait:
        raise BadRequest("--wait: cannot be combined with --undo", "--wait")
    engine = ask(url, admin_key, "DELETE" if undo else "POST", f"{_path(name)}/drain")
    with understood():
        say(engine_in_words(engine))
        while wait and engine["in_flight"]:
            time.sleep(POLL_SECONDS)
            left = engine["in_flight"]
            engine = {each["name"]: each for each in ask(url, admin_key, "GET", "/engines")}[name]
            if engine["in_flight"] != left:
                say(f"{engine['in_flight']} sequences still run on {name}")


@engines.command()
def remove(name: Name, url: Url = HERE, admin_key: AdminKey = None) -> None:
    """Remove an engine from the fleet at once; its running sequences finish, and its process continues."""
    gone = ask(url, admin_key, "DELETE", _path(name))
    with understood():
        say(f"{name} removed; {gone['in_flight']} sequences still run on it")


@engines.command("role")
def set_role(
    name: Name,
    role: Annotated[Role, typer.Argument(help="New role of the engine.")],
    url: Url = HERE,
    admin_key: AdminKey = None,
) -> None:
    """Change the role of an engine."""
    changed = ask(url, admin_key, "PUT", f"{_path(name)}/role", {"role": role})
    with understood():
        say(engine_in_words(changed))


@engines.command("roles")
def explain_roles(url: Url = HERE, admin_key: AdminKey = None, as_json: Json = False) -> None:
    """Show the objectives, the share of requests that met them, and the reasons for roles (`--roles auto`)."""
    show_answer(ask(url, admin_key, "GET", "/roles"), as_json, roles_in_words)


engines.command()(move)
engines.command()(adapters)


def _path(name: str) -> str:
    return f"/engines/{quote(name, safe='')}"


def engine_in_words(engine: dict[str, Any], width: int = 0) -> str:
    """Return one engine as a line; its name is padded to ``width`` characters."""
    leaving = "draining" if engine["draining"] else "stopping" if engine["stopping"] else ""
    leaving = leaving or ("paused" if engine.get("paused") else "")  # a router before 0.3 does not report it
    state = leaving or ("serving" if engine["reachable"] else "refused" if engine["refused"] else "unreachable")
    return (
        f"{engine['name']:{width}}  {engine['role']:7}  {state:11}  {engine['in_flight']:4}  {engine['url']}  "
        f"{engine['refused'] or _report(engine['report'])}"
    )


def _report(report: dict[str, Any] | None) -> str:
    if report is None:
        return "no report"
    busy = f"{report['running']} running, {report['waiting']} waiting"
    return f"{busy}, KV {report['kv_usage']:.0%} ({report['age']:.1f} s ago)"
