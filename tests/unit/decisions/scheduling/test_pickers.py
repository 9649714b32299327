"""Pickers of profiles."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from tercet.decisions.scheduling.plugin import Picker
from tercet.decisions.scheduling.profiles import MaxScorePicker, PowerOfTwoPicker, RandomPicker, WeightedRandomPicker

from .builders import Bench, View

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
