"""Roles that follow the load: a policy decides at regular intervals, and its decisions are executed.

In a fleet with several router processes one process decides, and all can show its decisions.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tercet.aio.files import FileThread, write_whole
from tercet.aio.tasks import Failures, keep_running, repeat
from tercet.decisions.planning import FleetPlan, Observed, PlanLimits
from tercet.decisions.roles import WINDOW_S, RoleController, RoleEffects, RoleFlip
from tercet.fleet import EngineFleet
from tercet.fleet.policy_views import PrefillLine, SeenRequests, observed_engines
from tercet.protocol import EngineError, TercetError
from tercet.router.state.followers import read_record
from tercet.router.state.state_store import name_of_this_process
from tercet.settings import RescheduleSettings
from tercet.settings.fleet_settings import Objectives

if TYPE_CHECKING:  # a simulation, too, imports this module, and needs no store of states with its Kubernetes client
    from tercet.router.state.fleet_state import FleetState
    from tercet.router.state.shared_state import SharedState

INTERVAL_S = 0.5
REMEMBERED = 32
FOLLOWS = "prefill_to_decode"


def with_roles_followed(settings: RescheduleSettings) -> RescheduleSettings:
    """Return the settings with the policy that moves sequences off engines whose role is now prefill."""
    if FOLLOWS in settings.policies:
        return settings
    return msgspec.structs.replace(settings, policies=(FOLLOWS, *settings.policies))


def seen_for_roles(fleet: EngineFleet, objectives: Objectives) -> SeenRequests:
    """Return a record of requests for :class:`FleetRoles`; add it to the observers of the service's sequences."""
    return SeenRequests(WINDOW_S, objectives, fleet.costs.clock, named=False)


@dataclass(frozen=True)
class MadeFlip:
    """A change of roles; ``at`` is a time of the fleet's clock, ``time`` a Unix time, both in seconds."""

    at: float
    time: float
    flip: RoleFlip


class FleetRoles:
    """The observations and role changes of one process; ``flip`` executes a change and returns True if it was made.

    ``seen`` records the requests of this process (:func:`seen_for_roles`). Of several processes that share the fleet,
    ``lines`` returns the prefills of all by engine, and ``processes`` their number; None for this process only.
    ``flips`` are the last changes, oldest first.
    """

    def __init__(
        self,
        fleet: EngineFleet,
        objectives: Objectives,
        flip: Callable[[RoleFlip], Awaitable[bool]],
        seen: SeenRequests,
        lines: Callable[[], Mapping[str, PrefillLine]] | None = None,
        processes: Callable[[], int] | None = None,
    ) -> None:
        self._fleet = fleet
        self._objectives = objectives
        self._flip = flip
        self._seen = seen
        self._lines, self._processes = lines, processes
        self._controller = RoleController(objectives, prefill_s=lambda tokens: fleet.costs.model.prefill(tokens))
        self.last: RoleEffects | None = None
        self.flips: deque[MadeFlip] = deque(maxlen=REMEMBERED)
        self.engines_changed = 0
        # Pressures are computed from what engines report and from the work that picks have put on them; both begin only
        # when someone needs them.
        fleet.costs.watch()
        fleet.knowledge.start_reports()

    async def run(self) -> None:
        """Make a decision (:meth:`look`) at each interval, until cancelled."""
        await repeat(self.look, INTERVAL_S, "roles")

    async def look(self) -> None:
        """Observe the fleet once, and execute the controller's effects. Roles change; the number of engines stays."""
        fleet, now = self._fleet, self._fleet.costs.clock()
        engines = observed_engines(fleet, self._lines() if self._lines else None)
        able = [each.role for each in engines if each.able]
        plan = FleetPlan(able.count("prefill"), able.count("decode"))
        self.last = effects = self._controller.on_tick(
            Observed(
                now=now,
                since=self._seen.since,
                plan=plan,
                arrivals=self._seen.arrivals(now),
                engines=tuple(engines),
                objectives=self._objectives,
                limits=PlanLimits(max(2, plan.engines), max(2, plan.engines)),
                seen=1 / self._processes() if self._processes else 1.0,
                kv_tokens=min(
                    (each.kv_tokens for each in fleet.members if each.kv_tokens and not each.is_store), default=0
                ),
            )
        )
        if effects.flip is not None and await self._flip(effects.flip):
            self.flips.append(MadeFlip(now, time.time(), effects.flip))
            self.engines_changed += len(effects.flip.engines)


logger = logging.getLogger("tercet.router")


class FlipShown(msgspec.Struct, frozen=True):
    """A change of roles at the Unix time ``at``."""

    at: float
    engines: tuple[str, ...]
    role: str
    reason: str


class RoleDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The last decision of the deciding process, at the Unix time ``at``; ``flips`` are the last changes of roles.

    Pressures are None while they are not known; at 1 the objective is at its limit.
    """

    pid: int
    at: float
    why: str
    prefill_pressure: float | None = None
    decode_pressure: float | None = None
    demand: dict[str, float] = {}
    flips: tuple[FlipShown, ...] = ()


class RoleKeeper:
    """The decisions about roles in this process, while no other process that shares the state decides.

    A lock makes one process the decider; it is released when that process dies, or some seconds later. The next decider
    writes its name into the state, so that a late decision of the previous one is refused. It begins without history,
    so its decisions use only its own observations. Decisions are written to a file next to ``path``.
    """

    def __init__(self, shared: SharedState, path: Path, objectives: Objectives) -> None:
        self._shared = shared
        self._said = Path(f"{path}.roles.json")
        self._mine = shared.turn("roles")
        self._name = name_of_this_process()
        self._objectives = objectives
        self._seen = seen_for_roles(shared.service.fleet, objectives)
        shared.service.observers.append(self._seen)
        self._files = FileThread()
        self._failures = Failures("the decision about roles")

    async def run(self) -> None:
        """Wait for the lock, then decide while this process holds it, until cancelled."""
        try:
            await keep_running(self._decide, "roles")
        finally:
            self._shared.service.observers.remove(self._seen)
            self._files.close(self._give_back)

    async def _decide(self) -> None:
        while True:
            await self._turn()
            roles = FleetRoles(
                self._shared.service.fleet, self._objectives, self._flip, self._seen,
                self._shared.reports.lines, self._shared.reports.processes,
            )  # fmt: skip
            while await self._has_turn():
                await self._look(roles)
                await asyncio.sleep(INTERVAL_S)

    async def _turn(self) -> None:
        """Wait until this process holds the lock and the state names it as the decider."""
        while True:
            # First the lock, then the name in the state: only a decider whose name is there may change roles, so one
            # that was suspended while another took the lock is refused.
            if await self._has_turn():
                try:
                    await self._shared.change(lambda state: state.with_role_keeper(self._name))
                    return
                except TercetError as error:
                    self._failures.log(error)
            await asyncio.sleep(INTERVAL_S)

    async def _has_turn(self) -> bool:
        """True if this process holds the lock; False also if that is not known, since errors may end."""
        try:
            return await self._files.run(self._mine.take)
        except OSError as error:
            reason = error.strerror or "the file system does not answer"
            self._failures.log(EngineError(f"{self._mine.name}: {reason}"))
        except TercetError as error:
            self._failures.log(error)
        return False

    def _give_back(self) -> None:
        try:
            self._mine.release()
        except TercetError as error:  # the lock then ends by its timeout
            logger.warning("roles: %s: %s", self._mine.name, error)

    async def _look(self, roles: FleetRoles) -> None:
        """Make one decision and write it; log a refused change or a failed write, so that later ones follow."""
        # An error ends this decision only: the next look sees the fleet as it is then.
        before = roles.engines_changed
        try:
            await roles.look()
            await self._files.run(self._say, roles)
            self._failures.works()
        except (TercetError, OSError) as error:
            self._failures.log(error)
        found, metrics = roles.last, self._shared.service.metrics
        if found is not None and found.pressures is not None:
            metrics.pressures(*found.pressures)
        if found is not None and found.flip is not None and roles.engines_changed > before:
            metrics.flips.labels(found.flip.role).inc(roles.engines_changed - before)

    async def decision(self) -> RoleDecision | None:
        """Return the last decision of the deciding process; None before the first, and if the files do not answer."""
        with suppress(TimeoutError):
            return await self._files.run(lambda: read_record(self._said, RoleDecision))
        return None

    async def _flip(self, flip: RoleFlip) -> bool:
        """Change the roles of several engines at once in the shared state; return True if the change was made."""
        made = False

        def change(state: FleetState) -> FleetState:
            nonlocal made
            after = state.require_role_keeper(self._name).with_flip(flip.engines, flip.role)
            made = after is not state
            return after

        await self._shared.change(change, f"roles: auto: {flip.reason}")
        return made

    def _say(self, roles: FleetRoles) -> None:
        found = roles.last
        if found is None:
            return
        pressures = found.pressures
        said = RoleDecision(
            pid=os.getpid(),
            at=time.time(),
            why=found.why,
            prefill_pressure=None if pressures is None else pressures.prefill,
            decode_pressure=None if pressures is None else pressures.decode,
            demand=msgspec.to_builtins(found.demand) if found.demand is not None else {},
            flips=tuple(
                FlipShown(each.time, each.flip.engines, each.flip.role, each.flip.reason) for each in roles.flips
            ),
        )
        write_whole(self._said, msgspec.json.encode(said))
