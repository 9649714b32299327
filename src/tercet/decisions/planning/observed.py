"""Input and output of a planning policy: the observed fleet and its traffic, and the wanted fleet."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from tercet.decisions.planning.arrivals import ObservedRequest
from tercet.decisions.roles import ObservedEngine
from tercet.protocol import BadRequest
from tercet.settings.role_settings import Objectives


@dataclass(frozen=True, order=True)
class FleetPlan:
    """A number of engines for each role; engines of the role ``both`` stay as they are."""

    prefill: int
    decode: int

    @property
    def engines(self) -> int:
        """Number of engines of both roles: each costs the same."""
        return self.prefill + self.decode

    def __str__(self) -> str:
        return f"{self.prefill}P{self.decode}D"


@dataclass(frozen=True)
class PlanLimits:
    """Bounds of the number of engines. Raises :class:`~tercet.protocol.BadRequest` if they contradict each other."""

    fewest: int
    most: int

    def __post_init__(self) -> None:
        if self.fewest < 2:
            raise BadRequest(f"planner-min-engines: is {self.fewest}; give at least 2, one for each role",
                             "planner-min-engines")  # fmt: skip
        if self.most < self.fewest:
            raise BadRequest(f"planner-max-engines: is {self.most}; give at least planner-min-engines, {self.fewest}",
                             "planner-max-engines")  # fmt: skip

    def allow(self, plan: FleetPlan) -> bool:
        """True if a plan has at least one engine of each role, and its number of engines is within the bounds."""
        return plan.prefill >= 1 and plan.decode >= 1 and self.fewest <= plan.engines <= self.most


@dataclass(frozen=True)
class Expected:
    """The expected result of a plan: share of the requests within the objectives, and 99th percentile of TTFT in s.

    ``rate`` is the simulated load in requests per second; ``requests`` is the number of requests that were measured.
    """

    attainment: float
    ttft_p99: float
    rate: float
    requests: int = 1000

    @property
    def chance(self) -> float:
        """Standard deviation of the attainment by chance; at least its value if one request of a hundred is late."""
        late = min(0.5, max(0.01, 1 - self.attainment))
        return math.sqrt(late * (1 - late) / max(1, self.requests))


@dataclass(frozen=True)
class Observed:
    """A fleet at the time ``now``, in seconds of the observer's clock; the observer watches since ``since``.

    ``plan`` counts the engines that serve or start; ``starting`` of them do not serve yet. ``arrivals`` are the
    requests of the last minutes, in order. ``came`` is the share of the requests within the objectives, of those that
    ended since the last look; None if no request ended.
    """

    now: float
    since: float
    plan: FleetPlan
    arrivals: tuple[ObservedRequest, ...]
    engines: tuple[ObservedEngine, ...]
    objectives: Objectives
    limits: PlanLimits
    starting: int = 0
    came: float | None = None


@dataclass(frozen=True)
class WantedPlan:
    """The fleet that a policy wants from now on, the reason in one sentence, and the expected result (None: unknown).

    ``considered`` are the other fleets that were simulated, with their results.
    """

    plan: FleetPlan
    reason: str
    expected: Expected | None = None
    considered: tuple[tuple[FleetPlan, Expected], ...] = field(default=())


Policy: TypeAlias = Callable[[Observed], WantedPlan]
"""A function from the observed fleet to the wanted one; it decides by any method."""
