"""A live fleet for a planner: its view from ``GET /tercet/v1/traffic``, and the executors of plans.

The view is combined from the answers of a router's processes. Executors change roles only, or also start and stop
engines as ``tercet scale`` does.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

import msgspec

from tercet.cluster.detached_fleets import running_fleets
from tercet.cluster.scaling.decide import ScaleCall
from tercet.cluster.scaling.kubernetes import KubernetesFleet
from tercet.cluster.scaling.scaler import scale_fleet, scaling_of
from tercet.decisions.planning import FleetPlan, Observed, ObservedEngine, ObservedRequest, PlanLimits
from tercet.decisions.roles import WINDOW_S
from tercet.protocol import BadRequest, EngineUnreachable, Role, TercetError
from tercet.protocol.wire import UNREADABLE
from tercet.settings.fleet_settings import Objectives
from tercet_lab.planning.planner import FleetChange
from tercet_lab.sim.step_times import StepModel

LOOK_S = 1.0
"""Seconds between two looks of the guard."""
ENOUGH_FOR_GUARD = 400
"""Number of arrivals that are enough for the guard: their deviation by chance is small."""
FEWEST_STEPS = 8
"""Step times that engines must have reported before they correct the profile."""
MOST_STEPS = 200


class TrafficEngine(msgspec.Struct, frozen=True):
    """One engine in the answer; :class:`~tercet.decisions.roles.ObservedEngine` describes the fields."""

    name: str
    role: Any
    able: bool
    waiting_s: float
    busy_s: float
    running: int
    queued: int
    contexts: int
    step_s: float | None
    kv_usage: float
    draining: bool

    def observed(self) -> ObservedEngine:
        """Return the engine as policies see it."""
        fields = msgspec.structs.asdict(self)
        del fields["draining"]
        return ObservedEngine(**fields)


class ReportedObjectives(msgspec.Struct, frozen=True):
    """The router's objectives (times in seconds), and the numbers of requests that ended and that met them."""

    ttft: float | None
    tpot: float | None
    share: float
    requests: int
    met: int


class TrafficReport(msgspec.Struct, frozen=True):
    """The answer of one process of a router to ``GET /tercet/v1/traffic``; its times are of that process's clock."""

    pid: int
    processes: int
    now: float
    since: float
    objectives: ReportedObjectives
    program: str | None
    args: dict[str, str]
    arrivals: list[tuple[float, int, int, bool, tuple[int, ...], int, bool | None]]
    engines: list[TrafficEngine]


def read_traffic(answer: Any) -> TrafficReport:
    """Return a router's answer as a report; raise :class:`~tercet.protocol.EngineUnreachable` for another shape."""
    try:
        return msgspec.convert(answer, TrafficReport)
    except UNREADABLE as error:
        raise EngineUnreachable(f"no router of this version answers there: {error}", "url") from error


class TrafficView:
    """The reports of a router's processes, combined; times are by the clock of the process that answered last.

    Processes of one machine share a clock. The process that accepts the connection answers: until each has answered
    once, the requests of the processes that have answered represent those of the others.
    """

    def __init__(self) -> None:
        self._reports: dict[int, TrafficReport] = {}
        self._compared: tuple[int, int] | None = None
        self._ratios: list[float] = []

    def heard(self, report: TrafficReport) -> None:
        """Store the report of one process in place of its earlier one; drop the oldest if there are too many."""
        self._reports.pop(report.pid, None)
        self._reports[report.pid] = report
        while len(self._reports) > max(1, report.processes):
            del self._reports[next(iter(self._reports))]

    @property
    def newest(self) -> TrafficReport:
        """The last report; there must be at least one."""
        return self._reports[next(reversed(self._reports))]

    def observed(self, limits: PlanLimits | None = None, to_plan: bool = True) -> Observed:
        """Return the fleet as policies see it; without ``limits``, the number of engines is fixed.

        Without ``to_plan``, the view is for the guard: ``arrivals`` are those of the last ``WINDOW_S`` seconds, and
        ``came`` is None.
        """
        report = self.newest
        engines = tuple(each.observed() for each in report.engines if not each.draining)
        plan = FleetPlan(
            sum(each.role == "prefill" for each in engines), sum(each.role == "decode" for each in engines)
        )
        wanted = report.objectives
        return Observed(
            now=report.now,
            since=max(each.since for each in self._reports.values()),
            plan=plan,
            arrivals=self._arrivals(math.inf if to_plan else WINDOW_S),
            engines=engines,
            objectives=Objectives(ttft=wanted.ttft, tpot=wanted.tpot, share=wanted.share),
            limits=limits or PlanLimits(max(2, plan.engines), max(2, plan.engines)),
            came=self._came() if to_plan else None,
        )

    def _arrivals(self, newest_s: float) -> tuple[ObservedRequest, ...]:
        now = self.newest.now
        found = sorted((ObservedRequest(*each) for report in self._reports.values() for each in report.arrivals
                        if now - each[0] <= newest_s), key=lambda each: each.at)  # fmt: skip
        silent = self.newest.processes - len(self._reports)
        if silent <= 0 or not found:
            return tuple(found)
        # The other processes are assumed to have similar requests: each request is repeated to represent them.
        copies = self.newest.processes / len(self._reports)
        return tuple(each for index, each in enumerate(found)
                     for _ in range(int((index + 1) * copies) - int(index * copies)))  # fmt: skip

    def _came(self) -> float | None:
        now = self.newest.objectives
        before, self._compared = self._compared, (now.requests, now.met)
        ended = 0 if before is None else now.requests - before[0]
        return (now.met - before[1]) / ended if before is not None and ended > 0 else None

    def decode_scale(self, steps: StepModel) -> float:
        """Return the factor by which measured decode steps take longer than in the profile; 1 with too few of them."""
        for each in self.newest.engines:
            if each.running and each.step_s and not each.waiting_s:
                predicted = steps.step(0, 0.0, each.running, each.contexts)
                self._ratios.append(each.step_s / predicted)
        del self._ratios[:-MOST_STEPS]
        return median(self._ratios) if len(self._ratios) >= FEWEST_STEPS else 1.0


def guarded_s(report: TrafficReport) -> float:
    """Return the seconds of arrivals to ask for at the guard's next look: fewer if many came, since it looks often."""
    came = sum(report.now - each[0] <= LOOK_S for each in report.arrivals)
    return min(WINDOW_S, max(LOOK_S, LOOK_S * ENOUGH_FOR_GUARD / max(1, came)))


def rounded(scale: float) -> float:
    """Return ``scale`` rounded to 0.05, and at least 0.05, so that simulations of one load do not differ by noise."""
    return max(0.05, round(scale * 20) / 20)


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
