"""``tercet engines``: change the engines of a running router, their LoRA adapters, and where sequences run."""

from __future__ import annotations

import time
from typing import Annotated, Any
from urllib.parse import quote

import typer

from tercet.cli.adapters import adapters
from tercet.cli.flag_records import flags_as_records
from tercet.cli.given_names import given_as
from tercet.cli.moves import move
from tercet.cli.roles_in_words import roles_in_words
from tercet.cli.router_calls import Json, RunningRouter, show_answer, understood
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
@flags_as_records
def add(
    name: Name,
    engine_url: Annotated[str, typer.Argument(metavar="ENGINE_URL", help="Base URL of the engine's server.")],
    role: Annotated[Role, typer.Option(help="Role of the engine in this fleet.")] = "both",
    *,
    router: RunningRouter,
) -> None:
    """Add a running engine; it must serve the fleet's model, with the same context length.

    Example: `tercet engines add decode-2 http://10.0.0.7:8001 --role decode`
    """
    require_engine_url(engine_url, "ENGINE_URL", "http://10.0.0.7:8001")
    body = {"name": name, "url": engine_url.rstrip("/"), "role": role}
    with given_as({"url": "ENGINE_URL", "name": "NAME"}):
        added = router.ask("POST", "/engines", body)
    with understood():
        say(engine_in_words(added))


@engines.command()
@flags_as_records
def drain(
    name: Name,
    undo: Annotated[bool, typer.Option("--undo", help="Pick the engine again.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the engine has no running sequences.")] = False,
    *,
    router: RunningRouter,
) -> None:
    """Drain an engine: it gets no new requests, and its running sequences move to other engines with their KV.

    A sequence that cannot be moved finishes on the engine.
    """
    if undo and wait:
        raise BadRequest("--wait: cannot be combined with --undo", "--wait")
    engine = router.ask("DELETE" if undo else "POST", f"{_path(name)}/drain")
    with understood():
        say(engine_in_words(engine))
        while wait and engine["in_flight"]:
            time.sleep(POLL_SECONDS)
            left = engine["in_flight"]
            engine = {each["name"]: each for each in router.ask("GET", "/engines")}[name]
            if engine["in_flight"] != left:
                say(f"{engine['in_flight']} sequences still run on {name}")


@engines.command()
@flags_as_records
def remove(name: Name, router: RunningRouter) -> None:
    """Remove an engine from the fleet at once; its running sequences finish, and its process continues."""
    gone = router.ask("DELETE", _path(name))
    with understood():
        say(f"{name} removed; {gone['in_flight']} sequences still run on it")


@engines.command("role")
@flags_as_records
def set_role(
    name: Name,
    role: Annotated[Role, typer.Argument(help="New role of the engine.")],
    router: RunningRouter,
) -> None:
    """Change the role of an engine."""
    changed = router.ask("PUT", f"{_path(name)}/role", {"role": role})
    with understood():
        say(engine_in_words(changed))


@engines.command("roles")
@flags_as_records
def explain_roles(router: RunningRouter, as_json: Json = False) -> None:
    """Show the objectives, the share of requests that met them, and the reasons for roles (`--roles auto`)."""
    show_answer(router.ask("GET", "/roles"), as_json, roles_in_words)


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
