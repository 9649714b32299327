"""``host`` and ``ipc``: engines of one machine map each other's KV, and the receiver copies blocks out of it.

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

import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np

from tercet.transport.backends.reading import (
    Backend,
    BackendUnavailable,
    Batch,
    Copies,
    Fence,
    Reader,
    SendingPeer,
    in_steps,
)
from tercet.transport.peer_messages import BLOCK_NUMBER, ReadDescriptors
from tercet.transport.region import WORD_BYTES, KVRegion, Numbers, RegionShape
from tercet.transport.sockets import start_thread
from tercet.transport.staged import Places, StagedMemory

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
            return HostReader(sender.shape, mmap.mmap(fd, size, prot=mmap.PROT_READ), list(_extents(fd, size)))
        except (OSError, ValueError) as error:
            raise BackendUnavailable(f"host: the sender's memory cannot be mapped: {error}") from error

    def close(self) -> None:
        if self.memory is not None:
            os.close(self.memory)
            self.memory = None


def _extents(fd: int, size: int) -> Iterator[range]:
    """Yield the byte ranges of a file that have data; the rest are holes."""
    end = 0
    while end < size:
        try:
            begin = os.lseek(fd, end, os.SEEK_DATA)
        except OSError:  # only a hole is left
            return
        end = os.lseek(fd, begin, os.SEEK_HOLE)
        yield range(begin, end)


class HostReader(Reader):
    """Reader of ``theirs``, a mapping of the sender's region, whose ``filled`` ranges are not holes."""

    def __init__(self, shape: RegionShape, theirs: mmap.mmap, filled: Sequence[range]) -> None:
        self._shape = shape
        self._map = theirs
        self._theirs = memoryview(theirs)
        start_thread("tercet-map", _touch, theirs, filled)

    def read(self, batch: Batch, fence: Fence) -> bool:
        for some, nbytes in in_steps(batch.rows, STEP_BYTES):
            fence(lambda some=some, nbytes=nbytes: self._copy(some, batch.target, nbytes))
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

    def read(self, batch: Batch, fence: Fence) -> bool:
        chunks = [_places(chunk, blocks) for chunk, blocks in zip(batch.chunks, batch.blocks, strict=True)]
        if chunks:
            fence(lambda: self._ours.copy_across(self._theirs, chunks, batch.order))
        return self._words.read(Batch(batch.send, batch.lease, memoryview(b"")), fence)

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
