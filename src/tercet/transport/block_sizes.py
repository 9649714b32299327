"""Conversion between block sizes: the new places of tokens, and the copy.

A token range is cut at the block boundaries of the sender and of the receiver. Inside a block, each head has its keys,
then its values. Keys lie by dimension, a run of tokens for each; values lie by token. This is the layout of vLLM's
portable CPU kernels; if kernels group tokens otherwise, blocks of another size are refused.
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
        """Size of the block in bytes, keys and values together."""
        return 2 * self.heads * self.head_size * self.tokens * self.item_bytes

    def require_sane(self) -> None:
        """Raise :class:`~tercet.protocol.BadRequest` for impossible values."""
        if min(self.tokens, self.heads, self.head_size) < 1 or self.item_bytes not in (1, 2, 4, 8):
            raise BadRequest(
                f"a block cannot have {self.tokens} tokens and {self.heads} heads of {self.head_size} items"
            )


class Move(NamedTuple):
    """Copy of ``tokens`` tokens: from ``source`` on in the sender's slot, to ``target`` on in the receiver's block."""

    slot: int
    source: int
    block: int
    target: int
    tokens: int


def first_token(begin: int, tokens: int) -> int:
    """Return the first token of a sender's slot 0, for a reservation from ``begin`` on and blocks of ``tokens``."""
    return begin // tokens * tokens


def moves(slots: range, sender_tokens: int, begin: int, blocks: Sequence[int], receiver_tokens: int) -> list[Move]:
    """Return the moves of the tokens in a sender's slots into ``blocks``, which hold the tokens from ``begin`` on.

    Tokens before ``begin`` and after the last block do not belong to the lease and are left out.
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

    ``source`` and ``target`` are these heads' parts of the sender's and of the receiver's block.
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
