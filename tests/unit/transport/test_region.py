"""A rank's region: where things are, what a peer may claim about its own, what a sealed file cannot do; and what is
copied for read descriptors, in what steps.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import socket
from collections.abc import Callable, Iterator
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.protocol import BadRequest, TransferFailed
from tercet.transport.agent.agent import neighbouring
from tercet.transport.backends import reading
from tercet.transport.backends.reading import copies_of, in_steps, staging_copies
from tercet.transport.backends.tcp import LEAST_CHUNK_BYTES, LONGEST_CHUNK_BYTES, MAX_CHUNK_BYTES, chunk_bytes
from tercet.transport.peer import cuts
from tercet.transport.region import (
    PAGE_BYTES,
    TAIL_BYTES,
    WORD_BYTES,
    WORDS,
    KVRegion,
    RegionShape,
    create_file,
    neighbours,
    shape_of,
)
from tercet.transport.sockets import Vector, address_of, nowhere, send_all, wait_in_calls
from tests.unit.transport.builders import chunk, gather

LAYERS, BLOCKS, BLOCK_BYTES = 3, 5, 64


@pytest.fixture
def region() -> Iterator[KVRegion]:
    region = KVRegion.create(LAYERS, BLOCKS, BLOCK_BYTES)
    yield region
    region.close()


# ---- shapes --------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, PAGE_BYTES - 1), min_size=1, max_size=6), st.integers(1, 300), st.integers(1, 200)
)  # fmt: skip
def test_planes_are_whole_pages_of_their_own(offsets: list[int], num_blocks: int, block_bytes: int) -> None:
    length = num_blocks * block_bytes
    shape = shape_of([length] * len(offsets), num_blocks, block_bytes, offsets)
    shape.require_sane()
    at = 0
    for plane, offset in zip(shape.planes, offsets, strict=True):
        assert plane % PAGE_BYTES == offset
        assert plane - offset == at
        at = -(-(plane + length) // PAGE_BYTES) * PAGE_BYTES
    assert shape.words == at
    assert shape.size == at + TAIL_BYTES


def test_offsets_are_for_all_planes_or_for_none() -> None:
    with pytest.raises(ValueError, match="longer"):
        shape_of([64, 64], 1, 64, [0, 0, 0])


def test_blocks_follow_one_another() -> None:
    shape = shape_of([BLOCKS * BLOCK_BYTES] * 2, BLOCKS, BLOCK_BYTES)
    assert [shape.block(1, block) - shape.planes[1] for block in range(3)] == [0, 64, 128]


@given(st.integers(0, 2**64 - 1))
def test_words_and_scratch_are_aligned_and_behind_the_blocks(number: int) -> None:
    shape = shape_of([BLOCKS * BLOCK_BYTES], BLOCKS, BLOCK_BYTES)
    word, scratch = shape.word(number), shape.scratch(number)
    assert word % WORD_BYTES == scratch % WORD_BYTES == 0
    assert shape.words <= word <= shape.words + (WORDS - 1) * WORD_BYTES
    assert shape.words + WORDS * WORD_BYTES <= scratch <= shape.size - WORD_BYTES


sane = shape_of([BLOCKS * BLOCK_BYTES] * 2, BLOCKS, BLOCK_BYTES)


@pytest.mark.parametrize(
    "changes",
    [
        {"planes": ()},
        {"planes": (0, -1)},
        {"planes": (0, sane.size - BLOCKS * BLOCK_BYTES + 1)},
        {"planes": (2**64 - 1, 0)},
        {"num_blocks": 0},
        {"num_blocks": -1},
        {"num_blocks": 2**63},
        {"block_bytes": 0},
        {"block_bytes": -64},
        {"block_bytes": sane.size},
        {"words": -8},
        {"words": 4},
        {"words": sane.words + 8},
        {"words": 2**64 - 8},
        {"size": 0},
        {"size": -1},
        {"size": TAIL_BYTES - 1},
        {"size": sane.size - 8},
    ],
    ids=str,
)
def test_a_shape_that_does_not_hold_its_blocks_is_refused(changes: dict[str, object]) -> None:
    sane.require_sane()
    with pytest.raises(TransferFailed, match="is too small for its blocks"):
        msgspec.structs.replace(sane, **changes).require_sane()


numbers = st.one_of(st.integers(-(2**63), 2**64 - 1), st.integers(-100, 100_000))


@given(st.builds(RegionShape, st.lists(numbers, max_size=3).map(tuple), numbers, numbers, numbers, numbers), numbers)
def test_whatever_passes_has_its_blocks_and_words_inside(shape: RegionShape, number: int) -> None:
    try:
        shape.require_sane()
    except TransferFailed:
        return
    for layer in range(len(shape.planes)):
        assert 0 <= shape.block(layer, 0) <= shape.block(layer, shape.num_blocks - 1) <= shape.size - shape.block_bytes
    assert 0 <= shape.word(number) <= shape.size - WORD_BYTES
    assert 0 <= shape.scratch(number) <= shape.size - WORD_BYTES


# ---- blocks --------------------------------------------------------------------------------------------------


def test_blocks_are_views_of_the_file(region: KVRegion) -> None:
    region.blocks(1, 2, 2)[:] = b"\x07" * (2 * BLOCK_BYTES)
    at = region.shape.block(1, 2)
    assert os.pread(region.fd, 2 * BLOCK_BYTES, at) == b"\x07" * (2 * BLOCK_BYTES)
    assert region.bytes.tobytes().count(7) == 2 * BLOCK_BYTES


@pytest.mark.parametrize(
    ("layer", "first", "count"), [(-1, 0, 1), (LAYERS, 0, 1), (0, -1, 1), (0, BLOCKS, 1), (0, 0, BLOCKS + 1), (0, 0, 0)]
)
def test_blocks_that_there_are_not_cannot_be_had(region: KVRegion, layer: int, first: int, count: int) -> None:
    with pytest.raises(BadRequest, match="are not among 3 layers of 5 blocks"):
        region.blocks(layer, first, count)


@given(st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=9), st.integers(0, BLOCK_BYTES - 1), st.data())
def test_places_are_that_part_of_each_block(blocks: list[int], offset: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, BLOCK_BYTES - offset))
    region = KVRegion.create(LAYERS, BLOCKS, BLOCK_BYTES)
    try:
        for block in range(BLOCKS):
            region.blocks(1, block)[:] = bytes(range(block, block + BLOCK_BYTES))
        found = gather(region.places(range(1, 2), np.array(blocks), offset, size))
        assert found == b"".join(bytes(range(block + offset, block + offset + size)) for block in blocks)
    finally:
        region.close()


@pytest.mark.parametrize("blocks", [[-1], [0, BLOCKS], [BLOCKS, 0], [2, -1, 3]], ids=str)
def test_places_of_blocks_that_there_are_not(region: KVRegion, blocks: list[int]) -> None:
    with pytest.raises(BadRequest):
        region.places(range(1), np.array(blocks), 0, BLOCK_BYTES)
    with pytest.raises(BadRequest):
        region.places(range(1, LAYERS + 1), np.array([0]), 0, BLOCK_BYTES)


def test_places_of_several_layers_follow_one_another(region: KVRegion) -> None:
    found = gather(region.places(range(LAYERS), np.array([2, 1]), 1, 3))
    assert found == b"".join(bytes(region.blocks(layer, block)[1:4]) for layer in range(LAYERS) for block in (2, 1))


def test_neighbours_are_one_place(region: KVRegion) -> None:
    places = region.places(range(1), np.array([1, 2, 3, 0]), 0, BLOCK_BYTES)
    assert places[:, 1].tolist() == [3 * BLOCK_BYTES, BLOCK_BYTES]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20))
def test_neighbours_are_the_blocks_in_as_few_groups_as_can_be(blocks: list[int]) -> None:
    firsts, counts = neighbours(np.array(blocks, dtype=np.int64))
    sizes = [int(count) for count in np.broadcast_to(counts, firsts.shape)]
    groups = [range(first, first + size) for first, size in zip(firsts.tolist(), sizes, strict=True)]
    assert [block for group in groups for block in group] == blocks
    assert all(before.stop != after.start for before, after in pairwise(groups))


# ---- the file ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [-1, 1, -TAIL_BYTES])
def test_the_file_keeps_its_size(region: KVRegion, change: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(region.fd, region.shape.size + change)
    assert os.fstat(region.fd).st_size == region.shape.size


def test_a_new_file_is_zero_and_not_inherited() -> None:
    shape = shape_of([PAGE_BYTES], 1, PAGE_BYTES)
    fd = create_file(shape)
    try:
        assert not os.get_inheritable(fd)
        assert not any(os.pread(fd, shape.size, 0))
    finally:
        os.close(fd)


def test_a_file_that_cannot_be_made_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Invalid argument"):
        create_file(msgspec.structs.replace(sane, size=-1))
    assert len(os.listdir("/proc/self/fd")) == before


# ---- live words ----------------------------------------------------------------------------------------------


def word(region: KVRegion, number: int) -> int:
    at = region.shape.word(number)
    return int.from_bytes(region.bytes[at : at + WORD_BYTES], "little")


def test_a_word_holds_the_number_while_the_send_lives(region: KVRegion) -> None:
    number = 2**64 - 3
    region.set_word(number)
    assert word(region, number) == number
    region.clear_word(number)
    assert word(region, number) == 0


def test_a_later_send_in_the_same_word_outlives_the_earlier_one(region: KVRegion) -> None:
    region.set_word(7)
    region.set_word(7 + WORDS)
    region.clear_word(7)
    assert word(region, 7) == 7 + WORDS
    region.clear_word(7 + WORDS)
    assert word(region, 7) == 0


def test_words_are_each_others_neighbours_not_each_other(region: KVRegion) -> None:
    for number in range(1, WORDS + 1):
        region.set_word(number)
    assert all(word(region, number) == number for number in range(1, WORDS + 1))
    assert not any(region.bytes[: region.shape.planes[-1] + BLOCKS * BLOCK_BYTES])


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


def gather_left(vector: Vector) -> bytes:
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
    whole = gather_left(data)
    data.advance(4)
    assert (gather_left(data), data.left) == (whole[4:], 5)


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
    assert gather_left(nowhere(nbytes, scratch)) == b"x" * nbytes
