"""What a send is cut into, and how planes are put together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.transport.agent.sends import neighbouring
from tercet.transport.outgoing import units


@given(
    st.integers(0, 5), st.integers(1, 9), st.lists(st.integers(0, 99), max_size=20), st.integers(1, 9),
    st.integers(0, 9),
)  # fmt: skip
def test_units_are_every_block_of_every_layer_once(
    first: int, count: int, blocks: list[int], limit: int, less: int
) -> None:
    layers, together = range(first, first + count), max(0, limit - less)
    found = list(units(layers, blocks, limit, together))
    assert sorted((layer, start + at, block) for some, start, unit in found for layer in some
                  for at, block in enumerate(unit)) == sorted((layer, at, block) for layer in layers
                                                             for at, block in enumerate(blocks))  # fmt: skip
    assert all(0 < len(unit) <= limit for _, _, unit in found)
    assert all(len(some) == 1 or len(some) * len(unit) <= together for some, _, unit in found)


@pytest.mark.parametrize(
    ("planes", "expected"),
    [
        ((), []),
        ((3,), [range(3, 4)]),
        ((0, 1, 2), [range(3)]),
        ((4, 5, 6, 1), [range(4, 7), range(1, 2)]),
        ((2, 1, 0), [range(2, 3), range(1, 2), range(1)]),
        ((5, 5), [range(5, 6), range(5, 6)]),
    ],
)
def test_planes_that_are_neighbours_are_pushed_together(planes: tuple[int, ...], expected: list[range]) -> None:
    assert list(neighbouring(planes)) == expected
