"""The interface of backends, by which a receiver reads a sender's memory, and what several of them need for that.

A backend lets others read this rank's region (:meth:`Backend.offer`), and reads theirs (:meth:`Backend.connect`). The
receiver reads and the sender never writes: so the receiver alone fences a lease, and a peer that is late, stuck or
hostile cannot touch memory that has a new owner.

``host`` and ``ipc``: engines of one machine map each other's KV, and the receiver copies blocks out of it.

``host`` is one copy at memory speed, without a system call. The sender connects to the receiver's Unix socket and
passes a descriptor of its memory along with its greeting. So only a process that the kernel shows at the connection's
other end can have its KV mapped: if receivers trusted a process id, a peer could have any other engine's KV copied into
its blocks. The descriptor is read-only, and the file is sealed, so that it cannot shrink under a reader.

With ``ipc`` KV is on devices (CUDA IPC). Blocks go from device to device, or within one device, in batches, on a stream
of the receiver. The descriptor is that of the file with the sender's generation words; the offer opens the memory of
the worker next to it. If a device cannot be mapped (another container, devices without access to each other), the next
backend is used.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from tercet.protocol import TransferFailed
from tercet.protocol.wire import UNREADABLE
from tercet.transport.peer_messages import BLOCK_NUMBER, ReadDescriptors
from tercet.transport.region import PAGE_BYTES, WORD_BYTES, BlockOrder, KVRegion, Numbers, RegionShape, groups
from tercet.transport.sockets import start_thread
from tercet.transport.staged import Places, StagedMemory

# One row per copy: bytes, offset in the sender's region, offset in the batch's target, or NOWHERE.
Copies = NDArray[np.int64]
# Runs a step that copies while the lease is held, and returns its number of bytes; raises LeaseEnded if the lease has
# ended. A step waits for a peer for a few milliseconds at most: revoking the lease waits for the step.
UnderLease = Callable[[Callable[[], int]], int]

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
    """Chunks of one send that are read together."""

    send: int
    lease: str
    target: memoryview  # of the copies; not used with ``memory``
    staged: bool = False  # the target is not KV, but a buffer, from which tokens go into blocks of another size
    chunks: list[ReadDescriptors] = field(default_factory=list[ReadDescriptors])
    copies: list[Copies] = field(default_factory=list[Copies])  # of each chunk
    # For each chunk, the number of the lease's first blocks that were valid when the copies were made. Such blocks may
    # be in use as prefix cache: they are left out.
    in_place: list[int] = field(default_factory=list[int])
    memory: StagedMemory | None = None  # KV is reached through its buffers
    blocks: list[Numbers] = field(default_factory=list[Numbers])  # with ``memory``, of each chunk
    order: BlockOrder | None = None  # of the items that arrive, if it differs from ours

    @property
    def rows(self) -> Copies:
        """The copies of all chunks."""
        found = self.copies[0] if len(self.copies) == 1 else np.concatenate([NO_COPIES, *self.copies])
        return found[found[:, 2] != NOWHERE] if any(self.in_place) else found


class Reader(Protocol):
    """Reader of one sender's region."""

    def read(self, batch: Batch, under_lease: UnderLease) -> bool:
        """Copy all chunks; return True if the send's generation word was still set after that, as valid KV requires.

        An empty batch only checks the word. After this method has returned or raised, no byte is written to our region.
        Raises :class:`~tercet.protocol.TransferFailed`, ``OSError``, or an error of ``under_lease``.
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


# ---- Libraries -------------------------------------------------------------------------------------------------------


T = TypeVar("T")
INFINIBAND = "/sys/class/infiniband"
# In bytes. Each request to a library has a fixed cost, so requests are large.
READ_BYTES = 32 * 1024 * 1024


class RegisteredRegion:
    """A region's bytes by address; it keeps the mapping alive as long as a library may know that address.

    The words of its scratch page are slots. Each reader has its own slot, into which it fetches words of other regions.
    A slot is given as an offset in bytes from the region's start. Thread-safe.
    """

    def __init__(self, region: KVRegion) -> None:
        self._anchor = ctypes.c_char.from_buffer(region.bytes)
        self._bytes = region.bytes
        self.address = ctypes.addressof(self._anchor)
        self.size = region.shape.size
        self._free = [region.shape.scratch(number) for number in range(PAGE_BYTES // WORD_BYTES)]

    def take_slot(self) -> int:
        """Take a slot. Raise :class:`BackendUnavailable` if open readers use all slots."""
        try:
            return self._free.pop()
        except IndexError:
            raise BackendUnavailable(
                "this rank already reads from the maximum number of senders; close sessions first"
            ) from None

    def give_back(self, slot: int) -> None:
        """Free a closed reader's slot."""
        self._free.append(slot)

    def word(self, slot: int) -> int:
        return int.from_bytes(self._bytes[slot : slot + WORD_BYTES], "little")

    def set_word(self, slot: int, word: int) -> None:
        self._bytes[slot : slot + WORD_BYTES] = word.to_bytes(WORD_BYTES, "little")


