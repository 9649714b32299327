"""`import tercet.lab` for scripts and notebooks: experiments of typed parts and their tables; metrics that mean the
same everywhere; and the warm-up, which MSER-5 finds.
"""

from __future__ import annotations

import asyncio
import gc
import math
import shlex
import subprocess
import sys
import threading
import tracemalloc
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.cli import app
from tercet.protocol import BadRequest, Fleet, Request
from tercet_lab.bench.simulated.run_metrics import METRICS, metric_of
from tercet_lab.bench.simulated.steady import truncation
from tercet_lab.tables import REQUEST_COLUMNS

# Type checkers see one folder of `tercet`; the other one is in the distribution tercet-lab.
lab: Any = import_module("tercet.lab")
WORK = lab.Poisson(rate=20, requests=60, warm_up=5, input=lab.Lognormal(300, 200), output=lab.Fixed(16))


async def anywhere(request: Request, fleet: Fleet, *, pick: str = "round_robin"):  # type: ignore[no-untyped-def]
    with fleet.pick("both", by=pick, request=request) as engine:
        yield engine.start_generate(request)


def test_a_function_runs_with_arguments_and_gives_one_row_for_each_request() -> None:
    run = lab.simulate(anywhere, "both=2", WORK, args={"pick": "least_loaded"}, slo=lab.Slo(ttft=1.0, tpot=0.1))
    assert tuple(run.requests.columns) == tuple(REQUEST_COLUMNS)
    assert len(run.requests) == 60
    row = next(run.requests.rows())
    assert (row["id"], row["program"], row["ok"], row["met_slo"], row["wanted_tokens"]) == ("r5", "anywhere", 1, 1, 16)
    assert row["engine_prefill"] == row["engine_decode"] in ("both-0", "both-1")
    assert row["cached_tokens"] == 0
    assert run.attainment == 1.0
    assert run.goodput == pytest.approx(20, rel=0.5)
    assert run.summary.ttft.mean == pytest.approx(float(np.mean(run.requests.ttft)))
    assert run.engine_hours == pytest.approx(2 * max(run.requests["ended"]) / 3600, rel=0.01)


def test_a_simulation_in_a_running_loop_leaves_it_as_it_was() -> None:
    async def cell() -> float:
        run = lab.simulate("data_parallel", "both=1", WORK)
        await asyncio.sleep(0)
        return run.summary.ttft.mean

    assert asyncio.run(cell()) == lab.simulate("data_parallel", "both=1", WORK).summary.ttft.mean


def test_a_row_tells_where_the_prompt_was_computed_and_what_was_sent() -> None:
    work = lab.Poisson(rate=4, requests=30, input=400, output=8, prefixes=1, prefix=320)
    rows = list(lab.simulate("disaggregated", "1P1D", work).requests.rows())
    assert {row["engine_prefill"] for row in rows} <= {"prefill-0", "decode-0"}
    assert {row["engine_decode"] for row in rows} == {"decode-0"}
    assert rows[0]["sent_bytes"] > 0
    assert rows[0]["cached_tokens"] == 0
    assert {row["cached_tokens"] for row in rows[1:]} == {320}, "whole blocks of the prefix"


def test_retries_preemptions_and_failures_are_in_the_rows() -> None:
    fleet = lab.Fleet("both=2", total_blocks=120).fault("both-0", at=1.0, down=2.0)
    run = lab.simulate("data_parallel", fleet, lab.Poisson(rate=30, requests=90, input=200, output=200))
    assert int(np.nansum(run.requests["retries"])) == run.point.retries > 0
    assert int(np.nansum(run.requests["preempted"])) == run.point.counts["preemptions"] > 0
    failed = lab.simulate("data_parallel", "both=1", lab.Sessions(1.0, 6, turns=3, input_len=70_000, output_len=4))
    assert {*failed.requests["failure"]} - {""} == {"bad_request", "unsent"}
    assert sorted(set(failed.requests["turn"].tolist())) == [0, 1, 2]
    assert not failed.requests["ok"].all()


