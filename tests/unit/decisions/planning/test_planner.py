"""What a planner does with load that is steady, grows, falls, changes its mix or stops; its forecasts; and the smallest
change to a wanted fleet.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.decisions.planning import (
    MOST_DECODES,
    Expected,
    FleetPlan,
    LearnedCapacity,
    Observed,
    ObservedEngine,
    ObservedRequest,
    PlanLimits,
    answers_completed,
    demand_of,
)
from tercet.decisions.roles import RoleController
from tercet.protocol import BadRequest, EngineError
from tercet.settings.fleet_settings import Objectives
from tercet_planner.forecast import Forecast, Forecaster, is_enough
from tercet_planner.planner import Planner, change_to
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


def poisson(
    rate_at: Callable[[float], float], seconds: float, seed: int = 0, prompt: int = 500, output: int = 50
) -> list[ObservedRequest]:
    chance, at, found = random.Random(seed), 0.0, list[ObservedRequest]()
    while True:
        at += chance.expovariate(max(0.01, rate_at(at)))
        if at >= seconds:
            return found
        found.append(ObservedRequest(at, prompt, output, True))


def looked(arrivals: list[ObservedRequest], until: float, ahead: float = 30.0, window: float = 60.0) -> list[Forecast]:
    forecaster, found = Forecaster(), list[Forecast]()
    for step in range(1, int(until / 15) + 1):
        now = step * 15.0
        seen = [each for each in arrivals if now - window < each.at <= now]
        forecast = forecaster.look(now, 0.0, seen, ahead)
        assert forecast is not None
        found.append(forecast)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_the_level_of_a_steady_load(seed: int) -> None:
    found = looked(poisson(lambda _: 20.0, 600, seed), 600)
    assert all(14 < each.rate < 28 for each in found[2:])


def test_a_trend_reaches_ahead() -> None:
    found = looked(poisson(lambda at: 5 + at / 10, 300), 300)
    level = len(found[-1].sample) / 60
    assert "trend +" in found[-1].why
    assert found[-1].rate > 1.05 * level


@pytest.mark.slow
def test_a_season_is_seen_after_two_of_them() -> None:
    period = 600.0
    found = looked(poisson(lambda at: 30 - 25 * math.cos(2 * math.pi * at / period), 2400), 2400, ahead=120.0)
    assert any("season" in each.why for each in found[120:])
    errors = [
        abs(each.rate / (30 - 25 * math.cos(2 * math.pi * ((step + 1) * 15.0 + 60) / period)) - 1)
        for step, each in enumerate(found)
        if step >= 120 and "season" in each.why
    ]
    assert sorted(errors)[len(errors) // 2] < 0.35


def test_a_change_of_the_mix_makes_the_rest_history() -> None:
    before = poisson(lambda _: 45.0, 100, prompt=3000, output=80)
    after = [ObservedRequest(each.at + 100, 200, 1000, True) for each in poisson(lambda _: 45.0, 20, seed=1)]
    forecast = Forecaster().look(120.0, 0.0, [each for each in before + after if each.at > 60], 30.0)
    assert forecast is not None
    assert {each.prompt_tokens for each in forecast.sample} == {200}
    assert forecast.rate == pytest.approx(45, rel=0.3)


@pytest.mark.parametrize("seed", range(4))
def test_a_lull_of_a_few_long_requests_is_no_change(seed: int) -> None:
    """Three requests a second of lengths from a few tokens to tens of thousands, as people's conversations have."""
    chance = random.Random(seed)
    steady = [
        ObservedRequest(each.at, round(chance.lognormvariate(8.5, 1.3)), round(chance.lognormvariate(5.5, 0.8)), True)
        for each in poisson(lambda _: 3.0, 1800, seed)
    ]
    found = looked(steady, 1800, window=180.0)
    assert min(len(each.sample) for each in found[12:]) > 150
    assert all(2.0 < each.rate < 4.5 for each in found[12:])


@pytest.mark.slow
def test_errors_that_chance_explains_teach_little() -> None:
    forecaster, steady = Forecaster(), poisson(lambda _: 3.0, 3600)
    corrections = list[float]()
    for step in range(1, 240):
        now = 15.0 * step
        forecaster.look(now, 0.0, [each for each in steady if now - 180 < each.at <= now], 30.0)
        corrections.append(forecaster.correction)
    assert 0.9 < min(corrections) < max(corrections) < 1.12


