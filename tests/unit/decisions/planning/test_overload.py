"""The first seconds: what comes far faster than it is prefilled needs no time to last, and chance is no evidence."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tercet.decisions.planning import FleetPlan, Observed, ObservedEngine, ObservedRequest, PlanLimits
from tercet.decisions.roles import Demand, RoleController, overload_split

from .planned_world import OBJECTIVES, Engine

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
