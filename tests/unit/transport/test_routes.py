"""Engines that split layers and heads differently, or have blocks of another size: every plane, head and token of every
receiver comes from one sender and from its right place, and from nowhere else.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tercet.protocol import BadRequest, CacheGroup, KVLayout, LayoutMismatch
from tercet.transport import KVRegion, PlaneRun, RankRoute, SendReport
from tercet.transport.region import (
    BlockShape,
    HeadSlice,
    TokenCopy,
    copy_tokens,
    first_token,
    heads,
    routes,
    runs,
    token_copies,
)
from tests.unit.transport.models import a_grant
from tests.unit.transport.ranks import TOKENS, Send, filled, new_lease, rank
from tests.unit.transport.test_rank import BACKENDS, SCATTERED, settings

HEADS, HEAD_BYTES = 8, 64
DEGREES = (1, 2, 4, 8)


def layout(tp_size: int, stages: tuple[tuple[int, ...], ...], groups: int, layers: int) -> KVLayout:
    return KVLayout(
        "m", "bf16", layers, HEADS, 1, TOKENS, max(1, HEADS // tp_size) * HEAD_BYTES, tp_size, "plain", True,
        groups=tuple(CacheGroup("full_attention", 1) for _ in range(groups)) if groups > 1 else (),
        stages=stages if len(stages) > 1 else (),
    )  # fmt: skip


@st.composite
def staged(draw: st.DrawFn, kinds: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Layers of these kinds, cut into stages; how many of each kind each stage has."""
    cuts = sorted(draw(st.sets(st.integers(1, len(kinds) - 1), max_size=5))) if len(kinds) > 1 else []
    parts = [kinds[first:last] for first, last in itertools.pairwise([0, *cuts, len(kinds)])]
    return tuple(tuple(part.count(kind) for kind in range(max(kinds) + 1)) for part in map(list, parts))


def planes_of(kinds: Sequence[int], stages: tuple[tuple[int, ...], ...], stage: int) -> list[int]:
    """Naively: the model's layers that a stage holds, in the order of its planes, group by group."""
    first = sum(map(sum, stages[:stage]))
    held = range(first, first + sum(stages[stage]))
    return sorted(held, key=lambda layer: (kinds[layer], layer))


@given(st.data())
def test_every_head_of_every_layer_is_sent_once_to_where_it_is_held(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=12))
    kinds = [sorted(set(kinds)).index(kind) for kind in kinds]
    ours, theirs = data.draw(staged(kinds)), data.draw(staged(kinds))
    source = layout(data.draw(st.sampled_from(DEGREES)), ours, max(kinds) + 1, len(kinds))
    target = layout(data.draw(st.sampled_from(DEGREES)), theirs, max(kinds) + 1, len(kinds))
    source.require_mappable(target, "the other")
    got = [Counter[tuple[int, int]]() for _ in range(target.num_ranks)]
    for sender in range(source.num_ranks):
        stage, tensor_parallel = divmod(sender, source.tp_size)
        held = planes_of(kinds, ours, stage)
        for receiver, head_slice, planes in routes(source, target, sender):
            at_stage, at_rank = divmod(receiver, target.tp_size)
            count = head_slice.size // HEAD_BYTES
            first = tensor_parallel * HEADS // source.tp_size + head_slice.source_offset // HEAD_BYTES
            assert at_rank * HEADS // target.tp_size + head_slice.part * count == first
            for run in planes or (PlaneRun(0, 0, len(kinds)),):
                for at in range(run.length):
                    layer = held[run.source + at]
                    assert planes_of(kinds, theirs, at_stage)[run.target + at] == layer
                    got[receiver].update((layer, head) for head in range(first, first + count))
    for receiver, sent in enumerate(got):
        at_stage, at_rank = divmod(receiver, target.tp_size)
        first = at_rank * HEADS // target.tp_size
        wanted = {
            (layer, head)
            for layer in planes_of(kinds, theirs, at_stage)
            for head in range(first, first + target.heads_per_rank)
        }
        assert sent == Counter(dict.fromkeys(wanted, 1))


def test_two_stages_to_one_and_back() -> None:
    one, two = layout(1, ((4,),), 1, 4), layout(1, ((1,), (3,)), 1, 4)
    assert runs(one, two, 0, 1) == (PlaneRun(1, 0, 3),)
    assert [planes for each in range(2) for *_, planes in routes(two, one, each)] == [
        (PlaneRun(0, 0, 1),), (PlaneRun(0, 1, 3),),
    ]  # fmt: skip
    assert [route.receiver for route in routes(one, two, 0)] == [0, 1]


