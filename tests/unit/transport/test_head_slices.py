"""Ranks that split heads differently: every head of every receiver comes from one sender, and from the right place."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.protocol import KVLayout
from tercet.transport.region import HeadSlice, RankRoute, heads, routes

DEGREES = (1, 2, 4, 8)
HEAD_BYTES = 6


def layout(num_heads: int, tp_size: int, head_bytes: int = HEAD_BYTES) -> KVLayout:
    held = max(1, num_heads // tp_size)
    return KVLayout("m", "bf16", 1, num_heads, 1, 16, held * head_bytes, tp_size, "plain", splits_by_head=True)


def held_by_rank(num_heads: int, tp_size: int, rank: int) -> list[int]:
    """Naively: heads go round, or ranks share one."""
    if num_heads >= tp_size:
        each = num_heads // tp_size
        return list(range(rank * each, (rank + 1) * each))
    return [rank // (tp_size // num_heads)]


cases = [
    (num_heads, source, target)
    for num_heads in (1, 2, 3, 4, 6, 8, 12, 16, 24, 64)
    for source in DEGREES
    for target in DEGREES
    if all(num_heads % degree == 0 or degree % num_heads == 0 for degree in (source, target))
]


@pytest.mark.parametrize(("num_heads", "tp_size"), sorted({(num_heads, source) for num_heads, source, _ in cases}))
def test_heads_of_a_rank(num_heads: int, tp_size: int) -> None:
    held = [list(heads(layout(num_heads, tp_size), rank)) for rank in range(tp_size)]
    assert held == [held_by_rank(num_heads, tp_size, rank) for rank in range(tp_size)]
    assert {head for rank in held for head in rank} == set(range(num_heads))


@pytest.mark.parametrize(("num_heads", "source", "target"), cases)
def test_every_head_byte_is_filled_once_with_its_own(num_heads: int, source: int, target: int) -> None:
    here, there = layout(num_heads, source), layout(num_heads, target)
    here.require_mappable(there, "the other")
    written = [Counter[int]() for _ in range(target)]
    blocks = [bytearray(there.block_bytes) for _ in range(target)]
    for rank in range(source):
        # Each byte of a sender's block tells its head.
        block = bytes(head + 1 for head in held_by_rank(num_heads, source, rank) for _ in range(HEAD_BYTES))
        for receiver, head_slice, _ in routes(here, there, rank):
            assert head_slice.size * head_slice.parts == there.block_bytes
            assert 0 <= head_slice.source_offset <= here.block_bytes - head_slice.size
            at = head_slice.part * head_slice.size
            blocks[receiver][at : at + head_slice.size] = block[
                head_slice.source_offset : head_slice.source_offset + head_slice.size
            ]
            written[receiver].update(range(at, at + head_slice.size))
    for rank in range(target):
        assert written[rank] == Counter(range(there.block_bytes))
        expected = bytes(head + 1 for head in held_by_rank(num_heads, target, rank) for _ in range(HEAD_BYTES))
        assert blocks[rank] == expected


@given(st.sampled_from(cases), st.data())
def test_parts_of_one_receiver_are_cut_alike(case: tuple[int, int, int], data: st.DataObject) -> None:
    num_heads, source, target = case
    here, there = layout(num_heads, source), layout(num_heads, target)
    receiver = data.draw(st.integers(0, target - 1))
    strips = [head_slice for rank in range(source) for to, head_slice, _ in routes(here, there, rank) if to == receiver]
    assert {head_slice.parts for head_slice in strips} == {len(strips)}
    assert sorted(head_slice.part for head_slice in strips) == list(range(len(strips)))


def test_equal_degrees_send_whole_blocks_to_their_own_rank() -> None:
    same = layout(8, 4)
    whole = (0, 2 * HEAD_BYTES, 0, 1)
    assert [routes(same, same, rank) for rank in range(4)] == [[(rank, whole, ())] for rank in range(4)]


def test_one_rank_to_four_and_back() -> None:
    one, four = layout(8, 1), layout(8, 4)
    assert routes(one, four, 0) == [RankRoute(rank, HeadSlice(rank * 12, 12, 0, 1)) for rank in range(4)]
    assert [routes(four, one, rank) for rank in range(4)] == [
        [RankRoute(0, HeadSlice(0, 12, rank, 4))] for rank in range(4)
    ]


def test_of_ranks_with_the_same_head_the_first_one_sends() -> None:
    eight, two = layout(2, 8), layout(2, 2)
    sending = [bool(routes(eight, two, rank)) for rank in range(8)]
    assert sending == [True, False, False, False, True, False, False, False]
    assert [receiver for receiver, *_ in routes(two, eight, 1)] == [4, 5, 6, 7]


@pytest.mark.parametrize("factor", [2, 4, 8])
def test_a_strip_is_measured_in_the_senders_blocks(factor: int) -> None:
    """With blocks of another size on the other side, offset and size still are the sender's own."""
    here, there = layout(8, 1, HEAD_BYTES * factor), layout(8, 2)
    found = [head_slice for _, head_slice, _ in routes(here, there, 0)]
    assert found == [HeadSlice(0, 24 * factor), HeadSlice(24 * factor, 24 * factor)]
