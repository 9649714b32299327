"""Programs over simulated fleets: the figures add up, repeat to the byte, and say what is wrong with what they got."""

from __future__ import annotations

import gc
import math
import os
import random
import statistics
import subprocess
import sys
from itertools import islice
from pathlib import Path

import msgspec
import pytest

from tercet.cli import app
from tercet.fleet import RunningSequence, Trace
from tercet.programs import BUILT_IN, load_program
from tercet.protocol import BadRequest, Request
from tercet_lab.bench.results import load_result
from tercet_lab.bench.simulated import Experiment, Fleet, SyntheticWorkload, parse_fleet, run_once, run_requests
from tercet_lab.bench.simulated.grid import pareto
from tercet_lab.bench.simulated.scenario import members_of, names_of, requests_of
from tercet_lab.bench.simulated.sweep import parse_axis, sweep
from tercet_lab.bench.workloads.conversations import gaps_of
from tercet_lab.sim import EngineOptions, options_from
from tercet_lab.sim.block_pool import Prompt, Run
from tercet_lab.sim.network import Send
from tercet_lab.slo import Slo

PROFILE = "llama-3.1-8b-h100-tp1"


def simulation(**changes: object) -> Experiment:
    parts: dict[str, object] = {
        "program": "disaggregated",
        "work": SyntheticWorkload(rate=1, requests=100, warm_up=10, input_dev=50, output_dev=20),
    }
    fleet, options = changes.pop("fleet", "1P1D"), changes.pop("options", {})
    fleet = Fleet(fleet, profile=PROFILE, **options)  # type: ignore[arg-type]
    return Experiment(fleet=fleet, **{**parts, **changes})  # type: ignore[arg-type]


# ---- runs ----------------------------------------------------------------------------------------------------


PREFIX_AWARE = """
plugins:
- type: prefix-cache-scorer
- type: queue-scorer
- type: single-profile-handler
schedulingProfiles:
- name: mine
  plugins:
  - {pluginRef: prefix-cache-scorer, weight: 3}
  - pluginRef: queue-scorer
"""


