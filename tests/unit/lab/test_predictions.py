"""Policies believe in lengths of answers that differ from the true ones by a lognormal factor."""

from __future__ import annotations

import shlex
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tercet.cli import app
from tercet.protocol import BadRequest, Fleet, Request

# Type checkers see one folder of `tercet`; the other one is in the distribution tercet-lab.
lab: Any = import_module("tercet.lab")
WORK = lab.Poisson(rate=45, requests=500, input=64, output=lab.Lognormal(150, 400))


def least_predicted() -> Any:
    """Return a program that sends each request to the engine with the fewest predicted tokens to come."""
    coming = defaultdict[str, int](int)

    async def program(request: Request, fleet: Fleet):  # type: ignore[no-untyped-def]
        tokens = int(request.headers["x-predicted-tokens"])
        name = min((member.name for member in fleet.members), key=lambda name: (coming[name], name))
        coming[name] += tokens
        try:
            with fleet.engine(name) as engine:
                yield engine.start_generate(request)
        finally:
            coming[name] -= tokens

    return program


def jct(error: float, seed: int) -> float:
    fleet = lab.Fleet(both=4, max_num_seqs=8)
    return lab.simulate(least_predicted(), fleet, WORK, seed=seed, predict_error=error).summary.e2el.mean


@pytest.mark.slow
def test_the_believed_length_differs_by_a_lognormal_factor_with_this_deviation() -> None:
    work = lab.Poisson(rate=100, requests=2_000, input=20, output=lab.Lognormal(400, 200))
    logs = dict[float, Any]()
    for error in (0.0, 0.5, 1.0):
        rows = lab.simulate("data_parallel", "both=4", work, predict_error=error).requests
        assert (rows["output_tokens"] == rows["wanted_tokens"]).all(), "answers have their true lengths"
        logs[error] = np.log(rows["predicted_tokens"] / rows["output_tokens"])
    assert not logs[0.0].any()
    assert np.std(logs[0.5]) == pytest.approx(0.5, rel=0.06)
    assert np.mean(logs[0.5]) == pytest.approx(0.0, abs=0.05)
    assert logs[1.0] == pytest.approx(2 * logs[0.5], abs=0.2), "the same luck, scaled"
    rows = lab.simulate("data_parallel", "both=4", lab.Poisson(10, 20)).requests
    assert np.isnan(rows["predicted_tokens"]).all()


@pytest.mark.slow
def test_policies_lose_as_predictions_get_worse() -> None:
    means = [np.mean([jct(error, seed) for seed in range(3)]) for error in (0.0, 1.0, 3.0)]
    assert means[0] < means[1] < means[2]
    assert means[2] > 1.05 * means[0]


@pytest.mark.parametrize("program", ["auto", "disaggregated"])
def test_predictions_without_error_change_nothing(program: str) -> None:
    work = lab.Poisson(rate=20, requests=150, input=lab.Lognormal(800, 800), output=lab.Lognormal(60, 100))
    told, plain = (
        lab.simulate(program, "2P2D", work, **({} if error is None else {"predict_error": error})).requests
        for error in (0.0, None)
    )
    told.fill("predicted_tokens", [float("nan")] * 150)
    assert told.plain() == plain.plain()


def test_auto_believes_the_prediction() -> None:
    work = lab.Poisson(rate=20, requests=150, input=lab.Lognormal(800, 800), output=lab.Lognormal(60, 100))
    right, wrong = (lab.simulate("auto", "2P2D", work, predict_error=error).requests for error in (0.0, 3.0))
    assert right["ended"].tolist() != wrong["ended"].tolist()


def test_later_turns_have_predictions_and_an_error_is_an_axis_of_a_sweep() -> None:
    run = lab.simulate("data_parallel", "both=1", lab.Sessions(4.0, 12, turns=3, output_len=20), predict_error=0.3)
    assert np.isfinite(run.requests["predicted_tokens"]).all()
    assert max(run.requests["turn"]) == 2
    grid = lab.sweep("auto", "2P2D", lab.Poisson(10, 60), over={"predict_error": [0.0, 2.0]})
    assert grid.points[0] != grid.points[1]
    with pytest.raises(BadRequest, match="--over: predict_error=much is not a number"):
        lab.sweep("auto", "2P2D", lab.Poisson(10, 60), over={"predict_error": ["much"]})
    with pytest.raises(BadRequest, match="predict_error: is -1, and must be 0 or more"):
        lab.simulate("auto", "2P2D", lab.Poisson(10, 60), predict_error=-1.0)


def test_the_command_repeats_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = lab.simulate("auto", "2P2D", lab.Poisson(10, 60), predict_error=0.4)
    report = tmp_path / "report.json"
    assert app._run([*shlex.split(run.experiment.command())[1:], "--result-filename", str(report)]) == 0
    assert report.read_bytes() == run.experiment.report([10.0], run.experiment.name).to_json()
    assert app._run(["sim", "--num-prompts", "20", "--predict-error", "-1"]) == 2
    assert "--predict-error: is -1" in capsys.readouterr().err
