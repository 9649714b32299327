"""What to copy for a REFERENCE: the sender's blocks, checked, in pieces that a lease may be held for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tercet.protocol import TransferFailed
from tercet.transport.backends import Copy
from tercet.transport.frames import Header, Reference
from tercet.transport.region import RegionShape

# Copied while a lease is held at a time, so that its revocation need not wait longer than for this.
MAX_COPY_BYTES = 1024 * 1024


def copies(
    header: Header, size: int, reference: Reference, theirs: RegionShape, ours: RegionShape, blocks: Sequence[int]
) -> Iterator[Copy]:
    """From the sender's blocks to ``size`` bytes, the header's part, of each of our ``blocks``.

    Raises :class:`~tercet.protocol.TransferFailed` if they do not fit.
    """
    whole = header.parts == 1 and reference.offset == 0 and size == theirs.block_bytes
    inside = all(0 <= block < theirs.num_blocks for block in reference.blocks)
    fits = 0 <= reference.offset <= theirs.block_bytes - size and header.layer < len(theirs.planes)
    if reference.size != size or len(reference.blocks) != len(blocks) or not (inside and fits):
        raise TransferFailed("the reference does not fit the slots that it is for")
    here, there = ours.block(header.layer, 0) + header.part * size, theirs.block(header.layer, 0) + reference.offset
    if whole:
        return _joined_copies(size, there, here, reference.blocks, blocks)
    return (
        (size, there + source * theirs.block_bytes, here + target * ours.block_bytes)
        for source, target in zip(reference.blocks, blocks, strict=True)
    )


def _joined_copies(size: int, there: int, here: int, sources: Sequence[int], targets: Sequence[int]) -> Iterator[Copy]:
    """Whole blocks; neighbours on both sides go in one copy."""
    first, limit = 0, max(1, MAX_COPY_BYTES // size)
    for index in range(1, len(sources) + 1):
        together = (
            index < len(sources)
            and sources[index] == sources[index - 1] + 1
            and targets[index] == targets[index - 1] + 1
            and index - first < limit
        )
        if not together:
            yield (index - first) * size, there + sources[first] * size, here + targets[first] * size
            first = index


def batches(copies: Iterator[Copy]) -> Iterator[list[Copy]]:
    """As many copies at a time as a lease may be held for; at least one."""
    batch: list[Copy] = []
    total = 0
    for copy in copies:
        batch.append(copy)
        total += copy[0]
        if total >= MAX_COPY_BYTES:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch
