"""Published experiments again, in virtual time: the evaluation of "Microserving LLM engines", and ``python -m
benchmarks.migration``.
"""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path

import msgspec
import numpy as np
import pytest
from benchmarks.command_line import run_with
from benchmarks.microserving import (
    LINES,
    LOWEST,
    RATES,
    TWO_ENGINES,
    EvaluationSetup,
    Figures,
    Times,
    fit_to_figures,
    gains,
    gauss_newton,
    held_out_error,
    misplaced,
    order,
    parse_plot,
    published_rows,
    tp8_gain,
)
from benchmarks.migration.__main__ import migration
from benchmarks.migration.moving import (
    DESTINATION,
    MOVED_AFTER,
    MOVES,
    SOURCE,
    WAYS,
    BystanderGaps,
    MoveCost,
    measure_move,
)
from benchmarks.migration.moving_figure import plot_pauses
from benchmarks.migration.moving_report import neighbour_rows, pause_rows, slowdown

from tercet.decisions.migration import Stage
from tercet.fleet import EngineFleet, Member
from tercet.protocol import BadRequest
from tercet.settings import MoveSettings
from tests.unit.lab.sim.models import engines_of, is_empty, profile_of
from tests.virtual_time import in_virtual_time

from .golden_images import check_image

# As `benchmarks/microserving.py` fits it to the figure, on 800 requests.
FITTED = Times(0.00356, 1.12e-05, 0.0745, 1.07)
FIGURE = Path(__file__).parents[4] / "benchmarks/microserving_figure.json"


@pytest.fixture(scope="module")
def setting() -> EvaluationSetup:
    return EvaluationSetup(seeds=1, requests=200)


@pytest.mark.slow
def test_one_wide_engine_is_best_at_the_lowest_rate_and_worst_at_the_highest(setting: EvaluationSetup) -> None:
    assert 0 < tp8_gain(setting, FITTED) < 0.16
    assert order(setting, FITTED, LOWEST)[0] == "TP8"
    assert order(setting, FITTED, RATES[-1])[-1] == "TP8"


@pytest.mark.slow
def test_disaggregation_is_ahead_by_its_decode_steps(setting: EvaluationSetup) -> None:
    best = max(gains(setting, FITTED, "1P1D").values())
    assert 0.05 < best < 0.16  # the text: up to 16%
    assert all(gain > 0 for gain in gains(setting, FITTED, "1P1D", "tpot").values())
    assert all(gain < 0 for gain in gains(setting, FITTED, "1P1D", "ttft").values())


@pytest.mark.slow
def test_the_other_rates_of_the_figure_follow() -> None:
    """With the figure's number of requests, since their arrivals are those of its run."""
    setting, plot = EvaluationSetup(), parse_plot(FIGURE.read_bytes())
    assert held_out_error(setting, FITTED, plot)[0] < 0.05
    assert held_out_error(setting, FITTED, plot, TWO_ENGINES)[0] < 0.11
    for line in LINES:
        assert held_out_error(setting, FITTED, plot, [line])[1] < 0.1
    assert misplaced(setting, FITTED, plot) == []


def test_all_rates_have_the_draws_of_one_run() -> None:
    slow, fast = published_rows(1.0, 50), published_rows(4.0, 50)
    assert [row.at for row in slow.rows] == pytest.approx([4 * row.at for row in fast.rows])
    assert [row.input_tokens for row in slow.rows] == [row.input_tokens for row in fast.rows]
    assert slow.rows[0].at == 0.0
    assert published_rows(1.0, 50, seed=1) != slow


@pytest.mark.slow
def test_sharing_the_prefill_pays_once_the_prefill_engine_is_loaded(setting: EvaluationSetup) -> None:
    names = order(setting, FITTED, RATES[-1])
    assert names.index("1P1D balanced 0.1") < names.index("1P1D")


@pytest.mark.slow
def test_constants_that_made_a_plot_are_found_again() -> None:
    """The plot is the simulation's own, with other constants: the fit must undo them, on one rate alone."""
    small = EvaluationSetup(seeds=1, requests=60)
    truth = Times(host=0.005, send=3e-5, latency=0.12)
    rates = (LOWEST, 4.0)
    plot = {line: {rate: small.figures(line, rate, truth) for rate in rates} for line in LINES}
    found = fit_to_figures(small, plot, LOWEST)
    assert found.host == pytest.approx(truth.host, rel=0.03)
    assert found.send == pytest.approx(truth.send, rel=0.03)
    assert found.latency == pytest.approx(truth.latency, rel=0.2)
    assert found.prompts == pytest.approx(truth.prompts, rel=0.03)
    assert held_out_error(small, found, plot, fit_rate=LOWEST)[0] < 0.05
    assert held_out_error(small, Times(), plot, fit_rate=LOWEST)[0] > 0.05


