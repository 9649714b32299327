"""The warm-up of a run is found by MSER-5, said, and left out of means on request; replays keep all."""

from __future__ import annotations

import math
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.cli import app
from tercet.protocol import BadRequest
from tercet_lab.bench.simulated.steady import truncation

# Type checkers see one folder of `tercet`; the other one is in the distribution tercet-lab.
lab: Any = import_module("tercet.lab")


def by_definition(values: list[float]) -> int | None:
    """MSER-5 as the paper has it: batch means, and the squared half-width of each truncated series."""
    batches = [sum(values[at : at + 5]) / 5 for at in range(0, len(values) - len(values) % 5, 5)]
    best, least = 0, math.inf
    for cut in range(len(batches) - 5):
        rest = batches[cut:]
        mean = sum(rest) / len(rest)
        found = sum((each - mean) ** 2 for each in rest) / len(rest) ** 2
        if found < least * (1 - 1e-9):
            best, least = cut, found
    return None if best > len(batches) // 2 else 5 * best


@given(st.lists(st.integers(0, 1_000_000), min_size=40, max_size=120, unique=True))
def test_the_cut_is_that_of_the_definition(values: list[int]) -> None:
    assert truncation(np.array(values, dtype=float)) == by_definition(list(map(float, values)))


def test_a_ramp_is_cut_and_a_trend_has_no_steady_part() -> None:
    chance = np.random.default_rng(0)
    level = chance.normal(1.0, 0.1, 400)
    ramp = level.copy()
    ramp[:80] *= np.linspace(0.1, 1.0, 80)
    assert 40 <= (truncation(ramp) or 0) <= 90
    assert (truncation(level) or 0) < 100
    assert truncation(np.concatenate([np.linspace(0.0, 9.0, 300), np.full(100, 9.0)])) is None
    assert truncation(np.full(400, 2.0)) == 0
    ramp[5:9] = np.nan
    assert 40 <= (truncation(ramp) or 0) <= 90


SLO = lab.Slo(ttft=0.4)
# Decodes of 600 tokens take about 6 s: TTFT and JCT grow until the batch is full.
WORK = lab.Poisson(rate=12, requests=600, input=400, output=600)


def test_a_run_says_its_steady_window_and_means_leave_the_warm_up_out() -> None:
    run = lab.simulate("data_parallel", "both=1", WORK, slo=SLO)
    steady = run.steady
    assert 0 < steady.left_out < 300
    due = np.sort(run.requests["scheduled"])
    assert steady.begin == due[steady.left_out]
    assert steady.begin < due[-1] < steady.end
    assert len(steady.requests) == 600 - steady.left_out
    assert steady.summary.e2el.mean > run.summary.e2el.mean
    said = list[str]()
    without = lab.simulate("data_parallel", "both=1", WORK, slo=SLO, steady=True, note=said.append)
    assert without.summary == steady.summary == without.point.summary
    assert len(without.requests) == 600, "the table has all"
    wanted = f"warm-up: the first {steady.left_out} of 600 requests ({steady.begin - due[0]:.1f} s) are left out"
    assert any(wanted in line for line in said)


def test_a_replay_keeps_all_its_requests_and_says_so() -> None:
    run = lab.simulate("data_parallel", "both=1", WORK, slo=SLO)
    again = lab.simulate("data_parallel", "both=1", lab.Rows(run.requests), slo=SLO, steady=True)
    assert again.steady.left_out == 0
    assert again.steady.why == "all requests of a replay are kept"
    assert again.summary.completed == 600
    few = lab.simulate("data_parallel", "both=1", lab.Poisson(5, 50), steady=True)
    assert few.steady.why == "all requests are kept: 50 are too few to find a warm-up"
    at_once = lab.simulate("data_parallel", "both=1", lab.Poisson(math.inf, 200, input=50, output=3))
    assert at_once.steady.left_out == 0
    with pytest.raises(BadRequest, match="steady: a stream keeps no requests"):
        lab.stream("data_parallel", "both=1", WORK, steady=True)


def test_the_command_and_files_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = lab.simulate("data_parallel", "both=1", WORK, slo=SLO, steady=True)
    file, report = tmp_path / "run.json", tmp_path / "report.json"
    run.save(file)
    assert lab.load(file).summary == run.summary
    assert app._run([*shlex.split(run.experiment.command())[1:], "--result-filename", str(report)]) == 0
    assert f"the first {run.steady.left_out} of 600 requests" in capsys.readouterr().err
    assert report.read_bytes() == run.experiment.report([12.0], run.experiment.name).to_json()
