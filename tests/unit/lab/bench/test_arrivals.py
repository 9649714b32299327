"""When requests are due: the distribution of gaps, determinism, replayed traces, and what is refused."""

from __future__ import annotations

import math
from itertools import islice
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.protocol import BadRequest
from tercet_lab.bench.workloads.conversations import Arrival, arrival_times, gaps_of, replayed

MANY = 20_000


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_variation_of_their_gamma_process(burstiness: float) -> None:
    found = np.array(list(islice(gaps_of("gamma", 5.0, burstiness, Random(1)), MANY)))
    variation = found.std() / found.mean()
    assert found.mean() == pytest.approx(0.2, rel=0.05)
    assert variation == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_poisson_gaps_have_the_quantiles_of_the_exponential_distribution() -> None:
    found = np.array(list(islice(gaps_of("poisson", 2.0, 1.0, Random(2)), MANY)))
    shares = np.array([0.1, 0.5, 0.9, 0.99])
    np.testing.assert_allclose(np.quantile(found, shares), -np.log(1 - shares) / 2.0, rtol=0.08)


def test_counts_of_a_poisson_process_vary_as_much_as_their_mean() -> None:
    times = np.array(arrival_times(MANY, "poisson", 10.0, 1.0, Random(3)))
    counts, _ = np.histogram(times, bins=np.arange(0, math.floor(times[-1])))
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.15)


def test_a_constant_rate_is_constant() -> None:
    assert arrival_times(4, "constant", 4.0, 1.0, Random(0)) == [0.0, 0.25, 0.5, 0.75]


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times(3, "poisson", math.inf, 1.0, Random(0)) == [0.0, 0.0, 0.0]


def test_only_gamma_takes_the_burstiness() -> None:
    half, one = (arrival_times(9, "gamma", 2.0, burstiness, Random(4)) for burstiness in (0.5, 1.0))
    assert half != pytest.approx(one)
    half, poisson = (arrival_times(9, "poisson", 2.0, burstiness, Random(4)) for burstiness in (0.5, 1.0))
    assert half == poisson == pytest.approx(one)


@given(st.integers(0, 50), st.floats(0.01, 100), st.floats(0.1, 10), st.integers())
def test_times_begin_at_zero_never_go_back_and_depend_on_the_seed_alone(
    count: int, rate: float, burstiness: float, seed: int
) -> None:
    times = arrival_times(count, "gamma", rate, burstiness, Random(seed))
    assert len(times) == count
    assert times == sorted(times)
    assert times[:1] == [0.0][:count]
    assert times == arrival_times(count, "gamma", rate, burstiness, Random(seed))


def test_another_seed_gives_other_times() -> None:
    assert arrival_times(5, "poisson", 1.0, 1.0, Random(1)) != arrival_times(5, "poisson", 1.0, 1.0, Random(2))


def test_a_trace_is_replayed_from_zero_on() -> None:
    assert replayed([12.0, 10.0, 10.5]) == [0.0, 0.5, 2.0]


@given(st.lists(st.integers(0, 10**6), min_size=2).filter(lambda times: len(set(times)) > 1), st.floats(0.1, 100))
def test_stretching_a_trace_changes_its_rate_and_keeps_its_bursts(recorded: list[int], rate: float) -> None:
    original, stretched = np.array(replayed(recorded)), np.array(replayed(recorded, rate))
    assert (len(recorded) - 1) / stretched[-1] == pytest.approx(rate)
    np.testing.assert_allclose(stretched / stretched[-1], original / original[-1])


def test_a_trace_without_extent_fits_no_rate() -> None:
    assert replayed([3.0, 3.0]) == [0.0, 0.0]
    assert replayed([3.0, 4.0], math.inf) == [0.0, 0.0]
    with pytest.raises(BadRequest, match="request-rate"):
        replayed([3.0, 3.0], 1.0)


@pytest.mark.parametrize("rate", [1e-300, 1e-9, 5e-324])
@pytest.mark.parametrize("arrivals", ["gamma", "constant"])
def test_a_rate_at_which_a_run_would_not_end_is_refused(rate: float, arrivals: Arrival) -> None:
    with pytest.raises(BadRequest, match="higher rate") as caught:
        arrival_times(6, arrivals, rate, 1.0, Random(0))
    assert caught.value.param == "request-rate"


@pytest.mark.parametrize(("recorded", "rate"), [([0.0, 1e300], None), ([0.0, 1e8], 1.0), ([0.0, 1.0], 1e-300)])
def test_a_trace_in_which_a_run_would_not_end_is_refused(recorded: list[float], rate: float | None) -> None:
    with pytest.raises(BadRequest, match="higher rate"):
        replayed(recorded, rate)


@pytest.mark.parametrize(
    ("rate", "burstiness", "field"),
    [(0, 1, "request-rate"), (-1, 1, "request-rate"), (math.nan, 1, "request-rate"), (1, 0, "burstiness")],
)
def test_senseless_processes_are_refused(rate: float, burstiness: float, field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        arrival_times(3, "gamma", rate, burstiness, Random(0))
    assert caught.value.param == field
