"""`import tercet.lab` for scripts and notebooks: experiments of typed parts, and their tables."""

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

from tercet.cli import app
from tercet.protocol import BadRequest, Fleet, Request
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
