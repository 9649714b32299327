"""What to copy for a REFERENCE: the sender's blocks, checked, in pieces that a lease may be held for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tercet.protocol import TransferFailed
from tercet.transport.backends import Copies
from tercet.transport.frames import REFERRED, Header, Reference
from tercet.transport.region import WORD_BYTES, Numbers, RegionShape, groups

# Neighbours are joined up to here.
MAX_COPY_BYTES = 1024 * 1024
MAX_REFERRED_ROWS = 65536


def copies(
    header: Header, size: int, reference: Reference, theirs: RegionShape, ours: RegionShape, blocks: Numbers
) -> Copies:
    """From the sender's blocks to ``size`` bytes, the header's part, of each of our ``blocks``; in the header's layers.

    Of whole blocks, neighbours on both sides go in one copy. Raises :class:`~tercet.protocol.TransferFailed` if they do
    not fit.
    """
    sources, targets = _numbers(reference.blocks), blocks
    # As unsigned numbers, of which negative ones are the largest.
    inside = sources.size > 0 and int(sources.view(np.uint64).max()) < theirs.num_blocks
    layers = header.layer_range
    fits = 0 <= reference.offset <= theirs.block_bytes - size and layers.stop <= len(theirs.planes)
    if reference.size != size or len(sources) != len(targets) or not (inside and fits):
        raise TransferFailed("the reference does not fit the slots that it is for")
    counts: Numbers | int = 1
    whole = header.parts == 1 and reference.offset == 0 and size == theirs.block_bytes
    if whole and not (apart := _apart(sources, targets)).all():
        first, counts = _runs(apart, max(1, MAX_COPY_BYTES // size))
        sources, targets = sources[first], targets[first]
    within = np.empty((len(sources), 3), dtype=np.int64)
    within[:, 0] = counts * size
    within[:, 1] = sources * theirs.block_bytes
    within[:, 2] = targets * ours.block_bytes
    there, here = reference.offset, header.part * size
    begins = np.array([(0, theirs.planes[layer] + there, ours.planes[layer] + here) for layer in layers])
    return (begins[:, None] + within).reshape(-1, 3)


def _numbers(blocks: bytes) -> Numbers:
    if len(blocks) % WORD_BYTES:
        raise TransferFailed("the reference names half a block")
    return np.frombuffer(blocks, dtype=REFERRED).astype(np.int64, copy=False)


def _apart(sources: Numbers, targets: Numbers) -> NDArray[np.bool_]:
    """For each pair of blocks but the first, whether it is not next to the one before, on both sides."""
    # Slices and not np.diff, which costs several times as much for a few numbers.
    return (sources[1:] - sources[:-1] != 1) | (targets[1:] - targets[:-1] != 1)


def _runs(apart: NDArray[np.bool_], limit: int) -> tuple[Numbers, Numbers]:
    """Where runs of neighbours begin, and how many blocks they have: at most ``limit``."""
    first, counts = groups(apart)
    if counts.max() <= limit:
        return first, counts
    cuts = -(-counts // limit)
    within = np.arange(int(cuts.sum())) - np.repeat(np.cumsum(cuts) - cuts, cuts)
    return np.repeat(first, cuts) + within * limit, np.minimum(np.repeat(counts, cuts) - within * limit, limit)


def batches(copies: Copies, limit: int) -> Iterator[tuple[Copies, int]]:
    """Copies of up to ``limit`` bytes together, at least one at a time; and their bytes."""
    # A loop: what numpy needs for this is out of the caches each time, after copying megabytes.
    first = held = 0
    for at, size in enumerate(copies[:, 0].tolist()):
        if held + size > limit and at > first:
            yield copies[first:at], held
            first, held = at, 0
        held += size
    yield copies[first:], held


class Referred:
    """References of one send under one lease that are to be copied together."""

    def __init__(self) -> None:
        self.headers: list[Header] = []
        self._copies: list[Copies] = []
        self._rows = 0

    def __bool__(self) -> bool:
        return bool(self.headers)

    def takes(self, header: Header) -> bool:
        """Whether there is room for one more, and it is of the same send."""
        first = self.headers[0]
        return (first.send, first.lease) == (header.send, header.lease) and self._rows < MAX_REFERRED_ROWS

    def add(self, header: Header, copies: Copies) -> None:
        """One more."""
        self.headers.append(header)
        self._copies.append(copies)
        self._rows += len(copies)

    @property
    def copies(self) -> Copies:
        """What is to be copied for all of them."""
        return self._copies[0] if len(self._copies) == 1 else np.concatenate(self._copies)
