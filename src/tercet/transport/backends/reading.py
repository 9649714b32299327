"""The interface of backends, by which a receiver reads a sender's memory, and the copies of a chunk.

A backend lets others read this rank's region (:meth:`Backend.offer`), and reads theirs (:meth:`Backend.connect`). The
receiver reads and the sender never writes: so the receiver alone fences a lease, and a peer that is late, stuck or
hostile cannot touch memory that has a new owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tercet.protocol import TransferFailed
from tercet.transport.memory.block_order import BlockOrder
from tercet.transport.memory.staged import StagedMemory
from tercet.transport.peer_messages import BLOCK_NUMBER, ReadDescriptors
from tercet.transport.region import WORD_BYTES, Numbers, RegionShape, groups

# One row per copy: bytes, offset in the sender's region, offset in the batch's target, or NOWHERE.
Copies = NDArray[np.int64]
# Runs a step that copies while the lease is held, and returns its number of bytes; raises LeaseEnded if the lease has
# ended. A step waits for a peer for a few milliseconds at most: revoking the lease waits for the step.
Fence = Callable[[Callable[[], int]], int]

# Adjacent copies are joined up to this size, in bytes.
MAX_COPY_BYTES = 1024 * 1024
# The target of a copy that is not written, and the number of a missing block.
NOWHERE = -1
NO_COPIES: Copies = np.zeros((0, 3), dtype=np.int64)


class BackendUnavailable(TransferFailed, status=502):
    """A backend is missing or failed its self-check on this machine; the message names it and the remedy."""


@dataclass(frozen=True)
class SendingPeer:
    """The sender at a connection's other end: its region's layout, and a descriptor of the region, or None."""

    shape: RegionShape
    memory: int | None = None


@dataclass
class Batch:
    """Chunks of one send that are read together: ``copies[i]`` for ``chunks[i]``, into ``target``.

    ``in_place[i]`` is the number of the lease's first blocks that were valid when the copies were made, and are left
    out. ``staged``: the target is not KV, but a buffer from which tokens are copied into blocks of another size. With
    ``memory``, KV is reached through its buffers, and ``target`` is not used: ``blocks[i]`` are a chunk's blocks, whose
    items are converted from ``order``, if it differs from ours.
    """

    send: int
    lease: str
    target: memoryview
    staged: bool = False
    chunks: list[ReadDescriptors] = field(default_factory=list[ReadDescriptors])
    copies: list[Copies] = field(default_factory=list[Copies])
    in_place: list[int] = field(default_factory=list[int])
    memory: StagedMemory | None = None
    blocks: list[Numbers] = field(default_factory=list[Numbers])
    order: BlockOrder | None = None

    @property
    def rows(self) -> Copies:
        """The copies of all chunks."""
        found = self.copies[0] if len(self.copies) == 1 else np.concatenate([NO_COPIES, *self.copies])
        return found[found[:, 2] != NOWHERE] if any(self.in_place) else found


class Reader(Protocol):
    """Reader of one sender's region."""

    def read(self, batch: Batch, fence: Fence) -> bool:
        """Copy all chunks; return True if the send's generation word was still set after that, as valid KV requires.

        An empty batch only checks the word. After this method has returned or raised, no byte is written to our region.
        Raises :class:`~tercet.protocol.TransferFailed`, ``OSError``, or an error of ``fence``.
        """
        ...

    def close(self) -> None:
        """Release the resources of reading."""
        ...


class Backend(Protocol):
    """One way to read memory of other ranks; one object per rank. ``name`` is its name in settings.

    ``stages``: it can read into memory outside of our region.
    """

    name: str
    stages: bool

    def offer(self) -> bytes:
        """Return the data that another rank's backend needs to read our region, in addition to the connection."""
        return b""

    def connect(self, offer: bytes, sender: SendingPeer) -> Reader:
        """Return a reader of the offered region; raise :class:`BackendUnavailable` if that fails."""
        ...

    def close(self) -> None:
        """Release all resources; the caller has closed the readers before."""


