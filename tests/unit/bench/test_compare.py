"""Comparisons: the order of rounds, and intervals that hold what they promise."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from tercet_bench.bench_config import CompareConfig
from tercet_bench.experiment import STATISTICS, ratio_interval, ratios_of, turns_of
from tercet_lab.bench.results import Point
from tercet_lab.tables import RequestRow

MEAN = STATISTICS["mean"]


def point(
    label: str, number: int, ttft: float, *, partial: bool = False, rate: float = 1.0, fails: int = -1, count: int = 10
) -> Point:
    """Requests whose first token comes after ``ttft`` seconds, with a little that differs between them."""
    records = [
        RequestRow(
            id=i, scheduled=i, sent=i, ended=i + 2 * ttft, output_tokens=5, failure="http" if i == fails else None,
            first_token=None if i == fails else i + ttft * (1 + i / 100),
        )
        for i in range(count)
    ]  # fmt: skip
    return Point(label=label, request_rate=rate, round=number, metrics={}, partial=partial, records=tuple(records))


def test_every_label_is_measured_once_a_round_and_in_every_place() -> None:
    labels = ["a", "b", "c"]
    order = turns_of(labels, 6, seed=1)
    rounds = [[label for n, label in order if n == number] for number in range(6)]
    assert all(sorted(one) == labels for one in rounds)
    assert [number for number, _ in order] == sorted(number for number, _ in order)
    assert Counter((place, label) for one in rounds for place, label in enumerate(one)) == dict.fromkeys(
        itertools.product(range(3), labels), 2
    )


def test_the_order_depends_on_the_seed() -> None:
    orders = {tuple(turns_of(["a", "b", "c", "d"], 4, seed)) for seed in range(20)}
    assert len(orders) > 1
    assert turns_of(["a", "b"], 3, 7) == turns_of(["a", "b"], 3, 7)


def test_paired_requests_of_one_ratio_have_an_interval_without_width() -> None:
    baseline = [np.array([1.0, 2.0, 7.0]), np.array([3.0, 4.0])]
    found = ratio_interval([2 * values for values in baseline], baseline, MEAN, 200, 0.95, 0)
    assert found is not None
    assert (found.ratio, found.low, found.high) == pytest.approx((2, 2, 2))
    assert (found.value, found.baseline) == pytest.approx((6.8, 3.4))


@pytest.mark.slow
def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    """Rounds that differ among themselves, as on a machine that drifts; 90 % intervals over 8 of them."""
    generator = np.random.default_rng(3)
    held = 0
    for trial in range(60):
        drifts = generator.normal(1, 0.15, size=(2, 8))
        ours, theirs = ([drift * generator.gamma(4, 0.25, size=40) for drift in side] for side in drifts)
        found = ratio_interval(ours, theirs, MEAN, 200, 0.9, trial)
        assert found is not None
        held += found.low <= 1.0 <= found.high
    # A bootstrap of 8 rounds is somewhat too narrow; half of them would mean that rounds were taken for independent.
    assert 45 <= held <= 60


def test_more_confidence_is_wider() -> None:
    generator = np.random.default_rng(0)
    ours, theirs = ([generator.random(20) for _ in range(4)] for _ in range(2))
    some, more = (ratio_interval(ours, theirs, MEAN, 500, level, 0) for level in (0.5, 0.99))
    assert some is not None
    assert more is not None
    assert more.low < some.low < some.ratio < some.high < more.high


def test_a_side_without_values_has_no_ratio() -> None:
    nothing, something = [np.array([np.nan])], [np.array([1.0])]
    for ours, theirs in ((nothing, something), (something, nothing), ([np.empty(0)], [np.empty(0)])):
        assert ratio_interval(ours, theirs, MEAN, 100, 0.9, 0) is None


def test_statistics() -> None:
    values = np.arange(1.0, 102.0, dtype=np.float64)
    assert [statistic(values) for statistic in STATISTICS.values()] == [51.0, 51.0, 100.0]


def compared(*points: Point, **more: object) -> dict[tuple[str, str], float]:
    config = CompareConfig(program=("a", "b"), request_rate=(1.0,), rounds=2, resamples=100, **more)  # type: ignore[arg-type]
    return {(ratio.label, ratio.metric): ratio.ratio for ratio in ratios_of(points, config)}


@pytest.mark.slow
def test_ratios_are_against_the_baseline() -> None:
    points = [point(label, number, ttft) for number in range(2) for label, ttft in (("a", 1.0), ("b", 1.5))]
    assert compared(*points)["b", "mean TTFT"] == pytest.approx(1.5)
    assert compared(*points, baseline="b")["a", "median E2EL"] == pytest.approx(1 / 1.5)
    assert {label for label, _ in compared(*points)} == {"b"}


@pytest.mark.slow
def test_percentiles_have_ratios_if_there_are_enough_requests_for_them() -> None:
    for count, there in ((49, False), (50, True)):
        points = [point(label, number, 1.0, count=count) for number in range(2) for label in ("a", "b")]
        assert (("b", "p99 E2EL") in compared(*points)) is there


def test_rounds_that_one_side_did_not_finish_do_not_count() -> None:
    points = [point("a", 0, 1.0), point("b", 0, 2.0), point("a", 1, 1.0), point("b", 1, 9.0, partial=True)]
    assert compared(*points)["b", "mean TTFT"] == pytest.approx(2.0)


def test_requests_that_failed_on_one_side_are_left_out_there() -> None:
    points = [point("a", 0, 1.0), point("b", 0, 1.0, fails=9)]
    assert compared(*points)["b", "mean TTFT"] == pytest.approx(1.04 / 1.045)


def test_every_load_has_ratios_of_its_own() -> None:
    points = [
        point(label, 0, ttft * rate, rate=rate) for rate in (1.0, 2.0) for label, ttft in (("a", 1.0), ("b", rate))
    ]
    config = CompareConfig(program=("a", "b"), request_rate=(1.0, 2.0), rounds=1, resamples=100)
    found = {r.request_rate: r.ratio for r in ratios_of(points, config) if r.metric == "mean TTFT"}
    assert found == pytest.approx({1.0: 1.0, 2.0: 2.0})
