"""What is copied for read descriptors, and in what steps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.transport.backends import reading
from tercet.transport.backends.reading import copies_of, in_steps, staging_copies
from tercet.transport.region import shape_of
from tests.unit.transport.builders import chunk

LIMIT = 1024


@given(st.lists(st.integers(1, 3 * LIMIT), max_size=20))
def test_steps_are_the_copies_and_no_larger_than_needed(sizes: list[int]) -> None:
    copies = np.array([(size, number, number) for number, size in enumerate(sizes)]).reshape(-1, 3)
    found = list(in_steps(copies, LIMIT))
    assert [row for some, _ in found for row in some.tolist()] == copies.tolist()
    assert all(nbytes == some[:, 0].sum() for some, nbytes in found)
    assert all(len(some) == 1 or 0 < nbytes <= LIMIT for some, nbytes in found)


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=40),
    st.lists(st.integers(0, 30), min_size=40, max_size=40, unique=False),
    st.integers(1, 5),
)
def test_copies_are_the_blocks_in_order_and_neighbours_joined(
    sources: list[int], targets: list[int], limit: int
) -> None:
    targets, size = targets[: len(sources)], 64
    shape = shape_of([40 * size], 40, size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "MAX_COPY_BYTES", limit * size)
        found = copies_of(chunk(0, 0, sources), size, shape, shape, np.array(targets)).tolist()
    blocks = [(there + at, here + at) for length, there, here in found for at in range(0, length, size)]
    assert blocks == [(source * size, target * size) for source, target in zip(sources, targets, strict=True)]
    assert all(length <= limit * size for length, _, _ in found)
    assert all(
        there + length != after or here + length != behind or length == limit * size
        for (length, there, here), (_, after, behind) in itertools.pairwise(found)
    )


@given(st.lists(st.integers(0, 30), min_size=1, max_size=40), st.integers(0, 100))
def test_what_is_put_aside_lies_layer_by_layer(sources: list[int], at: int) -> None:
    shape = shape_of([40 * 64] * 3, 40, 64)
    found = staging_copies(chunk(1, 0, sources, size=32, offset=16, layers=2), 32, shape, at).tolist()
    expected = [shape.planes[layer] + block * 64 + 16 for layer in (1, 2) for block in sources]
    assert found == [[32, there, at + 32 * number] for number, there in enumerate(expected)]