def test_too_little_is_no_forecast_and_no_traffic_is_one() -> None:
    assert Forecaster().look(3.0, 0.0, [ObservedRequest(1.0, 10, 10, True)], 30.0) is None
    assert Forecaster().look(3.0, 0.0, [], 30.0) is None
    for over in ([], [ObservedRequest(each / 10, 10, 10, True) for each in range(200)]):
        found = Forecaster().look(80.0, 0.0, over, 30.0)
        assert found is not None
        assert found.rate == 0


def test_answers_that_have_not_ended_are_as_long_as_longer_ones_of_like_prompts() -> None:
    ended = [ObservedRequest(float(at), 200, length, True) for at, length in enumerate([100, 300, 500, 700] * 5)]
    others = [ObservedRequest(30.0, 3000, 10, True) for _ in range(50)]
    running = [
        ObservedRequest(40.0, 210, 400, False),
        ObservedRequest(41.0, 200, 900, False),
        ObservedRequest(42.0, 200, 0, False),
    ]
    first, beyond, new = answers_completed([*ended, *others, *running])[-3:]
    assert first.output_tokens in (500, 700)
    assert beyond.output_tokens == 1800
    assert new.output_tokens in (100, 300, 500, 700)
    assert all(each.ended for each in (first, beyond, new))


@pytest.mark.parametrize(
    ("rate", "ended", "now", "enough"),
    [(60, True, 5.0, True), (10, True, 5.0, False), (60, False, 5.0, False), (0.1, False, 15.0, True)],
)
def test_the_first_seconds_tell_enough_if_many_came_and_their_answers_ended(
    rate: float, ended: bool, now: float, enough: bool
) -> None:
    came = [replace(each, ended=ended or each.at > now / 2) for each in poisson(lambda _: rate, now)]
    assert is_enough(now, 0.0, came) is enough


def engines(prefill: int, decode: int) -> list[ObservedEngine]:
    return [ObservedEngine(f"p{each}", "prefill", waiting_s=each) for each in range(prefill)] + [
        ObservedEngine(f"d{each}", "decode", kv_usage=each / 10) for each in range(decode)
    ]


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
def test_a_change_gives_the_plan_and_nothing_more(prefill: int, decode: int, to_prefill: int, to_decode: int) -> None:
    plan = FleetPlan(to_prefill, to_decode)
    change = change_to(plan, engines(prefill, decode))
    roles = {each.name: each.role for each in engines(prefill, decode)}
    roles |= dict(change.flips)
    kept = [role for name, role in roles.items() if name not in change.stops] + list(change.starts)
    assert (kept.count("prefill"), kept.count("decode")) == (to_prefill, to_decode)
    assert not (change.starts and change.stops)
    assert len(change.flips) <= abs(to_prefill - prefill)
    assert not set(change.stops) & {name for name, _ in change.flips}


def test_idle_engines_change_first() -> None:
    assert change_to(FleetPlan(2, 4), engines(3, 3)).flips == (("p0", "decode"),)
    assert change_to(FleetPlan(3, 2), engines(3, 3)).stops == ("d0",)
    assert not change_to(FleetPlan(3, 3), engines(3, 3))


def test_the_guard_adds_engines_where_no_role_can_give_any() -> None:
    controller, limits = RoleController(Objectives(ttft=1.0, tpot=0.025), Engine()), PlanLimits(2, 8)
    found = None
    for step in range(30):
        busy = [ObservedEngine("p0", "prefill", waiting_s=2.0 * step, busy_s=0.5 * step)]
        decoding = ObservedEngine("d0", "decode", running=200, contexts=200_000, step_s=0.03 + 1e-5 * step)
        observed = Observed(0.5 * step, 0.0, FleetPlan(1, 1), (), (*busy, decoding),
                            Objectives(ttft=1.0, tpot=0.025), limits)  # fmt: skip
        found = found or controller.on_tick(observed).plan
    assert found is not None
    assert found.engines > 2
    assert found.engines <= 8
