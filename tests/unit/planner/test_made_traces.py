"""The loads of ``python -m benchmarks.planner``, and its fixed fleets."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import msgspec
import pytest
from benchmarks.planner import Shape, best_sequence, in_hindsight, load_at, trace, unchanged

from tercet.decisions.planning import FleetPlan
from tercet.settings.fleet_settings import Objectives


@pytest.mark.parametrize("shape", ["flip", "day", "bursts", "tenants", "steady"])
def test_a_trace_has_the_load_that_it_is_made_of(shape: Shape) -> None:
    seconds, rate = 400.0, 10.0
    lines = list(trace(shape, seconds, rate, seed=1))
    assert lines == list(trace(shape, seconds, rate, seed=1))
    times = [line["timestamp"] / 1e3 for line in lines]
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] < seconds
    expected = sum(load_at(shape, at / 10, seconds, rate).rate / 10 for at in range(int(seconds * 10)))
    assert len(lines) == pytest.approx(expected, rel=0.1)
    blocks = [block for line in lines for block in line["hash_ids"]]
    assert len(blocks) == len(set(blocks))
    for line in lines[::50]:
        at = line["timestamp"] / 1e3
        assert line["input_length"] == pytest.approx(load_at(shape, at, seconds, rate).prompt, rel=1.2)


@pytest.mark.slow
def test_hindsight_is_at_least_as_good_as_each_fixed_fleet(tmp_path: Path) -> None:
    seconds = 120.0
    lines = list(trace("flip", seconds, 2, seed=0))
    file = tmp_path / "trace.jsonl"
    file.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    objectives = Objectives(ttft=0.4, tpot=0.02)
    engines = {"1P1D": 2, "2P1D": 3, "1P2D": 3}
    fixed = {fleet: unchanged(file, fleet, "llama-3.1-8b-h100-tp1", objectives) for fleet in engines}
    for each in fixed.values():
        assert sum(each.met) == pytest.approx(each.row.met * len(lines))
        assert len(each.met) == 2
    best = in_hindsight(fixed, len(lines), start_s=30.0)
    assert 0 < best.met <= 1
    for fleet, each in fixed.items():
        assert best.per_hour >= sum(each.met) / (engines[fleet] * seconds / 3600) * (1 - 1e-9)


# The best sequence of fleets in hindsight, against all sequences.

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
