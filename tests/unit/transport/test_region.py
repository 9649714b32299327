"""A rank's region: where things are, what a peer may claim about its own, and what a sealed file cannot do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.protocol import BadRequest, TransferFailed
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
from tests.unit.transport.builders import gather

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
