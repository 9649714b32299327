"""Figures that say what was made good, and what was not measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tercet.programs import load_program
from tercet.protocol import BadRequest
from tercet_bench.bench_report import markdown
from tercet_lab.bench.results import achieved, load_result, summarize
from tercet_lab.bench.simulated import simulation
from tercet_lab.bench.simulated import sweep as sweeps
from tercet_lab.bench.simulated.experiment import Experiment, Fleet
from tercet_lab.bench.simulated.grid import Estimate
from tercet_lab.bench.simulated.scenario import EngineGroup, Fault, FleetSpec, SyntheticWorkload
from tercet_lab.bench.simulated.sweep import parse_axis, sweep
from tercet_lab.bench.simulated.virtual_run import run_once
from tercet_lab.sim import EngineOptions
from tercet_lab.slo import Slo
from tercet_lab.tables import Requests

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