def test_a_stage_without_layers_of_a_kind_sends_none() -> None:
    here, there = layout(1, ((1, 1), (2, 0)), 2, 4), layout(1, ((2, 0), (1, 1)), 2, 4)
    assert routes(here, there, 1) == [
        RankRoute(0, routes(here, there, 1)[0].head_slice, (PlaneRun(0, 1, 1),)),
        RankRoute(1, routes(here, there, 1)[1].head_slice, (PlaneRun(1, 0, 1),)),
    ]
    assert runs(here, there, 0, 1) == (PlaneRun(1, 1, 1),)


@pytest.mark.parametrize("stages", [((2,), (3,)), ((1,), (2,)), ((2, 2), (2, 0))], ids=str)
def test_stages_that_hold_other_layers_are_refused(stages: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(LayoutMismatch, match="stages is"):
        layout(1, ((2,), (2,)), 1, 4).require_mappable(layout(1, stages, 1, 4), "the other")


WAYS = [((1, (4,)), (1, (1, 3))), ((1, (1, 3)), (1, (4,))), ((2, (3, 1)), (1, (2, 2))), ((1, (2, 2)), (2, (1, 3)))]


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_layer_and_head_finds_its_rank(
    backend: str, way: tuple[tuple[int, tuple[int, ...]], tuple[int, tuple[int, ...]]], one_by_one: bool
) -> None:
    """Bytes, through each transport, whether layers are pushed together or as they are computed.

    And a lease is valid only where all layers have come.
    """
    source, target = (layout(tp, tuple((count,) for count in counts), 1, 4) for tp, counts in way)
    sources, targets = SCATTERED
    held = [
        [range(sum(counts[:stage]), sum(counts[: stage + 1])) for stage in range(len(counts)) for _ in range(tp)]
        for tp, counts in way
    ]

    def layers_of(number: int) -> Sequence[int]:
        layers = range(len(held[0][number]))
        return [*layers] if one_by_one else layers

    ours = [filled(len(layers), 40, source.block_bytes, 10 + each) for each, layers in enumerate(held[0])]
    theirs = [filled(len(layers), 40, target.block_bytes, 50 + each) for each, layers in enumerate(held[1])]
    end, lease = len(targets) * TOKENS, new_lease(len(targets) * TOKENS)
    senders, receivers = (
        [rank(region, settings(backend)) for region in regions] for regions in (ours, theirs)
    )  # fmt: skip
    sending, receiving = ([each.__enter__() for each in ranks] for ranks in (senders, receivers))
    try:
        for receiver in receiving:
            receiver.grants.grant(a_grant(lease, targets, 0, end, TOKENS))
        sends = [
            (number, Send(sender, receiving[route.receiver].addresses, lease, route.head_slice, planes=route.planes))
            for number, sender in enumerate(sending)
            for route in routes(source, target, number)
        ]
        *most, (last, send) = sends
        for number, each in most:
            each.push(layers_of(number), sources)
            each.finish(end)
        assert all(isinstance(each.wait(), SendReport) for _, each in most)
        assert 0 in [each.grants._open[lease].valid.end for each in receiving]
        send.push(layers_of(last), sources)
        send.finish(end)
        assert isinstance(send.wait(), SendReport)
        assert [receiver.grants.revoke(lease) for receiver in receiving] == [end] * len(receiving)
    finally:
        for each in (*senders, *receivers):
            each.__exit__(None, None, None)
    assert _heads(target, held[1], theirs, targets) == _heads(source, held[0], ours, sources)


def _heads(of: KVLayout, held: list[range], regions: list[KVRegion], blocks: Sequence[int]) -> dict[object, bytes]:
    found: dict[object, bytes] = {}
    for number, (layers, region) in enumerate(zip(held, regions, strict=True)):
        first = number % of.tp_size * HEADS // of.tp_size
        for at, layer in enumerate(layers):
            for index, block in enumerate(blocks):
                data = bytes(region.blocks(at, block))
                for head in range(of.heads_per_rank):
                    found[layer, index, first + head] = data[head * HEAD_BYTES : (head + 1) * HEAD_BYTES]
    return found


SLICE_BYTES = 6


def layout_by_head(num_heads: int, tp_size: int, head_bytes: int = SLICE_BYTES) -> KVLayout:
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
    held = [list(heads(layout_by_head(num_heads, tp_size), rank)) for rank in range(tp_size)]
    assert held == [held_by_rank(num_heads, tp_size, rank) for rank in range(tp_size)]
    assert {head for rank in held for head in rank} == set(range(num_heads))


@pytest.mark.parametrize(("num_heads", "source", "target"), cases)
def test_every_head_byte_is_filled_once_with_its_own(num_heads: int, source: int, target: int) -> None:
    here, there = layout_by_head(num_heads, source), layout_by_head(num_heads, target)
    here.require_mappable(there, "the other")
    written = [Counter[int]() for _ in range(target)]
    blocks = [bytearray(there.block_bytes) for _ in range(target)]
    for sender in range(source):
        # Each byte of a sender's block tells its head.
        block = bytes(head + 1 for head in held_by_rank(num_heads, source, sender) for _ in range(SLICE_BYTES))
        for receiver, head_slice, _ in routes(here, there, sender):
            assert head_slice.size * head_slice.parts == there.block_bytes
            assert 0 <= head_slice.source_offset <= here.block_bytes - head_slice.size
            at = head_slice.part * head_slice.size
            blocks[receiver][at : at + head_slice.size] = block[
                head_slice.source_offset : head_slice.source_offset + head_slice.size
            ]
            written[receiver].update(range(at, at + head_slice.size))
    for receiver in range(target):
        assert written[receiver] == Counter(range(there.block_bytes))
        expected = bytes(head + 1 for head in held_by_rank(num_heads, target, receiver) for _ in range(SLICE_BYTES))
        assert blocks[receiver] == expected


@given(st.sampled_from(cases), st.data())
def test_parts_of_one_receiver_are_cut_alike(case: tuple[int, int, int], data: st.DataObject) -> None:
    num_heads, source, target = case
    here, there = layout_by_head(num_heads, source), layout_by_head(num_heads, target)
    receiver = data.draw(st.integers(0, target - 1))
    strips = [head_slice for rank in range(source) for to, head_slice, _ in routes(here, there, rank) if to == receiver]
    assert {head_slice.parts for head_slice in strips} == {len(strips)}
    assert sorted(head_slice.part for head_slice in strips) == list(range(len(strips)))


def test_equal_degrees_send_whole_blocks_to_their_own_rank() -> None:
    same = layout_by_head(8, 4)
    whole = (0, 2 * SLICE_BYTES, 0, 1)
    assert [routes(same, same, rank) for rank in range(4)] == [[(rank, whole, ())] for rank in range(4)]


def test_one_rank_to_four_and_back() -> None:
    one, four = layout_by_head(8, 1), layout_by_head(8, 4)
    assert routes(one, four, 0) == [RankRoute(rank, HeadSlice(rank * 12, 12, 0, 1)) for rank in range(4)]
    assert [routes(four, one, rank) for rank in range(4)] == [
        [RankRoute(0, HeadSlice(0, 12, rank, 4))] for rank in range(4)
    ]


def test_of_ranks_with_the_same_head_the_first_one_sends() -> None:
    eight, two = layout_by_head(2, 8), layout_by_head(2, 2)
    sending = [bool(routes(eight, two, rank)) for rank in range(8)]
    assert sending == [True, False, False, False, True, False, False, False]
    assert [receiver for receiver, *_ in routes(two, eight, 1)] == [4, 5, 6, 7]


@pytest.mark.parametrize("factor", [2, 4, 8])
def test_a_strip_is_measured_in_the_senders_blocks(factor: int) -> None:
    """With blocks of another size on the other side, offset and size still are the sender's own."""
    here, there = layout_by_head(8, 1, SLICE_BYTES * factor), layout_by_head(8, 2)
    found = [head_slice for _, head_slice, _ in routes(here, there, 0)]
    assert found == [HeadSlice(0, 24 * factor), HeadSlice(24 * factor, 24 * factor)]


UNTOUCHED = 0xEE
SIZES = st.integers(16, 256)


class Recut(NamedTuple):
    """A lease whose blocks hold the tokens from ``begin`` on, and slots of a sender's that are sent to it."""

    sender: int
    receiver: int
    begin: int
    blocks: tuple[int, ...]
    slots: range

    def moves(self) -> list[TokenCopy]:
        return token_copies(self.slots, self.sender, self.begin, self.blocks, self.receiver)


@st.composite
def recuts(draw: st.DrawFn, sizes: st.SearchStrategy[int] = SIZES) -> Recut:
    sender, receiver = draw(sizes), draw(sizes)
    begin = draw(st.integers(0, 20)) * receiver
    count = draw(st.integers(1, 6))
    blocks = tuple(draw(st.permutations(range(8)))[:count])
    # Some slots reach behind the last block, as a sender's last block does.
    num_slots = -(-(begin % sender + count * receiver) // sender) + 1
    first = draw(st.integers(0, num_slots - 1))
    return Recut(sender, receiver, begin, blocks, range(first, draw(st.integers(first, num_slots))))


def naive(recut: Recut) -> dict[tuple[int, int], tuple[int, int]]:
    """(block, token in it) of the receiver: (slot, token in it) of the sender, token by token."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    origin = recut.begin - recut.begin % recut.sender
    for slot in recut.slots:
        for offset in range(recut.sender):
            index = origin + slot * recut.sender + offset - recut.begin
            if 0 <= index < len(recut.blocks) * recut.receiver:
                found[recut.blocks[index // recut.receiver], index % recut.receiver] = (slot, offset)
    return found


@given(recuts())
def test_moves_are_the_naive_ones(recut: Recut) -> None:
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for move in recut.moves():
        assert move.tokens > 0
        for token in range(move.tokens):
            assert (move.block, move.target + token) not in found
            found[move.block, move.target + token] = (move.slot, move.source + token)
    assert found == naive(recut)


@given(recuts())
def test_a_move_is_cut_at_block_boundaries_only(recut: Recut) -> None:
    found = recut.moves()
    assert all(move.source + move.tokens <= recut.sender for move in found)
    assert all(move.target + move.tokens <= recut.receiver for move in found)
    for move, following in pairwise(found):
        assert move.source + move.tokens == recut.sender or move.target + move.tokens == recut.receiver
        assert following.source == 0 or following.target == 0


@given(st.integers(0, 100_000), SIZES)
def test_slot_0_is_the_block_that_the_first_token_is_in(begin: int, tokens: int) -> None:
    assert first_token(begin, tokens) <= begin < first_token(begin, tokens) + tokens
    assert first_token(begin, tokens) % tokens == 0


def fresh(shape: BlockShape) -> NDArray[np.uint8]:
    return np.full(shape.block_bytes, UNTOUCHED, np.uint8)


def items(block: NDArray[np.uint8], shape: BlockShape) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """A block's keys ``[head, dimension, token, byte]``, its values ``[head, token, dimension, byte]``, in place."""
    both = block.reshape(shape.heads, 2, -1)
    keys = both[:, 0].reshape(shape.heads, shape.head_size, shape.tokens, shape.item_bytes)
    values = both[:, 1].reshape(shape.heads, shape.tokens, shape.head_size, shape.item_bytes)
    return keys, values


@given(
    recuts(st.integers(16, 48)), st.integers(1, 3), st.integers(1, 5), st.sampled_from([1, 2, 4, 8]), st.integers(0, 99)
)
def test_tokens_are_put_in_place_and_nothing_else(
    recut: Recut, heads: int, head_size: int, item_bytes: int, seed: int
) -> None:
    sender, receiver = (BlockShape(size, heads, head_size, item_bytes) for size in (recut.sender, recut.receiver))
    random = np.random.default_rng(seed)
    sources = {slot: random.integers(0, 256, sender.block_bytes, np.uint8) for slot in recut.slots}
    targets = {block: fresh(receiver) for block in range(8)}
    for move in recut.moves():
        copy_tokens(sources[move.slot].data, sender, targets[move.block].data, receiver, heads, move)

    expected = {block: fresh(receiver) for block in range(8)}
    for (block, to), (slot, token) in naive(recut).items():
        (their_keys, their_values), (keys, values) = items(sources[slot], sender), items(expected[block], receiver)
        keys[:, :, to] = their_keys[:, :, token]
        values[:, to] = their_values[:, token]
    for block in range(8):
        assert np.array_equal(targets[block], expected[block])


def test_a_part_is_some_heads_of_a_block() -> None:
    """One of two heads travels: the other one's bytes stay."""
    sender, receiver = BlockShape(4, 2, 1, 1), BlockShape(2, 2, 1, 1)
    target = fresh(receiver)
    source = np.arange(8, dtype=np.uint8)  # four keys, four values
    copy_tokens(source.data, sender, target.data[4:], receiver, 1, TokenCopy(0, 1, 0, 0, 2))
    assert target.tolist() == [UNTOUCHED] * 4 + [1, 2, 5, 6]


def test_bytes_of_a_block_are_keys_and_values() -> None:
    assert BlockShape(16, 3, 64, 2).block_bytes == 2 * 3 * 16 * 64 * 2


@pytest.mark.parametrize(
    "shape",
    [(0, 1, 1, 2), (-16, 1, 1, 2), (16, 0, 1, 2), (16, 1, 0, 2), (16, 1, 1, 0), (16, 1, 1, 3), (16, 1, 1, 16)],
    ids=str,
)
def test_what_no_block_looks_like(shape: tuple[int, int, int, int]) -> None:
    with pytest.raises(BadRequest):
        BlockShape(*shape).require_sane()
    BlockShape(16, 1, 1, 2).require_sane()
