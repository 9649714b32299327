"""Blocks of another size: the same tokens, wherever the blocks are cut, and no others."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tercet.protocol import BadRequest
from tercet.transport.region import BlockShape, TokenCopy, copy_tokens, first_token, token_copies

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
