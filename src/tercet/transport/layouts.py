"""The KV of two engines that lay it out differently: which of it each pair of ranks exchanges, and in which form.

A pipeline stage holds adjacent layers of the model, and so a run of adjacent layers of each group. In a rank's region
the planes of a group lie together. So the common part of two stages is one run of planes in each group. A block holds
its rank's KV heads one after the other. So if one tensor-parallel degree divides the other, the common part of two
ranks is one run of bytes in each of their blocks::

    sender's rank 0 of 1    h0 ██████  h1 ██████  h2 ██████  h3 ██████    its block: source_offset 2 heads, size 2 heads
                                                     │          │
    receiver's rank 1 of 2                        h2 ██████  h3 ██████    its block: part 0 of 1

Blocks may also have another number of tokens, or their items in another order. Everything else must be equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from tercet.protocol import BadRequest, KVLayout, TransferFailed

# ---- Layers ----------------------------------------------------------------------------------------------------------


class PlaneRun(NamedTuple):
    """A run of ``length`` planes: from ``source`` on in the sender's region, from ``target`` on in the receiver's."""

    source: int
    target: int
    length: int

    def within(self, planes: range) -> PlaneRun | None:
        """Return the part of this run that lies in ``planes`` of the sender, or None."""
        first, stop = max(planes.start, self.source), min(planes.stop, self.source + self.length)
        return PlaneRun(first, first - self.source + self.target, stop - first) if first < stop else None


def runs(source: KVLayout, target: KVLayout, stage: int, receiver: int) -> tuple[PlaneRun, ...] | None:
    """Return the part that stage ``stage`` of the source sends to stage ``receiver`` of the target, or None.

    The result is empty if both have one stage: all planes, with equal numbers. The layouts must have passed
    :meth:`~tercet.protocol.KVLayout.require_mappable`.
    """
    if not source.stages and not target.stages:
        return ()
    total = tuple(map(sum, zip(*(source.stages or target.stages), strict=True)))
    here, there = source.stages or (total,), target.stages or (total,)
    found: list[PlaneRun] = []
    for group in range(len(total)):
        ours, theirs = _held(here, stage, group), _held(there, receiver, group)
        common = range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
        if common:
            first, second = sum(here[stage][:group]), sum(there[receiver][:group])
            found.append(PlaneRun(first + common.start - ours.start, second + common.start - theirs.start, len(common)))
    return tuple(found) or None


def _held(stages: Sequence[Sequence[int]], stage: int, group: int) -> range:
    """Return the planes of a group that a stage holds, numbered in the whole model."""
    ends = [0, *itertools.accumulate(counts[group] for counts in stages)]
    return range(ends[stage], ends[stage + 1])


# ---- Heads -----------------------------------------------------------------------------------------------------------


class HeadSlice(NamedTuple):
    """The bytes of a block that are sent: ``[source_offset, source_offset + size)`` of the sender's blocks.

    They fill part ``part`` of ``parts`` equal ones of the receiver's blocks.
    """

    source_offset: int
    size: int
    part: int = 0
    parts: int = 1


def shared(source: KVLayout, target: KVLayout, rank: int, receiver: int) -> HeadSlice | None:
    """Return the part that rank ``rank`` of the source sends to rank ``receiver`` of the target, or None.

    The result is also None if an earlier rank holds the same heads and sends them. The layouts must have passed
    :meth:`~tercet.protocol.KVLayout.require_mappable`.
    """
    if source.tp_size == target.tp_size and source.block_bytes == target.block_bytes:
        return HeadSlice(0, source.block_bytes) if rank == receiver else None
    here, there = heads(source, rank), heads(target, receiver)
    common = range(max(here.start, there.start), min(here.stop, there.stop))
    if not common or any(common.start in heads(source, earlier) for earlier in range(rank)):
        return None
    head_bytes = source.block_bytes // len(here)
    return HeadSlice(
        source_offset=(common.start - here.start) * head_bytes,
        size=len(common) * head_bytes,
        part=(common.start - there.start) // len(common),
        parts=len(there) // len(common),
    )


def heads(layout: KVLayout, rank: int) -> range:
    """Return the KV heads that a tensor-parallel rank holds; with more ranks than heads, several hold the same one."""
    first = rank * layout.num_kv_heads // layout.tp_size
    return range(first, first + layout.heads_per_rank)


class RankRoute(NamedTuple):
    """The KV that one sending rank has for one receiving rank: a ``head_slice`` of each block of some ``planes``.

    Empty ``planes`` stand for all planes, with equal numbers.
    """

    receiver: int
    head_slice: HeadSlice
    planes: tuple[PlaneRun, ...] = ()


def routes(source: KVLayout, target: KVLayout, rank: int) -> list[RankRoute]:
    """Return the destinations of rank ``rank``'s blocks; empty if other ranks hold the same heads and send them.

    The layouts must have passed :meth:`~tercet.protocol.KVLayout.require_mappable`.
    """
    stage, rank = divmod(rank, source.tp_size)
    found: list[RankRoute] = []
    for receiver in range(target.num_ranks):
        their_stage, their_rank = divmod(receiver, target.tp_size)
        planes = runs(source, target, stage, their_stage)
        head_slice = shared(source, target, rank, their_rank)
        if planes is not None and head_slice is not None:
            found.append(RankRoute(receiver, head_slice, planes))
    return found


# ---- Tokens ----------------------------------------------------------------------------------------------------------
# A token range is cut at the block boundaries of both sides. Inside a block, each head has its keys, then its values.
# Keys lie by dimension, a run of tokens for each; values lie by token. This is the layout of vLLM's portable CPU
# kernels; if kernels group tokens otherwise, blocks of another size are refused.


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


class TokenCopy(NamedTuple):
    """Copy of ``tokens`` tokens: from ``source`` on in the sender's slot, to ``target`` on in the receiver's block."""

    slot: int
    source: int
    block: int
    target: int
    tokens: int


def first_token(begin: int, tokens: int) -> int:
    """Return the first token of a sender's slot 0, for a reservation from ``begin`` on and blocks of ``tokens``."""
    return begin // tokens * tokens


