"""Blocks of another size: the new places of their tokens, and the copy.

A token range is cut at block boundaries, those of the sender and those of the receiver. Inside a block, each head has
its keys, then its values. Keys lie by dimension, a run of tokens for each; values lie by token. That is the layout of
vLLM's portable CPU kernels; with kernels that group tokens otherwise, blocks of another size are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from tercet.protocol import BadRequest


class BlockShape(msgspec.Struct, frozen=True, array_like=True):
    """One rank's block of one layer: ``tokens`` of ``heads`` heads with ``head_size`` items of ``item_bytes`` each."""

    tokens: int
    heads: int
    head_size: int
    item_bytes: int

    @property
    def block_bytes(self) -> int:
        """Bytes of keys and values."""
        return 2 * self.heads * self.head_size * self.tokens * self.item_bytes

    def require_sane(self) -> None:
        """Raise :class:`~tercet.protocol.BadRequest` for impossible values."""
        if min(self.tokens, self.heads, self.head_size) < 1 or self.item_bytes not in (1, 2, 4, 8):
            raise BadRequest(f"a block of {self.tokens} tokens, {self.heads} heads of {self.head_size} is not possible")


class Move(NamedTuple):
    """``tokens`` tokens of the sender's slot, from ``source`` on, go to the receiver's block, from ``target`` on."""

    slot: int
    source: int
    block: int
    target: int
    tokens: int


def first_token(begin: int, tokens: int) -> int:
    """The first token of a sender's slot 0, for a reservation that begins at ``begin``, with blocks of ``tokens``."""
    return begin // tokens * tokens


def moves(slots: range, sender_tokens: int, begin: int, blocks: Sequence[int], receiver_tokens: int) -> list[Move]:
    """Moves of the tokens in a sender's slots into a reservation whose ``blocks`` hold the tokens from ``begin`` on.

    Tokens before ``begin``, and after the last block, are left out: they do not belong to the lease.
    """
    found: list[Move] = []
    origin, end = first_token(begin, sender_tokens), begin + len(blocks) * receiver_tokens
    for slot in slots:
        start = origin + slot * sender_tokens
        at, stop = max(start, begin), min(start + sender_tokens, end)
        while at < stop:
            index, offset = divmod(at - begin, receiver_tokens)
            count = min(stop - at, receiver_tokens - offset)
            found.append(Move(slot, at - start, blocks[index], offset, count))
            at += count
    return found


def place(
    source: memoryview, sender: BlockShape, target: memoryview, receiver: BlockShape, heads: int, move: Move
) -> None:
    """Copy one move's tokens of ``heads`` heads.

    ``source`` and ``target`` are those heads' parts of a sender's and of a receiver's block.
    """
    item = np.dtype(f"u{sender.item_bytes}")
    theirs = np.frombuffer(source, item).reshape(heads, 2, -1)
    ours = np.frombuffer(target, item).reshape(heads, 2, -1)
    there, here = slice(move.source, move.source + move.tokens), slice(move.target, move.target + move.tokens)
    size = sender.head_size
    keys = ours.reshape(heads, 2, size, receiver.tokens)[:, 0]
    keys[:, :, here] = theirs.reshape(heads, 2, size, sender.tokens)[:, 0][:, :, there]
    values = ours.reshape(heads, 2, receiver.tokens, size)[:, 1]
    values[:, here] = theirs.reshape(heads, 2, sender.tokens, size)[:, 1][:, there]
