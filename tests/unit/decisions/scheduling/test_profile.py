"""A profile: filters, weights, and what it does with plugins that misbehave."""

from __future__ import annotations

import math

import pytest

from tercet.decisions.scheduling import Decision, Engines, SchedulingProfile
from tercet.decisions.scheduling.filters import DecodeFilter, HealthFilter, PrefillFilter
from tercet.decisions.scheduling.plugin import Scorer
from tercet.decisions.scheduling.profiles import MaxScorePicker
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
