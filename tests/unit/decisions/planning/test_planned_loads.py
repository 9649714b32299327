"""What a planner serves for an engine-hour of loads that change, against fixed fleets."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from tercet.decisions.planning import FleetPlan, PlanLimits

from .planned_world import PlannedWorld, Traffic

LIMITS = PlanLimits(2, 12)
SECONDS = 5400.0


def day(at: float) -> Traffic:
    """A third of the mean at night, five thirds at noon, three times in the run."""
    return Traffic(rate=8 * (1 - 2 / 3 * math.cos(6 * math.pi * at / SECONDS)))


def tenants(at: float) -> Traffic:
    """Another tenant comes for the middle of the run, with long prompts."""
    busy = SECONDS / 3 < at < 2 * SECONDS / 3
    return Traffic(rate=9, prompt=2500, output=150) if busy else Traffic(rate=4, prompt=400, output=150)


@pytest.mark.parametrize(("load", "changes", "gain"), [(day, 36, 1.15), (tenants, 8, 1.2)])
@pytest.mark.slow
def test_more_is_served_for_an_engine_hour_than_by_any_fixed_fleet_that_meets_the_objectives(
    load: Callable[[float], Traffic], changes: int, gain: float
) -> None:
    world = PlannedWorld(FleetPlan(3, 3), LIMITS)
    world.run(SECONDS, load)
    assert world.share > 0.97
    unchanged = [
        world.fixed(FleetPlan(prefill, total - prefill)) for total in range(2, 13) for prefill in range(1, total)
    ]
    meeting = [per_hour for share, per_hour in unchanged if share >= 0.98]
    assert meeting
    assert world.per_engine_hour > gain * max(meeting)
    assert len(world.changes) <= changes
