"""What a send is cut into, and how planes are put together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.transport.agent.agent import neighbouring
from tercet.transport.backends.tcp import LEAST_CHUNK_BYTES, MAX_CHUNK_BYTES, chunk_bytes
from tercet.transport.peer import cuts


@given(st.integers(0, 5), st.integers(1, 9), st.integers(0, 30), st.integers(1, 9))
def test_cuts_are_every_block_of_every_layer_once(first: int, num_layers: int, count: int, limit: int) -> None:
    layers = range(first, first + num_layers)
    found = list(cuts(layers, count, limit))
    places = [(layer, at) for some, cut in found for layer in some for at in range(count)[cut]]
    assert sorted(places) == [(layer, at) for layer in layers for at in range(count)]
    sizes = [(len(some), cut.stop - cut.start) for some, cut in found]
    assert all(num * size <= limit and size > 0 for num, size in sizes)
    # None is left with a few blocks while the others are full.
    assert not sizes or max(size for _, size in sizes) - min(size for _, size in sizes) < max(1, -(-count // limit))


@given(st.integers(0, 2**40), st.integers(1, 64))
def test_every_connection_gets_a_chunk_unless_chunks_were_small(total: int, streams: int) -> None:
    size = chunk_bytes(total, streams)
    assert LEAST_CHUNK_BYTES <= size <= MAX_CHUNK_BYTES
    assert size == LEAST_CHUNK_BYTES or -(-total // size) >= streams


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