def test_moves_engines_and_token_times_are_recorded_on_request() -> None:
    record = lab.Record(tokens=True, engines_every=0.5)
    work = lab.Poisson(rate=60, requests=150, input=300, output=lab.Lognormal(100, 300))
    fleet = lab.Fleet(both=4, total_blocks=400)
    run = lab.simulate("data_parallel", fleet, work, moves=lab.Moves("neutral_load", interval=0.5), record=record)
    assert {*run.engines["engine"]} == {f"both-{n}" for n in range(4)}
    assert sum(outcome == "moved" for outcome in run.moves["outcome"]) == run.point.moves.moved
    assert int(np.nansum(run.requests["moves"])) == run.point.moves.moved > 0
    row = next(run.requests.rows())
    assert len(row["token_times"]) == row["output_tokens"]
    assert row["token_times"][0] == row["first_token"]
    assert row["token_times"][-1] == row["last_token"]


def test_tables_are_written_and_read(tmp_path: Path) -> None:
    run = lab.simulate("disaggregated", "1P1D", WORK, slo=lab.Slo(ttft=0.05), record=lab.Record(tokens=True))
    file = tmp_path / "run.csv"
    run.requests.write(file)
    again = lab.Requests.read(file)
    assert again.plain() == run.requests.plain()
    with pytest.raises(BadRequest, match=r"path: .*\.txt must end with \.csv or \.parquet"):
        run.requests.write(tmp_path / "run.txt")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(BadRequest, match="lacks the column sent"):
        lab.Requests.read(tmp_path / "other.csv")
    (tmp_path / "torn.csv").write_text(file.read_text().splitlines()[0] + "\nr1,2\n")
    with pytest.raises(BadRequest, match="line 2: has 2 of"):
        lab.Requests.read(tmp_path / "torn.csv")
    with pytest.raises(BadRequest, match="there is no 'ttft'; the columns are id"):
        run.requests["ttft"]


@pytest.mark.parametrize("module", ["pandas", "pyarrow", "polars"])
def test_data_frames_need_an_extra_and_say_so(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BadRequest, match=rf"{module}: is not installed; pip install 'tercet-lab\[tables\]', or write"):
        getattr(lab.Requests(), f"to_{module.removeprefix('py')}")()


PROGRAM = """
async def mine(request, fleet, *, pick="round_robin"):
    with fleet.pick("both", by=pick, request=request) as engine:
        yield engine.start_generate(request)
"""


def test_the_command_repeats_the_experiment(tmp_path: Path) -> None:
    file, report = tmp_path / "mine.py", tmp_path / "report.json"
    file.write_text(PROGRAM)
    fleet = lab.Fleet("both=2", total_blocks=900).fault("both-1", at=1.0, down=1.0).write(tmp_path / "fleet.yaml")
    run = lab.simulate(
        f"{file}:mine", fleet, lab.Poisson(12, 80, input=lab.Normal(300, 90), output=20, burstiness=0.5, warm_up=3),
        args={"pick": "least_loaded"}, seed=7, slo=lab.Slo(ttft=0.25, tpot=0.02),
        moves=lab.Moves("neutral_load", threshold=0.3),
    )  # fmt: skip
    line = shlex.split(run.experiment.command())
    assert line[:2] == ["tercet", "sim"]
    assert app._run([*line[1:], "--result-filename", str(report)]) == 0
    assert report.read_bytes() == run.experiment.report([12.0], run.experiment.name).to_json()


