"""KV that is reached through buffers in host memory: an accelerator's, by copies on separate streams.

To send, a chunk's blocks are gathered into a buffer when the receiver requests it, and sent from there. To receive, a
chunk arrives in a buffer as a whole, and is copied into its blocks while its lease is held::

    sender's blocks ──gather──▶ buffer ──socket──▶ buffer ──scatter, under the lease──▶ receiver's blocks
      on the device              host               host                                  on the device

Each direction has :data:`BUFFERS` buffers, so one is filled while others are emptied, and the memory for this is
limited: :meth:`StagedMemory.host_bytes` of pinned host memory, and the device memory that its :class:`DeviceBlocks`
needs. A buffer has one owner at a time. The owner may be gone (a cancelled send, a broken connection) while a device
still copies from or into the buffer: then it stays unavailable until that copy has ended, however late.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from tercet.protocol import BadRequest, TransferFailed
from tercet.transport.region import BlockOrder, KVMemory, Numbers, RegionShape
from tercet.transport.sockets import Vector, address_of

# NIXL's names of host memory and of a device's memory.
MemoryKind = Literal["DRAM", "VRAM"]


class RdmaHandles(msgspec.Struct, frozen=True, array_like=True):
    """Handles by which other machines read a worker's KV over RDMA, after the worker has registered it."""

    metadata: bytes  # of the worker's NIXL agent
    # For each plane the address of its block 0 in the worker, and the distance between two blocks in bytes.
    planes: tuple[tuple[int, int], ...]
    kind: MemoryKind
    device: int


class DeviceHandles(msgspec.Struct, frozen=True):
    """Handles that open a worker's KV in another process of its machine."""

    device: int
    storages: tuple[tuple[Any, ...], ...]  # the allocations, as PyTorch shares them between processes
    # For each plane its allocation, the offset of its block 0 in bytes, and the distance between two blocks: more than
    # a block if the blocks of all layers are interleaved.
    planes: tuple[tuple[int, int, int], ...]
    events: tuple[bytes, ...]  # a ring: the worker records one when KV of a layer is computed


# Time limit in seconds. Every step of a transfer has a timeout, so a transfer holds a buffer for less time.
WAIT_SECONDS = 60.0


class BufferLedger:
    """States of ``count`` buffers by number. No I/O; not thread-safe."""

    def __init__(self, count: int) -> None:
        self._free = list(reversed(range(count)))
        self._taken: set[int] = set()
        self._copying: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """Take a free buffer and return its number; None if all are taken."""
        if not self._free:
            return None
        number = self._free.pop()
        self._taken.add(number)
        return number

    def copy_begins(self, number: int) -> None:
        """Record that a device copies from or into a taken buffer from now on."""
        self._require(number in self._taken and number not in self._copying, number)
        self._copying.add(number)

    def copy_ended(self, number: int) -> None:
        """Record that the device's copy of this buffer has ended."""
        self._require(number in self._copying, number)
        self._copying.remove(number)
        if number not in self._taken:
            self._free.append(number)

    def give_back(self, number: int) -> None:
        """Record that the owner no longer needs the buffer."""
        self._require(number in self._taken, number)
        self._taken.remove(number)
        if number not in self._copying:
            self._free.append(number)

    @staticmethod
    def _require(holds: bool, number: int) -> None:
        if not holds:
            raise RuntimeError(f"staging buffer {number} does not have the state that this call requires")


class StagingBuffer:
    """A taken buffer; ``bytes`` is its memory."""

    def __init__(self, number: int, memory: memoryview, pool: BufferPool) -> None:
        self.bytes = memory
        self.number = number
        self._pool = pool

    @contextmanager
    def copying(self, is_over: Callable[[], bool]) -> Generator[None]:
        """Mark the buffer as being copied while entered; after an error, until ``is_over`` returns True."""
        self._pool.copy_begins(self.number)
        try:
            yield
        except BaseException:
            # The device may still write there: the buffer is not reused before it has ended.
            self._pool.abandon(self.number, is_over)
            raise
        self._pool.copy_ended(self.number)

    def give_back(self) -> None:
        self._pool.give_back(self.number)


