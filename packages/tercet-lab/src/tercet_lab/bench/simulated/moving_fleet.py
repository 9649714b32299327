"""The router's service in a simulation, with moves and a rescheduler in virtual time, and the results of moves."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Annotated, Any

import msgspec
import numpy as np

from tercet.decisions.sessions import Pause
from tercet.fleet import Trace
from tercet.router.serve.moves import MoveRecord
from tercet.router.serve.rescheduler import OwnSequences, Rescheduler
from tercet.router.serve.service import Service
from tercet.router.serve.sessions import MoveEnd, PinEnd, Ran, Sessions
from tercet.router.state.roles import with_roles_followed
from tercet.settings import MoveSettings, RescheduleSettings, Settings
from tercet.settings.declaration import Setting
from tercet.settings.role_settings import OBJECTIVES, Objectives, RolesBy, require_objectives
from tercet.settings.session_settings import SessionSettings
from tercet_lab.bench.simulated.request_classes import weights_of
from tercet_lab.bench.simulated.virtual_roles import VirtualRoles
from tercet_lab.planning.planner_settings import NO_PLANNER, PlannedBy, PlannerSettings, require_planner
from tercet_lab.sim import SimEngine

# Seconds between two checks for stuck engines, as in a router.
WATCH_SECONDS = 0.5
_UNCOUNTED = nullcontext()


class MovingSettings(Settings, frozen=True):
    """The settings of ``tercet router`` for moves, sessions, objectives and roles, and of ``tercet planner``."""

    moves: MoveSettings = MoveSettings()
    reschedule: RescheduleSettings = RescheduleSettings()
    objectives: Objectives = Objectives()
    sessions: SessionSettings = SessionSettings()
    roles: RolesBy = "fixed"
    planner: PlannedBy = NO_PLANNER
    planning: PlannerSettings = PlannerSettings()
    class_traffic: Annotated[
        Mapping[str, str],
        Setting(
            "Frequency of a class among simulated requests: NAME=WEIGHT; `default` is requests without a class. "
            "Repeatable",
            panel=OBJECTIVES,
        ),
    ] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        weights_of(self.class_traffic, self.objectives)
        require_objectives(self.roles, self.objectives)
        require_planner(self.planner, self.roles, self.objectives)


class MoveTotals(msgspec.Struct, frozen=True, kw_only=True):
    """The totals of a run's moves. ``outcomes`` counts them by reason and outcome, such as ``neutral_load moved``.

    ``pause_p50`` and ``pause_p99`` are the seconds between the source's last token and the next token; None if no
    sequence with a token was moved. ``bytes`` is the amount of KV sent, ``recomputed`` the number of positions computed
    again. ``held_back`` counts proposals that limits did not allow in a round; the next round may repeat them.
    """

    outcomes: dict[str, int] = {}
    pause_p50: float | None = None
    pause_p99: float | None = None
    bytes: int = 0
    recomputed: int = 0
    held_back: int = 0

    @property
    def moved(self) -> int:
        """Number of successful moves."""
        return sum(count for name, count in self.outcomes.items() if name.endswith(" moved"))

    def flat(self) -> dict[str, float]:
        """Return the values by name, for a report. Pauses are in milliseconds."""
        found: dict[str, float] = {f"moves_{name.replace(' ', '_')}": count for name, count in self.outcomes.items()}
        found |= {"moved_bytes": self.bytes, "moves_recomputed": self.recomputed, "moves_held_back": self.held_back}
        for name, pause in (("p50", self.pause_p50), ("p99", self.pause_p99)):
            if pause is not None:
                found[f"{name}_move_pause_ms"] = pause * 1e3
        return found


class SessionCounts:
    """The counters of sessions: turns by place, moves of contexts by outcome, and pins by outcome."""

    def __init__(self) -> None:
        self.counts = Counter[str]()

    def sizes(self, sessions: int, kept: int) -> None: ...

    def turn(self, ran: Ran) -> None:
        self.counts[f"session_turns_{ran}"] += 1

    def paused(self, waited_for: Pause, seconds: float) -> None:
        self.counts[f"session_pauses_{waited_for}"] += 1

    def moved(self, end: MoveEnd, sent: int) -> None:
        self.counts[f"session_moves_{end}"] += 1
        self.counts["session_moved_bytes"] += sent

    def unpinned(self, end: PinEnd) -> None:
        self.counts[f"session_pins_{end}"] += 1


class MoveCounts:
    """The counters of moves and sessions. The traces of sequences contain the other metrics of a service."""

    def __init__(self) -> None:
        self.sessions = SessionCounts()
        self._outcomes = Counter[str]()
        self._pauses: list[float] = []
        self._bytes = self._recomputed = self._held_back = 0

    def sequence(self) -> AbstractContextManager[object]:
        return _UNCOUNTED

    def finished(self, trace: Trace) -> None: ...

    def objectives(self, of_class: str, met: bool) -> None: ...

    def retried(self, code: str, answered: bool) -> None: ...

    def fell_back(self, program: str, code: str) -> None: ...

    def program_failed(self, program: str) -> None: ...

    def uses(self, version: int) -> None: ...

    def returned(self, program: str, to_version: int) -> None: ...

    def move(self) -> AbstractContextManager[object]:
        return _UNCOUNTED

    def moved(self, move: MoveRecord) -> None:
        self._outcomes[f"{move.reason} {move.outcome}"] += 1
        self._bytes += move.bytes
        self._recomputed += move.recomputed
        if move.pause is not None:
            self._pauses.append(move.pause)

    def held_back(self, moves: int) -> None:
        self._held_back += moves

    def totals(self) -> MoveTotals:
        """Return the totals so far."""
        p50, p99 = (float(value) for value in np.percentile(self._pauses, (50, 99))) if self._pauses else (None, None)
        return MoveTotals(
            outcomes=dict(sorted(self._outcomes.items())),
            pause_p50=p50,
            pause_p99=p99,
            bytes=self._bytes,
            recomputed=self._recomputed,
            held_back=self._held_back,
        )


class MovingFleet:
    """The background work of a router: a rescheduler of the service's sequences, and a check for stuck engines.

    The rescheduler runs if policies, sessions or faults need it. The check runs only with faults (``has_faults``),
    since engines are never stuck otherwise.
    """

    def __init__(
        self,
        service: Service[MoveCounts],
        engines: Mapping[str, SimEngine],
        settings: MovingSettings,
        has_faults: bool,
    ) -> None:
        self._fleet = fleet = service.fleet
        self._engines = engines
        self._interval = settings.reschedule.interval_s
        self._work: list[Coroutine[Any, Any, None]] = []
        by_itself = settings.roles == "auto"
        change = by_itself or settings.planner != NO_PLANNER
        policies = with_roles_followed(settings.reschedule) if change else settings.reschedule
        rescheduler = Rescheduler(fleet, OwnSequences(fleet, service.sequences, service.moves), policies)
        self.roles = VirtualRoles(service, engines, settings.objectives) if by_itself else None
        if self.roles is not None:
            self._work.append(self.roles.run())
        if settings.sessions.on:
            service.sessions = sessions = Sessions(fleet, settings.sessions, service.metrics.sessions, "session")
            self._work.append(sessions.run())
        if policies.policies or has_faults or settings.sessions.on:
            fleet.knowledge.needed()
            self._work += [self._report(), rescheduler.run()]
        if has_faults:
            self._work.append(self._watch())

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Run the background work while the context is open. Raise its error."""
        async with alongside(*self._work):
            yield

    async def _report(self) -> None:
        """Report the loads of engines that compute: they report nothing themselves during a run of steps."""
        loads = self._fleet.knowledge.loads
        while True:
            for name, engine in self._engines.items():
                if engine.computes:
                    loads.report(name, engine.load())
            await asyncio.sleep(self._interval)

    async def _watch(self) -> None:
        """Detect stuck engines and their recovery, as :mod:`tercet.fleet.membership` does."""
        fleet = self._fleet
        while True:
            for member in fleet.members:
                engine = self._engines[member.name]
                if not engine.down:
                    fleet.health.heard(member.name, engine.load().stalled_s)
                member.reachable = not (engine.down or fleet.liveness.is_stuck(member.name))
            fleet.health.stand_still(WATCH_SECONDS)
            await asyncio.sleep(WATCH_SECONDS)


@asynccontextmanager
async def alongside(*work: Coroutine[Any, Any, None]) -> AsyncGenerator[None]:
    """Run coroutines while the context is open, then cancel them. Raise the error of one that failed."""
    tasks = [asyncio.get_running_loop().create_task(each) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()
