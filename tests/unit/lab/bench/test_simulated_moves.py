"""Moves and rescheduling in ``tercet sim``: the router's own code over simulated engines, and what is reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tercet.cli import app
from tercet.protocol import BadRequest
from tercet.settings import Source, decode_settings
from tercet_lab.bench.results import load_result
from tercet_lab.bench.simulated import Experiment, Fleet, MovingSettings, SimulatedPoint, SyntheticWorkload
from tercet_lab.bench.simulated.sweep import sweep

pytestmark = pytest.mark.slow

# KV is scarce, lengths have a long tail, and requests come in bursts.
UNEVEN = SyntheticWorkload(
    rate=1, requests=300, input_mean=512, input_dev=1024, output_mean=256, output_dev=512, lengths="lognormal",
    arrivals="gamma", burstiness=1 / 9,
)  # fmt: skip
RATE = 40.0


def uneven(fleet: str = "both=4", **settings: object) -> Experiment:
    return Experiment(
        program="data_parallel",
        fleet=Fleet(fleet, profile="llama-3.1-8b-h100-tp1", total_blocks=2000),
        work=UNEVEN,
        moves=decode_settings(MovingSettings, Source(settings)),
    )


def imbalance(point: SimulatedPoint) -> float:
    assert point.imbalance is not None
    return point.imbalance.p95


def test_rescheduling_evens_kv_out_and_loses_no_throughput() -> None:
    without, with_it = uneven().point(RATE), uneven(reschedule=["neutral_load"]).point(RATE)
    assert without.moves.moved == 0
    assert with_it.moves.moved > 10
    assert with_it.summary.failed == 0
    assert imbalance(with_it) < 0.8 * imbalance(without)
    assert with_it.summary.output_throughput > 0.98 * without.summary.output_throughput
    moves = with_it.moves
    assert set(moves.outcomes) <= {"neutral_load moved", "neutral_load ended", "neutral_load failed"}
    assert moves.bytes > 0
    assert moves.pause_p50 is not None
    assert moves.pause_p50 < 0.05  # a few steps of this profile
    # Few positions are computed anew: what came during the last stage.
    assert moves.recomputed < 16 * moves.moved


@pytest.mark.slow
def test_a_run_with_moves_repeats_to_the_byte_and_reports_them() -> None:
    first, second = (uneven(reschedule=["neutral_load"]).report([RATE], "x").to_json() for _ in range(2))
    assert first == second
    assert b'"moves_neutral_load_moved"' in first
    assert b'"p95_kv_imbalance"' in first
    assert b'"reschedule"' in first


def test_an_engine_that_is_drained_is_emptied(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text("engines: [{role: both, count: 4}]\nfaults: [{engine: both-0, at: 3, down: 2, kind: drain}]\n")
    point = uneven(str(fleet)).point(RATE)
    assert point.summary.failed == 0
    assert point.moves.outcomes["drain moved"] > 5
    assert point.retries == 0


def test_what_runs_on_a_frozen_engine_goes_on_elsewhere(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text("engines: [{role: both, count: 4}]\nfaults: [{engine: both-0, at: 3, down: 30, kind: freeze}]\n")
    point = uneven(str(fleet)).point(RATE)
    assert point.summary.failed == 0
    assert point.retries > 0


@pytest.mark.slow
def test_settings_of_moves_are_axes_of_a_sweep() -> None:
    report = sweep(
        uneven(reschedule=["neutral_load"]), RATE, [("reschedule-threshold", ("0.1", "1"))], "ttft.p99", "tpot.p99"
    )
    often, never = (trial.points[0].moves.moved for trial in report.trials)
    assert often > 0
    assert never == 0
    with pytest.raises(BadRequest, match="--over reschedule-threshold: must be at most 1"):
        sweep(uneven(), RATE, [("reschedule-threshold", ("2",))], "ttft.p99", "tpot.p99")


def test_the_command_takes_the_routers_flags(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    line = "sim --fleet both=2 --request-rate 20 --num-prompts 60 --lengths lognormal --output-dev 300"
    moving = ["--option", "total_blocks=400", "--reschedule", "neutral_load", "--reschedule-threshold", "0.05"]
    assert app._run([*line.split(), *moving, "--result-filename", str(out)]) == 0
    result = load_result(out)
    assert result.config["moving"] == {"reschedule": ["neutral_load"], "reschedule-threshold": 0.05}


def test_a_policy_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert app._run(["sim", "--num-prompts", "5", "--reschedule", "neutral"]) == 2
    assert "there is no policy 'neutral'" in capsys.readouterr().err
