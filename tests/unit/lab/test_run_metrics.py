"""One name of a metric means the same in tables of sweeps, figures and the search of a rate."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import pytest

from tercet.cli import app
from tercet.protocol import BadRequest
from tercet_lab.bench.simulated.run_metrics import METRICS, metric_of

# Type checkers see one folder of `tercet`; the other one is in the distribution tercet-lab.
lab: Any = import_module("tercet.lab")
SLO = lab.Slo(ttft=0.02, tpot=0.02)
WORK = lab.Poisson(rate=30, requests=120, input=lab.Lognormal(400, 300), output=16)


def test_a_run_and_its_point_in_a_sweep_have_the_same_values() -> None:
    run = lab.simulate("data_parallel", "both=2", WORK, slo=SLO)
    grid = lab.sweep("data_parallel", "both=2", WORK, slo=SLO, over={"rate": [30]})
    for name, metric in METRICS.items():
        if name.startswith("itl"):
            assert math.isnan(metric.value(run)), "no times of tokens were recorded"
            with pytest.raises(BadRequest, match="a sweep keeps no times of tokens"):
                grid.table(name)
            continue
        row = next(grid.table(name).rows())
        assert row[name] == metric.value(run) == grid.estimate(0, name).mean, name
    assert metric_of("attainment").value(run) == run.attainment < 1
    assert metric_of("goodput").value(run) == run.goodput
    assert metric_of("ttft.p99").value(run) == run.summary.ttft.p99
    assert metric_of("engine_hours").value(run) == run.engine_hours
    per_hour = run.attainment * len(run.requests) / run.engine_hours
    assert metric_of("goodput_per_engine_hour").value(run) == pytest.approx(per_hour)
    found = lab.max_rate("data_parallel", "both=2", WORK, slo=SLO, seeds=1)
    row = next(found.table.rows())
    assert [row[name] for name in ("attainment", "goodput", "throughput")] == [
        metric_of(name).value(found.runs[0]) for name in ("attainment", "goodput", "throughput")
    ]


def test_a_figure_draws_the_value_of_the_table() -> None:
    grid = lab.sweep("data_parallel", "both=2", WORK, slo=SLO, over={"rate": [30, 60]}, seeds=2)
    for name, scale in (("attainment", 100), ("busy", 100), ("preemptions", 1), ("goodput", 1), ("moved", 1)):
        wanted = (grid.table(name)[name] * scale).tolist()
        line = lab.plot.goodput(grid, y=name).axes[0].get_lines()[0]
        assert line.get_ydata().tolist() == pytest.approx(wanted), name
        assert [bar.get_height() for bar in lab.plot.bars(grid, name).axes[0].patches] == pytest.approx(wanted)


def test_a_failed_request_makes_latencies_infinite_and_too_few_requests_make_them_unknown() -> None:
    work = lab.Sessions(1.0, 6, turns=3, input_len=70_000, output_len=4)
    failed = lab.simulate("data_parallel", "both=1", work)
    assert metric_of("ttft.mean").value(failed) == math.inf
    few = lab.simulate("data_parallel", "both=1", lab.Poisson(10, 20))
    assert math.isnan(metric_of("ttft.p99").value(few))
    assert metric_of("ttft.p90").value(few) == few.summary.ttft.p90
    measured = lab.Run(requests=few.requests)
    assert math.isnan(metric_of("busy").value(measured))


@pytest.mark.parametrize(
    ("name", "meant"),
    [("ttft.p98", "ttft.p9"), ("goodputt", "goodput"), ("engine-hours", "engine_hours"), ("TTFT.mean", "ttft.mean")],
)
def test_an_unknown_name_gets_a_suggestion_wherever_it_is_asked(
    name: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = lab.simulate("data_parallel", "both=1", lab.Poisson(10, 20), slo=SLO)
    grid = lab.sweep("data_parallel", "both=1", lab.Poisson(10, 20), slo=SLO, over={"rate": [10]})
    asked: list[Any] = [
        lambda: grid.table(name), lambda: grid.frontier(name, "goodput"), lambda: lab.plot.goodput(run, y=name),
        lambda: lab.plot.bars(grid, name), lambda: lab.plot.pareto(run, "goodput", name),
    ]  # fmt: skip
    for ask in asked:
        with pytest.raises(BadRequest, match=f"metric: '{name}' is unknown; did you mean {meant}"):
            ask()
    assert app._run(["sim", "--num-prompts", "20", "--over", "request-rate=4", "--x", name]) == 2
    assert f"did you mean {meant}" in capsys.readouterr().err
