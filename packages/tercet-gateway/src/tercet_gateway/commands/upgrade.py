"""``tercet upgrade``: replace a fleet behind a model router by a new one, and return to the old one on errors."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tercet.aio.tasks import signals_to
from tercet.cli.detached import detach, stop_detached
from tercet.cli.setting_flags import flags_as_records
from tercet.cli.terminal import announce
from tercet.cli.which_fleet import is_at, the_one, url_of
from tercet.cluster.detached_fleets import detached_fleets, running_fleets
from tercet.cluster.up_config import UpConfig
from tercet.protocol import BadRequest
from tercet.settings import Source, decode_settings, read_yaml, require_url
from tercet.settings.process_settings import ADMIN_KEY_VARIABLE, URL_VARIABLE
from tercet_gateway.upgrading import STEPS, RolloutPlan, Upgrade, require_listed

DEFAULT_STEPS = ",".join(f"{step:.0%}".rstrip("%") for step in STEPS)


@dataclass(frozen=True)
class UpgradeFlags:
    """The two fleets of an upgrade, how requests are shifted between them, and how long the old one is drained."""

    old: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="URL|PORT",
            envvar=URL_VARIABLE,
            help="Router whose fleet is replaced: its URL, or its port on this machine.",
            show_default="the only other fleet that runs here",
        ),
    ] = None
    to: Annotated[
        str | None,
        typer.Option(
            metavar="URL|PORT",
            help="Running router with the new fleet: its URL, or its port on this machine.",
            show_default="the fleet of --config",
        ),
    ] = None
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Settings file of `tercet up` for a new fleet, which is started on this machine."
        ),
    ] = None
    model_router: Annotated[str, typer.Option(metavar="URL", help="URL of the model router before both fleets.")] = (
        "http://127.0.0.1:8000"
    )
    steps: Annotated[
        str,
        typer.Option(metavar="PERCENT,...", help="Shares of the requests that the new fleet gets, in order (percent)."),
    ] = DEFAULT_STEPS
    hold: Annotated[float, typer.Option(min=0, max=86_400, help="Time for which each share is watched (seconds).")] = (
        30.0
    )
    tolerance: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Highest share of failed requests above the old fleet's; above it the old fleet gets all requests.",
        ),
    ] = 0.01
    drain_timeout: Annotated[
        float, typer.Option(min=0, max=86_400, help="Longest time to drain a fleet that leaves (seconds).")
    ] = 300.0
    keep: Annotated[bool, typer.Option("--keep", help="Keep the old fleet running, without requests.")] = False
    admin_key: Annotated[
        str, typer.Option(envvar=ADMIN_KEY_VARIABLE, help="Admin key of the model router.", show_default=False)
    ] = ""

    def both_urls(self) -> tuple[str, str | None]:
        """Return the URLs of the old fleet and, if it runs already, of the new one.

        Raises :class:`~tercet.protocol.BadRequest` for flags that exclude one another, and for an invalid URL.
        """
        if (self.to is None) == (self.config is None):
            raise BadRequest("--to: give either --to or --config", "--to")
        old = None if self.old is None else url_of(self.old, "--from")
        new = None if self.to is None else url_of(self.to, "--to")
        require_url(self.model_router, "--model-router")
        if old is None:
            found = [fleet for fleet in running_fleets() if new is None or not is_at(fleet, new)]
            if not found:
                raise BadRequest("--from: needs the router whose fleet is replaced; no other fleet runs here", "--from")
            old = the_one(found, "--from").url
        return old, new

    def plan(self) -> RolloutPlan:
        """Return the shares of requests and how they are watched; raise :class:`~tercet.protocol.BadRequest`."""
        try:
            shares = [float(each) / 100 for each in self.steps.split(",")]
        except ValueError:
            said = f"--steps: must be percentages such as 5,25,50,100, is {self.steps!r}"
            raise BadRequest(said, "--steps") from None
        return RolloutPlan(shares, self.hold, self.tolerance)


@flags_as_records
def upgrade(given: UpgradeFlags) -> None:
    """Replace a model, its version or its flags without a failed request: start, shift, watch, drain the old fleet.

    The new fleet may have another model and another tokenizer: no KV moves between the two. If more requests fail on
    the new fleet than on the old one, the old fleet gets all requests again. The same happens after Ctrl-C, until the
    new fleet has all requests.

    Examples:
    - `tercet upgrade --from http://127.0.0.1:8001 --config new-up.yaml`
    - `tercet upgrade --from http://127.0.0.1:8001 --to http://10.0.0.8:8000 --steps 1,10,50,100 --hold 300`
    """
    old, new = given.both_urls()
    plan = given.plan()
    started = None
    if given.config is not None:
        asyncio.run(require_listed(given.model_router, given.admin_key, old))
        # At any free port unless the file names one.
        started = detach(decode_settings(UpConfig, read_yaml(given.config), Source({"port": 0})))
    new = started.url if started is not None else new or ""
    changed = Upgrade(
        given.model_router, given.admin_key, old, new, plan, given.drain_timeout,
        lambda line: announce(f"  {line}"),
    )  # fmt: skip
    try:
        asyncio.run(_run(changed))
    except BaseException:
        if started is not None and changed.rollout.state != "shifted":
            stop_detached(started)
        raise
    announce(f"{new} has replaced {old}")
    if not given.keep:
        for fleet in detached_fleets():
            if fleet.url.rstrip("/") == old.rstrip("/"):
                stop_detached(fleet)
                break


async def _run(changed: Upgrade) -> None:
    """Run the upgrade. After a signal the old fleet gets all requests unless the new one has them; exit 130 or 143."""
    task = asyncio.ensure_future(changed.run())

    def stop() -> None:
        announce("stopping; the old fleet gets all requests" if changed.rollout.state == "shifting" else "stopping")
        task.cancel()

    with signals_to(stop, lambda: None) as asked:
        try:
            await task
        except asyncio.CancelledError:
            sys.exit(128 + asked[0] if asked else 1)
