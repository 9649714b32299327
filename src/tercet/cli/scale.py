"""``tercet scale``: show and change the number of engines of a running fleet."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from tercet.cli.setting_flags import flags_as_records, refuse, require_defaults
from tercet.cli.terminal import announce, say
from tercet.cli.which_fleet import WhichFleet, but_at, the_one
from tercet.cluster.scaling.decide import DRAIN_SECONDS, SELECTOR, EngineStep, ScaleCall, ScaleRecord, parse_counts
from tercet.protocol import EngineError

if TYPE_CHECKING:
    from tercet.cluster.scaling.kubernetes import KubernetesFleet

POLL_SECONDS = 0.25
START_SECONDS = 3600.0
KUBECONFIG_VARIABLE = "KUBECONFIG"


@dataclass(frozen=True)
class KubernetesFlags:
    """The engines of a Kubernetes namespace, which are scaled with ``kubernetes``."""

    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="Scale the engines of a Kubernetes namespace instead.")
    ] = False
    namespace: Annotated[
        str,
        typer.Option(
            help="Kubernetes namespace; needs --kubernetes.", show_default="that of the kubeconfig or the pod"
        ),
    ] = ""
    selector: Annotated[
        str, typer.Option(help="Label selector of the engines' workloads, such as Deployments; needs --kubernetes.")
    ] = SELECTOR
    kubeconfig: Annotated[
        Path | None,
        typer.Option(
            envvar=KUBECONFIG_VARIABLE,
            help="Kubeconfig file; needs --kubernetes.",
            show_default="the pod's service account",
        ),
    ] = None

    def require_consistent(self) -> None:
        """Raise :class:`~tercet.protocol.BadRequest` for flags that need ``--kubernetes``, if it is not given."""
        if not self.kubernetes:
            # The variable is for kubectl too, so it says nothing about this command.
            by_variable = str(self.kubeconfig) == os.environ.get(KUBECONFIG_VARIABLE)
            require_defaults(self, "--kubernetes", "namespace", "selector", *(() if by_variable else ("kubeconfig",)))

    def fleet(self) -> KubernetesFleet:
        """Return the namespace's fleet; raise :class:`~tercet.protocol.BadRequest` without access to Kubernetes."""
        from tercet.cluster.scaling.kubernetes import KubernetesFleet
        from tercet.fleet.kubernetes_api import from_kubeconfig, in_cluster

        file = self.kubeconfig
        access = in_cluster() if file is None else from_kubeconfig(file.expanduser())
        return KubernetesFleet(access, self.namespace, self.selector)


@flags_as_records
def scale(
    counts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ROLE=NUMBER]...",
            help="Number of engines of a role: prefill, decode or both. Other roles keep their number.",
            show_default=False,
        ),
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option(min=0, max=86_400, help="Longest time to drain an engine that leaves (seconds).")
    ] = DRAIN_SECONDS,
    *,
    which: WhichFleet,
    pods: KubernetesFlags,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Return at once; scaling continues in the background.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON; see docs/howto/scale.md.")] = False,
) -> None:
    """Grow or shrink a fleet of `tercet up` while it serves; without numbers, show its progress.

    First engines change their roles, then new engines start, and after these serve, other engines are drained and
    stopped. The fleet's process does the work: Ctrl-C ends only this command.

    Examples:
    - `tercet scale prefill=3 decode=5`
    - `tercet scale`
    - `tercet scale decode=8 --kubernetes --namespace llm`
    """
    given = parse_counts(counts or ())
    pods.require_consistent()
    drains = drain_timeout != DRAIN_SECONDS
    if not given:
        refuse({"--drain-timeout": drains, "--no-wait": no_wait}, "needs ROLE=NUMBER")
    if pods.kubernetes:
        here = {"--port": which.port is not None, "--url": which.is_given, "--drain-timeout": drains, "--json": as_json}
        refuse(here, "cannot be combined with --kubernetes")
        fleet = pods.fleet()
        if given:
            scaled = fleet.scale(ScaleCall(**given), lambda line: announce(f"  {line}"), not no_wait)
            say(f"{asyncio.run(scaled)} ready")
        else:
            for each in asyncio.run(fleet.workloads()):
                say(str(each))
        return
    call = ScaleCall(**given, drain_seconds=drain_timeout) if given else None
    from tercet.cluster.detached_fleets import running_fleets

    fleets = [fleet for fleet in running_fleets() if fleet.control]
    found = which.among(fleets)
    if not found:
        raise EngineError(f"no fleet of `tercet up` runs here{which.in_words()}{but_at(fleets)}")
    socket = Path(the_one(found).control)
    # After the errors, which these imports would only delay: they load asyncio's HTTP client.
    from tercet.cluster.scaling.scaler import scale_fleet, scaling_of

    if call is None:
        _show(asyncio.run(scaling_of(socket)), as_json)
        return
    record = asyncio.run(scale_fleet(socket, call))
    if not no_wait:
        record = _followed(socket, record, drain_timeout, quiet=as_json)
    _show(record, as_json)
    if record.state == "failed":
        raise EngineError(f"scaling failed: the fleet has {record.present}, wanted {record.wanted}: {record.why}")


def _followed(socket: Path, record: ScaleRecord, drain_timeout: float, quiet: bool) -> ScaleRecord:
    """Print each step until scaling ends, and return the last record; Ctrl-C ends only this wait."""
    from tercet.cluster.scaling.scaler import scaling_of

    said, before = set[str](), dict[str, EngineStep]()
    deadline = time.monotonic() + START_SECONDS + drain_timeout
    try:
        while True:
            for line in _steps(before, record):
                if not quiet and line not in said:
                    announce(f"  {line}")
                    said.add(line)
            before = {each.name: each for each in record.engines}
            if record.state != "under_way":
                return record
            if time.monotonic() > deadline:
                raise EngineError(f"the fleet has not reached {record.wanted} yet; `tercet scale` shows its progress")
            time.sleep(POLL_SECONDS)
            after = asyncio.run(scaling_of(socket))
            # The fleet has one scaling at a time: ours has ended, and what is seen now is another command's.
            if after.number != record.number:
                raise EngineError(f"another command scales the fleet now, to {after.wanted}")
            record = after
    except KeyboardInterrupt:
        announce(f"the fleet continues to {record.wanted}; `tercet scale` shows its progress")
        raise


def _steps(before: dict[str, EngineStep], record: ScaleRecord) -> Iterator[str]:
    """Return a line for each engine that has changed since ``before``."""
    here = {each.name: each for each in record.engines}
    for name, each in here.items():
        was = before.get(name)
        if was is None and each.phase == "serving" and not before:
            continue
        if was is None or (was.phase, was.role, was.left) != (each.phase, each.role, each.left):
            yield _in_words(each)
    for name in before.keys() - here.keys():
        yield f"{name}  removed"


def _in_words(each: EngineStep) -> str:
    left = f", {each.left} sequences left" if each.phase == "draining" else ""
    return f"{each.name}  {each.role}  {each.phase}{left}"


def _show(record: ScaleRecord, as_json: bool) -> None:
    if as_json:
        say(msgspec.json.format(msgspec.json.encode(record)).decode())
        return
    if record.state == "under_way":
        say(f"scaling for {record.seconds:.0f} s: {record.present}, wanted {record.wanted}")
        for each in record.engines:
            say(f"  {_in_words(each)}")
    elif record.state == "failed":
        say(f"failed after {record.seconds:.0f} s: {record.present}, wanted {record.wanted}: {record.why}")
    else:
        say(f"{record.present}" + (f", scaled in {record.seconds:.1f} s" if record.number else ""))