def test_what_a_command_line_cannot_say_is_named() -> None:
    with_fault = lab.Fleet("both=2").fault("both-0", at=1.0)

    async def inner(request: Request, fleet: Fleet):  # type: ignore[no-untyped-def]
        with fleet.pick("both", request=request) as engine:
            yield engine.start_generate(request)

    for parts, said in (
        ({"program": inner}, "program: a command line cannot name inner; define it at the top of a .py file"),
        ({"fleet": with_fault}, "fleet: a command line takes faults from a file"),
    ):
        given = lab.Experiment(**{"program": "data_parallel", "work": WORK, **parts})
        with pytest.raises(BadRequest, match=said):
            given.command()
    assert "test_lab.py:anywhere" in lab.Experiment(program=anywhere, work=WORK).command()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: lab.Fleet("3X"), "fleet: '3X' is not"),
        (lambda: lab.Fleet("2P2D", both=1), "fleet: give either"),
        (lambda: lab.Fleet("both=1", blocks=3), "blocks"),
        (lambda: lab.Fleet("both=1").fault("both-7", at=0), "both-7"),
        (lambda: lab.Poisson(0, 10), "rate: is 0"),
        (lambda: lab.Moves(treshold=0.2), "moves: unknown key treshold"),
        (lambda: lab.Record(engines_every=0), "engines_every: is 0"),
        (lambda: lab.simulate(anywhere, "both=1", WORK, args={"pik": "x"}), "args: anywhere has no parameter 'pik'"),
        (lambda: lab.simulate(anywhere), "fleet: is missing"),
        (lambda: lab.simulate(math.sqrt, "both=1", WORK), "program: sqrt is not an async generator"),
    ],
)
def test_wrong_parts_are_named(make: Any, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        make()


def test_a_planner_may_be_a_function_and_takes_its_objectives_from_the_slo() -> None:
    from tercet.decisions.planning import FleetPlan, Observed, WantedPlan

    def one_more(observed: Observed) -> WantedPlan:
        return WantedPlan(FleetPlan(1, 2), "it was asked")

    planner = lab.Planner(one_more, interval=2.0, most=3, start_time=1)
    work = lab.Poisson(rate=10, requests=100, input=200, output=10)
    run = lab.simulate("disaggregated", "1P1D", work, slo=lab.Slo(ttft=1.0, tpot=0.1), planner=planner)
    changes = [row for row in run.plans.rows() if row["started"] or row["flipped"] or row["stopped"]]
    assert [(row["plan"], row["reason"]) for row in changes] == [("1P2D", "it was asked")]
    assert len(run.plans) == run.point.planned.decisions > 3
    assert {row["expected"] for row in run.plans.rows()} == {None}, "this policy does not tell"
    assert run.plans["came"].tolist() == [1.0] * len(run.plans), "lenient limits"
    assert 2 * max(run.requests["ended"]) / 3600 < run.engine_hours < 3 * max(run.requests["ended"]) / 3600


def test_a_stream_has_the_rows_of_the_run_and_keeps_none() -> None:
    given = lab.Experiment(program="disaggregated", fleet=lab.Fleet("1P1D"), work=WORK, slo=lab.Slo(ttft=0.1))
    batches = list(lab.stream(given, every=25))
    assert [len(each) for each in batches] == [25, 25, 10]
    assert [row for each in batches for row in each.rows()] == list(lab.simulate(given).requests.rows())
    with pytest.raises(BadRequest, match="every: is 0"):
        lab.stream(given, every=0)
    with pytest.raises(BadRequest, match="there is no 'none'"):
        list(lab.stream(given, program="none"))


def test_a_stream_that_is_left_ends_its_simulation() -> None:
    work = lab.Poisson(rate=50, requests=100_000, input=50, output=2)
    stream = lab.stream("data_parallel", "both=2", work, every=10)
    assert len(next(stream)) == 10
    stream.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "lab.stream"]


@pytest.mark.slow
def test_rows_of_a_stream_are_freed() -> None:
    """What is allocated after the second tenth of a long run is about what is allocated at its end."""
    work = lab.Poisson(rate=50, requests=5_000, input=50, output=2)
    tracemalloc.start()
    try:
        kept = list[int]()
        for _ in lab.stream("data_parallel", "both=2", work, every=500):
            gc.collect()
            kept.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert len(kept) == 10
    assert kept[-1] < kept[2] + 500_000, "5,000 rows take 1.2 MB"