class RegisteredReader(Reader):
    """Reader of a sender's region of shape ``theirs`` into ``ours``. A library's subclass implements the copy."""

    def __init__(self, ours: RegisteredRegion, theirs: RegionShape) -> None:
        self._ours, self._theirs = ours, theirs
        self._slot = ours.take_slot()

    def copy(self, copies: Copies) -> None:
        """Copy bytes; raise :class:`~tercet.protocol.TransferFailed` after the last write."""
        raise NotImplementedError

    def read(self, batch: Batch, under_lease: UnderLease) -> bool:
        for some, nbytes in in_steps(batch.rows, READ_BYTES):
            under_lease(lambda some=some, nbytes=nbytes: self.copy(some) or nbytes)
        return self.word(self._theirs.word(batch.send)) == batch.send

    def word(self, there: int) -> int:
        """Read an aligned word of the sender's region, after all earlier copies."""
        # The word decides whether the KV counts, so an old value in the slot must not be taken for it.
        self._ours.set_word(self._slot, 0)  # so a value found there later was fetched later
        self.copy(np.array([(WORD_BYTES, there, self._slot)]))
        return self._ours.word(self._slot)

    def require_own_word(self, name: str) -> None:
        """Check a reader of this rank's region, and close it: it must read a random word back."""
        slot, word = self._ours.take_slot(), secrets.randbits(63) + 1
        try:
            self._ours.set_word(slot, word)
            if self.word(slot) != word:
                raise BackendUnavailable(f"{name}: the self-check read other bytes than were in memory")
        finally:
            self._ours.give_back(slot)
            self.close()

    def close(self) -> None:
        self._ours.give_back(self._slot)


def understood(name: str, offer: bytes, kind: type[T]) -> T:
    """Decode a sender's offer; raise :class:`BackendUnavailable` if it is invalid."""
    try:
        return msgspec.msgpack.decode(offer, type=kind)
    except UNREADABLE as error:
        raise BackendUnavailable(f"{name}: the sender's offer cannot be decoded: {error}") from error


def has_rdma() -> bool:
    """True if this machine has an RDMA device."""
    try:
        return bool(os.listdir(INFINIBAND))
    except OSError:
        return False


MADV_POPULATE_READ = 22  # Linux 5.14
# Bytes mapped in one call, during which no other thread of this process runs: about a millisecond.
TOUCHED_AT_A_TIME = 8 * 1024 * 1024
STEP_BYTES = 1024 * 1024


