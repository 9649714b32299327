"""The best sequence of fleets in hindsight, against all sequences."""

from __future__ import annotations

import itertools
import random

import pytest
from benchmarks.planner import best_sequence

from tercet.decisions.planning import FleetPlan

PLANS = [FleetPlan(1, 1), FleetPlan(2, 1), FleetPlan(3, 2)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("start_s", [0.0, 20.0, 300.0])
def test_no_sequence_serves_more_for_an_engine_hour(seed: int, start_s: float) -> None:
    chance = random.Random(seed)
    met = {plan: [chance.uniform(0, 40) * plan.engines**0.5 for _ in range(5)] for plan in PLANS}
    found = best_sequence(met, 30.0, start_s)

    def per_hour(fleets: tuple[FleetPlan, ...]) -> float:
        starts = sum(max(0, after.engines - before.engines) for before, after in itertools.pairwise(fleets))
        hours = (sum(each.engines for each in fleets) * 30.0 + starts * start_s) / 3600
        return sum(met[each][when] for when, each in enumerate(fleets)) / hours

    assert found.per_hour == pytest.approx(max(map(per_hour, itertools.product(PLANS, repeat=5))))
    assert found.per_hour == pytest.approx(per_hour(found.fleets))


def test_engines_that_take_long_to_start_are_kept_through_a_lull() -> None:
    small, large = FleetPlan(1, 1), FleetPlan(4, 2)
    met = {small: [2.0, 10.0, 2.0], large: [90.0, 10.0, 90.0]}
    assert best_sequence(met, 30.0, 0.0).fleets == (large, small, large)
    assert best_sequence(met, 30.0, 120.0).fleets == (large, large, large)
    assert best_sequence(met, 30.0, 120.0).changes == 0
