"""Roles that follow the load: a policy decides at regular intervals, and its decisions are executed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from tercet.aio import repeat
from tercet.decisions.planning import FleetPlan, Observed, PlanLimits
from tercet.decisions.planning.candidates import LearnedCapacity, overload_split
from tercet.decisions.roles import WINDOW_S, ObservedEngine, RoleFlip, RoleLook, RolePolicy, idlest
from tercet.fleet import EngineFleet
from tercet.fleet.policy_views import PrefillLine, SeenRequests, observed_engines
from tercet.settings import RescheduleSettings
from tercet.settings.role_settings import Objectives

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
        self._policy = RolePolicy(objectives)
        self.last: RoleLook | None = None
        self.flips: deque[MadeFlip] = deque(maxlen=REMEMBERED)
        self.engines_changed = 0
        fleet.costs.watch()
        fleet.knowledge.needed()

    async def run(self) -> None:
        """Make a decision (:meth:`look`) at each interval, until cancelled."""
        await repeat(self.look, INTERVAL_S, "roles")

    async def look(self) -> None:
        """Observe the fleet once, and execute the policy's decision."""
        now = self._fleet.costs.clock()
        engines = observed_engines(self._fleet, self._lines() if self._lines else None)
        found = self._policy.look(now, engines)
        if found.flip is None:
            found = self._relieved(found, engines)
        self.last = found
        if found.flip is not None and await self._flip(found.flip):
            self.flips.append(MadeFlip(now, time.time(), found.flip))
            self.engines_changed += len(found.flip.engines)

    def _relieved(self, found: RoleLook, engines: Sequence[ObservedEngine]) -> RoleLook:
        """Return the look with a change of roles if prefills overload their engines beyond chance, else the look.

        Such an overload need not last, and the growth of the decodes so far does not count: the demand of decodes
        follows from the arrivals. The times of steps must be known (pressures are None before).
        """
        if found.pressures is None or found.demand is None or not self._policy.may_give_to_prefill(found.at):
            return found
        plan = FleetPlan(found.roles["prefill"], found.roles["decode"])
        observed = Observed(
            now=found.at,
            since=self._seen.since,
            plan=plan,
            arrivals=self._seen.arrivals(found.at),
            engines=tuple(engines),
            objectives=self._objectives,
            limits=PlanLimits(plan.engines, plan.engines),
        )
        seen = 1 / self._processes() if self._processes else 1.0
        split = overload_split(observed, found.demand, self._capacity(), seen)
        if split is None:
            return found
        able = [each for each in engines if each.able and each.role == "decode"]
        reason = (
            f"the prefills of the last {found.demand.over_s:.1f} s need {found.demand.prefill:.1f} engines, and "
            f"{plan.prefill} prefill"
        )
        return self._policy.take(found, RoleFlip(idlest(able, split.prefill - plan.prefill), "prefill", reason))

    def _capacity(self) -> LearnedCapacity:
        """Return the capacity of an engine by what was learned; the smallest known KV cache counts."""
        room = min((each.kv_tokens for each in self._fleet.members if each.kv_tokens), default=0)
        return LearnedCapacity(self._fleet.costs.model.prefill, self._policy.step_s, room)
