"""Records become numbers: the formulas, what counts as a failure, who is left out, what was made good or not measured,
and KV usage against an oracle that asks engines at short intervals.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tercet.programs import load_program
from tercet.protocol import BadRequest, Request
from tercet.router.serve.service import Service
from tercet_bench.bench_report import markdown
from tercet_lab.bench.results import Distribution, achieved, load_result, most_at_once, summarize
from tercet_lab.bench.simulated import parse_fleet, run_requests, simulation
from tercet_lab.bench.simulated import sweep as sweeps
from tercet_lab.bench.simulated.experiment import Experiment, Fleet
from tercet_lab.bench.simulated.grid import Estimate
from tercet_lab.bench.simulated.scenario import EngineGroup, Fault, FleetSpec, SyntheticWorkload
from tercet_lab.bench.simulated.sweep import parse_axis, sweep
from tercet_lab.bench.simulated.virtual_run import PaidTime, run_once
from tercet_lab.sim import EngineOptions, SimEngine, kv_usage, load_profile
from tercet_lab.sim.kv_usage import KVImbalance
from tercet_lab.sim.step_times import HostSharing
from tercet_lab.slo import Slo
from tercet_lab.tables import RequestRow, Requests

FLAT = (
    "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
    "request_goodput", "output_throughput", "total_token_throughput", "max_concurrent_requests",
)  # fmt: skip
times = st.floats(0, 1e5, allow_nan=False)


def record(index: int = 0, *, scheduled: float = 0.0, sent: float | None = None, **rest: Any) -> RequestRow:
    """A request of three tokens, due at ``scheduled``: TTFT 1 s, TPOT 0.5 s, E2EL 2 s after the send."""
    at = scheduled if sent is None else sent
    fields: dict[str, Any] = {
        "token_times": (at + 1.0, at + 1.5, at + 2.0), "first_token": at + 1.0, "ended": at + 2.0, "input_tokens": 10,
        "output_tokens": 3, **rest,
    }  # fmt: skip
    return RequestRow(id=index, scheduled=scheduled, sent=at, **fields)


def failed(index: int = 0, kind: str = "http", **rest: Any) -> RequestRow:
    return record(index, first_token=None, token_times=(), output_tokens=0, failure=kind, error="no", **rest)


def test_one_request() -> None:
    one = record()
    table = Requests.of_rows([one])
    assert (one.ok, table.ttft[0], table.e2el[0], table.tpot[0], list(table.itl)) == (True, 1.0, 2.0, 0.5, [0.5, 0.5])
    found = summarize([one])
    assert (found.completed, found.failed, found.duration, found.request_throughput) == (1, 0, 2.0, 0.5)
    assert (found.output_throughput, found.total_token_throughput) == (1.5, 6.5)
    assert found.ttft is not None
    assert found.ttft.p99 == 1.0


def test_latency_from_the_scheduled_arrival_contains_the_delay_of_the_send() -> None:
    found = summarize([record(sent=0.25)])
    assert found.ttft
    assert found.ttft_scheduled
    assert found.e2el_scheduled
    assert found.send_delay
    assert (found.ttft.mean, found.ttft_scheduled.mean, found.e2el_scheduled.mean) == (1.0, 1.25, 2.25)
    assert found.send_delay.mean == 0.25


def test_failures_count_and_have_no_latency() -> None:
    found = summarize([record(0), failed(1), failed(2, "timeout"), failed(3, "interrupted")])
    assert (found.completed, found.failed, found.interrupted) == (1, 2, 1)
    assert found.errors == {"http": 1, "interrupted": 1, "timeout": 1}
    assert found.ttft is not None
    assert found.ttft.count == 1


def test_a_stream_that_broke_off_counts_as_failed_though_it_had_tokens() -> None:
    found = summarize([record(failure="disconnected", error="gone")])
    assert (found.completed, found.failed, found.ttft, found.itl, found.total_output_tokens) == (0, 1, None, None, 0)


def test_an_answer_without_a_token_is_a_failure() -> None:
    found = summarize([record(first_token=None, token_times=(), output_tokens=0)])
    assert (found.completed, found.failed, found.errors) == (0, 1, {"empty": 1})


def test_warm_up_is_left_out() -> None:
    found = summarize([record(0, scheduled=0.0, warmup=True), record(1, scheduled=5.0)])
    assert (found.completed, found.duration) == (1, 2.0)


def test_no_requests_at_all() -> None:
    found = summarize([], Slo(ttft=0.001))
    assert (found.completed, found.failed, found.duration, found.request_goodput, found.ttft) == (0, 0, 0.0, 0.0, None)
    assert "mean_ttft_ms" not in found.flat()


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(), 2),
        (Slo(ttft=1.0), 1),  # the second was sent late, and that counts
        (Slo(ttft=1.1), 2),
        (Slo(tpot=0.499), 0),
        (Slo(tpot=0.5, e2el=2.0), 1),
        (Slo(e2el=1.999), 0),
    ],
)
def test_goodput(slo: Slo, good: int) -> None:
    run = [record(0), record(1, sent=0.1), failed(2)]
    found = summarize(run, slo)
    assert found.request_goodput is not None
    assert found.request_goodput * found.duration == pytest.approx(good)


def test_one_token_answers_have_no_tpot_and_keep_any() -> None:
    one = record(output_tokens=1, ended=1.0, token_times=(1.0,))
    found = summarize([one], Slo(tpot=0.000001))
    assert (found.tpot, found.request_goodput) == (None, 1.0)
    assert math.isnan(Requests.of_rows([one]).tpot[0])


def test_flat_names_are_those_of_vllm_bench_serve() -> None:
    flat = summarize([record()], Slo(ttft=1.0)).flat()
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{key}_{name}_ms" for key in ("mean", "median", "std", "p90", "p99")} <= set(flat)
    assert set(FLAT) <= set(flat)
    assert flat["mean_tpot_ms"] == 500.0


@given(st.lists(times, min_size=1))
def test_a_distribution_is_ordered_and_within_its_values(values: list[float]) -> None:
    found = Distribution.of(values)
    assert found is not None
    assert min(values) <= found.p50 <= found.p90 <= found.p99 <= found.max == max(values)
    assert math.isclose(found.mean, sum(values) / len(values), rel_tol=1e-9, abs_tol=1e-9)


@given(st.lists(st.tuples(times, times).map(sorted)))
def test_most_at_once_is_what_counting_at_every_begin_finds(spans: list[list[float]]) -> None:
    spans = [span for span in spans if span[0] < span[1]]
    slow = max((sum(b <= begin < e for b, e in spans) for begin, _ in spans), default=0)
    begins, ends = (np.array([span[side] for span in spans], dtype=np.float64) for side in (0, 1))
    assert most_at_once(begins, ends) == slow


@given(st.lists(st.tuples(times, st.floats(0, 10), st.booleans()), max_size=30))
def test_every_request_is_counted_once(given_requests: list[tuple[float, float, bool]]) -> None:
    run = [
        record(i, scheduled=at, sent=at + late) if fine else failed(i, scheduled=at, ended=at)
        for i, (at, late, fine) in enumerate(given_requests)
    ]
    found = summarize(run)
    assert found.completed + found.failed + found.interrupted == len(run)
    assert sum(found.errors.values()) == found.failed
    assert Requests.of_rows(run).itl.size == 2 * found.completed


def test_a_generated_run_has_the_numbers_that_numpy_finds() -> None:
    chance = np.random.default_rng(5)
    run: list[RequestRow] = []
    for index in range(200):
        sent = index * 0.1 + chance.random() / 100
        at = sent + 0.1 + np.cumsum(chance.gamma(2, 0.02, size=chance.integers(1, 30)))
        run.append(
            record(
                index, scheduled=index * 0.1, sent=sent, token_times=tuple(at), first_token=at[0], ended=at[-1],
                output_tokens=len(at), input_tokens=int(chance.integers(1, 99)),
            )
        )  # fmt: skip
    run += [failed(200, ended=30.0), record(201, warmup=True)]
    flat = summarize(run, Slo(ttft=0.2, tpot=0.04)).flat()
    good = run[:200]
    ttft = np.array([one.token_times[0] - one.sent for one in good])
    e2el = np.array([one.ended - one.sent for one in good])
    longer = [one for one in good if one.output_tokens > 1]
    tpot = np.array([(one.ended - one.token_times[0]) / (one.output_tokens - 1) for one in longer])
    itl = np.concatenate([np.diff(one.token_times) for one in good])
    for name, values in (("ttft", ttft), ("e2el", e2el), ("tpot", tpot), ("itl", itl)):
        expected = {
            "mean": np.mean(values), "std": np.std(values), "median": np.median(values),
            "p90": np.percentile(values, 90), "p99": np.percentile(values, 99), "max": np.max(values),
        }  # fmt: skip
        for key, value in expected.items():
            assert flat[f"{key}_{name}_ms"] == pytest.approx(value * 1000), (key, name)
    assert flat["duration"] == pytest.approx(30.0)
    assert flat["output_throughput"] == pytest.approx(sum(one.output_tokens for one in good) / 30.0)
    slow = Requests.of_rows(good).tpot > 0.04
    kept = sum(one.token_times[0] - one.scheduled <= 0.2 and not late for one, late in zip(good, slow, strict=True))
    assert 0 < kept < 200
    assert flat["request_goodput"] == pytest.approx(kept / 30.0)


PROFILE = "llama-3.1-8b-h100-tp1"
WORK = SyntheticWorkload(rate=8, requests=30, input_mean=300, output_mean=20)
MIXED = (EngineGroup(role="prefill", profile=PROFILE), EngineGroup(role="decode", profile="qwen3-32b-h100-tp2"))


def simulated(fleet: str = "1P1D", program: str = "disaggregated", **changes: object) -> Experiment:
    return Experiment(program=program, fleet=Fleet(fleet, profile=PROFILE), **{"work": WORK, **changes})  # type: ignore[arg-type]


def run(spec: FleetSpec, program: str = "disaggregated", workload: SyntheticWorkload = WORK):  # type: ignore[no-untyped-def]
    return run_once(load_program(program, {}), spec, PROFILE, EngineOptions(), workload, 0)


def test_a_fleet_that_cannot_exchange_kv_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"prefill-0 .* and decode-0 .*cannot exchange KV.*without_kv_exchange"):
        run(FleetSpec(engines=MIXED))


def test_engines_of_one_model_with_other_degrees_exchange_kv() -> None:
    names = ("llama-3.1-70b-fp8-h100-tp4", "llama-3.1-70b-fp8-h100-tp8")
    groups = tuple(EngineGroup(role=r, profile=p) for r, p in zip(("prefill", "decode"), names, strict=True))
    assert not run(FleetSpec(engines=groups)).fallbacks


def test_what_was_made_good_is_told_in_columns_and_a_warning(tmp_path: Path) -> None:
    file, notes = tmp_path / "fleet.yaml", list[str]()
    file.write_text(
        "without_kv_exchange: true\nengines:\n- {role: prefill}\n- {role: decode, profile: qwen3-32b-h100-tp2}\n"
    )
    report = simulated(str(file)).report([8.0], "x", notes.append)
    row = dict(zip(simulation.headings(report), simulation.table(report)[0], strict=False))
    assert (row["done"], row["failed"], row["retries"], row["fallbacks"]) == ("30", "0", "30", "30")
    assert any("one engine served 30 of 30 requests" in note and "cannot exchange KV" in note for note in notes)


def test_a_sweep_tells_failures_and_fallbacks_too(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(
        "without_kv_exchange: true\nengines:\n- {role: prefill}\n- {role: decode, profile: qwen3-32b-h100-tp2}\n"
    )
    found = sweep(simulated(), 8.0, [parse_axis(f"fleet=1P1D,{file}")], "ttft.mean", "tpot.mean")
    told = [dict(zip(sweeps.headings(found), row, strict=False))["fallbacks"] for row in sweeps.rows(found)]
    assert told == ["0", "30"]


def test_rates_are_of_the_steady_part_of_a_run() -> None:
    """Ten requests per second, each of which takes 20 s: the drain is as long as the arrivals."""
    sent = np.arange(200) / 10
    samples = Requests.of({
        "scheduled": sent, "sent": sent, "first_token": sent + 1, "last_token": sent + 8, "input_tokens": np.ones(200),
        "output_tokens": np.ones(200), "ok": np.ones(200, dtype=np.bool_), "ended": sent + 8,
    })  # fmt: skip
    found = summarize(samples, Slo(ttft=2))
    assert found.request_throughput == pytest.approx(200 / 27.9)
    assert found.steady_throughput == pytest.approx(10, rel=0.01)
    assert found.steady_goodput == found.steady_throughput
    assert achieved(found.flat(), "goodput") == found.steady_goodput


def test_a_run_that_is_all_drain_has_the_rate_of_the_whole() -> None:
    sent = np.zeros(50)
    ended = np.linspace(1, 5, 50)
    samples = Requests.of({
        "scheduled": sent, "sent": sent, "first_token": ended, "last_token": ended, "input_tokens": np.ones(50),
        "output_tokens": np.ones(50), "ok": np.ones(50, dtype=np.bool_), "ended": ended,
    })  # fmt: skip
    found = summarize(samples)
    assert found.steady_throughput is None
    assert achieved(found.flat(), "throughput") == 10
    assert achieved(found.flat(), "goodput") is None


def test_seeds_that_change_nothing_have_no_interval() -> None:
    assert Estimate.of([2.0, 2.0, 2.0]) == Estimate(2.0, None)
    assert Estimate.of([2.0, 3.0, 2.0]).half


@pytest.mark.slow
def test_a_trace_at_its_own_times_has_no_interval(tmp_path: Path) -> None:
    from tercet_lab.bench.simulated.scenario import PlannedWorkload

    trace = tmp_path / "t.jsonl"
    trace.write_text(
        "".join(f'{{"timestamp": {n * 200}, "input_length": 64, "output_length": 4}}\n' for n in range(12))
    )
    work, notes = PlannedWorkload(workload=(f"mooncake,path={trace}",), arrivals="trace"), list[str]()
    base = simulated("both=1", "data_parallel", work=work)
    found = sweep(base, 5.0, [parse_axis("max_num_seqs=4,8")], "ttft.mean", "tpot.mean", 3, notes.append)
    assert "±" not in str(sweeps.rows(found))
    assert any("seeds gave the same" in note for note in notes)


def test_an_empty_value_is_a_value() -> None:
    assert parse_axis("reschedule=,neutral_load")[1] == ("", "neutral_load")
    with pytest.raises(BadRequest, match="is not NAME=VALUE"):
        parse_axis("reschedule=")
    found = sweep(simulated("both=2"), 8.0, [parse_axis("reschedule=,neutral_load")], "ttft.mean", "tpot.mean")
    assert [trial.settings["reschedule"] for trial in found.trials] == ["", "neutral_load"]


def test_a_sweep_is_a_result_that_can_be_drawn(tmp_path: Path) -> None:
    file = tmp_path / "sweep.json"
    found = sweep(simulated(), 8.0, [parse_axis("max_num_seqs=1,64")], "ttft.mean", "tpot.mean", seeds=2)
    file.write_bytes(found.to_json())
    result = load_result(file)
    assert [(point.label, point.metrics["completed"]) for point in result.points] == [
        ("max_num_seqs=1", 60), ("max_num_seqs=64", 60),
    ]  # fmt: skip
    assert result.config["sweep"]["trials"][0]["standing"]
    assert "max_num_seqs=64" in markdown([result])


@pytest.mark.parametrize("kind", ["die", "freeze"])
def test_what_an_engine_did_before_it_died_stays_in_the_sums(kind: str) -> None:
    work = SyntheticWorkload(rate=8, requests=40, input_mean=300, output_mean=20)
    calm = run(FleetSpec(engines=(EngineGroup(role="both", count=2),)), "data_parallel", work)
    fault = Fault(engine="both-0", at=4.0, down=0.5, kind=kind)  # type: ignore[arg-type]
    shaken = run(FleetSpec(engines=(EngineGroup(role="both", count=2),), faults=(fault,)), "data_parallel", work)
    assert len(shaken.requests) == 40
    for name in ("steps", "prefill_tokens", "decode_tokens"):
        assert shaken.counts[name] > 0.85 * calm.counts[name]
    assert shaken.busy > 0.85 * calm.busy


EVERY_S = 0.0005
FEW_BLOCKS = 90


def arrivals_of(seed: int) -> list[tuple[float, Request]]:
    chance, when, found = random.Random(seed), 0.2, list[tuple[float, Request]]()
    for number in range(60):
        when += chance.choice((0.0, chance.expovariate(25)))
        prompt = tuple(chance.randrange(9) for _ in range(chance.randrange(1, 400)))
        found.append((when, Request(seq_id=f"r{number}", prompt=prompt, sampling_params={"max_tokens": 80})))
    return found


class Sampler:
    """A companion of a run that asks each engine at short intervals from the first arrival to the last one.

    In the middle it stops to pay for an engine, and later pays again.
    """

    def __init__(self, arrivals: list[tuple[float, Request]], unpaid: str = "") -> None:
        self._begin, self._end = arrivals[0][0], arrivals[-1][0]
        self._unpaid = unpaid
        self.imbalances: list[float] = []
        self.usages: list[float] = []

    async def __call__(self, service: Service, engines: Mapping[str, SimEngine], paid: PaidTime) -> None:
        loop, length = asyncio.get_running_loop(), self._end - self._begin
        if self._unpaid:
            loop.call_at(self._begin + length / 3, lambda: paid.end(self._unpaid, loop.time()))
            loop.call_at(self._begin + length * 2 / 3, lambda: paid.begin(self._unpaid, loop.time()))
        await asyncio.sleep(self._begin + EVERY_S / 2)
        while loop.time() < self._end:
            usages = [engine.load().kv_usage for name, engine in engines.items() if name in paid]
            self.usages.append(float(np.mean(usages)))
            self.imbalances.append(max(usages) - self.usages[-1])
            await asyncio.sleep(EVERY_S)


def require_same(exact: KVImbalance | None, sampled: Sampler) -> None:
    assert exact is not None
    assert len(sampled.usages) > 1000
    assert exact.usage == pytest.approx(np.mean(sampled.usages), abs=2e-4)
    assert exact.mean == pytest.approx(np.mean(sampled.imbalances), abs=2e-4)
    assert exact.p95 == pytest.approx(np.percentile(sampled.imbalances, 95), abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("program", "fleet"), [("data_parallel", "both=3"), ("disaggregated", "prefill=1,decode=2")])
@pytest.mark.parametrize("settled_at", [7, kv_usage.SETTLED_AT])
@pytest.mark.parametrize("faults", [(), ("die",), ("freeze", "drain")])
def test_it_is_that_of_short_samples(
    program: str, fleet: str, settled_at: int, faults: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With scarce blocks: sequences are preempted, leases and reservations wait."""
    monkeypatch.setattr(kv_usage, "SETTLED_AT", settled_at)
    spec = parse_fleet(fleet)
    first, *_, last = ("both-0", "both-2") if fleet.startswith("both") else ("decode-0", "decode-1")
    planned = tuple(
        Fault(engine=first if number else last, at=0.7 + number / 10, down=0.6, kind=kind)  # type: ignore[arg-type]
        for number, kind in enumerate(faults)
    )
    arrivals, options = arrivals_of(len(faults)), EngineOptions(total_blocks=FEW_BLOCKS)
    sampler = Sampler(arrivals, unpaid=last)
    outcome = run_requests(
        load_program(program), replace(spec, faults=planned), PROFILE, options, arrivals, companion=sampler
    )
    require_same(outcome.imbalance, sampler)


def test_it_follows_the_speed_of_a_shared_host(tmp_path: Path) -> None:
    sharing = HostSharing(
        prefill_beside_prefill=1.5, prefill_beside_decode=1.3, decode_beside_prefill=1.7, decode_beside_decode=2.5
    )
    file = tmp_path / "shared.json"
    file.write_bytes(msgspec.json.encode(replace(load_profile(PROFILE), sharing=sharing)))
    arrivals = arrivals_of(5)
    sampler = Sampler(arrivals)
    options = EngineOptions(total_blocks=2 * FEW_BLOCKS)
    outcome = run_requests(
        load_program("data_parallel"), parse_fleet("both=3@h"), str(file), options, arrivals, companion=sampler
    )
    require_same(outcome.imbalance, sampler)


def test_without_time_between_arrivals_there_is_none() -> None:
    arrivals = [(1.0, request) for _, request in arrivals_of(0)[:3]]
    program, fleet = load_program("data_parallel"), parse_fleet("both=1")
    assert run_requests(program, fleet, PROFILE, EngineOptions(), arrivals).imbalance is None
