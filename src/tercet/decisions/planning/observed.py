"""What a planning policy sees, and what it answers."""

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
    """Numbers of engines by role; engines of the role ``both`` are left as they are."""

    prefill: int
    decode: int

    @property
    def engines(self) -> int:
        """All of them: each costs the same."""
        return self.prefill + self.decode

    def __str__(self) -> str:
        return f"{self.prefill}P{self.decode}D"


@dataclass(frozen=True)
class PlanLimits:
    """Bounds of the number of engines. Raises :class:`~tercet.protocol.BadRequest` if they contradict one another."""

    fewest: int
    most: int

    def __post_init__(self) -> None:
        if self.fewest < 2:
            raise BadRequest(f"planner-min-engines: is {self.fewest}, and must be at least 2: one of each role",
                             "planner-min-engines")  # fmt: skip
        if self.most < self.fewest:
            raise BadRequest(f"planner-max-engines: is {self.most}, less than planner-min-engines, {self.fewest}",
                             "planner-max-engines")  # fmt: skip

    def allow(self, plan: FleetPlan) -> bool:
        """Whether a plan has at least one engine of each role, and no more or fewer engines than allowed."""
        return plan.prefill >= 1 and plan.decode >= 1 and self.fewest <= plan.engines <= self.most


@dataclass(frozen=True)
class Expected:
    """What a plan would give: share of the requests that meet the objectives, and 99th percentile of TTFT in seconds.

    ``rate`` is the load, in requests per second, that it was simulated for; ``requests`` were measured.
    """

    attainment: float
    ttft_p99: float
    rate: float
    requests: int = 1000

    @property
    def chance(self) -> float:
        """Standard deviation of the attainment by chance, at least that where one request of a hundred is late."""
        late = min(0.5, max(0.01, 1 - self.attainment))
        return math.sqrt(late * (1 - late) / max(1, self.requests))


@dataclass(frozen=True)
class Observed:
    """A fleet at the time ``now``, in seconds of the observer's clock, which watches since ``since``.

    ``plan`` has the engines that serve or start; ``starting`` of them do not serve yet. ``arrivals`` are those of the
    last minutes, in order. ``came`` is the share of the requests ended since the last look that met the objectives,
    None without any.
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
    """The fleet that a policy wants from now on, in one sentence why, and what it expects of it if it knows."""

    plan: FleetPlan
    reason: str
    expected: Expected | None = None
    considered: tuple[tuple[FleetPlan, Expected], ...] = field(default=())


Policy: TypeAlias = Callable[[Observed], WantedPlan]
"""A function from what was observed to what is wanted; how it decides is free."""
