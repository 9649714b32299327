"""The evaluation of "Microserving LLM engines" in simulation: what its text says holds.

Mostly on fewer requests than `benchmarks/microserving.py` runs.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
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

from tercet.protocol import BadRequest

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
