"""What fleets are worth where none meets the objectives, and what a planner does then."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.decisions.planning import (
    EngineDemand,
    Expected,
    FleetPlan,
    Observed,
    ObservedEngine,
    ObservedRequest,
    PlanLimits,
    demand_of,
)
from tercet_planner.forecast import Forecast
from tercet_planner.planner import Planner, neighbours, worth_simulating, worths

from .planned_world import OBJECTIVES, Engine, PlannedWorld, Traffic

SHARES = {2: 0.1, 3: 0.53, 4: 0.78, 5: 0.85, 6: 0.88, 7: 0.90, 8: 0.92}
"""Of a trace with prompts that no engine computes within the objective."""


def limited(plan: FleetPlan, forecast: Forecast) -> Expected:
    share = SHARES[plan.engines] - 0.1 * abs(plan.decode - 1)
    return Expected(max(0.0, share), 9.0, forecast.rate)


@pytest.mark.parametrize("start", [FleetPlan(1, 1), FleetPlan(4, 2), FleetPlan(7, 1)])
def test_where_none_meets_them_the_fleet_is_neither_the_largest_nor_the_smallest(start: FleetPlan) -> None:
    world = PlannedWorld(start, PlanLimits(2, 8), Planner(limited, Engine()))
    world.run(900, Traffic(rate=9, prompt=1500, output=50))
    assert world.plan == FleetPlan(3, 1)
    assert len(world.changes) <= 3
    assert [when for when, _ in world.changes if when > 400] == []


def test_a_load_that_just_cannot_be_met_costs_no_engines() -> None:
    """One percent more than the largest fleet can do is no reason to fall to the one that is cheapest per request."""

    def almost(plan: FleetPlan, forecast: Forecast) -> Expected:
        return Expected({4: 0.6, 5: 0.72, 6: 0.85, 7: 0.92, 8: 0.985}.get(plan.engines, 0.2), 1.2, forecast.rate)

    world = PlannedWorld(FleetPlan(6, 2), PlanLimits(2, 8), Planner(almost, Engine()))
    world.run(900, Traffic(rate=12, prompt=2000, output=100))
    assert world.plan.engines >= 6


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6), st.floats(0.01, 1)), min_size=1, max_size=8))
def test_more_engines_for_the_same_share_are_worth_less(given_: list[tuple[int, int, float]]) -> None:
    simulated = [(FleetPlan(prefill, decode), Expected(share, 1.0, 1.0)) for prefill, decode, share in given_]
    (plan, got), *_ = simulated
    values = worths([*simulated, (FleetPlan(plan.prefill + 1, plan.decode), got)])
    assert values[-1] < values[0]


@given(st.floats(0, 12), st.floats(0, 12), st.integers(1, 7), st.integers(1, 7))
def test_what_is_simulated_is_allowed_new_and_not_much(prefill: float, decode: float, p: int, d: int) -> None:
    now, limits = FleetPlan(p, d), PlanLimits(2, 14)
    found = worth_simulating(now, EngineDemand(prefill, decode), limits)
    assert len(found) == len(set(found)) <= 7
    assert found
    assert now not in found
    assert all(limits.allow(each) for each in found)


def test_a_fleet_that_the_estimate_does_not_think_of_is_found() -> None:
    """Decodes need one engine, where the estimate says two or three: each step goes by simulations alone."""
    estimated = demand_of([ObservedRequest(0.0, 1000, 150, True)], 6, Engine(), OBJECTIVES)
    assert estimated.decode > 2
    world = PlannedWorld(FleetPlan(3, 4), PlanLimits(2, 8), Planner(limited, Engine()))
    world.run(600, Traffic(rate=6, prompt=1000, output=150))
    assert world.plan == FleetPlan(3, 1)


@given(st.integers(1, 30), st.integers(1, 30))
def test_neighbours_differ_by_a_step_and_both_ways(p: int, d: int) -> None:
    plan, limits = FleetPlan(p, d), PlanLimits(2, 64)
    for each in neighbours(plan, limits):
        assert limits.allow(each)
        assert 0 < abs(each.prefill - p) + abs(each.decode - d) <= 2 * max(1, plan.engines // 8)
        assert max(plan.engines, each.engines) >= 16 or plan in neighbours(each, limits)


def test_where_none_meets_them_queues_alone_change_nothing() -> None:
    world = PlannedWorld(FleetPlan(3, 1), PlanLimits(2, 8), Planner(limited, Engine()))
    world.run(120, Traffic(rate=9, prompt=1500, output=50))
    pressed = [
        Observed(
            120 + step / 2, 0.0, FleetPlan(3, 1), (), (*(queued(f"p{each}", step) for each in range(3)), DECODES),
            OBJECTIVES, PlanLimits(2, 8),
        )
        for step in range(60)
    ]  # fmt: skip
    assert [world.planner.guard(each) for each in pressed] == [None] * 60
    fresh = Planner(limited, Engine())
    assert any(fresh.guard(each) is not None for each in pressed)


DECODES = ObservedEngine("d0", "decode", running=20, contexts=20_000, step_s=0.01)


def queued(name: str, step: int) -> ObservedEngine:
    return ObservedEngine(name, "prefill", waiting_s=2.0 + step, busy_s=0.5 * step)
