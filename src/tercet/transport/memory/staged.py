"""KV that is reached through buffers in host memory: an accelerator's, by copies on streams of their own.

To send, a chunk's blocks are gathered into a buffer when the receiver asks for it, and go from there. To receive, a
chunk comes into a buffer as a whole, and is put into its blocks while its lease is held. Each direction has
:data:`BUFFERS` buffers, so one is filled while others are emptied, and the memory that this takes has a bound:
:meth:`StagedMemory.host_bytes` of pinned host memory, and of the device's what its :class:`DeviceBlocks` say.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tercet.protocol import BadRequest, TransferFailed
from tercet.transport.memory.block_order import BlockOrder
from tercet.transport.memory.buffers import BufferPool, StagingBuffer
from tercet.transport.memory.handles import MemoryKind, RdmaHandles
from tercet.transport.memory.kv_memory import KVMemory
from tercet.transport.region import Numbers, RegionShape
from tercet.transport.vectors import Vector, address_of

logger = logging.getLogger(__name__)
BUFFERS = 8
# A chunk's copy takes a millisecond; a device that is not done after so long will not be.
COPY_SECONDS = 30.0
# How often a copy is looked at without a pause, and the pause after that.
SPINS, PAUSE_SECONDS = 200, 50e-6

IsOver = Callable[[], bool]
# Of one side: layers, which may have other numbers on the other side, blocks in each, and how far into each block.
Places = tuple[range, Numbers, int]


@dataclass(frozen=True)
class Landing:
    """Memory beside the blocks, where chunks arrive that are read over RDMA; ``memory`` keeps it alive."""

    address: int
    size: int
    kind: MemoryKind
    device: int
    memory: object


class DeviceBlocks(Protocol):
    """A device's side: begins copies from and to its blocks. Calls come from several threads.

    ``offer`` is what opens the blocks in another process of this machine; empty if nothing does. ``rdma`` is by what
    others read them from other machines, None if they cannot.
    """

    offer: bytes
    rdma: RdmaHandles | None

    def attach(self) -> None:
        """Prepare this thread for calls of libraries that use the device."""
        ...

    def landing(self, nbytes: int) -> Landing:
        """Memory of this process where the blocks are, for one chunk."""
        ...

    def begin_landed(self, landing: Landing, here: Places, size: int, order: BlockOrder | None) -> IsOver:
        """Begin to put a chunk that has arrived into our blocks; as :meth:`begin_in` otherwise."""
        ...

    def opened(self, offer: bytes, shape: RegionShape) -> object:
        """Another rank's blocks; raises :class:`~tercet.protocol.TransferFailed` if they cannot be had here."""
        ...

    def begin_across(
        self,
        theirs: object,
        there: Places,
        here: Places,
        size: int,
        order: BlockOrder | None,
    ) -> IsOver:
        """Begin to copy ``size`` bytes of each of their blocks, which :meth:`opened` returned, to ours."""
        ...

    def buffer(self, nbytes: int) -> memoryview:
        """Host memory that the device copies from and to without a detour."""
        ...

    def begin_out(self, layers: range, blocks: Numbers, offset: int, size: int, into: memoryview) -> IsOver:
        """Begin to copy bytes ``[offset, offset + size)`` of each layer's blocks, one after the other; is it over?"""
        ...

    def begin_in(
        self, layers: range, blocks: Numbers, offset: int, size: int, source: memoryview, order: BlockOrder | None
    ) -> IsOver:
        """The other way round; negative ``blocks`` are left out, and their bytes passed over.

        With ``order``, whole blocks come in that one, and their items are put into ours.
        """
        ...


class DeviceHangs(TransferFailed):
    """A device has not done in time what takes a millisecond."""


class DeviceLost(TransferFailed):
    """A device does nothing more for this process; CUDA says so of everything from the first error on."""


@contextmanager
def ending_where_a_device_is_lost() -> Generator[None]:
    """End this process, and with it the worker beside it, for whom nobody would move KV any more."""
    try:
        yield
    except DeviceLost as error:
        logger.critical("%s; this engine ends", error.message)
        end_process()
        raise


@contextmanager
def ending_where_a_device_hangs() -> Generator[None]:
    """As :func:`ending_where_a_device_is_lost`, and where a copy into blocks is not over in time.

    It may still be carried out, and nobody could say when its blocks are safe to be given to somebody else.
    """
    try:
        with ending_where_a_device_is_lost():
            yield
    except DeviceHangs as error:
        logger.critical("%s, and may still write there; this engine ends", error.message)
        end_process()


def end_process() -> None:
    """At once, whatever other threads do."""
    os._exit(1)