@pytest.mark.slow
def test_slower_prompts_are_told_from_slower_steps() -> None:
    small = EvaluationSetup(seeds=1, requests=60)
    truth = Times(host=0.004, send=2e-5, latency=0.08, prompts=1.2)
    found = fit_to_figures(small, {line: {4.0: small.figures(line, 4.0, truth)} for line in LINES}, 4.0)
    assert found.prompts == pytest.approx(truth.prompts, rel=0.03)
    assert found.host == pytest.approx(truth.host, rel=0.03)


def test_lines_in_the_wrong_order_are_named() -> None:
    small = EvaluationSetup(seeds=1, requests=60)
    here = {line: small.figures(line, LOWEST, Times()).jct for line in ("TP8", "1P1D")}
    right = {line: {LOWEST: Figures(jct=seconds)} for line, seconds in here.items()}
    swapped = {"TP8": right["1P1D"], "1P1D": right["TP8"]}
    assert misplaced(small, Times(), right) == []
    assert misplaced(small, Times(), swapped) == [f"1P1D before TP8 at {LOWEST}/s"]
    assert misplaced(small, Times(), swapped, apart=1.0) == []


def test_gauss_newton_finds_the_least_squares() -> None:
    def errors(at: np.ndarray) -> np.ndarray:
        return np.array([at[0] - 0.3, (at[1] + 0.2) * (1 + at[0] ** 2)])

    assert gauss_newton(errors, np.zeros(2)) == pytest.approx([0.3, -0.2], abs=1e-3)


def test_a_plot_is_read_and_checked() -> None:
    plot = parse_plot(msgspec.json.encode({"TP8": {"1.6": {"jct": 1.2}}}))
    assert plot["TP8"][1.6] == Figures(jct=1.2)
    for wrong, said in (
        ({"TP9": {}}, "'TP9' is not a line"),
        ({"TP8": {"fast": {}}}, "could not convert"),
        ({"TP8": {"1.6": {"jtc": 1}}}, "jtc"),
    ):
        with pytest.raises(BadRequest, match=said):
            parse_plot(msgspec.json.encode(wrong))
    with pytest.raises(BadRequest, match="no values at rate"):
        fit_to_figures(EvaluationSetup(requests=60), {"TP8": {2.4: Figures(jct=1.2)}})


STEP, PER_TOKEN, SPEED = 0.010, 0.001, 1e9


async def measured(way: str, length: int) -> MoveCost:
    engines = engines_of(SOURCE, DESTINATION, profile=profile_of(speed=SPEED), stream_every=1)
    members = [Member(engine.name, "", "both", engine) for engine in engines]
    fleet = EngineFleet(members, clock=asyncio.get_running_loop().time)
    found = await measure_move(fleet, way, length, MoveSettings(), seed=1)
    await asyncio.sleep(1)
    assert all(is_empty(engine) for engine in engines)
    assert [member.in_flight for member in members] == [0, 0]
    return found


@pytest.mark.parametrize("length", [128, 1000])
@in_virtual_time
async def test_three_ways_in_virtual_time(length: int) -> None:
    live, blocking, recompute = [await measured(way, length) for way in ("live", "blocking", "recompute")]
    # One sequence and two bystanders decode in a step: 10 ms, and 1 ms for each token past the first.
    assert live.step == pytest.approx(STEP + 2 * PER_TOKEN)
    assert live.pause <= 2 * live.step
    assert [len(cost.stages) for cost in (live, blocking, recompute)] == [1, 1, 0]
    assert blocking.pause >= 0
    assert recompute.pause >= length * PER_TOKEN - STEP


@in_virtual_time
async def test_bystanders_of_both_engines_are_watched_before_during_and_after() -> None:
    for way in WAYS:
        found = await measured(way, 500)
        assert [gaps.engine for gaps in found.bystanders] == [SOURCE, DESTINATION]
        for gaps in found.bystanders:
            alone, with_it = STEP + PER_TOKEN, STEP + 2 * PER_TOKEN
            here = DESTINATION if way == "there" else SOURCE
            before, after = (with_it, alone) if gaps.engine == here else (alone, with_it)
            assert statistics.median(gaps.before) == pytest.approx(before)
            assert len(gaps.before) >= MOVED_AFTER - 2
            assert statistics.median(gaps.after) == pytest.approx(after if way in MOVES else before)
            assert gaps.during
            if way == "recompute" and gaps.engine == DESTINATION:
                assert max(gaps.during) >= 500 * PER_TOKEN


