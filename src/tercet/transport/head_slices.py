"""The parts of a block that each rank sends, if two engines split a model's heads differently.

With equal tensor-parallel degrees, each rank sends whole blocks to its counterpart. Otherwise a block holds, on both
sides, its rank's KV heads one after the other. So if one degree divides the other, the common part of two ranks is one
run of bytes in each of their blocks.
"""

from __future__ import annotations

from typing import NamedTuple

from tercet.protocol import KVLayout


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
