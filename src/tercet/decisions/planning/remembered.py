"""What a planner remembers: what it expected and what came, and what it tried in vain."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tercet.decisions.planning.observed import Expected, FleetPlan

SAME_LOAD = 0.95
"""Share of a load at which something was tried in vain, above which it is not tried again."""
LIKE_LOAD = 0.9
"""Share of the larger of two loads above which the smaller one is like it: a few hundred requests tell no more."""
TRIED_AGAIN_S = 120.0
"""Seconds after which it is."""


@dataclass(frozen=True)
class Verdict:
    """What was expected ``at`` a time for the interval after it, and what came; None while, or if, it is not known."""

    at: float
    plan: FleetPlan
    reason: str
    expected: Expected | None
    came: float | None = None


@dataclass(frozen=True)
class TriedLoad:
    """A load at which something else than ``plan`` was tried lately in vain."""

    at: float = -math.inf
    rate: float = 0.0
    plan: FleetPlan | None = None

    def holds(self, now: float, rate: float) -> bool:
        """Whether the load is still like that, or larger."""
        return now - self.at < TRIED_AGAIN_S and rate >= SAME_LOAD * self.rate

    def settles(self, now: float, rate: float, plan: FleetPlan) -> bool:
        """Whether that is still the plan, and the load is like that, and not larger."""
        alike = min(rate, self.rate) >= LIKE_LOAD * max(rate, self.rate)
        return plan == self.plan and now - self.at < TRIED_AGAIN_S and alike
