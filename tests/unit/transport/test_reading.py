"""What is copied for read descriptors, and in what steps."""

from __future__ import annotations

import ctypes
import itertools
import socket
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.transport.agent.agent import neighbouring
from tercet.transport.backends import reading
from tercet.transport.backends.reading import copies_of, in_steps, staging_copies
from tercet.transport.backends.tcp import LEAST_CHUNK_BYTES, LONGEST_CHUNK_BYTES, MAX_CHUNK_BYTES, chunk_bytes
from tercet.transport.peer import cuts
from tercet.transport.region import shape_of
from tercet.transport.sockets import Vector, address_of, nowhere, send_all, wait_in_calls
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


# What a send is cut into, and how planes are put together.


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


@given(st.integers(0, 2**40), st.integers(1, 64), st.sampled_from([MAX_CHUNK_BYTES, LONGEST_CHUNK_BYTES]))
def test_every_connection_gets_a_chunk_unless_chunks_were_small(total: int, streams: int, longest: int) -> None:
    size = chunk_bytes(total, streams, longest)
    assert LEAST_CHUNK_BYTES <= size <= longest
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


# Buffers and places, for one system call after another: whatever the sizes, all arrives, and waiting is told apart.


def gather(vector: Vector) -> bytes:
    """What is in the places that are left."""
    left = vector._places[vector._first :]
    return b"".join(ctypes.string_at(address, length) for address, length in left.tolist())


def in_one_place(buffer: bytearray) -> Vector:
    return Vector(np.array([(address_of(buffer), len(buffer))], dtype=np.uint64), buffer, len(buffer))


def in_places(buffer: bytearray) -> Vector:
    """Three places, the buffer's last bytes first."""
    third, at = len(buffer) // 3, address_of(buffer)
    rows = [(at + 2 * third, len(buffer) - 2 * third), (at, third), (at + third, third)]
    return Vector(np.array([row for row in rows if row[1]], dtype=np.uint64), buffer, len(buffer))


BOTH = pytest.mark.parametrize("make", [in_one_place, in_places])


@pytest.mark.parametrize(("source", "target"), [(in_one_place, in_one_place), (in_places, in_places)])
@given(st.binary(min_size=1, max_size=300_000))
def test_what_is_sent_arrives_in_its_places(
    source: Callable[[bytearray], Vector], target: Callable[[bytearray], Vector], data: bytes
) -> None:
    near, far = socket.socketpair()
    with near, far:
        for end in (near, far):
            wait_in_calls(end, 0.01, 0.01)
        sent, got = source(bytearray(data)), bytearray(len(data))
        into = target(got)
        while into.left:
            if sent.left:
                sent.advance(sent.send(near) or 0)
            into.advance(into.receive(far) or 0)
        assert got == data
        assert sent.left == 0


@BOTH
def test_rest_is_what_is_left(make: Callable[[bytearray], Vector]) -> None:
    data = make(bytearray(b"abcdefghi"))
    whole = gather(data)
    data.advance(4)
    assert (gather(data), data.left) == (whole[4:], 5)


@BOTH
def test_nothing_to_read_and_the_end_are_told_apart(make: Callable[[bytearray], Vector]) -> None:
    near, far = socket.socketpair()
    with far:
        wait_in_calls(far, 0.01, 0.01)
        into = make(bytearray(3))
        assert into.receive(far) is None
        near.close()
        assert into.receive(far) == 0


def test_a_peer_that_takes_nothing_is_a_timeout() -> None:
    near, far = socket.socketpair()
    with near, far:
        wait_in_calls(near, 0.01, 0.01)
        with pytest.raises(TimeoutError):
            send_all(near, in_places(bytearray(10_000_000)))


@given(st.integers(0, 200_000))
def test_what_nobody_wants_is_the_same_few_bytes(nbytes: int) -> None:
    scratch = memoryview(bytearray(b"x" * 4096))
    assert gather(nowhere(nbytes, scratch)) == b"x" * nbytes
