"""``tercet upgrade``: a new fleet takes over from an old one behind a model router, and back on errors."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from tercet.aio import signals_to
from tercet.cli.detached import detach, stop_detached
from tercet.cli.terminal import announce
from tercet.cluster.detached_fleets import DetachedFleet, detached_fleets
from tercet.cluster.up_config import UpConfig
from tercet.cluster.upgrading import Upgrade
from tercet.decisions.rollout import STEPS, RolloutPlan
from tercet.protocol import BadRequest
from tercet.settings import Source, decode_settings, read_yaml, require_url
from tercet.settings.variables import ADMIN_KEY_VARIABLE


def upgrade(
    old: Annotated[str, typer.Option("--from", metavar="URL", help="The router whose fleet is replaced.")],
    to: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A router that serves already.", show_default="the fleet of --config"),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Settings of `tercet up` for a new fleet, which is started here."),
    ] = None,
    model_router: Annotated[
        str, typer.Option(metavar="URL", help="The model router before both.")
    ] = "http://127.0.0.1:8000",
    steps: Annotated[
        str, typer.Option(metavar="PERCENT,...", help="Shares of the requests that the new fleet gets, in order.")
    ] = ",".join(f"{step:.0%}".rstrip("%") for step in STEPS),
    hold: Annotated[float, typer.Option(min=0, max=86_400, help="Seconds for which each share is watched.")] = 30.0,
    tolerance: Annotated[
        float,
        typer.Option(min=0, max=1, help="Failed share above that of the old fleet, from which on it is returned to."),
    ] = 0.01,
    drain_timeout: Annotated[
        float, typer.Option(min=0, max=86_400, help="Seconds in which a fleet that leaves is emptied, at most.")
    ] = 300.0,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the old fleet running, without requests.")] = False,
    admin_key: Annotated[
        str, typer.Option(envvar=ADMIN_KEY_VARIABLE, help="The model router's admin key.", show_default=False)
    ] = "",
) -> None:
    """Replace a model, its version or its flags without a failed request: start, shift, watch, empty the old fleet.

    The new fleet may have another model and another tokenizer: nothing moves between the two. If it fails requests that
    the old one does not, the old one has all requests again. So it is after Ctrl-C, until the new one has all of them.

    Examples:
    - `tercet upgrade --from http://127.0.0.1:8001 --config new-up.yaml`
    - `tercet upgrade --from http://127.0.0.1:8001 --to http://10.0.0.8:8000 --steps 1,10,50,100 --hold 300`
    """
    if (to is None) == (config is None):
        raise BadRequest("--to: give either this or --config", "--to")
    for name, url in (("--from", old), ("--to", to), ("--model-router", model_router)):
        if url is not None:
            require_url(url, name)
    plan = RolloutPlan(_shares(steps), hold, tolerance)
    started = None if config is None else _started(config)
    new = started.url if started is not None else to or ""
    changed = Upgrade(model_router, admin_key, old, new, plan, drain_timeout, lambda line: announce(f"  {line}"))
    try:
        asyncio.run(_run(changed))
    except BaseException:
        if started is not None and changed.rollout.state != "shifted":
            stop_detached(started)
        raise
    announce(f"{new} has replaced {old}")
    replaced = next((each for each in detached_fleets() if each.url.rstrip("/") == old.rstrip("/")), None)
    if replaced is not None and not keep:
        stop_detached(replaced)


def _shares(given: str) -> list[float]:
    try:
        return [float(each) / 100 for each in given.split(",")]
    except ValueError:
        raise BadRequest(f"--steps: {given!r} are not percentages such as 5,25,50,100", "--steps") from None


def _started(file: Path) -> DetachedFleet:
    """A new fleet in the background, at any free port unless its file names one."""
    told = read_yaml(file)
    return detach(decode_settings(UpConfig, told, Source({"port": 0})))


async def _run(changed: Upgrade) -> None:
    """Exits with 130 or 143 when told to stop; the old fleet has all requests again, unless the new one had them."""
    task = asyncio.ensure_future(changed.run())

    def stop() -> None:
        announce("stopping; the old fleet gets all requests" if changed.rollout.state == "shifting" else "stopping")
        task.cancel()

    with signals_to(stop, lambda: None) as asked:
        try:
            await task
        except asyncio.CancelledError:
            sys.exit(128 + asked[0] if asked else 1)