def token_copies(
    slots: range, sender_tokens: int, begin: int, blocks: Sequence[int], receiver_tokens: int
) -> list[TokenCopy]:
    """Return the copies of the tokens in a sender's slots into ``blocks``, which hold the tokens from ``begin`` on.

    Tokens before ``begin`` and after the last block do not belong to the lease and are left out.
    """
    found: list[TokenCopy] = []
    origin, end = first_token(begin, sender_tokens), begin + len(blocks) * receiver_tokens
    for slot in slots:
        start = origin + slot * sender_tokens
        at, stop = max(start, begin), min(start + sender_tokens, end)
        while at < stop:
            index, offset = divmod(at - begin, receiver_tokens)
            count = min(stop - at, receiver_tokens - offset)
            found.append(TokenCopy(slot, at - start, blocks[index], offset, count))
            at += count
    return found


def copy_tokens(
    source: memoryview, sender: BlockShape, target: memoryview, receiver: BlockShape, heads: int, copy: TokenCopy
) -> None:
    """Carry out one copy, of ``heads`` heads.

    ``source`` and ``target`` are these heads' parts of the sender's and of the receiver's block.
    """
    item = np.dtype(f"u{sender.item_bytes}")
    theirs = np.frombuffer(source, item).reshape(heads, 2, -1)
    ours = np.frombuffer(target, item).reshape(heads, 2, -1)
    there, here = slice(copy.source, copy.source + copy.tokens), slice(copy.target, copy.target + copy.tokens)
    size = sender.head_size
    keys = ours.reshape(heads, 2, size, receiver.tokens)[:, 0]
    keys[:, :, here] = theirs.reshape(heads, 2, size, sender.tokens)[:, 0][:, :, there]
    values = ours.reshape(heads, 2, receiver.tokens, size)[:, 1]
    values[:, here] = theirs.reshape(heads, 2, sender.tokens, size)[:, 1][:, there]


# ---- Items -----------------------------------------------------------------------------------------------------------
# An item is the data of one token and one head: keys and values together, or the single latent of MLA, or fp8 numbers
# with their scales. Attention backends differ only in the order of heads and tokens; an item's bytes are not changed.

Order = Literal["HN", "NH"]


class BlockOrder(msgspec.Struct, frozen=True, array_like=True):
    """Order of a block of ``heads`` times ``tokens`` items.

    ``order`` names the outermost dimension first: heads (``HN``) or tokens (``NH``).
    """

    order: Order
    heads: int
    tokens: int
    item_bytes: int

    @property
    def block_bytes(self) -> int:
        """Size of all items in bytes."""
        return self.heads * self.tokens * self.item_bytes

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of outer and of inner items."""
        return (self.heads, self.tokens) if self.order == "HN" else (self.tokens, self.heads)


def rearranged(theirs: BlockOrder | None, ours: BlockOrder | None) -> BlockOrder | None:
    """Return the sender's order if a block's items must be reordered; None if the bytes can stay as they are.

    Raises :class:`~tercet.protocol.TransferFailed`, with the difference, for blocks that have other items.
    """
    if theirs is None and ours is None:
        return None
    if theirs is None or ours is None:
        raise TransferFailed(f"blocks: one side has {theirs or ours}, but the other side does not describe its blocks")
    for name in ("heads", "tokens", "item_bytes"):
        if getattr(theirs, name) != getattr(ours, name):
            raise TransferFailed(f"blocks: {name} is {getattr(theirs, name)} there and {getattr(ours, name)} here")
    one_order = theirs.order == ours.order or 1 in ours.sizes
    return None if one_order else theirs
