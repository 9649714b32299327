"""The executors of a planner's plans: changes of roles only, or engines that start and stop as by `tercet scale`."""

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
from tercet.protocol import BadRequest, Role, TercetError
from tercet_lab.planning.acting import FleetChange

DRAIN_S = 60.0
"""Most seconds to drain an engine that is given up; no other change is made meanwhile."""
AT_ONCE = 16
"""Most changes of roles that are requested at the same time."""

Ask = Callable[[str, str, Any], Awaitable[Any]]
"""A function from method, path and body of a request to the router's answer."""


@dataclass(frozen=True)
class HandsState:
    """The state of the last change: its ``number``, True while it is ``under_way``, and the cause if it failed."""

    number: int = 0
    under_way: bool = False
    failure: str = ""


class PlannerHands(Protocol):
    """An executor that changes a fleet to a plan; ``resizes`` is True if it can start and stop engines."""

    resizes: bool

    async def state(self) -> HandsState:
        """Return the state of the last change; a planner waits while it is under way."""
        ...

    async def change(self, plan: FleetPlan, change: FleetChange) -> None:
        """Begin ``change``, which gives ``plan``. Raises :class:`~tercet.protocol.TercetError` if it cannot begin."""
        ...


class RoleHands:
    """An executor that only changes roles, by the router; implements :class:`PlannerHands`."""

    resizes = False

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def state(self) -> HandsState:
        """Return a state that is never under way: roles change at once."""
        return HandsState()

    async def change(self, plan: FleetPlan, change: FleetChange) -> None:
        """Send a request for each engine, several at a time; try all of them, then raise the first error."""
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
    """An executor that asks the owner of a fleet, ``tercet up`` here or on Ray, to scale it.

    It implements :class:`PlannerHands`.
    """

    resizes = True

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    async def state(self) -> HandsState:
        """Return the state of the last change, as the owner reports it."""
        record = await scaling_of(self._socket)
        return HandsState(record.number, record.state == "under_way", record.why)

    async def change(self, plan: FleetPlan, change: FleetChange) -> None:
        """Ask the owner to scale; it chooses the engines: roles change first, then engines start, then others drain."""
        await scale_fleet(self._socket, ScaleCall(prefill=plan.prefill, decode=plan.decode, drain_seconds=DRAIN_S))


class KubernetesHands:
    """An executor that sets the number of pods of each role; implements :class:`PlannerHands`."""

    resizes = True

    def __init__(self, fleet: KubernetesFleet) -> None:
        self._fleet = fleet
        self._number = 0
        self._task: asyncio.Task[object] | None = None

    async def state(self) -> HandsState:
        """Return the state: under way until all pods are ready and those that leave are gone."""
        task = self._task
        if task is None or not task.done():
            return HandsState(self._number, task is not None)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, TercetError):
            raise error
        return HandsState(self._number, failure="" if error is None else error.message)

    async def change(self, plan: FleetPlan, change: FleetChange) -> None:
        """Start to scale the pods of both roles; a changed role is one pod more and one pod fewer."""
        self._number += 1
        call = ScaleCall(prefill=plan.prefill, decode=plan.decode)
        self._task = asyncio.create_task(self._fleet.scale(call, lambda _: None), name="scaling of pods")


def fleet_of_router(url: str) -> Path:
    """Return the socket of the ``tercet up`` process whose router has the port of ``url``.

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