class HostBackend(Backend):
    """Backend that reads regions of other processes of this machine.

    ``memory`` is the descriptor that receivers get.
    """

    name = "host"
    stages = True

    def __init__(self, region: KVRegion) -> None:
        self.memory: int | None = os.open(f"/proc/self/fd/{region.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def connect(self, offer: bytes, sender: SendingPeer) -> Reader:
        if sender.memory is None:
            raise BackendUnavailable("host: the sender's memory was not sent with its greeting, over a Unix socket")
        fd, size = sender.memory, sender.shape.size
        try:
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size != size:
                raise ValueError("it is not a sealed file of the size that the sender names")
            filled, end = list[range](), 0  # the ranges of the file that have data; the rest are holes
            while end < size:
                try:
                    begin = os.lseek(fd, end, os.SEEK_DATA)
                except OSError:  # only a hole is left
                    break
                end = os.lseek(fd, begin, os.SEEK_HOLE)
                filled.append(range(begin, end))
            return HostReader(sender.shape, mmap.mmap(fd, size, prot=mmap.PROT_READ), filled)
        except (OSError, ValueError) as error:
            raise BackendUnavailable(f"host: the sender's memory cannot be mapped: {error}") from error

    def close(self) -> None:
        if self.memory is not None:
            os.close(self.memory)
            self.memory = None


class HostReader(Reader):
    """Reader of ``theirs``, a mapping of the sender's region, whose ``filled`` ranges are not holes."""

    def __init__(self, shape: RegionShape, theirs: mmap.mmap, filled: Sequence[range]) -> None:
        self._shape = shape
        self._map = theirs
        self._theirs = memoryview(theirs)
        start_thread("tercet-map", _touch, theirs, filled)

    def read(self, batch: Batch, under_lease: UnderLease) -> bool:
        for some, nbytes in in_steps(batch.rows, STEP_BYTES):
            under_lease(lambda some=some, nbytes=nbytes: self._copy(some, batch.target, nbytes))
        word = self._shape.word(batch.send)
        return int.from_bytes(self._theirs[word : word + WORD_BYTES], "little") == batch.send

    def _copy(self, copies: Copies, ours: memoryview, nbytes: int) -> int:
        theirs = self._theirs
        for size, there, here in copies.tolist():
            ours[here : here + size] = theirs[there : there + size]
        return nbytes

    def close(self) -> None:
        self._theirs.release()
        self._map.close()


def _touch(region: mmap.mmap, filled: Sequence[range]) -> None:
    """Map pages in advance, so that the first copies do not map them one by one.

    Holes are skipped: reading one would allocate memory for it.
    """
    with suppress(ValueError, OSError):  # closed in the meantime; or an older kernel, where the copies map pages
        for part in filled:
            for at in range(part.start, part.stop, TOUCHED_AT_A_TIME):
                region.madvise(MADV_POPULATE_READ, at, min(TOUCHED_AT_A_TIME, part.stop - at))


# ---- Devices ---------------------------------------------------------------------------------------------------------


class IpcBackend(HostBackend):
    """Backend that reads KV on devices of other processes of this machine."""

    name = "ipc"
    stages = False

    def __init__(self, region: KVRegion, memory: StagedMemory) -> None:
        super().__init__(region)
        self._memory = memory

    def offer(self) -> bytes:
        return self._memory.device.offer

    def connect(self, offer: bytes, sender: SendingPeer) -> Reader:
        words = super().connect(b"", sender)
        try:
            return IpcReader(words, self._memory, self._memory.device.opened(offer, sender.shape))
        except BaseException:
            words.close()
            raise


class IpcReader(Reader):
    """Reader of ``theirs``, the sender's mapped device memory; ``words`` reads the sender's generation words."""

    def __init__(self, words: Reader, ours: StagedMemory, theirs: object) -> None:
        self._words, self._ours = words, ours
        self._theirs: object | None = theirs

    def read(self, batch: Batch, under_lease: UnderLease) -> bool:
        chunks = [_places(chunk, blocks) for chunk, blocks in zip(batch.chunks, batch.blocks, strict=True)]
        if chunks:
            under_lease(lambda: self._ours.copy_across(self._theirs, chunks, batch.order))
        return self._words.read(Batch(batch.send, batch.lease, memoryview(b"")), under_lease)

    def close(self) -> None:
        # The mapping ends with its last user. Until then the memory of a dead worker may stay allocated, and
        # its replacement may find too little.
        self._theirs = None
        self._words.close()


def _places(chunk: ReadDescriptors, blocks: Numbers) -> tuple[Places, Places, int]:
    """Return a chunk's places there, its places here, and the bytes of each block."""
    sources = np.frombuffer(chunk.blocks, BLOCK_NUMBER).astype(np.int64)
    layers = range(chunk.layer, chunk.layer + chunk.layers)
    return (chunk.sources, sources, chunk.offset), (layers, blocks, chunk.part * chunk.size), chunk.size