class StagedMemory(KVMemory):
    """The KV of one rank whose region looks like ``shape``, in chunks of ``chunk_bytes``, or of one block."""

    def __init__(self, device: DeviceBlocks, shape: RegionShape, chunk_bytes: int) -> None:
        self.device, self._shape = device, shape
        self.buffer_bytes = max(chunk_bytes, shape.block_bytes)
        self._out = BufferPool([device.buffer(self.buffer_bytes) for _ in range(BUFFERS)])
        self._in = BufferPool([device.buffer(self.buffer_bytes) for _ in range(BUFFERS)])

    @property
    def host_bytes(self) -> int:
        """Pinned host memory that the buffers take."""
        return 2 * BUFFERS * self.buffer_bytes

    def buffers_free(self) -> tuple[int, int]:
        """Buffers that nobody uses, on the ways out and in."""
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
        """Copy a block in and out, while nobody uses the cache, and leave it as it was.

        So what is slow at its first use (kernels are loaded, memory is taken) has been used, and a device, or a mapping
        of it, that does not copy what it is given is found before anybody relies on it. Raises
        :class:`~tercet.protocol.TransferFailed`.
        """
        was, size = self._practised(None), self._shape.block_bytes
        some = np.random.default_rng(size).bytes(size)
        try:
            if self._practised(some) != some:
                raise TransferFailed("the device's copies of KV do not bring back what they took there")
        finally:
            self._practised(was)

    def _practised(self, given: bytes | None) -> bytes:
        """Put ``given`` into the first block of the first layer, if it is; what is there then."""
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
        """A buffer for a chunk that is to be asked for; its holder gives it back."""
        return self._in.take()

    def room_at_once(self) -> StagingBuffer | None:
        """As :meth:`room`, if there is one now."""
        return self._in.take_at_once()

    def put(
        self,
        buffer: StagingBuffer,
        layers: range,
        blocks: Numbers,
        offset: int,
        size: int,
        order: BlockOrder | None = None,
    ) -> int:
        """Put a chunk that has come, in ``order`` if that is not ours, into its blocks.

        Returns its bytes, once the device has them. To be called while nobody can be given the blocks.
        """
        nbytes = self._checked(layers, blocks[blocks >= 0], offset, size, len(blocks))
        source = buffer.bytes[:nbytes]
        with ending_where_a_device_hangs():
            self._copy(buffer, lambda: self.device.begin_in(layers, blocks, offset, size, source, order))
        return nbytes

    def copy_across(
        self,
        theirs: object,
        there: Places,
        here: Places,
        size: int,
        order: BlockOrder | None,
    ) -> int:
        """Copy a chunk of a rank that is mapped here into our blocks; returns its bytes, once the device has them.

        To be called while nobody can be given our blocks.
        """
        layers, blocks, offset = here
        nbytes = self._checked(layers, blocks[blocks >= 0], offset, size, len(blocks))
        with ending_where_a_device_hangs():
            wait_until(self.device.begin_across(theirs, there, here, size, order))
        return nbytes

    def put_landed(self, landing: Landing, here: Places, size: int, order: BlockOrder | None) -> int:
        """As :meth:`copy_across`, for a chunk that has arrived."""
        layers, blocks, offset = here
        nbytes = self._checked(layers, blocks[blocks >= 0], offset, size, len(blocks))
        with ending_where_a_device_hangs():
            wait_until(self.device.begin_landed(landing, here, size, order))
        return nbytes

    def _copy(self, buffer: StagingBuffer, begin: Callable[[], IsOver]) -> None:
        is_over: IsOver = lambda: True  # noqa: E731  as long as nothing has begun
        with buffer.copying(lambda: is_over()):
            is_over = begin()
            wait_until(is_over)

    def _checked(self, layers: range, blocks: Numbers, offset: int, size: int, count: int | None = None) -> int:
        """A chunk's bytes; raises :class:`~tercet.protocol.BadRequest` for one that is not of this rank's blocks."""
        shape = self._shape
        inside = not len(blocks) or (int(blocks.min()) >= 0 and int(blocks.max()) < shape.num_blocks)
        known = 0 <= layers.start <= layers.stop <= len(shape.planes) and 0 <= offset <= shape.block_bytes - size
        nbytes = len(layers) * (len(blocks) if count is None else count) * size
        if not (inside and known and 0 < nbytes <= self.buffer_bytes):
            raise BadRequest(f"{nbytes} bytes of {layers} of layers, blocks {blocks!r:.80} are not in this rank's KV")
        return nbytes

    def close(self) -> None:
        """The buffers go with their last user."""


def wait_until(is_over: IsOver, seconds: float = COPY_SECONDS) -> None:
    """Wait for a device; raises :class:`DeviceHangs` if it takes too long."""
    deadline, looks = time.monotonic() + seconds, 0
    while not is_over():
        looks += 1
        if looks > SPINS:
            time.sleep(PAUSE_SECONDS)
        if time.monotonic() > deadline:
            raise DeviceHangs(f"the device has not copied KV within {seconds:.0f} s")


def whole(memory: memoryview) -> Vector:
    """All of some memory, in one place."""
    return Vector(np.array([(address_of(memory), len(memory))], dtype=np.uint64), memory, len(memory))
