"""Workloads of ``tercet bench`` on simulated engines: recorded times, conversations, mixes, and traces that are
replayed from the ids of their blocks.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from tercet.cli import app
from tercet.decisions.scheduling import Scheduling, load_scheduling
from tercet.programs import data_parallel, load_program
from tercet.protocol import BadRequest, Request
from tercet_lab.bench.simulated import Experiment, Fleet, Outcome, PlannedWorkload, parse_fleet, run_once, run_requests
from tercet_lab.bench.simulated.scenario import PlannedTraffic
from tercet_lab.bench.workloads.recorded import KINDS
from tercet_lab.block_tokens import BlockTokens
from tercet_lab.sim import EngineOptions, load_profile
from tercet_lab.sim.step_times import StepTimes

PROFILE = "llama-3.1-8b-h100-tp1"


def run(workload: PlannedWorkload, fleet: str = "both=1", seed: int = 0) -> Outcome:
    return run_once(data_parallel, parse_fleet(fleet), PROFILE, EngineOptions(), workload, seed)


def mooncake(path: Path, *rows: tuple[int, int, int, tuple[int, ...]]) -> str:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows))
    return f"mooncake,path={path}"


ROWS = ((1000, 600, 5, (1, 2)), (1500, 1100, 7, (1, 2, 3)), (4000, 600, 3, (4, 5)))


def test_a_trace_comes_at_its_own_times_and_shares_its_blocks(tmp_path: Path) -> None:
    trace = mooncake(tmp_path / "t.jsonl", *ROWS)
    outcome = run(PlannedWorkload(workload=(trace,), arrivals="trace"))
    assert list(outcome.requests["sent"]) == [0.0, 0.5, 3.0]
    assert sorted(outcome.requests["input_tokens"]) == [600, 600, 1100]
    assert sorted(outcome.requests["output_tokens"]) == [3, 5, 7]
    # The second prompt repeats the first one, but for the rest of its last block of 16.
    assert outcome.counts["prefill_tokens"] == 600 + (1100 - 592) + 600


def test_a_trace_is_stretched_to_a_rate(tmp_path: Path) -> None:
    trace = mooncake(tmp_path / "t.jsonl", *ROWS)
    outcome = run(PlannedWorkload(workload=(trace,), arrivals="trace", rate=0.5))
    assert list(outcome.requests["sent"]) == pytest.approx([0.0, 2 / 3, 4.0])
    some = run(PlannedWorkload(workload=(trace,), arrivals="constant", rate=0.5, requests=2))
    assert list(some.requests["sent"]) == pytest.approx([2.0, 4.0])


def test_a_conversation_goes_on_with_what_was_said() -> None:
    traffic = PlannedTraffic(
        PlannedWorkload(workload=("sessions,turns=3,think_time=2,output_len=4",), rate=1.0, requests=7), 0
    )
    arrivals = list(traffic.arrivals())
    assert len(arrivals) == 3, "the last one is cut"
    _, first = arrivals[0]
    following = traffic.after(first, (7, 8, 9))
    assert following is not None
    pause, second, is_after_tool, _ = following
    assert (pause > 0, is_after_tool) == (True, False)
    assert first.session == second.session is not None
    assert second.prompt[: first.num_tokens + 3] == (*first.prompt, 7, 8, 9)
    assert traffic.unsent(second) == 1
    assert traffic.after(second, ()) is None, "it failed"
    assert traffic.after(arrivals[2][1], ()) is None, "it has one turn"


def test_a_share_of_the_turns_comes_after_a_tool() -> None:
    text = "sessions,turns=40,think_time=100,tool_share=0.75,tool_time=1,output_len=4"
    traffic = PlannedTraffic(PlannedWorkload(workload=(text,), rate=1.0, requests=40), 0)
    request, pauses = next(iter(traffic.arrivals()))[1], {True: list[float](), False: list[float]()}
    while (following := traffic.after(request, (1,))) is not None:
        pauses[following.is_after_tool].append(following.pause)
        request = following.request
    assert 20 <= len(pauses[True]) < 39
    assert sum(pauses[True]) / len(pauses[True]) < 10 < sum(pauses[False]) / len(pauses[False])


def test_turns_wait_for_the_answers_before_them_and_find_them_cached() -> None:
    sessions = "sessions,turns=3,think_time=1,input_len=160,output_len=32"
    outcome = run(PlannedWorkload(workload=(sessions,), rate=0.1, requests=30))
    assert len(outcome.requests["sent"]) == 30
    assert sorted(set(outcome.requests["input_tokens"])) == [160, 352, 544]
    assert outcome.counts["prefill_tokens"] < 30 * 200
    never = run(PlannedWorkload(workload=(sessions,), rate=0.1, requests=30, warm_up=10))
    assert not len(never.requests), "a conversation counts as a whole"


def test_turns_after_one_that_failed_count_as_failed() -> None:
    long = "sessions,turns=3,input_len=200000"
    outcome = run(PlannedWorkload(workload=(long,), rate=1.0, requests=6))
    assert sum(outcome.failures.values()) == 6
    assert outcome.failures["unsent"] == 4
    assert len(outcome.requests["sent"]) == 6


def files(folder: Path) -> dict[str, str]:
    talk = [{"from": "human", "value": "one two three four five"}, {"from": "gpt", "value": "five four three two one"}]
    contents = {
        "sharegpt": json.dumps([{"conversations": talk}]),
        "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,80,20",
        "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,47,18,65,API log",
        "mooncake": json.dumps({"timestamp": 5, "input_length": 10, "output_length": 3}),
    }
    for kind, text in contents.items():
        (folder / kind).write_text(text)
    return {kind: f"{kind},path={folder / kind}" for kind in contents}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_served(kind: str, tmp_path: Path) -> None:
    text = files(tmp_path).get(kind, kind)
    outcome = run(PlannedWorkload(workload=(text,), rate=5.0, requests=1))
    assert (len(outcome.requests["sent"]), outcome.failures.total()) == (1, 0)


def test_mixes_and_phases_repeat_to_the_byte() -> None:
    workload = PlannedWorkload(
        workload=("random,weight=3+sessions,turns=2", "sonnet,input_len=900"), rate=1, requests=40
    )
    simulation = Experiment(program="data_parallel", fleet=Fleet("both=2", profile=PROFILE), work=workload)
    once, again = (simulation.report([4.0], "x") for _ in range(2))
    assert once.to_json() == again.to_json()
    assert once.points[0].summary.completed == 40
    assert msgspec.json.decode(once.to_json())["config"]["workload"]["workload"] == list(workload.workload)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"workload": ("sonnet",), "arrivals": "trace"}, "arrivals"),
        ({"workload": ("sonnet",)}, "rate"),
        ({"workload": ("sonnet",), "rate": -1.0}, "rate"),
        ({"workload": ("sonnet",), "rate": 1.0, "requests": 3, "warm_up": 3}, "warm_up"),
        ({"workload": ("none",), "rate": 1.0}, "workload"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, object], field: str) -> None:
    with pytest.raises(BadRequest, match=field):
        PlannedWorkload(**changes)  # type: ignore[arg-type]


def test_the_command_takes_a_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = mooncake(tmp_path / "t.jsonl", *ROWS)
    written = tmp_path / "run.json"
    assert app._run(["sim", "--workload", trace, "--arrival", "trace", "--result-filename", str(written)]) == 0
    (point,) = msgspec.json.decode(written.read_bytes())["points"]
    assert point["metrics"]["completed"] == 3
    assert "recorded" in capsys.readouterr().out
    for flags, named in (
        (["--workload", trace, "--input-mean", "5"], "--input-mean"),
        (["--arrival", "trace"], "trace"),
    ):
        assert app._run(["sim", *flags]) == 2
        assert named in capsys.readouterr().err


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
