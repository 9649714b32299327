"""The memory of a planner: expected and measured results of its plans, and loads at which a search found nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tercet.decisions.planning.observed import Expected, FleetPlan

SAME_LOAD = 0.95
"""A search that found nothing is not repeated at loads above this share of the load at which it was made."""
LIKE_LOAD = 0.9
"""Two loads are alike if the smaller one is at least this share of the larger: a few hundred requests tell no more."""
TRIED_AGAIN_S = 120.0
"""Seconds after which a search that found nothing is repeated."""


@dataclass(frozen=True)
class Verdict:
    """A plan made ``at`` a time in seconds, with its reason and its results over the interval that follows.

    ``expected`` is what the simulation expects, ``came`` the measured share of the requests within the objectives;
    both are None while they are not known.
    """

    at: float
    plan: FleetPlan
    reason: str
    expected: Expected | None
    came: float | None = None


@dataclass(frozen=True)
class TriedLoad:
    """A load, in requests per second, at which a recent search for a fleet other than ``plan`` found nothing."""

    at: float = -math.inf
    rate: float = 0.0
    plan: FleetPlan | None = None

    def holds(self, now: float, rate: float) -> bool:
        """True if the search is recent and ``rate`` is like that load, or larger."""
        return now - self.at < TRIED_AGAIN_S and rate >= SAME_LOAD * self.rate

    def settles(self, now: float, rate: float, plan: FleetPlan) -> bool:
        """True if the search is recent, ``plan`` is still the plan, and ``rate`` is like that load, and not larger."""
        alike = min(rate, self.rate) >= LIKE_LOAD * max(rate, self.rate)
        return plan == self.plan and now - self.at < TRIED_AGAIN_S and alike