@pytest.mark.slow
def test_a_scheduling_file_decides_picks(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(PREFIX_AWARE)
    workload = SyntheticWorkload(rate=1, requests=200, prefixes=20, prefix=256)

    def prefilled(pick: str, scheduling: str | None) -> tuple[int, bytes]:
        given = simulation(
            program="data_parallel", args={"pick": pick}, fleet="both=8", work=workload,
            scheduling=scheduling,
        )  # fmt: skip
        point = given.point(4)
        return point.counts["prefill_tokens"], msgspec.json.encode(point)

    anywhere, _ = prefilled("round_robin", None)
    where_it_is, report = prefilled("mine", str(file))
    assert where_it_is < 0.8 * anywhere
    assert prefilled("scheduled", str(file)) == prefilled("mine", str(file)) == (where_it_is, report)
    with pytest.raises(BadRequest, match="scheduling"):
        prefilled("mine", str(tmp_path / "none.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("program", sorted(BUILT_IN))
@pytest.mark.parametrize("schedule", ["chunked", "prefill_first"])
def test_every_program_serves_every_request(program: str, schedule: str) -> None:
    point = simulation(program=program, options={"schedule": schedule}).point(8)
    assert (point.summary.completed, point.summary.failed, point.fallbacks) == (90, 0, 0)
    assert point.summary.ttft is not None
    assert point.summary.tpot is not None
    assert 0 < point.busy < 1
    alone = program in ("data_parallel", "fetch")  # these prompts share nothing that could be pulled
    assert (point.counts["kv_bytes_sent"] > 0) == (not alone)


def test_requests_at_given_times_are_served_then_and_warm_up_is_not_counted() -> None:
    requests = [Request(seq_id=f"r{n}", prompt=(n,) * 100, sampling_params={"max_tokens": 4}) for n in range(5)]
    arrivals = [(float(when), request) for when, request in zip((0, 1, 1, 3, 7), requests, strict=True)]
    program, fleet = load_program("disaggregated"), parse_fleet("1P1D")
    outcome = run_requests(program, fleet, PROFILE, EngineOptions(), arrivals, warm_up=2)
    assert list(outcome.requests["sent"]) == [1.0, 3.0, 7.0]
    assert list(outcome.requests["input_tokens"]) == [100] * 3
    assert list(outcome.requests["output_tokens"]) == [4] * 3


@pytest.mark.slow
def test_prefix_aware_picking_finds_prefixes_and_repeats_to_the_byte() -> None:
    """The program that the simulator's speed is measured with."""
    program = str(Path(__file__).parents[4] / "benchmarks" / "prefix_aware.py") + ":prefix_aware"
    shared = SyntheticWorkload(rate=1, requests=400, input_mean=512, output_mean=16, prefixes=16, prefix=256)
    given = {"fleet": "both=8", "work": shared}
    aware = simulation(program=program, **given)
    assert aware.report([16.0], "a").to_json() == aware.report([16.0], "a").to_json()
    blind = simulation(program="data_parallel", **given)
    # Each prefix is computed about once, and not on every engine.
    served, by_turns = aware.point(16), blind.point(16)
    assert served.counts["prefill_tokens"] < 0.85 * by_turns.counts["prefill_tokens"]
    assert served.busy > 0.5 * by_turns.busy  # by all engines, and not by one with all prefixes


@pytest.mark.processes
def test_the_same_seed_gives_the_same_bytes_in_another_process() -> None:
    line = [
        "sim",
        "--program",
        "balanced",
        "--fleet",
        "1P1D",
        "--request-rate",
        "4,8",
        "--num-prompts",
        "60",
        "--result-filename",
        "-",
    ]
    found = [
        subprocess.run(
            [sys.executable, "-m", "tercet.cli", *line, "--seed", seed],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed, hash_seed in (("1", "1"), ("1", "2"), ("2", "1"))
    ]
    assert found[0] == found[1]
    assert found[0] != found[2]


@pytest.mark.slow
def test_more_load_takes_longer() -> None:
    means = [point.summary.e2el.mean for point in simulation().report([2, 20, 60], "x").points if point.summary.e2el]
    assert means == sorted(means)
    assert means[2] > means[0]


def test_shared_prefixes_are_found_again() -> None:
    workload = SyntheticWorkload(rate=1, requests=100, input_mean=600, prefixes=2, prefix=512)
    shared = simulation(program="data_parallel", work=workload).point(8)
    alone = simulation(program="data_parallel", work=workload, options={"prefix_caching": "false"}).point(8)
    assert shared.counts["prefill_tokens"] < 0.3 * alone.counts["prefill_tokens"]
    assert alone.counts["prefill_tokens"] == 100 * 600


@pytest.mark.slow
def test_what_engines_cached_goes_with_the_run() -> None:
    """Runs of blocks know one another: what is left of a simulation must not wait for the garbage collector."""
    gc.collect()
    # By type(): isinstance() asks each object for its __class__, and some of torch's answer with a warning.
    before = sum(type(found) is Run for found in gc.get_objects())
    gc.disable()
    try:
        assert simulation(work=SyntheticWorkload(rate=4, requests=40, prefixes=4, prefix=64)).point(4.0)
        assert sum(type(found) is Run and found.blocks > 0 for found in gc.get_objects()) <= before
    finally:
        gc.enable()


@pytest.mark.parametrize("program", sorted(BUILT_IN))
def test_ended_requests_leave_no_reference_cycles(program: str) -> None:
    """Prompts and traces would wait for the garbage collector, which runs rarely in a simulation."""
    kinds = (RunningSequence, Trace, Prompt, Send)
    gc.collect()
    before = sum(type(found) in kinds for found in gc.get_objects())
    gc.disable()
    try:
        simulation(program=program, work=SyntheticWorkload(rate=1, requests=20)).point(8)
        assert sum(type(found) in kinds for found in gc.get_objects()) == before
    finally:
        gc.enable()


@pytest.mark.slow
def test_goodput_counts_what_keeps_the_bounds() -> None:
    all_of_it = simulation(slo=Slo(ttft=10)).point(8).summary
    none = simulation(slo=Slo(tpot=0.000001)).point(8).summary
    assert all_of_it.request_goodput == pytest.approx(all_of_it.request_throughput)
    assert none.request_goodput == 0


def test_when_an_engine_dies_the_others_serve(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(
        "engines: [{role: prefill}, {role: decode, count: 2}]\n"
        "faults: [{engine: decode-0, at: 5, down: 3}, {engine: prefill-0, at: 8}]\n"
    )
    point = simulation(fleet=str(fleet)).point(8)
    assert 0 < point.fallbacks <= point.retries
    assert (point.summary.completed, point.summary.failed) == (90, 0)


def test_requests_wait_for_an_engine_while_none_answers(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text("engines: [{role: both}]\nfaults: [{engine: both-0, at: 3, down: 8}]\n")
    point = simulation(program="data_parallel", fleet=str(fleet)).point(8)
    assert point.fallbacks == 0, "it is the same way again"
    assert point.retries > 10
    assert (point.summary.completed, point.summary.failed) == (90, 0)
    assert point.summary.ttft is not None
    assert point.summary.ttft.max > 5


def test_lost_transfers_fall_back_to_one_engine() -> None:
    point = simulation(options={"transfer_failures": "0.3"}).point(8)
    assert point.summary.completed == 90
    assert point.fallbacks > 10


def test_a_failure_in_a_group_of_tasks_falls_back_as_at_a_router(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import asyncio\n"
        "async def grouped(request, fleet):\n"
        "    with fleet.pick('decode') as decode, fleet.pick('prefill') as prefill:\n"
        "        async with decode.prep_recv(request) as space:\n"
        "            async with asyncio.TaskGroup() as group:\n"
        "                group.create_task(prefill.remote_send(request, space, space.matched_len))\n"
        "            yield decode.start_generate(request, space.end)\n"
    )
    point = simulation(program=f"{file}:grouped", options={"transfer_failures": "0.3"}).point(8)
    assert point.summary.completed == 90
    assert point.fallbacks > 10


def test_a_program_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "async def last(request, fleet):\n"
        "    async for output in fleet.members[-1].engine.start_generate(request):\n"
        "        yield output\n"
    )
    point = simulation(program=f"{file}:last").point(8)
    assert point.summary.completed == 90


def test_a_program_that_fails_is_counted_not_hidden(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "async def half(request, fleet):\n"
        "    async for output in fleet.members[0].engine.start_generate(request):\n"
        "        yield output\n"
        "        return\n"
    )
    summary = simulation(program=f"{file}:half").point(8).summary
    assert (summary.completed, summary.failed, summary.errors) == (0, 90, {"program_failed": 90})


def test_the_program_is_the_one_that_production_runs() -> None:
    outcome = run_once(
        load_program("disaggregated"),
        parse_fleet("1P1D"),
        PROFILE,
        EngineOptions(),
        SyntheticWorkload(rate=4, requests=20),
        0,
    )
    assert len(outcome.requests["ended"]) == 20
    assert not any(math.isnan(first) for first in outcome.requests["first_token"])


# ---- traffic -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arrivals", ["poisson", "constant", "gamma"])
def test_arrivals_have_the_rate(arrivals: str) -> None:
    workload = SyntheticWorkload(rate=5, requests=4000, arrivals=arrivals)  # type: ignore[arg-type]
    *_, (last, _request) = requests_of(workload, 0)
    assert 4000 / last == pytest.approx(5, rel=0.1)


def test_lengths_and_prefixes() -> None:
    workload = SyntheticWorkload(
        rate=5, requests=500, input_mean=300, input_dev=30, output_mean=50, output_dev=5, prefixes=3, prefix=100
    )
    found = [request for _, request in requests_of(workload, 0)]
    assert sum(request.num_tokens for request in found) / 500 == pytest.approx(300, rel=0.05)
    assert len({request.prompt[:100] for request in found}) == 3
    assert len({request.prompt[:150] for request in found}) == 500
    assert found == [request for _, request in islice(requests_of(workload, 0), 500)]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"rate": 0}, "rate"),
        ({"input_mean": -1}, "input_mean"),
        ({"requests": 5, "warm_up": 5}, "requests"),
        ({"prefixes": 2}, "prefixes"),
        ({"output_dev": -1}, "output_dev"),
        ({"burstiness": 0}, "burstiness"),
    ],
)
def test_traffic_that_makes_no_sense_is_refused(change: dict[str, object], names: str) -> None:
    with pytest.raises(BadRequest, match=names) as raised:
        msgspec.structs.replace(SyntheticWorkload(rate=1, requests=10), **change)
    assert raised.value.param == names


# ---- fleets --------------------------------------------------------------------------------------------------


def test_fleets_on_a_line() -> None:
    assert names_of(parse_fleet("2P1D")) == ["prefill-0", "prefill-1", "decode-0"]
    assert names_of(parse_fleet("both=2")) == ["both-0", "both-1"]
    assert len(members_of(parse_fleet("prefill=3,decode=5,both=1"))) == 9


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("engines: []", "at least one engine"),
        ("engines: [{role: cook}]", "role: must be one of both, decode, prefill"),
        ("engines: [{role: both, kount: 2}]", "unknown key kount; did you mean count"),
        ("engines: [{role: both}]\nfaults: [{engine: both-7, at: 1}]", "engine 'both-7' does not exist"),
        ("engines: [{role: both}]\nfaults: [{engine: both-0, at: -1}]", "at must be 0 s or more"),
        ("a: [", "is not YAML"),
    ],
)
def test_what_is_wrong_with_a_fleet_file_is_said(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(text)
    with pytest.raises(BadRequest, match=says) as raised:
        parse_fleet(str(file))
    assert raised.value.param == "fleet"


def test_options_are_text_or_values() -> None:
    assert options_from(EngineOptions(), {"max_num_seqs": "7", "prefix_caching": "false"}).max_num_seqs == 7
    with pytest.raises(BadRequest, match="unknown key nonsense; the keys are schedule"):
        options_from(EngineOptions(), {"nonsense": 1})
    with pytest.raises(BadRequest, match=r"max_lease_share: is 2\.0"):
        options_from(EngineOptions(), {"max_lease_share": 2})


# ---- sweeps --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sweep_runs_every_combination() -> None:
    report = sweep(
        simulation(program="balanced"),
        8,
        [parse_axis("balance_ratio=0,0.2"), parse_axis("fleet=1P1D,1P2D"), ("max_num_seqs", ("64",))],
        "ttft.mean",
        "tpot.p90",
    )
    assert [trial.settings["fleet"] for trial in report.trials] == ["1P1D", "1P2D"] * 2
    assert any(trial.standing == "best" for trial in report.trials)
    assert report.to_json() == report.to_json()


def test_a_percentile_of_too_few_requests_is_refused_before_any_runs() -> None:
    with pytest.raises(BadRequest, match=r"--y tpot\.p99: 90 requests are too few .*--num-prompts.* tpot\.mean"):
        sweep(simulation(), 8, [("max_num_seqs", ("64",))], "ttft.mean", "tpot.p99")


@pytest.mark.parametrize("line", ["--planner-interval 20", "--over planner-interval=10,20"])
def test_a_setting_of_a_planner_that_does_not_run_is_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app._run(["sim", "--num-prompts", "20", *line.split()]) == 2
    assert "planner-interval: has no effect without --planner" in capsys.readouterr().err


@pytest.mark.slow
def test_a_sweep_over_seeds_has_a_run_and_an_interval_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    report = sweep(simulation(program="data_parallel"), 8, [("stream_every", ("1",))], "ttft.mean", "tpot.mean", 3)
    (trial,) = report.trials
    means = [point.summary.ttft.mean for point in trial.points if point.summary.ttft is not None]
    assert report.seeds == (0, 1, 2)
    assert len(set(means)) == 3
    assert trial.x.mean == pytest.approx(sum(means) / 3)
    assert trial.x.half is not None
    assert app._run(["sim", "--num-prompts", "20", "--over", "request-rate=2", "--seeds", "2", "--seed", "5"]) == 0
    assert "±" in capsys.readouterr().out


def test_efficient_is_what_nothing_beats() -> None:
    nan = float("inf")
    assert pareto([(1, 5), (2, 3), (3, 4), (4, 1), (1, 6), (2, 3)]) == {0, 1, 3, 5}
    assert pareto([(nan, nan), (1, 1)]) == {1}
    assert pareto([]) == set()


# ---- command line --------------------------------------------------------------------------------------------


def test_a_result_is_one_of_the_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sim.json"
    assert (
        app._run(
            ["sim", "--num-prompts", "50", "--request-rate", "2,4", "--label", "mine", "--result-filename", str(file)]
        )
        == 0
    )
    result = load_result(file)
    assert result.source == "sim"
    assert [(point.label, point.request_rate) for point in result.points] == [("mine", 2), ("mine", 4)]
    assert "JCT, s" in capsys.readouterr().out


def test_warm_up_comes_before_the_prompts_and_bursts_are_shaped_as_in_bench(tmp_path: Path) -> None:
    file = tmp_path / "sim.json"
    line = f"sim --num-prompts 30 --num-warmups 10 --goodput ttft:5000,tpot:500 --result-filename {file}"
    assert app._run(line.split()) == 0
    (point,) = load_result(file).points
    assert point.metrics["completed"] == 30
    assert point.metrics["request_goodput"] == point.metrics["request_throughput"]


@pytest.mark.parametrize("shape", [0.25, 4.0])
def test_burstiness_is_the_shape_of_a_gamma_process(shape: float) -> None:
    found = list(islice(gaps_of("gamma", 5.0, shape, random.Random(1)), 20_000))
    mean = statistics.fmean(found)
    assert mean == pytest.approx(0.2, rel=0.05)
    assert statistics.pstdev(found) / mean == pytest.approx(shape**-0.5, rel=0.05)


@pytest.mark.slow
def test_the_sweep_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "sweep.svg"
    line = f"sim --num-prompts 50 --over fleet=both=1 --over request-rate=2,4 --plot {picture}"
    assert app._run(line.replace("fleet=both=1", "stream_every=0,1").split()) == 0
    assert "stream_every" in capsys.readouterr().out
    assert picture.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("sim --num-prompts 3 --result-filename /not/here/x.json", "--result-filename"),
        ("sim --fleet cook=1", "fleet"),
        ("sim --fleet /not/here.yaml", "fleet"),
        ("sim --fleet 0P1D", "fleet"),
        ("sim --profile nothing", "profile"),
        ("sim --program nothing", "program"),
        ("sim --program balanced --program-arg balance_ratio=2 --fleet 1P1D --num-prompts 3", "balance_ratio"),
        ("sim --request-rate 0", "--request-rate"),
        ("sim --request-rate x", "--request-rate"),
        ("sim --request-rate nan", "--request-rate"),
        ("sim --num-prompts 0", "--num-prompts: must be at least 1"),
        ("sim --burstiness 0.5", "--burstiness: needs --arrival gamma"),
        ("sim --option nonsense=1", "nonsense"),
        ("sim --option max_num_seqs=0", "max_num_seqs"),
        ("sim --option max_num_seqs", "--option"),
        ("sim --goodput nonsense:1", "--goodput"),
        ("sim --goodput ttft=1", "is not NAME:MILLISECONDS"),
        ("sim --over request-rate=1 --plot x.gif", "--plot"),
        ("sim --over x", "--over"),
        ("sim --over request-rate=none", "request-rate"),
        ("sim --over max_num_seq=1", "max_num_seq is not a setting; did you mean max_num_seqs?"),
        ("sim --over salt=1 --program balanced", "balance_ratio"),
        ("sim --over request-rate=1 --over request-rate=2", "--over"),
        ("sim --over request-rate=1 --x ttft", "metric"),
        ("sim --over rates=1", "rates is not a setting"),
        ("bench profile nothing", "NAME"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(line: str, names: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app._run(line.split()) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("rate")]
    assert len(said) == 1
    assert said[0].startswith("tercet: ")
    assert names in said[0]


# ---- all at once -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arrival", ["poisson", "constant", "gamma"])
def test_requests_may_come_all_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str], arrival: str) -> None:
    file = tmp_path / "sim.json"
    line = f"sim --num-prompts 20 --request-rate 4,inf --arrival {arrival} --result-filename {file}"
    assert app._run(line.split()) == 0
    assert " inf " in capsys.readouterr().out
    slow, at_once = load_result(file).points
    assert (slow.request_rate, slow.concurrency) == (4, None)
    assert (at_once.request_rate, at_once.concurrency) == (None, 20)
    assert at_once.metrics["completed"] == 20


@pytest.mark.parametrize("workload", ["sonnet,input_len=64,output_len=8", "random,input_len=64,output_len=8"])
def test_a_planned_workload_may_come_all_at_once(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app._run(["sim", "--num-prompts", "10", "--request-rate", "inf", "--workload", workload]) == 0
    assert " 10 " in capsys.readouterr().out


def test_a_sweep_may_have_all_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sweep.json"
    line = f"sim --num-prompts 10 --request-rate inf --over max_num_seqs=4,8 --result-filename {file}"
    assert app._run(line.split()) == 0
    assert "all at once" in capsys.readouterr().out
    assert msgspec.json.decode(file.read_bytes())["config"]["rate"] == "inf"
    assert app._run(["sim", "--num-prompts", "10", "--over", "request-rate=4,inf"]) == 0
