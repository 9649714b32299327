"""Random small fleets with hardly any KV, in virtual time: no run hangs, and nothing stays pinned."""

from __future__ import annotations

import random

import pytest

from tercet.programs import load_program
from tercet.settings import RescheduleSettings
from tercet_lab.bench.simulated.scenario import SyntheticWorkload, parse_fleet
from tercet_lab.bench.simulated.virtual_run import run_once
from tercet_lab.planner_settings import MovingSettings
from tercet_lab.sim import EngineOptions
from tests.long_runs import FULL

CASES = 400 if FULL else 40
PROFILE = "llama-3.1-8b-h100-tp1"
FLEETS = ("1P1D", "1P2D", "2P1D", "both=1", "both=2", "both=3", "prefill=1,decode=1,both=1")
PROGRAMS: tuple[tuple[str, dict[str, str]], ...] = (
    ("data_parallel", {}),
    ("disaggregated", {}),
    ("balanced", {"balance_ratio": "0.3"}),
    ("balanced", {"balance_ratio": "0.9"}),
    ("conditional", {}),
    ("auto", {}),
)


@pytest.mark.parametrize("seed", range(CASES))
def test_a_small_fleet_with_scarce_kv_serves_every_request(seed: int) -> None:
    choice = random.Random(seed)
    name, arguments = choice.choice(PROGRAMS)
    blocks = choice.choice([34, 48, 60, 100])
    longest = blocks * 8
    requests = choice.randint(2, 30)
    workload = SyntheticWorkload(
        rate=choice.choice([5.0, 50.0, 2000.0]),
        requests=requests,
        input_mean=choice.randint(16, longest // 2),
        output_mean=choice.randint(1, longest // 2),
        warm_up=0,
    )
    options = EngineOptions(
        total_blocks=blocks,
        max_num_seqs=choice.choice([2, 8, 256]),
        max_num_batched_tokens=choice.choice([256, 8192]),
        schedule=choice.choice(["chunked", "prefill_first"]),
        max_lease_share=choice.choice([0.5, 0.8, 1.0]),
        prefix_caching=choice.random() < 0.8,
    )
    policies = choice.choice([(), ("neutral_load",)])
    moving = MovingSettings(reschedule=RescheduleSettings(policies=policies))
    outcome = run_once(
        load_program(name, arguments),
        parse_fleet(choice.choice(FLEETS)),
        PROFILE,
        options,
        workload,
        seed,
        None,
        moving,
    )
    assert len(outcome.requests["ended"]) == requests
    assert not outcome.failures, outcome.first_error
