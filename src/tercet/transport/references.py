"""What to copy for a REFERENCE: the sender's blocks, checked, in pieces that a lease may be held for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tercet.protocol import TransferFailed
from tercet.transport.backends import Copies
from tercet.transport.frames import Header, Reference
from tercet.transport.region import RegionShape

# Copied while a lease is held at a time, so that its revocation need not wait longer than for this.
MAX_COPY_BYTES = 4 * 1024 * 1024


def copies(
    header: Header, size: int, reference: Reference, theirs: RegionShape, ours: RegionShape, blocks: Sequence[int]
) -> Copies:
    """From the sender's blocks to ``size`` bytes, the header's part, of each of our ``blocks``.

    Of whole blocks, neighbours on both sides go in one copy. Raises :class:`~tercet.protocol.TransferFailed` if they do
    not fit.
    """
    sources, targets = _array(reference.blocks), np.array(blocks, dtype=np.int64)
    inside = sources.size > 0 and sources.min() >= 0 and sources.max() < theirs.num_blocks
    fits = 0 <= reference.offset <= theirs.block_bytes - size and header.layer < len(theirs.planes)
    if reference.size != size or len(sources) != len(targets) or not (inside and fits):
        raise TransferFailed("the reference does not fit the slots that it is for")
    here, there = ours.block(header.layer, 0) + header.part * size, theirs.block(header.layer, 0) + reference.offset
    counts = np.ones(len(sources), dtype=np.int64)
    if header.parts == 1 and reference.offset == 0 and size == theirs.block_bytes:
        first, counts = _runs(sources, targets, max(1, MAX_COPY_BYTES // size))
        sources, targets = sources[first], targets[first]
    return np.stack(
        [counts * size, there + sources * theirs.block_bytes, here + targets * ours.block_bytes], axis=1
    )  # fmt: skip


def _array(blocks: Sequence[int]) -> NDArray[np.int64]:
    try:
        return np.array(blocks, dtype=np.int64)
    except OverflowError:
        raise TransferFailed("the reference names blocks that there cannot be") from None


def _runs(
    sources: NDArray[np.int64], targets: NDArray[np.int64], limit: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where blocks begin that are neighbours on both sides, and how many they are: at most ``limit``."""
    apart = (np.diff(sources) != 1) | (np.diff(targets) != 1)
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    counts = np.diff(np.append(first, len(sources)))
    cuts = -(-counts // limit)
    within = np.arange(int(cuts.sum())) - np.repeat(np.cumsum(cuts) - cuts, cuts)
    return np.repeat(first, cuts) + within * limit, np.minimum(np.repeat(counts, cuts) - within * limit, limit)


def batches(copies: Copies) -> list[Copies]:
    """As many copies at a time as a lease may be held for; at least one."""
    starts = np.cumsum(copies[:, 0]) - copies[:, 0]
    return np.split(copies, np.flatnonzero(np.diff(starts // MAX_COPY_BYTES)) + 1)
