"""`lab.plot`: what is drawn is what the runs have, labels say what differs, and files can be put into a paper."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tercet.protocol import BadRequest

# Type checkers see one folder of `tercet`; the other one is in the distribution tercet-lab.
lab: Any = import_module("tercet.lab")
SLO = lab.Slo(ttft=0.2, tpot=0.02)


def run_of(rate: float = 20, seed: int = 0, fleet: Any = "both=2", program: str = "data_parallel", **parts: Any) -> Any:
    work = lab.Poisson(rate=rate, requests=80, input=lab.Lognormal(300, 200), output=16)
    return lab.simulate(program, fleet, work, seed=seed, slo=SLO, **parts)


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Any]]:
    return {
        fleet: [run_of(rate, seed, fleet) for rate in (10, 30) for seed in (0, 1)] for fleet in ("both=1", "both=2")
    }


def lines_of(figure: Any, axis: int = 0) -> dict[str, Any]:
    return {line.get_label(): line.get_xydata() for line in figure.axes[axis].get_lines()}


def test_a_distribution_has_a_step_for_each_request_and_pools_seeds(runs: dict[str, list[Any]]) -> None:
    drawn = lines_of(lab.plot.cdf(runs, "ttft"))
    assert set(drawn) == set(runs)
    wanted = np.sort(np.concatenate([run.requests.ttft for run in runs["both=1"]]))
    in_ms = drawn["both=1"][:, 0] / (1 if wanted.max() > 1 else 1e3)
    assert in_ms == pytest.approx(wanted)
    assert drawn["both=1"][-1, 1] == 1.0
    beyond = lines_of(lab.plot.cdf(runs, "ttft", tail=True))["both=1"]
    assert (beyond[0, 1], beyond[-1, 1]) == (1.0, pytest.approx(1 / len(wanted)))


def test_failed_requests_keep_a_distribution_below_one() -> None:
    work = lab.Sessions(1.0, 6, turns=3, input_len=70_000, output_len=4)
    failed = lab.simulate("data_parallel", "both=1", work)
    drawn = lines_of(lab.plot.cdf({"short context": failed, "all": run_of()}))
    ok = float(failed.requests["ok"].mean())
    assert 0 < ok < 1
    assert drawn["short context"][-1, 1] == pytest.approx(ok)


def test_goodput_over_load_is_the_mean_over_seeds(runs: dict[str, list[Any]]) -> None:
    drawn = lab.plot.goodput(runs)
    data = next(line for line in drawn.axes[0].get_lines() if len(line.get_xdata()) == 2)
    assert data.get_xdata().tolist() == [10, 30]
    assert data.get_ydata()[0] == pytest.approx(np.mean([run.goodput for run in runs["both=1"][:2]]))
    assert drawn.axes[0].get_xlabel() == "offered load, requests/s"
    assert lab.plot.goodput(runs, y="ttft.p50").axes[0].get_ylabel() in ("P50 TTFT, ms", "P50 TTFT, s")
    assert lab.plot.goodput(runs, y="attainment", at=0.9).axes[0].get_ylabel() == "SLO attainment, %"


def test_the_frontier_knows_in_which_direction_a_metric_is_better(runs: dict[str, list[Any]]) -> None:
    drawn = lab.plot.pareto(runs, "engine_hours", "goodput")
    axis = drawn.axes[0]
    assert axis.get_ylabel() == "goodput, requests/s (more is better)"
    assert axis.get_xlabel() == "engine-hours (less is better)"
    at = {
        label: (np.mean([run.engine_hours for run in of]), np.mean([run.goodput for run in of]))
        for label, of in runs.items()
    }
    (frontier,) = [line for line in axis.get_lines() if line.get_drawstyle() == "steps-post"]
    beaten = at["both=2"][0] >= at["both=1"][0] and at["both=2"][1] <= at["both=1"][1]
    assert len(frontier.get_xdata()) == (1 if beaten else 2)


def test_a_time_line_shows_rates_engines_and_moves() -> None:
    fleet, record = lab.Fleet(both=4, total_blocks=400), lab.Record(engines_every=0.5)
    work = lab.Poisson(rate=60, requests=150, input=300, output=lab.Lognormal(100, 300))
    run = lab.simulate(
        "data_parallel", fleet, work, moves=lab.Moves("neutral_load", interval=0.5), record=record, slo=SLO
    )
    drawn = lab.plot.timeline(run, every=0.5)
    assert [axis.get_ylabel() for axis in drawn.axes] == ["requests/s", "TTFT, ms", "KV usage, %"]
    arrivals = lines_of(drawn)["arrivals"]
    assert arrivals[:, 1].sum() * 0.5 == pytest.approx(len(run.requests))
    ticks = [line for line in drawn.axes[2].get_lines() if line.get_marker() == "|"]
    assert len(ticks[0].get_xdata()) == run.point.moves.moved > 0
    assert len(lab.plot.timeline(run_of()).axes) == 2


def test_labels_say_what_differs() -> None:
    one, other = run_of(fleet="both=1"), run_of(fleet="both=2")
    assert list(lab.plot.runs_of([one, other, other])) == ["both=1", "both=2"]
    moved = run_of(fleet="both=2", moves=lab.Moves("neutral_load"))
    assert list(lab.plot.runs_of([other, moved])) == ["data_parallel", "neutral_load"]
    assert list(lab.plot.runs_of(one)) == ["data_parallel"]
    assert list(lab.plot.runs_of([one.requests])) == ["run 1"]


def test_saved_runs_are_drawn_again(runs: dict[str, list[Any]], tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.json" for number in range(4)]
    for file, run in zip(files, runs["both=1"], strict=True):
        run.save(file)
    again = lines_of(lab.plot.cdf({"x": files}))["x"]
    assert again.tolist() == lines_of(lab.plot.cdf({"x": runs["both=1"]}))["x"].tolist()
    loads = lab.plot.goodput({"x": files}).axes[0].get_lines()[0]
    assert (
        loads.get_xydata().tolist()
        == lab.plot.goodput({"x": runs["both=1"]}).axes[0].get_lines()[0].get_xydata().tolist()
    )
    table = tmp_path / "mine.csv"
    runs["both=1"][0].requests.write(table)
    assert list(lab.plot.runs_of([table])) == ["mine"]


def test_a_pdf_has_the_width_of_a_column_its_fonts_and_no_title(runs: dict[str, list[Any]], tmp_path: Path) -> None:
    file = tmp_path / "cdf.pdf"
    drawn = lab.plot.cdf(runs, "ttft", file)
    assert drawn.get_size_inches()[0] == 3.35
    assert drawn.get_suptitle() == ""
    data = file.read_bytes()
    assert b"/FontFile2" in data, "TrueType fonts are embedded"
    assert b"/Type3" not in data
    box = re.search(rb"/MediaBox \[ ?0 0 ([\d.]+)", data)
    assert box is not None
    assert float(box[1]) == pytest.approx(3.35 * 72, abs=0.5)
    assert lab.plot.cdf(runs, width="text", title="T").get_suptitle() == "T"
    assert lab.plot.cdf(runs, width=5.0).get_size_inches()[0] == 5.0


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda run: lab.plot.cdf(run, "ttfd"), "metric: 'ttfd' is not"),
        (lambda run: lab.plot.pareto(run, "ttft.p98", "goodput"), "metric: 'ttft.p98' is unknown"),
        (lambda run: lab.plot.pareto(run, "ttft.p99", "tpot.mean"), "runs: no run has a value of both ttft.p99"),
        (lambda run: lab.plot.cdf([]), "runs: there are none"),
        (lambda run: lab.plot.cdf(run, "ttft", "x.jpg"), r"file: x.jpg must end with one of .png, .svg, .pdf"),
        (lambda run: lab.plot.cdf(run, width="page"), "width: is 'page'; choose column, text"),
        (lambda run: lab.plot.cdf(run, width=-1.0), "must be positive numbers of inches"),
        (lambda run: lab.plot.goodput(run.requests), "runs: a run has no offered rate"),
        (lambda run: lab.plot.timeline(run, every=0), "every: is 0"),
    ],
)
def test_wrong_arguments_are_named(draw: Any, said: str, runs: dict[str, list[Any]]) -> None:
    with pytest.raises(BadRequest, match=said):
        draw(runs["both=1"][0])


@pytest.fixture(scope="module")
def grid() -> Any:
    work = lab.Poisson(rate=20, requests=80, input=lab.Lognormal(300, 200), output=16)
    over = {"fleet": ["both=1", "both=2"], "rate": [10, 30], "max_num_seqs": [64]}
    return lab.sweep("data_parallel", "both=2", work, slo=SLO, over=over, seeds=3)


def test_a_grid_has_a_line_for_each_setting_over_its_loads(grid: Any) -> None:
    axis = lab.plot.goodput(grid, y="ttft.mean").axes[0]
    assert [text.get_text() for text in axis.figure.legends[0].get_texts()] == ["both=1", "both=2"]
    lines = [bars[0].get_xydata() for bars in axis.containers]
    for line, cells in zip(lines, ((0, 1), (2, 3)), strict=True):
        assert line[:, 0].tolist() == [10, 30]
        assert line[:, 1] == pytest.approx([grid.estimate(cell, "ttft.mean").mean * 1e3 for cell in cells])
    lower = axis.containers[0][2][0].get_segments()[0]
    half = grid.estimate(0, "ttft.mean").half * 1e3
    assert float(lower[1][1] - lower[0][1]) == pytest.approx(2 * half), "the interval over seeds"
    over = lab.plot.goodput(grid, x="max_num_seqs", y="busy").axes[0]
    assert over.get_xlabel() == "max num seqs"
    assert len(over.containers) == 4


def test_bars_of_a_grid_have_groups_and_intervals(grid: Any) -> None:
    axis = lab.plot.bars(grid, "ttft.mean", by="fleet").axes[0]
    assert [text.get_text() for text in axis.get_xticklabels()] == ["both=1", "both=2"]
    heights = [[bar.get_height() for bar in bars] for bars in axis.containers if hasattr(bars, "patches")]
    wanted = [grid.estimate(cell, "ttft.mean").mean * 1e3 for cell in range(4)]
    assert heights[0] + heights[1] == pytest.approx([wanted[0], wanted[2], wanted[1], wanted[3]])
    lower, upper = axis.containers[0][2][0].get_segments()[0][:, 1]
    assert upper - lower == pytest.approx(2e3 * grid.estimate(0, "ttft.mean").half)
    alone = lab.plot.bars(grid, "goodput").axes[0]
    assert [text.get_text() for text in alone.get_xticklabels()] == [
        "both=1, 10", "both=1, 30", "both=2, 10", "both=2, 30",
    ]  # fmt: skip


def test_each_load_of_a_grid_has_a_frontier(grid: Any) -> None:
    axis = lab.plot.pareto(grid, "engine_hours", "ttft.mean").axes[0]
    assert len([line for line in axis.get_lines() if line.get_drawstyle() == "steps-post"]) == 2


def test_a_saved_grid_is_drawn_again_and_so_is_the_file_of_a_sweep(grid: Any, tmp_path: Path) -> None:
    from tercet.cli import app

    saved, swept = tmp_path / "grid.json", tmp_path / "swept.json"
    grid.save(saved)
    line = ["sim", "--fleet", "both=2", "--num-prompts", "80", "--input-mean", "300", "--output-mean", "16"]
    line += ["--input-dev", "200", "--lengths", "lognormal", "--goodput", "ttft:200,tpot:20", "--seeds", "3"]
    line += ["--over", "fleet=both=1;both=2", "--over", "rate=10,30", "--over", "max_num_seqs=64"]
    assert app._run([*line, "--request-rate", "20", "--result-filename", str(swept)]) == 0
    for file in (saved, swept):
        again = lab.load(file)
        assert again.points == grid.points
        for draw in (lab.plot.goodput, lab.plot.bars):
            assert len(draw(file).axes[0].containers) == len(draw(grid).axes[0].containers)
        assert again.table("ttft.mean", "goodput").plain() == grid.table("ttft.mean", "goodput").plain()
        assert again.difference("fleet", "both=1", "both=2", "goodput").plain() == (
            grid.difference("fleet", "both=1", "both=2", "goodput").plain()
        )
        assert again.slo == SLO
    assert app._run(["bench", "report", str(saved)]) == 0
    with pytest.raises(BadRequest, match=r"is a sweep, without requests"):
        lab.load(saved, slo=SLO)
    with pytest.raises(BadRequest, match=r"is a sweep, which has no requests"):
        lab.plot.cdf(saved)
    with pytest.raises(BadRequest, match=r"must end with \.json"):
        grid.save(tmp_path / "grid.csv")


def test_a_saved_run_keeps_its_counters(tmp_path: Path) -> None:
    run = run_of()
    run.save(tmp_path / "run.json")
    again = lab.load(tmp_path / "run.json")
    assert again.point == run.point
    assert lab.plot.bars(again, "busy").axes[0].patches[0].get_height() == pytest.approx(100 * run.point.busy)


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda grid: lab.plot.goodput(grid, y="attainment", at=90), "at: is 90, and attainment is a share"),
        (lambda grid: lab.plot.goodput(grid, x="fleet"), "x: fleet has the value 'both=1', which is not a number"),
        (lambda grid: lab.plot.bars(grid, by="flet"), "x: there is no axis flet; did you mean fleet"),
        (lambda _: lab.plot.bars(run_of(), by="fleet"), "x: runs have no axis fleet"),
    ],
)
def test_wrong_axes_of_a_grid_are_named(draw: Any, said: str, grid: Any) -> None:
    with pytest.raises(BadRequest, match=said):
        draw(grid)
