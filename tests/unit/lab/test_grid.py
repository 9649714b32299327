"""Sweeps from scripts: axes, processes, the cache, paired differences and frontiers; and the largest rate within the
objectives.
"""

from __future__ import annotations

import asyncio
import csv
import math
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tercet.cli import app
from tercet.protocol import BadRequest, Fleet, Request
from tercet_lab.bench.simulated.grid import chance_of, corrected, with_setting

# Type checkers see one folder of `tercet`; the other one is in the distribution tercet-lab.
lab: Any = import_module("tercet.lab")
WORK = lab.Poisson(rate=20, requests=40, input=300, output=8)
BASE = lab.Experiment(program="data_parallel", work=WORK)


async def split(request: Request, fleet: Fleet, *, share: float = 0.5):  # type: ignore[no-untyped-def]
    with fleet.pick("both", by="round_robin" if share < 0.7 else "least_loaded", request=request) as engine:
        yield engine.start_generate(request)


def test_every_combination_has_a_row_with_an_interval_and_processes_change_nothing() -> None:
    over = {"program": ["data_parallel", split], "fleet": ["both=2", lab.Fleet(both=3)], "rate": [20, 60]}
    one, more = (lab.sweep(BASE, over=over, seeds=2, jobs=jobs, slo=lab.Slo(ttft=0.03)) for jobs in (1, 3))
    assert one.points == more.points
    rows = list(one.table("ttft.mean", "attainment", "goodput", "engine_hours", "imbalance").rows())
    assert [(row["program"], row["fleet"], row["rate"]) for row in rows] == [
        (program, fleet, rate) for program in ("data_parallel", "split") for fleet in ("both=2", "both=3")
        for rate in ("20", "60")
    ]  # fmt: skip
    assert all(row["ttft.mean_low"] < row["ttft.mean"] < row["ttft.mean_high"] for row in rows)
    alone = lab.simulate(split, lab.Fleet(both=3), lab.Poisson(60, 40, input=300, output=8), seed=1)
    assert one.points[-1][1].summary.ttft == alone.summary.ttft


def test_a_sweep_runs_in_a_notebook_too() -> None:
    async def cell() -> Any:
        grid = lab.sweep(BASE, over={"share": [0.1, 0.9]}, program=split, jobs=2)
        await asyncio.sleep(0)
        return grid

    assert [row["share"] for row in asyncio.run(cell()).table("ttft.mean").rows()] == ["0.1", "0.9"]


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("fleet", "prefill=1,decode=2", lambda each: str(each.fleet) == "prefill=1,decode=2"),
        ("total_blocks", 900, lambda each: each.fleet.options == {"total_blocks": 900}),
        ("profile", "qwen3-32b-h100-tp2", lambda each: each.fleet.profile == "qwen3-32b-h100-tp2"),
        ("request-rate", "7", lambda each: each.work.rate == 7.0),
        ("num-prompts", "50", lambda each: each.work.requests == 50),
        ("output-dev", "64", lambda each: each.work.output_dev == 64.0),
        ("burstiness", 0.5, lambda each: (each.work.arrivals, each.work.burstiness) == ("gamma", 0.5)),
        ("reschedule", "neutral_load", lambda each: each.moves.reschedule.policies == ("neutral_load",)),
        ("scheduling", "", lambda each: each.scheduling is None),
        ("slo", lab.Slo(ttft=1.0), lambda each: each.slo.ttft == 1.0),
        ("pick", "least_loaded", lambda each: each.args == {"pick": "least_loaded"}),
    ],
)
def test_any_part_is_an_axis(name: str, value: Any, found: Any) -> None:
    assert found(with_setting(BASE, name, value))


