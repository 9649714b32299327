"""The first seconds: what comes far faster than it is prefilled needs no time to last, and chance is no evidence."""

from __future__ import annotations

import random
from dataclasses import replace

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
from tercet.decisions.roles import Demand, RoleController, overload_split
from tercet_planner.forecast import Forecast
from tercet_planner.planner import Planner, neighbours, worth_simulating, worths

from .planned_world import OBJECTIVES, Engine, PlannedWorld, Traffic

SIX = PlanLimits(6, 6)
PROMPT_S = 0.2
"""Seconds of a prompt of 1,000 tokens on an :class:`Engine`."""


def engines(plan: FleetPlan, waiting_s: float, busy_s: float, running: int = 0) -> tuple[ObservedEngine, ...]:
    """Each of those that prefill has so much in line."""
    return (
        *(ObservedEngine(f"p{each}", "prefill", True, waiting_s, busy_s) for each in range(plan.prefill)),
        *(
            ObservedEngine(f"d{each}", "decode", running=running, contexts=1000 * running, step_s=0.01)
            for each in range(plan.decode)
        ),
    )


def arrivals(rate: float, now: float, seed: int = 0, ended: bool = True, **given: int) -> tuple[ObservedRequest, ...]:
    """Of five seconds; each answer has as many tokens as are said to have ended."""
    chance, found, at = random.Random(seed), list[ObservedRequest](), max(0.0, now - 5)
    prompt, output = given.get("prompt", 1000), given.get("output", 20)
    while (at := at + chance.expovariate(rate)) < now:
        found.append(ObservedRequest(at, prompt, output, ended))
    return tuple(found)


def observed(plan: FleetPlan, now: float, came: tuple[ObservedRequest, ...], line_s: float, **given: int) -> Observed:
    return Observed(now, 0.0, plan, came, engines(plan, line_s / plan.prefill, now, **given), OBJECTIVES, SIX)


def demand(prefill: float, over_s: float, waiting_s: float = 0.0, decodes: float = 0.0) -> Demand:
    return Demand(prefill, waiting_s, decodes, 1000 * decodes, 0.0, 0.0, 0.0, over_s)


@pytest.mark.parametrize("start", [FleetPlan(1, 5), FleetPlan(2, 4)])
def test_an_overload_of_the_first_second_is_acted_on_at_once(start: FleetPlan) -> None:
    controller, rate, found, now = RoleController(OBJECTIVES, Engine()), 20.0, None, 0.0
    while found is None:
        line = max(0.0, now * (rate * PROMPT_S - start.prefill))
        found = controller.on_tick(observed(start, now, arrivals(rate, now), line)).plan
        now += 0.5
        assert now < 4.0
    assert found.engines == 6
    assert found.prefill in (4, 5)


def test_what_engines_compute_easily_is_none_whoever_comes_together() -> None:
    for seed in range(200):
        came = arrivals(4.0, 5.0, seed)
        work = sum(each.prompt_tokens for each in came) / 5_000
        measured = demand(work / 5, 5.0, waiting_s=1.0)
        assert overload_split(observed(FleetPlan(2, 4), 5.0, came, 1.0), measured, Engine()) is None, seed


def test_while_answers_have_not_ended_nothing_is_known_of_decodes() -> None:
    plan, measured = FleetPlan(1, 5), demand(4.0, 2.0, 6.0)
    known, unknown = (observed(plan, 2.0, arrivals(20.0, 2.0, ended=ended), 6.0) for ended in (True, False))
    assert overload_split(known, measured, Engine()) is not None
    assert overload_split(unknown, measured, Engine()) is None


def test_times_of_the_first_requests_mislead_and_what_is_cached_costs_nothing() -> None:
    """The lesser of what was measured and of what the prompts cost counts."""
    came = arrivals(4.0, 2.0)
    plan = FleetPlan(1, 5)
    assert overload_split(observed(plan, 2.0, came, 10.0), demand(6.0, 2.0, 10.0), Engine()) is None
    many = arrivals(20.0, 2.0)
    assert overload_split(observed(plan, 2.0, many, 0.0), demand(0.5, 2.0), Engine()) is None
    assert overload_split(observed(plan, 2.0, many, 6.0), demand(4.0, 2.0, 6.0), Engine()) is not None


def test_decodes_keep_the_engines_that_they_need() -> None:
    plan, measured = FleetPlan(2, 4), demand(5.0, 2.0, 10.0)
    came = arrivals(25.0, 2.0, output=60)
    found = overload_split(observed(plan, 2.0, came, 10.0), measured, Engine())
    assert found is None  # 25 answers of 60 tokens each second need more than three engines
    short = arrivals(25.0, 2.0, output=5)
    assert overload_split(observed(plan, 2.0, short, 10.0), measured, Engine()) == FleetPlan(5, 1)
    held = demand(5.0, 2.0, 10.0, decodes=35.0)  # long answers from before
    assert overload_split(observed(plan, 2.0, short, 10.0), held, Engine()) is None


def test_of_several_processes_each_sees_a_part_of_what_comes() -> None:
    plan, measured = FleetPlan(1, 5), demand(4.0, 5.0, 10.0)
    whole = arrivals(20.0, 5.0)
    found = overload_split(observed(plan, 5.0, whole, 10.0), measured, Engine())
    part = observed(plan, 5.0, whole[::2], 10.0)
    assert found is not None
    assert overload_split(part, measured, Engine()) is None
    assert overload_split(replace(part, seen=0.5), measured, Engine()) == found


def test_engines_that_start_are_waited_for() -> None:
    came, plan = arrivals(20.0, 2.0), FleetPlan(1, 5)
    starting = Observed(2.0, 0.0, plan, came, engines(plan, 6.0, 2.0), OBJECTIVES, SIX, starting=1)
    assert overload_split(starting, demand(4.0, 2.0, 6.0), Engine()) is None


# What fleets are worth where none meets the objectives, and what a planner does then.

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
