"""Roles that follow the load: a policy decides at regular intervals, and its decisions are executed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import msgspec

from tercet.aio import repeat
from tercet.decisions.roles import RoleFlip, RoleLook, RolePolicy
from tercet.fleet import EngineFleet
from tercet.fleet.observed_roles import PrefillLine, observed_engines
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


@dataclass(frozen=True)
class MadeFlip:
    """A change of roles; ``at`` is a time of the fleet's clock, ``time`` a Unix time, both in seconds."""

    at: float
    time: float
    flip: RoleFlip


class FleetRoles:
    """The observations and role changes of one process; ``flip`` executes a change and returns True if it was made.

    ``lines`` returns the prefills of all processes that share the fleet, by engine; None for this process only.
    ``flips`` are the last changes, oldest first.
    """

    def __init__(
        self,
        fleet: EngineFleet,
        objectives: Objectives,
        flip: Callable[[RoleFlip], Awaitable[bool]],
        lines: Callable[[], Mapping[str, PrefillLine]] | None = None,
    ) -> None:
        self._fleet = fleet
        self._flip = flip
        self._lines = lines
        self._policy = RolePolicy(objectives)
        self.last: RoleLook | None = None
        self.flips: deque[MadeFlip] = deque(maxlen=REMEMBERED)
        self.engines_changed = 0
        fleet.costs.watch()
        fleet.knowledge.needed()

    async def run(self) -> None:
        """Make a decision (:meth:`look`) at each interval, until cancelled."""
        await repeat(self.look, INTERVAL_S)

    async def look(self) -> None:
        """Observe the fleet once, and execute the policy's decision."""
        now = self._fleet.costs.clock()
        found = self._policy.look(now, observed_engines(self._fleet, self._lines() if self._lines else None))
        self.last = found
        if found.flip is not None and await self._flip(found.flip):
            self.flips.append(MadeFlip(now, time.time(), found.flip))
            self.engines_changed += len(found.flip.engines)