@pytest.mark.parametrize(
    ("over", "more", "said"),
    [
        ({"sharee": [1]}, {"program": split}, "--over: sharee is not a setting; .*share"),
        ({"rate": []}, {}, "--over: rate has no values"),
        ({"rate": ["fast"]}, {}, "--over: rate=fast"),
        ({"rate": [-1]}, {}, "rate: is -1"),
        ({"fleet": ["3X"]}, {}, "fleet: '3X' is not"),
        ({"rate": [1]}, {"jobs": 0}, "jobs: is 0"),
    ],
)
def test_wrong_axes_are_named_before_anything_runs(over: Any, more: Any, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        lab.sweep(BASE, over=over, **more)


def test_an_error_of_a_process_is_raised_here() -> None:
    async def breaks(request: Request, fleet: Fleet):  # type: ignore[no-untyped-def]
        raise ValueError("not mine")
        yield

    with pytest.raises(Exception, match="not mine"):
        lab.sweep(BASE, over={"rate": [10, 20, 30]}, program=breaks, jobs=2)


def test_differences_are_paired_by_seed_and_corrected_for_their_number() -> None:
    grid = lab.sweep(BASE, over={"fleet": ["both=1", "both=2"], "rate": [20, 40, 80]}, seeds=4)
    rows = list(grid.difference("fleet", "both=1", "both=2", "ttft.mean").rows())
    assert [row["rate"] for row in rows] == ["20", "40", "80"]
    for row, cell in zip(rows, range(3), strict=True):
        ours, theirs = grid.values(cell, "ttft.mean"), grid.values(cell + 3, "ttft.mean")
        assert row["difference"] == pytest.approx(sum(ours) / 4 - sum(theirs) / 4)
        assert row["low"] < row["difference"] < row["high"]
    pairs = [zip(grid.values(n, "ttft.mean"), grid.values(n + 3, "ttft.mean"), strict=True) for n in range(3)]
    alone = [chance_of([ours - theirs for ours, theirs in pair]) for pair in pairs]
    assert [row["chance"] for row in rows] == pytest.approx(corrected(alone))
    assert corrected([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    for wrong, said in (
        (("flet", "a", "b"), "there is no flet"),
        (("fleet", "both=9", "both=1"), "has no value both=9"),
    ):
        with pytest.raises(BadRequest, match=said):
            grid.difference(*wrong, "ttft.mean")
    with pytest.raises(BadRequest, match="goodput needs limits; give an SLO"):
        grid.table("goodput")
    with pytest.raises(BadRequest, match="40 requests are too few for this percentile"):
        grid.table("ttft.p99")


def test_a_frontier_knows_what_is_better_and_loads_do_not_compete() -> None:
    over = {"fleet": ["both=1", "both=4"], "rate": [10, 150], "requests": [120]}
    grid = lab.sweep(BASE, over=over, seeds=6, slo=lab.Slo(ttft=0.03))
    found = {(row["fleet"], row["rate"]): row["standing"] for row in grid.frontier("ttft.mean", "goodput").rows()}
    assert found["both=4", "150"] == "best"
    assert found["both=1", "150"] == "beaten"
    assert found["both=4", "10"] in ("best", "near")


def test_the_cache_is_by_content(tmp_path: Path) -> None:
    program, cached = tmp_path / "mine.py", tmp_path / "cache"
    text = "async def mine(request, fleet):\n    with fleet.pick('both', request=request) as engine:\n"
    text += "        yield engine.start_generate(request)\n"
    program.write_text(text)
    given = {"over": {"rate": [10.0, 20.0]}, "seeds": 2, "cache": cached, "program": f"{program}:mine"}
    first = lab.sweep(BASE, **given)
    assert len(list(cached.iterdir())) == 4
    for file in cached.iterdir():
        os.utime(file, (1, 1))
    assert lab.sweep(BASE, **given).points == first.points
    assert {file.stat().st_mtime for file in cached.iterdir()} == {1}, "nothing was simulated again"
    program.write_text(text + "# other\n")
    lab.sweep(BASE, **given)
    assert len(list(cached.iterdir())) == 8
    torn = next(iter(cached.iterdir()))
    torn.write_bytes(b"\x81")
    program.write_text(text)
    assert lab.sweep(BASE, **given).points == first.points


def test_the_command_takes_values_with_commas_processes_and_any_metric(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["sim", "--num-prompts", "20", "--over", "fleet=prefill=1,decode=1;both=2", "--over", "output-dev=0,64"]
    goodput = ["--goodput", "ttft:500", "--x", "goodput", "--y", "engine_hours"]
    assert app._run([*line, "--seeds", "2", "--jobs", "2", *goodput]) == 0
    shown = capsys.readouterr()
    assert "prefill=1,decode=1" in shown.out.replace("\n", "")
    assert "goodput" in shown.out
    assert shown.err.count("fleet=") == 4
    assert app._run([*line, "--x", "goodput"]) == 2
    assert "goodput needs limits" in capsys.readouterr().err


def test_seeds_are_needed_for_a_difference() -> None:
    grid = lab.sweep(BASE, over={"rate": [10, 20]})
    assert math.isnan(grid.table("ttft.mean")["ttft.mean_low"][0])
    with pytest.raises(BadRequest, match="seeds: one seed"):
        grid.difference("rate", 10, 20, "ttft.mean")


def test_records_of_a_sweep_have_a_column_for_each_axis(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    swept, file = tmp_path / "swept.csv", tmp_path / "command.csv"
    over = {"fleet": ["both=1", "both=2"], "max-num-seqs": [4, 64], "program": ["data_parallel"], "rate": [20.0]}
    grid = lab.sweep(BASE, over=over, seeds=2, jobs=2, records=swept, cache=tmp_path / "cache")
    text = swept.read_text()
    lines = list(csv.DictReader(text.splitlines()))
    assert list(lines[0])[:6] == ["fleet", "max_num_seqs", "over_program", "over_rate", "label", "rate"]
    assert len(lines) == 4 * 2 * 40
    for cell, settings in enumerate(grid.settings):
        for seed in grid.seeds:
            rows = [
                row for row in lines
                if (row["fleet"], float(row["max_num_seqs"]), int(row["seed"]))
                == (settings["fleet"], settings["max-num-seqs"], seed)
            ]  # fmt: skip
            ttft = [float(row["first_token"]) - float(row["sent"]) for row in rows]
            assert sum(ttft) / 40 == pytest.approx(grid.points[cell][seed].summary.ttft.mean)
    lab.sweep(BASE, over=over, seeds=2, records=swept, cache=tmp_path / "cache")
    assert swept.read_text() == text, "the cache has no requests"
    line = ["sim", "--num-prompts", "40", "--input-mean", "300", "--output-mean", "8", "--seeds", "2"]
    line += ["--over", "fleet=both=1;both=2", "--over", "max-num-seqs=4,64", "--over", "program=data_parallel"]
    assert app._run([*line, "--over", "rate=20", "--records", str(file)]) == 0
    assert file.read_text() == text
    assert app._run([*line, "--records", str(tmp_path / "x.txt")]) == 2
    assert "--records" in capsys.readouterr().err
    with pytest.raises(BadRequest, match=r"records: .*must end with"):
        lab.sweep(BASE, over=over, records=tmp_path / "x.txt")


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
