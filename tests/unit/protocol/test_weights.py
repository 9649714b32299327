"""A choice by weights: parts are exact to rounding, whatever the size of the weights."""

from __future__ import annotations

from fractions import Fraction
from sys import float_info

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tercet.protocol.names import chosen_by_weight

TINIEST, LARGEST = 5e-324, float_info.max
ROUNDING = Fraction(1, 10**12)


@given(st.lists(st.floats(0, LARGEST), min_size=1, max_size=6).filter(any), st.floats(0, 1, exclude_max=True))
@example([TINIEST, TINIEST], 0.25)
@example([TINIEST, TINIEST], 0.75)
@example([LARGEST, LARGEST, LARGEST], 0.5)
def test_a_draw_is_in_the_part_of_the_chosen(weights: list[float], draw: float) -> None:
    exact = [Fraction(weight) for weight in weights]
    chosen = chosen_by_weight(weights, draw)
    assert weights[chosen] > 0
    begin, end = sum(exact[:chosen]) / sum(exact), sum(exact[: chosen + 1]) / sum(exact)
    assert begin - ROUNDING <= Fraction(draw) <= end + ROUNDING


@pytest.mark.parametrize("weights", [(0.1, 0.2, 0.0), (1.0, 0.1, 0.1, 0.1), (TINIEST, 0.0)])
def test_the_largest_draw_chooses_the_last_with_a_weight(weights: tuple[float, ...]) -> None:
    last = max(index for index, weight in enumerate(weights) if weight)
    assert chosen_by_weight(weights, 1.0 - 2**-53) == last
