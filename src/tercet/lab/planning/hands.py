"""What carries out a planner's plans: changes of roles alone, or engines that start and stop as by `tercet scale`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

from tercet.cluster.detached_fleets import running_fleets
from tercet.cluster.scaling.control import scale_fleet, scaling_of
from tercet.cluster.scaling.kubernetes import KubernetesFleet
from tercet.cluster.scaling.records import ScaleCall
from tercet.decisions.planning import FleetPlan
from tercet.decisions.planning.acting import FleetChange
from tercet.protocol import BadRequest, Role, TercetError

DRAIN_S = 60.0
"""Seconds in which an engine that is given up is emptied: no other change is made meanwhile."""
AT_ONCE = 16
"""Changes of roles that are asked for at once."""

Ask = Callable[[str, str, Any], Awaitable[Any]]
"""Method, path and body to the router's answer."""


@dataclass(frozen=True)
class HandsState:
    """What has become of the last change: its ``number``, whether it is under way, and why it failed if it did."""

    number: int = 0
    under_way: bool = False
    failure: str = ""


class PlannerHands(Protocol):
    """Makes a fleet what a plan says; ``resizes`` says whether it can start and stop engines."""

    resizes: bool

    async def state(self) -> HandsState:
        """Of the last change; a planner waits while it is under way."""
        ...

    async def change(self, plan: FleetPlan, change: FleetChange) -> None:
        """Begin it: ``change`` gives ``plan``. Raises :class:`~tercet.protocol.TercetError`."""
        ...


class RoleHands:
    """Changes roles by the router; implements :class:`PlannerHands`."""

    resizes = False

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def state(self) -> HandsState:
        """Roles change at once."""
        return HandsState()

    async def change(self, plan: FleetPlan, change: FleetChange) -> None:
        """One request for each engine, several at once; all are tried, and the first error is raised."""
        if change.starts or change.stops:
            raise BadRequest(f"act: {plan} needs engines that start or stop; plan with --act scale", "act")
        turns = asyncio.Semaphore(AT_ONCE)

        async def flip(name: str, role: Role) -> None:
            async with turns:
                await self._ask("PUT", f"/engines/{quote(name, safe='')}/role", {"role": role})

        found = await asyncio.gather(*(flip(*each) for each in change.flips), return_exceptions=True)
        failed = next((each for each in found if each is not None), None)
        if failed is not None:
            raise failed


class ScaleHands:
    """Has the owner of a fleet of ``tercet up``, here or on Ray, scale it; implements :class:`PlannerHands`."""

    resizes = True

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    async def state(self) -> HandsState:
        """As the owner says."""
        record = await scaling_of(self._socket)
        return HandsState(record.number, record.state == "under_way", record.why)

    async def change(self, plan: FleetPlan, change: FleetChange) -> None:
        """It chooses the engines itself: roles change first, then engines start, and only then others are emptied."""
        await scale_fleet(self._socket, ScaleCall(prefill=plan.prefill, decode=plan.decode, drain_seconds=DRAIN_S))


class KubernetesHands:
    """Sets how many pods there are of each role; implements :class:`PlannerHands`."""

    resizes = True

    def __init__(self, fleet: KubernetesFleet) -> None:
        self._fleet = fleet
        self._number = 0
        self._task: asyncio.Task[object] | None = None

    async def state(self) -> HandsState:
        """Under way until all pods are ready and those that leave are gone."""
        task = self._task
        if task is None or not task.done():
            return HandsState(self._number, task is not None)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, TercetError):
            raise error
        return HandsState(self._number, failure="" if error is None else error.message)

    async def change(self, plan: FleetPlan, change: FleetChange) -> None:
        """A role that is changed is one pod more and one fewer."""
        self._number += 1
        call = ScaleCall(prefill=plan.prefill, decode=plan.decode)
        self._task = asyncio.create_task(self._fleet.scale(call, lambda _: None), name="scaling of pods")


def fleet_of_router(url: str) -> Path:
    """The socket of the process of ``tercet up`` whose router has that URL's port.

    Raises :class:`~tercet.protocol.BadRequest` if none runs on this machine.
    """
    port = urlsplit(url).port
    for fleet in running_fleets():
        if fleet.control and fleet.port == port:
            return Path(fleet.control)
    raise BadRequest(
        f"act: no fleet of `tercet up` with the router {url} runs on this machine; start the planner there, or name "
        "--planner-namespace for engines that are pods", "act",
    )  # fmt: skip