class BufferPool:
    """Buffers of equal size for one direction; callers get them in turn. Thread-safe.

    Sending and receiving have separate pools, and a chunk is requested only after its buffer is taken. So the holder of
    a buffer never waits for a thread that waits for a buffer.
    """

    def __init__(self, memories: Sequence[memoryview]) -> None:
        self._memories = memories
        self._ledger = BufferLedger(len(memories))
        self._abandoned: dict[int, Callable[[], bool]] = {}
        self._changed = threading.Condition()
        self.buffer_bytes = min(map(len, memories))

    @property
    def free(self) -> int:
        with self._changed:
            self._look_at_abandoned()
            return self._ledger.free

    def take(self) -> StagingBuffer:
        """Take the next free buffer; raise :class:`~tercet.protocol.TransferFailed` at a timeout."""
        with self._changed:
            found: int | None = None

            def taken() -> bool:
                nonlocal found
                self._look_at_abandoned()
                found = self._ledger.take()
                return found is not None

            # A bound: a device that hangs gives no buffer back.
            if not self._changed.wait_for(taken, WAIT_SECONDS) or found is None:
                raise TransferFailed(f"no staging buffer became free within {WAIT_SECONDS:.0f} s")
            return StagingBuffer(found, self._memories[found], self)

    def take_at_once(self) -> StagingBuffer | None:
        """Take a free buffer and return it; None if all are taken now."""
        with self._changed:
            self._look_at_abandoned()
            found = self._ledger.take()
            return None if found is None else StagingBuffer(found, self._memories[found], self)

    def copy_begins(self, number: int) -> None:
        with self._changed:
            self._ledger.copy_begins(number)

    def copy_ended(self, number: int) -> None:
        with self._changed:
            self._ledger.copy_ended(number)
            self._changed.notify_all()

    def abandon(self, number: int, is_over: Callable[[], bool]) -> None:
        """Stop waiting for a copy; the buffer is reused once ``is_over`` returns True."""
        with self._changed:
            self._abandoned[number] = is_over

    def give_back(self, number: int) -> None:
        with self._changed:
            self._ledger.give_back(number)
            self._changed.notify_all()

    def _look_at_abandoned(self) -> None:
        for number in [number for number, is_over in self._abandoned.items() if is_over()]:
            del self._abandoned[number]
            self._ledger.copy_ended(number)


logger = logging.getLogger(__name__)
BUFFERS = 8
# In seconds. A chunk's copy takes a millisecond; after this time a device counts as hung.
COPY_SECONDS = 30.0
# Number of polls of a copy without a pause, and the pause between later polls, in seconds.
SPINS, PAUSE_SECONDS = 200, 50e-6

IsOver = Callable[[], bool]
# One side of a copy: layers (the other side may have other numbers for them), blocks in each, and the offset in each
# block.
Places = tuple[range, Numbers, int]


@dataclass(frozen=True)
class Landing:
    """Memory outside of the blocks for chunks that are read over RDMA; ``memory`` keeps it alive."""

    address: int
    size: int
    kind: MemoryKind
    device: int
    memory: object


class DeviceBlocks(Protocol):
    """A device's side: it begins copies from and to its blocks. Calls come from several threads.

    ``offer`` opens the blocks in another process of this machine; empty if that is not possible. ``rdma`` has the
    handles by which other machines read them, None if they cannot.
    """

    offer: bytes
    rdma: RdmaHandles | None

    def attach(self) -> None:
        """Prepare this thread for calls of libraries that use the device."""
        ...

    def landing(self, nbytes: int) -> Landing:
        """Return memory of this process on the blocks' device, for one chunk."""
        ...

    def begin_landed(self, landing: Landing, here: Places, size: int, order: BlockOrder | None) -> IsOver:
        """Begin to copy a chunk that has arrived in ``landing`` into our blocks; otherwise like :meth:`begin_in`."""
        ...

    def opened(self, offer: bytes, shape: RegionShape) -> object:
        """Open another rank's blocks; raise :class:`~tercet.protocol.TransferFailed` if that fails."""
        ...

    def begin_across(
        self, theirs: object, there: Places, here: Places, size: int, order: BlockOrder | None,
    ) -> IsOver:  # fmt: skip
        """Begin to copy ``size`` bytes of each of their blocks, which :meth:`opened` returned, to ours."""
        ...

    def buffer(self, nbytes: int) -> memoryview:
        """Return host memory that the device copies from and to directly."""
        ...

    def begin_out(self, layers: range, blocks: Numbers, offset: int, size: int, into: memoryview) -> IsOver:
        """Begin to copy bytes ``[offset, offset + size)`` of each layer's blocks; return a check for its end."""
        ...

    def begin_in(
        self, layers: range, blocks: Numbers, offset: int, size: int, source: memoryview, order: BlockOrder | None
    ) -> IsOver:
        """Begin the copy in the other direction; negative ``blocks`` are left out, and their bytes skipped.

        With ``order``, whole blocks arrive in that order, and their items are converted to ours.
        """
        ...


