"""`lab.max_rate`: the largest rate within the objectives, with an interval over seeds."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from tercet.cli import app
from tercet.protocol import BadRequest

# Type checkers see one folder of `tercet`; the other one is in the distribution tercet-lab.
lab: Any = import_module("tercet.lab")
SLO = lab.Slo(ttft=0.1, tpot=0.02)


def work(rate: float = 20, requests: int = 150) -> Any:
    return lab.Poisson(rate, requests=requests, input=1000, output=16)


def test_the_rate_is_where_the_attainment_crosses_for_each_seed() -> None:
    found = lab.max_rate("data_parallel", "both=1", work(), slo=SLO, attainment=0.8, seeds=3, seed=4, tolerance=0.01)
    assert list(found.by_seed) == [4, 5, 6]
    for seed, rate in found.by_seed.items():
        below, above = (
            lab.simulate("data_parallel", "both=1", work(rate * factor), slo=SLO, seed=seed).attainment
            for factor in (0.97, 1.03)
        )
        assert below >= 0.8 > above
    assert found.rate == pytest.approx(sum(found.by_seed.values()) / 3)
    low, high = found.interval
    assert low < min(found.by_seed.values()) or high > max(found.by_seed.values())
    assert low < found.rate < high


@pytest.mark.slow
def test_the_search_ends_at_the_same_rate_wherever_it_begins() -> None:
    rates = [
        lab.max_rate("data_parallel", "both=1", work(start), slo=SLO, seeds=1, tolerance=0.01).rate
        for start in (1, 20, 300)
    ]
    assert rates == pytest.approx([rates[0]] * 3, rel=0.02)
    bounded = lab.max_rate("data_parallel", "both=1", work(), slo=SLO, seeds=1, low=1, high=300, tolerance=0.01)
    assert bounded.rate == pytest.approx(rates[0], rel=0.02)
    assert bounded.interval is None


@pytest.mark.slow
def test_all_runs_behind_it_are_kept() -> None:
    found = lab.max_rate("data_parallel", "both=2", work(), slo=SLO, seeds=2)
    assert len(found.table) == len(found.runs) >= 4
    row = next(found.table.rows())
    assert (row["seed"], row["rate"]) == (0, 20)
    assert row["attainment"] == found.runs[0].attainment
    assert str(len(found.runs)) in str(found)
    assert {run.experiment.seed for run in found.runs} == {0, 1}
    twice = lab.max_rate("data_parallel", "both=1", work(), slo=SLO, seeds=2)
    assert found.rate > 1.5 * twice.rate, "two engines serve about twice as much"


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"slo": None}, "slo: is missing"),
        ({"attainment": 90}, "attainment: is 90, and must be between 0 and 1"),
        ({"seeds": 0}, "seeds: is 0"),
        ({"low": 0}, "low: is 0"),
        ({"low": 10, "high": 5}, "high: is 5, and must be a rate above low"),
        ({"tolerance": 0}, "tolerance: is 0"),
        ({"low": 5_000}, r"low: .*% of the requests meet the limits at 5000 requests/s; give a lower one"),
        ({"high": 2}, r"high: 100.0% of the requests meet the limits at 2 requests/s; give a higher one"),
        ({"slo": lab.Slo(ttft=1e-6)}, "slo: 0.0% of the requests meet the limits"),
        ({"slo": lab.Slo(ttft=1e6)}, "work: 100.0% of the requests meet the limits"),
    ],
)
def test_wrong_arguments_are_named(parts: dict[str, Any], said: str) -> None:
    given = {"slo": SLO, "seeds": 1, **parts}
    with pytest.raises(BadRequest, match=said):
        lab.max_rate("data_parallel", "both=1", work(requests=20), **given)


COMMAND = ["sim", "--fleet", "both=1", "--input-mean", "1000", "--output-mean", "16", "--num-prompts", "150"]


@pytest.mark.slow
def test_the_command_line_searches_the_same_rate(capsys: pytest.CaptureFixture[str]) -> None:
    found = lab.max_rate("data_parallel", "both=1", work(), slo=SLO, attainment=0.8, seeds=2)
    searched = [*COMMAND, "--request-rate", "20", "--goodput", "ttft:100,tpot:20", "--seeds", "2"]
    assert app._run([*searched, "--max-rate", "attainment=0.8"]) == 0
    printed = capsys.readouterr()
    for rate in (found.rate, *found.by_seed.values(), *found.interval):
        assert f"{rate:.3g}" in printed.out
    assert "seed 1: " in printed.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--max-rate", "attainment=0.9"], "--max-rate: needs --goodput"),
        (["--goodput", "ttft:100", "--max-rate", "0.9"], "--max-rate: '0.9' is not attainment=SHARE"),
        (["--goodput", "ttft:100", "--max-rate", "attainment=90"], "a share between 0 and 1"),
        (["--goodput", "ttft:100", "--max-rate", "attainment=0.9", "--over", "fleet=both=1"], "--over: cannot be"),
        (
            ["--goodput", "ttft:100", "--max-rate", "attainment=0.9", "--request-rate", "2,4"],
            "--request-rate: give one",
        ),
    ],
)
def test_wrong_flags_are_named(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app._run([*COMMAND, *flags]) == 2
    assert said in capsys.readouterr().err
