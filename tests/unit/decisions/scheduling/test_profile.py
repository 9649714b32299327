"""A profile: filters, weights, and what it does with plugins that misbehave."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from tercet.decisions.scheduling import Decision, Engines, SchedulingProfile
from tercet.decisions.scheduling.filters import (
    ByLabel,
    ByLabelSelector,
    DecodeFilter,
    HealthFilter,
    PrefillFilter,
    SaturationFilter,
)
from tercet.decisions.scheduling.plugin import Filter, Picker, Scorer
from tercet.decisions.scheduling.profiles import MaxScorePicker, PowerOfTwoPicker, RandomPicker, WeightedRandomPicker
from tercet.decisions.scheduling.scorers import NoHitLRUScorer, PrefixCacheScorer
from tercet.protocol import EngineUnreachable

from .builders import Bench, View, request_of


class Fixed(Scorer, frozen=True):
    """Gives what it is told."""

    of: tuple[float, ...]

    def score(self, decision: Decision, engines: Engines) -> tuple[float, ...]:
        return self.of


def chosen(bench: Bench, profile: SchedulingProfile) -> str:
    row = profile.pick(bench.decision(), bench.engines)
    return bench.views[bench.engines.rows.tolist().index(row)].name


def by_scores(*scorers: tuple[tuple[float, ...], float]) -> SchedulingProfile:
    return SchedulingProfile("p", [], [(Fixed(of=of), weight) for of, weight in scorers], MaxScorePicker())


@pytest.mark.parametrize(
    ("profile", "name"),
    [
        (by_scores(((1.0, 0.0), 1), ((0.0, 0.9), 1)), "a"),
        (by_scores(((1.0, 0.0), 1), ((0.0, 0.6), 2)), "b"),
        (by_scores(((7.0, 1.0), 1), ((0.0, 0.1), 1)), "b"),
        (by_scores(((-5.0, 0.0), 1), ((0.1, 0.0), 1)), "a"),
        (by_scores(((math.nan, 0.1), 1)), "b"),
        (by_scores(((1.0, 0.0), 0), ((0.0, 0.1), 1)), "b"),
    ],
    ids=["sum", "weights", "cut-at-1", "cut-at-0", "nan-is-0", "weight-0"],
)
def test_the_highest_sum_of_weighted_scores_wins(profile: SchedulingProfile, name: str) -> None:
    assert chosen(Bench(View("a"), View("b")), profile) == name


@pytest.mark.parametrize("scores", [(1.0,), (1.0, 0.0, 0.0)])
def test_a_scorer_that_loses_count_is_an_error(scores: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="Fixed gave scores of shape"):
        chosen(Bench(View("a"), View("b")), by_scores((scores, 1)))


def test_a_strict_filter_fails_the_pick_and_names_itself() -> None:
    profile = SchedulingProfile("mine", [PrefillFilter()], [], MaxScorePicker())
    with pytest.raises(EngineUnreachable, match=r"'mine'.*PrefillFilter leaves out all 1"):
        chosen(Bench(View("a", "decode")), profile)


def test_a_lenient_filter_that_leaves_nobody_is_passed_over() -> None:
    bench = Bench(View("a", "decode", reachable=False), View("b", "prefill", reachable=False))
    assert chosen(bench, SchedulingProfile("p", [HealthFilter(), DecodeFilter()], [], MaxScorePicker())) == "a"
    strict = SchedulingProfile("p", [HealthFilter(strict=True)], [], MaxScorePicker())
    with pytest.raises(EngineUnreachable):
        chosen(bench, strict)


def test_plugins_learn_who_was_picked() -> None:
    bench = Bench(View("a"), View("b"))
    scorers = [(PrefixCacheScorer(block_size=2), 2), (NoHitLRUScorer(), 1)]
    profile = SchedulingProfile("p", [], scorers, MaxScorePicker())

    def pick(*tokens: int) -> int:
        return profile.pick(bench.decision(request_of(*tokens)), bench.engines)

    first = pick(1, 2, 3, 4)
    assert pick(5, 6, 7, 8) != first  # new as well: to the other one
    assert pick(1, 2, 3, 4) == first  # known there
    assert pick(9, 9, 9, 9) == first  # new, and the last new one went to the other


# Pickers of profiles.

MANY = 4000


def shares(picker: Picker, scores: list[float], bench: Bench | None = None) -> list[float]:
    bench = bench or Bench(*(View(f"e{n}") for n in range(len(scores))))
    decision, engines = bench.decision(), bench.engines
    counts = Counter(picker.pick(decision, engines, np.array(scores)) for _ in range(MANY))
    assert set(counts) <= set(range(len(scores)))
    return [counts[n] / MANY for n in range(len(scores))]


def test_max_score_breaks_ties_by_chance() -> None:
    assert shares(MaxScorePicker(), [0.1, 0.9, 0.2]) == [0, 1, 0]
    assert shares(MaxScorePicker(), [0.9, 0.1, 0.9]) == pytest.approx([0.5, 0, 0.5], abs=0.05)


def test_random_looks_at_no_score() -> None:
    assert shares(RandomPicker(), [0.0, 1.0]) == pytest.approx([0.5, 0.5], abs=0.05)


def test_weighted_random_goes_by_share() -> None:
    assert shares(WeightedRandomPicker(), [0.0, 1.0, 3.0, 0.0]) == pytest.approx([0, 0.25, 0.75, 0], abs=0.05)
    assert shares(WeightedRandomPicker(), [0.0, 0.0]) == pytest.approx([0.5, 0.5], abs=0.05)


@pytest.mark.parametrize("drawn", [0.0, 1.0])
def test_weighted_random_never_takes_a_score_of_0_even_at_the_ends(drawn: float) -> None:
    class Drawn(Random):
        def random(self) -> float:
            return drawn

    bench = Bench(View("a"), View("b"), View("c"))
    decision = replace(bench.decision(), random=Drawn())
    assert WeightedRandomPicker().pick(decision, bench.engines, np.array([0.0, 0.3, 0.0])) == 1


def test_power_of_two_never_takes_the_worst_of_three_and_takes_the_best_twice_as_often() -> None:
    assert shares(PowerOfTwoPicker(), [0.1, 0.9, 0.5]) == pytest.approx([0, 2 / 3, 1 / 3], abs=0.05)


def test_power_of_two_takes_the_less_busy_of_equals() -> None:
    bench = Bench(View("a", in_flight=3), View("b"))
    assert shares(PowerOfTwoPicker(), [0.5, 0.5], bench) == [0, 1]


@pytest.mark.parametrize("picker", [MaxScorePicker(), RandomPicker(), WeightedRandomPicker(), PowerOfTwoPicker()])
def test_one_engine_is_no_choice(picker: Picker) -> None:
    assert shares(picker, [0.0]) == [1]


# Filters: who stays.


def kept(bench: Bench, plugin: Filter) -> str:
    engines = bench.engines
    return "".join(engine.name for engine in engines.where(plugin.keep(bench.decision(), engines)))


@pytest.mark.parametrize(
    ("plugin", "names"), [(PrefillFilter(), "pb"), (PrefillFilter(allows_both=False), "p"), (DecodeFilter(), "db")]
)
def test_roles(plugin: Filter, names: str) -> None:
    bench = Bench(View("p", "prefill"), View("d", "decode"), View("b", "both"))
    assert kept(bench, plugin) == names


@pytest.mark.parametrize(
    ("plugin", "names"),
    [
        (ByLabel(label="zone", valid_values=frozenset({"x"})), "a"),
        (ByLabel(label="zone", valid_values=frozenset({"x", "y"})), "ab"),
        (ByLabel(label="zone", valid_values=frozenset({"x"}), allows_no_label=True), "ac"),
        (ByLabel(label="gpu"), ""),
        (ByLabelSelector(match_labels={"zone": "x"}), "a"),
        (ByLabelSelector(match_labels={"zone": "y", "gpu": "h"}), "b"),
        (ByLabelSelector(match_labels={"zone": "x", "gpu": "h"}), ""),
    ],
)
def test_labels(plugin: Filter, names: str) -> None:
    bench = Bench(View("a", labels={"zone": "x"}), View("b", labels={"zone": "y", "gpu": "h"}), View("c"))
    assert kept(bench, plugin) == names


def test_health_is_the_last_answer() -> None:
    assert kept(Bench(View("a", reachable=False), View("b")), HealthFilter()) == "b"


def test_health_may_ask_for_a_recent_word() -> None:
    bench = Bench(View("a"), View("b"), View("never"))
    bench.report("a")
    bench.now += 5
    bench.report("b")
    assert kept(bench, HealthFilter(max_age=5)) == "ab"
    assert kept(bench, HealthFilter(max_age=4.9)) == "b"


def test_saturation_has_two_limits_and_the_limit_itself_passes() -> None:
    bench = Bench(View("a"), View("b"), View("c"), View("d"))
    bench.report("a", waiting=5, kv=0.8)
    bench.report("b", waiting=6)
    bench.report("c", kv=0.81)
    bench.report("d", waiting=7)
    assert kept(bench, SaturationFilter()) == "a"
    assert kept(bench, SaturationFilter(queue_depth_threshold=6)) == "ab"
    assert kept(bench, SaturationFilter(kv_cache_util_threshold=0.9)) == "ac"


def test_an_old_report_counts_as_full_unless_unknown_is_allowed() -> None:
    bench = Bench(View("old"), View("new"), View("full"))
    bench.report("old")
    bench.now += 1.1
    bench.report("new")
    bench.report("full", waiting=9)
    assert kept(bench, SaturationFilter()) == "new"
    assert kept(bench, SaturationFilter(allows_unknown=True)) == "oldnew"