def cost_of(way: str, length: int, pause: float, before: float, during: float, after: float = 0.04) -> MoveCost:
    gaps = tuple(BystanderGaps(side, [before] * 5, [during] * 2, [after]) for side in (SOURCE, DESTINATION))
    return MoveCost(way, length, pause, 0.04, (Stage(0, length, length * 1000, 0.01, "host"),), gaps)


def test_steps_are_compared_with_those_before_the_same_move_and_moves_are_resampled() -> None:
    alike = [cost_of("live", 256, 0.05, 0.04, 0.044), cost_of("live", 8000, 0.05, 0.08, 0.088)]
    assert slowdown([during(cost) for cost in alike]) == pytest.approx((1.1, 1.1, 1.1))
    unlike = [*alike, cost_of("live", 256, 0.05, 0.04, 0.08)]
    found = slowdown([during(cost) for cost in unlike])
    assert found is not None
    assert found.low == pytest.approx(1.1)
    assert found.low < found.ratio < found.high <= 2.0
    assert slowdown([([], [0.04])]) is None
    assert slowdown([([0.04], [])]) is None


def during(cost: MoveCost) -> tuple[list[float], list[float]]:
    return cost.bystanders[0].during, cost.bystanders[0].before


def test_steps_after_a_move_are_compared_with_those_of_the_control_of_the_same_round_and_length() -> None:
    costs = [
        cost
        for noise in (1.0, 3.0)
        for cost in (
            cost_of("live", 256, 0.05, 0.05, 0.05, 0.044 * noise),
            cost_of("live", 512, 0.05, 0.05, 0.05, 0.088 * noise),
            cost_of("there", 512, 0.05, 0.05, 0.05, 0.08 * noise),
            cost_of("there", 256, 0.05, 0.05, 0.05, 0.04 * noise),
        )
    ]
    rows = {(row[0], row[1]): row[-2:] for row in neighbour_rows(costs)}
    assert rows["live", "the source"] == ["x 1.10", "1.10 to 1.10"]
    without = {(row[0], row[1]): row[-2:] for row in neighbour_rows([c for c in costs if c.way == "live"])}
    assert without["live", "the source"] == ["-", "-"]


@pytest.mark.slow
def test_tables_and_the_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    costs = [cost_of(way, length, 0.06, 0.04, 0.04) for way in WAYS for length in (256, 8000)]
    assert next(iter(pause_rows(costs))) == ["live", "256", "1", "60.0", "1.50", "40.0", "1", "0.256"]
    assert len(list(pause_rows(costs))) == 2 * len(WAYS)
    assert next(iter(neighbour_rows(costs))) == [
        "live", "the source", "4", "x 1.00", "1.00 to 1.00", "x 1.00", "1.00 to 1.00",
    ]  # fmt: skip
    costs.append(cost_of("live", 256, -0.01, 0.04, 0.04))  # no pause: a logarithmic axis has no place for it
    costs += [cost_of("recompute", length, length / 1000, 0.04, 0.04) for length in (256, 1024, 8000)]
    costs += [cost_of("blocking", length, length / 9000 + 0.1, 0.04, 0.04) for length in (256, 1024, 8000)]
    draw = lambda file: plot_pauses(costs, file, "A machine, 2026-01-01")  # noqa: E731
    check_image("pauses.png", draw, tmp_path, monkeypatch)
    with pytest.raises(BadRequest, match="must end with"):
        draw(tmp_path / "pauses.txt")


@pytest.mark.parametrize(
    "wrong",
    [
        ["--ways", "live,by mail"],
        ["--lengths", "a few"],
        ["--lengths", "0"],
        ["--plot", "a.txt"],
        ["--plot", "/no/a.png"],
    ],
)
def test_bad_input_ends_with_2_before_anything_moves(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    given = ["http://127.0.0.1:1", "http://127.0.0.1:2", *wrong]
    assert run_with(migration, "benchmarks.migration", given) == 2
    assert capsys.readouterr().err.startswith(f"tercet: {wrong[0]}: ")