class DeviceHangs(TransferFailed):
    """A device has not finished in time a copy that takes a millisecond."""


class DeviceLost(TransferFailed):
    """A device no longer works for this process: after its first error, CUDA fails every call."""


@contextmanager
def ending_where_a_device_is_lost() -> Generator[None]:
    """End this process if the device is lost, and with it its worker, whose KV could no longer be moved."""
    try:
        yield
    except DeviceLost as error:
        logger.critical("%s; this engine ends", error.message)
        end_process()
        raise


@contextmanager
def ending_where_a_device_hangs() -> Generator[None]:
    """End this process if the device is lost, or if a copy into blocks does not end in time.

    Such a copy may still run later, so it is unknown when its blocks may get a new owner.
    """
    try:
        with ending_where_a_device_is_lost():
            yield
    except DeviceHangs as error:
        logger.critical("%s, and may still write there; this engine ends", error.message)
        end_process()


def end_process() -> None:
    """End the process at once, without waiting for its threads."""
    os._exit(1)


class StagedMemory(KVMemory):
    """The KV of one rank with a region of ``shape``; each buffer holds ``chunk_bytes``, or one block if larger."""

    def __init__(self, device: DeviceBlocks, shape: RegionShape, chunk_bytes: int) -> None:
        self.device, self._shape = device, shape
        self.buffer_bytes = max(chunk_bytes, shape.block_bytes)
        self._out = BufferPool([device.buffer(self.buffer_bytes) for _ in range(BUFFERS)])
        self._in = BufferPool([device.buffer(self.buffer_bytes) for _ in range(BUFFERS)])

    @property
    def host_bytes(self) -> int:
        """Size of the buffers in pinned host memory, in bytes."""
        return 2 * BUFFERS * self.buffer_bytes

    def buffers_free(self) -> tuple[int, int]:
        """Return the numbers of free buffers for sending and for receiving."""
        return self._out.free, self._in.free

    @contextmanager
    def reading(self, layers: range, blocks: Numbers, offset: int, size: int) -> Generator[Vector]:
        nbytes = self._checked(layers, blocks, offset, size)
        buffer = self._out.take()
        try:
            into = buffer.bytes[:nbytes]
            with ending_where_a_device_is_lost():
                self._copy(buffer, lambda: self.device.begin_out(layers, blocks, offset, size, into))
            yield whole(into)
        finally:
            buffer.give_back()

    def practise(self) -> None:
        """Copy a block out and in, while the cache is not in use, and leave it unchanged.

        Slow first uses (loading kernels, allocating memory) are then done, and a device or mapping that copies wrongly
        is found before it is needed. Raises :class:`~tercet.protocol.TransferFailed`.
        """
        was, size = self._practised(None), self._shape.block_bytes
        some = np.random.default_rng(size).bytes(size)
        try:
            if self._practised(some) != some:
                raise TransferFailed("the device returns other bytes of KV than were copied to it")
        finally:
            self._practised(was)

    def _practised(self, given: bytes | None) -> bytes:
        """Write ``given`` into the first block of the first layer unless it is None; return the block's bytes."""
        layer, block, size = range(1), np.zeros(1, dtype=np.int64), self._shape.block_bytes
        if given is not None:
            room = self.room()
            try:
                room.bytes[:size] = given
                self.put(room, layer, block, 0, size)
            finally:
                room.give_back()
        nbytes, buffer = self._checked(layer, block, 0, size), self._out.take()
        try:
            into = buffer.bytes[:nbytes]
            self._copy(buffer, lambda: self.device.begin_out(layer, block, 0, size, into))
            return bytes(into)
        finally:
            buffer.give_back()

    def room(self) -> StagingBuffer:
        """Take a buffer for a chunk that will be requested; its holder gives it back."""
        return self._in.take()

    def room_at_once(self) -> StagingBuffer | None:
        """Take a buffer like :meth:`room`; None if all are taken now."""
        return self._in.take_at_once()

    def put(
        self, buffer: StagingBuffer, layers: range, blocks: Numbers, offset: int, size: int,
        order: BlockOrder | None = None,
    ) -> int:  # fmt: skip
        """Copy a chunk that has arrived, in ``order`` if that differs from ours, into its blocks.

        Return its size in bytes after the device has them. Call this while the blocks cannot get another owner.
        """
        nbytes = self._checked_target((layers, blocks, offset), size)
        source = buffer.bytes[:nbytes]
        with ending_where_a_device_hangs():
            self._copy(buffer, lambda: self.device.begin_in(layers, blocks, offset, size, source, order))
        return nbytes

    def copy_across(
        self, theirs: object, chunks: Sequence[tuple[Places, Places, int]], order: BlockOrder | None
    ) -> int:
        """Copy chunks of a rank that is mapped here into our blocks; return their bytes after the device has them.

        A chunk is a place there, a place here, and the bytes of each block. All copies begin before the first has to
        end, so that the device does not wait between them. Call this while our blocks cannot get another owner.
        """
        nbytes = sum(self._checked_target(here, size) for _, here, size in chunks)
        with ending_where_a_device_hangs():
            is_over: IsOver = lambda: True  # noqa: E731  as long as nothing has begun
            try:
                for there, here, size in chunks:
                    is_over = self.device.begin_across(theirs, there, here, size, order)
            finally:
                wait_until(is_over)
        return nbytes

    def put_landed(self, landing: Landing, here: Places, size: int, order: BlockOrder | None) -> int:
        """Copy a chunk that has arrived in ``landing`` into our blocks; otherwise like :meth:`copy_across`."""
        nbytes = self._checked_target(here, size)
        with ending_where_a_device_hangs():
            wait_until(self.device.begin_landed(landing, here, size, order))
        return nbytes

    def _copy(self, buffer: StagingBuffer, begin: Callable[[], IsOver]) -> None:
        is_over: IsOver = lambda: True  # noqa: E731  as long as nothing has begun
        with buffer.copying(lambda: is_over()):
            is_over = begin()
            wait_until(is_over)

    def _checked_target(self, here: Places, size: int) -> int:
        """Return a chunk's bytes like :meth:`_checked`; negative blocks are not checked, but their bytes count."""
        layers, blocks, offset = here
        return self._checked(layers, blocks[blocks >= 0], offset, size, len(blocks))

    def _checked(self, layers: range, blocks: Numbers, offset: int, size: int, count: int | None = None) -> int:
        """Return a chunk's bytes; raise :class:`~tercet.protocol.BadRequest` if it is not within this rank's blocks."""
        shape = self._shape
        inside = not len(blocks) or (int(blocks.min()) >= 0 and int(blocks.max()) < shape.num_blocks)
        known = 0 <= layers.start <= layers.stop <= len(shape.planes) and 0 <= offset <= shape.block_bytes - size
        nbytes = len(layers) * (len(blocks) if count is None else count) * size
        if not (inside and known and 0 < nbytes <= self.buffer_bytes):
            raise BadRequest(f"{nbytes} bytes of {layers} of layers, blocks {blocks!r:.80} are not in this rank's KV")
        return nbytes

    def close(self) -> None:
        """Do nothing: the buffers are freed with their last user."""


def wait_until(is_over: IsOver, seconds: float = COPY_SECONDS) -> None:
    """Wait for a device; raise :class:`DeviceHangs` if it takes more than ``seconds``."""
    deadline, looks = time.monotonic() + seconds, 0
    while not is_over():
        looks += 1
        if looks > SPINS:
            time.sleep(PAUSE_SECONDS)
        if time.monotonic() > deadline:
            raise DeviceHangs(f"the device has not copied KV within {seconds:.0f} s")


def whole(memory: memoryview) -> Vector:
    """Return all of ``memory`` as one place."""
    return Vector(np.array([(address_of(memory), len(memory))], dtype=np.uint64), memory, len(memory))
