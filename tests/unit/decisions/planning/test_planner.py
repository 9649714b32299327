"""What a planner does with load that is steady, grows, falls, changes its mix or stops; and what it learns."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from tercet.decisions.planning import MOST_DECODES, Expected, FleetPlan, LearnedCapacity, PlanLimits, demand_of
from tercet.protocol import BadRequest, EngineError
from tercet_planner.forecast import Forecast
from tercet_planner.planner import Planner
from tests.long_runs import FULL

from .planned_world import OBJECTIVES, Engine, PlannedWorld, Traffic, evaluated

SIX = PlanLimits(6, 6)
TWO_TO_TWELVE = PlanLimits(2, 12)
STARTS = [FleetPlan(1, 1), FleetPlan(3, 3), FleetPlan(6, 6), FleetPlan(9, 3)]


@pytest.mark.parametrize("seed", range(7) if FULL else [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("start", STARTS)
def test_a_steady_load_is_left_alone_after_five_minutes(start: FleetPlan, seed: int) -> None:
    world = PlannedWorld(start, TWO_TO_TWELVE, seed=seed)
    world.run(1800, Traffic(rate=8))
    assert [when for when, _ in world.changes if when > 300] == []
    assert world.plan.engines < 12
    assert world.answers[-1].expected is not None
    assert world.answers[-1].expected.attainment == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(7) if FULL else (0, 4))
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("load", [Traffic(6, 2500, 60), Traffic(5, 300, 300), Traffic(20), Traffic(2)])
def test_other_steady_loads_are_left_alone_too(load: Traffic, start: FleetPlan, seed: int) -> None:
    world = PlannedWorld(start, TWO_TO_TWELVE, seed=seed)
    world.run(1800, load)
    assert [when for when, _ in world.changes if when > 300] == []
    assert world.share > 0.95


def test_roles_follow_a_change_of_the_mix_by_one_flip() -> None:
    world = PlannedWorld(FleetPlan(4, 2), SIX)
    world.run(300, Traffic(rate=4.5, prompt=3800, output=80))
    before = len(world.changes)
    world.run(300, Traffic(rate=4.5, prompt=200, output=400))
    assert world.plan.decode > world.plan.prefill
    assert world.plan.engines == 6
    assert before <= 1
    assert 1 <= len(world.changes) - before <= 2


def bears_almost_all(plan: FleetPlan, forecast: Forecast) -> Expected:
    share = demand_of(forecast.sample, forecast.rate, Engine(), OBJECTIVES).share(plan)
    return Expected(1.0 if share <= 0.99 else 0.5, 0.1, forecast.rate)


def test_a_split_that_is_at_its_limit_is_left_for_one_that_is_not_and_once() -> None:
    """Prefills keep 93% of three engines busy: that does while chance is kind, and costs nothing to mend."""
    world = PlannedWorld(FleetPlan(3, 3), SIX, Planner(bears_almost_all, Engine()))
    world.run(900, Traffic(rate=14, prompt=1000, output=20))
    assert world.plan == FleetPlan(5, 1)
    assert len(world.changes) == 1
    assert world.changes[0][0] <= 30


def test_a_first_plan_waits_for_answers_and_then_for_no_interval() -> None:
    planner = Planner(evaluated, Engine())
    world = PlannedWorld(FleetPlan(3, 3), SIX, planner)
    assert planner.pause_s(15.0) < 15.0
    world.run(15, Traffic(rate=8))
    assert planner.forecast is not None
    assert planner.pause_s(15.0) == 15.0


def test_engines_come_and_go_with_the_load() -> None:
    world = PlannedWorld(FleetPlan(2, 2), TWO_TO_TWELVE)
    world.run(300, Traffic(rate=4))
    few = world.plan.engines
    world.run(300, Traffic(rate=20))
    many = world.plan.engines
    world.run(600, Traffic(rate=4))
    assert many > few
    assert world.plan.engines <= few + 1


def test_fewer_engines_are_taken_only_after_they_were_simulated() -> None:
    simulated = list[tuple[FleetPlan, float]]()

    def noted(plan: FleetPlan, forecast: Forecast) -> Expected:
        simulated.append((plan, forecast.rate))
        return evaluated(plan, forecast)

    world = PlannedWorld(FleetPlan(5, 5), TWO_TO_TWELVE, Planner(noted, Engine()))
    world.run(300, Traffic(rate=4))
    assert world.changes
    for _, wanted in world.changes:
        assert wanted.plan in {plan for plan, _ in simulated}
        assert wanted.expected is not None
        assert wanted.expected.rate > 4


def test_no_engine_is_given_up_while_the_first_minutes_are_seen() -> None:
    """A day that begins low: what was seen of it says nothing about its peak."""
    world = PlannedWorld(FleetPlan(4, 4), TWO_TO_TWELVE)
    world.run(170, Traffic(rate=2))
    assert not [wanted for _, wanted in world.changes if wanted.plan.engines < 8]
    world.run(200, Traffic(rate=2))
    assert world.plan.engines < 8


def test_a_role_that_is_no_bottleneck_gets_no_engines() -> None:
    world = PlannedWorld(FleetPlan(2, 2), PlanLimits(2, 20))
    world.run(120, Traffic(rate=6, prompt=200, output=600))
    assert world.plan.decode > 2
    assert world.plan.prefill <= 2


def test_without_traffic_the_fewest_engines_stay_and_nothing_is_divided_by_it() -> None:
    world = PlannedWorld(FleetPlan(4, 4), TWO_TO_TWELVE)
    world.run(300, Traffic(rate=0), came=None)
    assert world.plan == FleetPlan(1, 1)
    assert len(world.changes) == 1
    world.run(60, Traffic(rate=1))
    assert world.plan.engines >= 2


def test_a_cold_start_decides_nothing() -> None:
    world = PlannedWorld(FleetPlan(3, 3), TWO_TO_TWELVE)
    world.run(15, lambda at: Traffic(rate=30 if at > 14 else 0.0001))
    assert world.changes == []


def test_a_simulator_that_fails_holds_the_fleet_and_says_so() -> None:
    def broken(plan: FleetPlan, forecast: Forecast) -> Expected:
        raise EngineError("the profile does not fit")

    world = PlannedWorld(FleetPlan(3, 3), TWO_TO_TWELVE, Planner(broken, Engine()))
    world.run(120, Traffic(rate=50))
    assert world.changes == []
    assert "the profile does not fit" in world.answers[-1].reason


def test_what_came_is_compared_with_what_was_expected_and_widens_the_margin() -> None:
    world = PlannedWorld(FleetPlan(4, 4), PlanLimits(8, 8))
    world.run(120, Traffic(rate=4), came=0.5)
    verdict = world.planner.verdicts[-2]
    assert verdict.came == 0.5
    assert verdict.expected is not None
    assert verdict.expected.attainment == 1.0
    widened = world.planner.margin
    assert widened > 0.1
    world.run(1200, Traffic(rate=4), came=1.0)
    assert world.planner.margin < widened


def test_limits_that_contradict_are_refused() -> None:
    with pytest.raises(BadRequest, match="planner-min-engines"):
        PlanLimits(1, 4)
    with pytest.raises(BadRequest, match="planner-max-engines"):
        PlanLimits(4, 3)


# The capacity of an engine by a router's own fits.


def capacity(kv_tokens: int = 0) -> LearnedCapacity:
    return LearnedCapacity(
        lambda tokens: tokens * 2e-5, lambda n, contexts: 5e-3 + 4e-5 * n + 5e-8 * contexts, kv_tokens
    )


@pytest.mark.parametrize(("context", "tpot", "most"), [(1000.0, 0.0142, 102), (0.0, 0.0091, 102), (1000.0, 0.001, 1)])
def test_as_many_decode_as_a_step_allows(context: float, tpot: float, most: int) -> None:
    assert capacity().decodes(context, tpot) == most


def test_no_more_decode_than_the_cache_holds() -> None:
    assert capacity(kv_tokens=20_000).decodes(1000.0, 0.0142) == 20
    assert capacity(kv_tokens=500).decodes(1000.0, 0.0142) == 1
    assert capacity().decodes(1.0, 100.0) == MOST_DECODES


def test_prompts_cost_what_was_learned() -> None:
    assert capacity().prefill_s(3000) == pytest.approx(0.06)


# What a planner serves for an engine-hour of loads that change, against fixed fleets.

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