def copies_of(chunk: ReadDescriptors, size: int, theirs: RegionShape, ours: RegionShape, blocks: Numbers) -> Copies:
    """Return copies from the sender's blocks to the chunk's part, ``size`` bytes, of each of our ``blocks``.

    They cover all layers of the chunk. A block :data:`NOWHERE` is not written. Whole blocks that are adjacent on both
    sides are one copy. Raises :class:`~tercet.protocol.TransferFailed` if they do not fit.
    """
    sources, targets = _sources(chunk, size, theirs, len(blocks)), blocks
    counts: Numbers | int = 1
    nowhere = targets < 0
    left_out = bool(nowhere.any())
    if not left_out and chunk.parts == 1 and chunk.offset == 0 and size == theirs.block_bytes == ours.block_bytes:
        # Slices and not np.diff, which costs several times as much for a few numbers.
        apart = (sources[1:] - sources[:-1] != 1) | (targets[1:] - targets[:-1] != 1)
        if not apart.all():
            first, counts = _runs(apart, max(1, MAX_COPY_BYTES // size))
            sources, targets = sources[first], targets[first]
    within = np.empty((len(sources), 3), dtype=np.int64)
    within[:, 0] = counts * size
    within[:, 1] = sources * theirs.block_bytes
    within[:, 2] = targets * ours.block_bytes
    here = chunk.part * size
    pairs = zip(chunk.sources, range(chunk.layer, chunk.layer + chunk.layers), strict=True)
    begins = np.array([(0, theirs.planes[there] + chunk.offset, ours.planes[at] + here) for there, at in pairs])
    found = begins[:, None] + within
    if left_out:
        found[:, nowhere, 2] = NOWHERE
    return found.reshape(-1, 3)


def staging_copies(chunk: ReadDescriptors, size: int, theirs: RegionShape, at: int) -> Copies:
    """Return copies like :func:`copies_of`, but to consecutive places from ``at`` on, layer by layer."""
    sources = _sources(chunk, size, theirs, chunk.end - chunk.begin)
    found = np.empty((chunk.layers, len(sources), 3), dtype=np.int64)
    found[:, :, 0] = size
    planes = theirs.planes[chunk.sources.start : chunk.sources.stop]
    found[:, :, 1] = np.array(planes)[:, None] + sources * theirs.block_bytes + chunk.offset
    found[:, :, 2] = at + np.arange(chunk.layers * len(sources)).reshape(chunk.layers, -1) * size
    return found.reshape(-1, 3)


def _sources(chunk: ReadDescriptors, size: int, theirs: RegionShape, count: int) -> Numbers:
    """Return the sender's blocks, if the chunk describes ``size`` bytes of each of ``count`` blocks."""
    if len(chunk.blocks) % WORD_BYTES:
        raise TransferFailed("the read descriptors name half a block")
    sources = np.frombuffer(chunk.blocks, dtype=BLOCK_NUMBER).astype(np.int64, copy=False)
    # Compared as unsigned numbers, where negative ones are the largest.
    inside = sources.size > 0 and int(sources.view(np.uint64).max()) < theirs.num_blocks
    fits = 0 <= chunk.offset <= theirs.block_bytes - size and chunk.sources.stop <= len(theirs.planes)
    if chunk.size != size or len(sources) != count or not (inside and fits):
        raise TransferFailed("the read descriptors do not fit their slots")
    return sources


def _runs(apart: NDArray[np.bool_], limit: int) -> tuple[Numbers, Numbers]:
    """Return the beginnings of runs of adjacent blocks, and their lengths: at most ``limit``."""
    first, counts = groups(apart)
    if counts.max() <= limit:
        return first, counts
    cuts = -(-counts // limit)
    within = np.arange(int(cuts.sum())) - np.repeat(np.cumsum(cuts) - cuts, cuts)
    return np.repeat(first, cuts) + within * limit, np.minimum(np.repeat(counts, cuts) - within * limit, limit)


def in_steps(copies: Copies, limit: int) -> Iterator[tuple[Copies, int]]:
    """Yield copies of up to ``limit`` bytes together, at least one at a time; and their bytes."""
    # A loop, because numpy's code would be out of the caches each time, after copying megabytes.
    first = held = 0
    for at, size in enumerate(copies[:, 0].tolist()):
        if held + size > limit and at > first:
            yield copies[first:at], held
            first, held = at, 0
        held += size
    if held:
        yield copies[first:], held
