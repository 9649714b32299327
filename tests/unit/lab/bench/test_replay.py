"""Recorded traces are replayed from the ids of their blocks: nothing differs from a run with all tokens.

Dynamo's figures are those of the offline replay of ai-dynamo 1.6.1, for the trace that is made here, with the engine
``{"block_size": 16, "num_gpu_blocks": 6000, "timing_model": {"type": "fixed", "prefill_ms": MS, "decode_ms": MS}}``.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from tercet.decisions.scheduling import Scheduling, load_scheduling
from tercet.programs import load_program
from tercet.protocol import Request
from tercet_lab.bench.simulated import PlannedWorkload, parse_fleet, run_requests
from tercet_lab.bench.simulated.scenario import PlannedTraffic
from tercet_lab.bench.simulated.virtual_run import Outcome
from tercet_lab.block_tokens import BlockTokens
from tercet_lab.sim import EngineOptions, load_profile
from tercet_lab.sim.step_times import StepTimes

PROFILE = "llama-3.1-8b-h100-tp1"
BLOCK = 512
CACHE_AWARE = Path(__file__).parents[4] / "benchmarks" / "cache_aware.yaml"


def trace(path: Path, requests: int, most_output: int = 1) -> str:
    """A workload of conversations whose prompts grow, behind one shared block, at distinct times."""
    chance, sessions, ids, rows = random.Random(7), list[list[int]](), itertools.count(1), list[bytes]()
    for number in range(requests):
        index = chance.randrange(len(sessions)) if sessions and chance.random() < 0.6 else len(sessions)
        if index == len(sessions):
            sessions.append([0])
        said = sessions[index]
        said += [next(ids) for _ in range(chance.randrange(1, 12))]
        length = len(said) * BLOCK - chance.randrange(BLOCK)
        row = {"timestamp": number * 50 + chance.randrange(50), "input_length": length, "hash_ids": list(said)}
        rows.append(msgspec.json.encode({**row, "output_length": most_output if most_output == 1 else
                                         chance.randrange(1, most_output)}))  # fmt: skip
        if length > 30_000:
            sessions[index] = [0]
    path.write_bytes(b"\n".join(rows))
    return f"mooncake,path={path}"


def arrivals_of(workload: str) -> Iterator[tuple[float, Request]]:
    return PlannedTraffic(PlannedWorkload(workload=(workload,), arrivals="trace"), 0).arrivals()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step_ms", "mean", "median", "p99", "longest", "prefilled"),
    [(97.31, 145.89422666666, 97.31, 389.24, 505.03, 10_291_787), (151.37, 293.23594, 258.59, 804.4, 1184.77, None)],
)
def test_it_agrees_with_dynamo(
    step_ms: float, mean: float, median: float, p99: float, longest: float, prefilled: int | None, tmp_path: Path
) -> None:
    """Steps of one length, answers of one token, four engines in turns, two thirds of the blocks evicted.

    With the longer step, Dynamo prefills 1,232 of ten million tokens less.
    """
    step = step_ms / 1e3
    times = StepTimes(knots=((1, step), (2, step)), pair=0.0, context=0.0, sequence=0.0, step=0.0)
    profile = tmp_path / "fixed.json"
    profile.write_bytes(msgspec.json.encode(replace(load_profile(PROFILE), steps=times, router=0.0, call=0.0)))
    arrivals = arrivals_of(trace(tmp_path / "t.jsonl", 1500))
    outcome = run_requests(
        load_program("data_parallel"), parse_fleet("both=4"), str(profile), EngineOptions(total_blocks=6000), arrivals
    )
    ttft = outcome.requests.ttft * 1e3
    found = (ttft.mean(), np.median(ttft), np.percentile(ttft, 99), ttft.max())
    assert found == pytest.approx((mean, median, p99, longest), abs=0.01)
    assert ttft.mean() == pytest.approx(mean, abs=1e-6)
    assert prefilled in (None, outcome.counts["prefill_tokens"])


def figures_of(outcome: Outcome, file: Path) -> Sequence[object]:
    outcome.requests.to_csv(file)
    return [
        file.read_bytes(), sorted(outcome.counts.items()), outcome.imbalance, outcome.retries, outcome.moves
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "fleet", "scheduling"),
    [("data_parallel", "both=4", None), ("data_parallel", "both=4", CACHE_AWARE), ("disaggregated", "2P2D", None),
     ("conditional", "2P2D", None), ("auto", "2P2D", None)],
)  # fmt: skip
def test_ids_and_tokens_give_the_same_run(program: str, fleet: str, scheduling: Path | None, tmp_path: Path) -> None:
    args = {"pick": "scheduled"} if scheduling else {}
    workload, made = trace(tmp_path / "t.jsonl", 250, most_output=300), list[Sequence[object]]()
    for expanded in (False, True):
        arrivals = (
            (when, replace(request, prompt=tuple(request.prompt)) if expanded else request)
            for when, request in arrivals_of(workload)
        )
        rules: Scheduling | None = None if scheduling is None else load_scheduling(scheduling)
        outcome = run_requests(
            load_program(program, args), parse_fleet(fleet), PROFILE, EngineOptions(total_blocks=4000), arrivals,
            scheduling=rules,
        )  # fmt: skip
        assert not outcome.failures
        made.append(figures_of(outcome, tmp_path / "requests.csv"))
    assert made[0] == made[1]


def test_a_run_makes_few_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = 0, BlockTokens._made

    def counted(self: BlockTokens, begin: int, end: int) -> tuple[int, ...]:
        nonlocal made
        made += end - begin
        return make(self, begin, end)

    monkeypatch.setattr(BlockTokens, "_made", counted)
    arrivals = arrivals_of(trace(tmp_path / "t.jsonl", 40))
    outcome = run_requests(load_program("data_parallel"), parse_fleet("both=2"), PROFILE, EngineOptions(), arrivals)
    assert 0 < made < outcome.requests["input_tokens"].sum() / 20
