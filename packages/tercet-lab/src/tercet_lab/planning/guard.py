"""The guard that acts between two plans, when queues grow: it changes roles, and adds engines if that does not help."""

from __future__ import annotations

import math

from tercet.decisions.planning.candidates import EngineCapacity, overload_split
from tercet.decisions.planning.observed import FleetPlan, Observed, WantedPlan
from tercet.decisions.roles import BUSY_FULL, RoleLook, RolePolicy
from tercet.settings.role_settings import Objectives

LASTING_S = 3.0
"""Seconds for which the fleet must be under pressure before engines are added: changes of roles come first."""
REST_S = 10.0
"""Seconds after engines were added in which no more are added."""
WORK_OFF_S = 15.0
"""Seconds in which added engines should empty the line that has formed."""


class QueueGuard:
    """A guard that acts on queue waits and step times, as ``--roles auto`` does, and adds engines if roles do not help.

    If far more prompts come than the engines compute, it does not wait for the pressure to last: ``engine`` and the
    arrivals of the last :data:`~tercet.decisions.roles.WINDOW_S` seconds tell which split bears them.
    """

    def __init__(self, objectives: Objectives, engine: EngineCapacity) -> None:
        self._roles = RolePolicy(objectives)
        self._engine = engine
        self._pressed_since: float | None = None
        self._added_at = -math.inf

    def look(self, observed: Observed) -> WantedPlan | None:
        """Return the fleet to change to now; None if nothing must be done."""
        serving = [each for each in observed.engines if each.able]
        found = self._roles.look(observed.now, serving)
        split = overload_split(observed, found.demand, self._engine) if found.demand is not None else None
        if split is not None and found.demand is not None:
            self._pressed_since = None
            return WantedPlan(
                split,
                f"guard: the prefills of the last {found.demand.over_s:.1f} s need {found.demand.prefill:.1f} engines, "
                f"and {observed.plan.prefill} prefill",
            )
        if found.flip is not None:
            sign = 1 if found.flip.role == "prefill" else -1
            count = sign * len(found.flip.engines)
            plan = FleetPlan(observed.plan.prefill + count, observed.plan.decode - count)
            self._pressed_since = None
            return WantedPlan(plan, f"guard: {found.flip.reason}")
        return self._more(observed, found)

    def _more(self, observed: Observed, found: RoleLook) -> WantedPlan | None:
        pressed = found.pressures is not None and found.pressures.worse >= 1
        if not pressed or found.pressures is None or found.demand is None:
            self._pressed_since = None
            return None
        if self._pressed_since is None:
            self._pressed_since = observed.now
        lasted, room = observed.now - self._pressed_since, observed.limits.most - observed.plan.engines
        rests = observed.now - self._added_at < REST_S or observed.starting > 0
        if lasted < LASTING_S or rests or room <= 0:
            return None
        plan = observed.plan
        if found.pressures.prefill >= found.pressures.decode:
            needed = math.ceil(found.demand.prefill / BUSY_FULL + found.demand.waiting_s / WORK_OFF_S) - plan.prefill
            more = FleetPlan(plan.prefill + min(room, max(1, needed)), plan.decode)
        else:
            needed = math.ceil(plan.decode * (found.pressures.decode - 1))
            more = FleetPlan(plan.prefill, plan.decode + min(room, max(1, needed)))
        self._added_at, self._pressed_since = observed.now, None
        return WantedPlan(
            more,
            f"guard: prefill at {found.pressures.prefill:.0%}, decode at {found.pressures.decode:.0%} of the limit for "
            f"{lasted:.1f} s, and {found.why}",
        )