STREAMED = """
import resource, sys
import tercet.lab as lab

work = lab.Poisson(rate=100, requests=int(sys.argv[1]), input=lab.Lognormal(100, 100), output=4)
rows = sum(len(each) for each in lab.stream("data_parallel", "both=2", work, every=5_000))
print(rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_the_memory_of_a_stream_does_not_grow_with_its_requests() -> None:
    """60,000 rows of a run take 14 MB, and what a run may forget more."""
    peaks = list[int]()
    for requests in (20_000, 60_000):
        line = [sys.executable, "-c", STREAMED, str(requests)]
        ran = subprocess.run(line, capture_output=True, text=True, check=True, timeout=400)
        rows, peak = map(int, ran.stdout.split())
        assert rows == requests
        peaks.append(peak)  # KiB
    assert peaks[1] < peaks[0] + 4_000


# `import tercet.lab`: the laboratory under the product's name.


def test_a_script_needs_one_import() -> None:
    simulation = lab.Experiment(
        program="data_parallel",
        fleet=lab.Fleet("both=2", profile="llama-3.1-8b-h100-tp1"),
        work=lab.SyntheticWorkload(rate=4.0, requests=20),
    )
    assert simulation.point(4.0).summary.completed == 20


def test_the_product_does_not_load_it() -> None:
    loaded = "import sys, tercet.cli; print(any(name.startswith(('tercet.lab', 'tercet_lab')) for name in sys.modules))"
    found = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


SLO = lab.Slo(ttft=0.02, tpot=0.02)
MEASURED_WORK = lab.Poisson(rate=30, requests=120, input=lab.Lognormal(400, 300), output=16)


def test_a_run_and_its_point_in_a_sweep_have_the_same_values() -> None:
    run = lab.simulate("data_parallel", "both=2", MEASURED_WORK, slo=SLO)
    grid = lab.sweep("data_parallel", "both=2", MEASURED_WORK, slo=SLO, over={"rate": [30]})
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
    found = lab.max_rate("data_parallel", "both=2", MEASURED_WORK, slo=SLO, seeds=1)
    row = next(found.table.rows())
    assert [row[name] for name in ("attainment", "goodput", "throughput")] == [
        metric_of(name).value(found.runs[0]) for name in ("attainment", "goodput", "throughput")
    ]


def test_a_figure_draws_the_value_of_the_table() -> None:
    grid = lab.sweep("data_parallel", "both=2", MEASURED_WORK, slo=SLO, over={"rate": [30, 60]}, seeds=2)
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


STEADY_SLO = lab.Slo(ttft=0.4)
# Decodes of 600 tokens take about 6 s: TTFT and JCT grow until the batch is full.
LONG_ANSWERS = lab.Poisson(rate=12, requests=600, input=400, output=600)


def test_a_run_says_its_steady_window_and_means_leave_the_warm_up_out() -> None:
    run = lab.simulate("data_parallel", "both=1", LONG_ANSWERS, slo=STEADY_SLO)
    steady = run.steady
    assert 0 < steady.left_out < 300
    due = np.sort(run.requests["scheduled"])
    assert steady.begin == due[steady.left_out]
    assert steady.begin < due[-1] < steady.end
    assert len(steady.requests) == 600 - steady.left_out
    assert steady.summary.e2el.mean > run.summary.e2el.mean
    said = list[str]()
    without = lab.simulate("data_parallel", "both=1", LONG_ANSWERS, slo=STEADY_SLO, steady=True, note=said.append)
    assert without.summary == steady.summary == without.point.summary
    assert len(without.requests) == 600, "the table has all"
    wanted = f"warm-up: the first {steady.left_out} of 600 requests ({steady.begin - due[0]:.1f} s) are left out"
    assert any(wanted in line for line in said)


def test_a_replay_keeps_all_its_requests_and_says_so() -> None:
    run = lab.simulate("data_parallel", "both=1", LONG_ANSWERS, slo=STEADY_SLO)
    again = lab.simulate("data_parallel", "both=1", lab.Rows(run.requests), slo=STEADY_SLO, steady=True)
    assert again.steady.left_out == 0
    assert again.steady.why == "all requests of a replay are kept"
    assert again.summary.completed == 600
    few = lab.simulate("data_parallel", "both=1", lab.Poisson(5, 50), steady=True)
    assert few.steady.why == "all requests are kept: 50 are too few to find a warm-up"
    at_once = lab.simulate("data_parallel", "both=1", lab.Poisson(math.inf, 200, input=50, output=3))
    assert at_once.steady.left_out == 0
    with pytest.raises(BadRequest, match="steady: a stream keeps no requests"):
        lab.stream("data_parallel", "both=1", LONG_ANSWERS, steady=True)


def test_the_command_and_files_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = lab.simulate("data_parallel", "both=1", LONG_ANSWERS, slo=STEADY_SLO, steady=True)
    file, report = tmp_path / "run.json", tmp_path / "report.json"
    run.save(file)
    assert lab.load(file).summary == run.summary
    assert app._run([*shlex.split(run.experiment.command())[1:], "--result-filename", str(report)]) == 0
    assert f"the first {run.steady.left_out} of 600 requests" in capsys.readouterr().err
    assert report.read_bytes() == run.experiment.report([12.0], run.experiment.name).to_json()
