"""``nixl`` for KV on devices: the receiver's agent process reads the sender's device memory over RDMA.

A library registers memory in the process that owns it. So the worker, which owns the KV, has an agent that others read
from (:class:`RegisteredPlanes`), and the process that moves KV has separate memory on its device, the landings: a chunk
arrives in one of them, and is copied into its blocks from there while the lease is held, like a chunk over ``ipc``. A
late read writes to a landing, never to KV, and the landing is reused once the agent that read is destroyed. Generation
words are in host memory, and are read as ``nixl`` reads host memory.
"""

from __future__ import annotations

import queue
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager

import msgspec
import numpy as np

from tercet.protocol import TransferFailed
from tercet.transport.backends.nixl import (
    NixlAgent,
    NixlReader,
    ReadingAgent,
    RegionOffer,
    Registered,
    load_bindings,
    pieces,
    starting,
)
from tercet.transport.backends.reading import Backend, BackendUnavailable, Batch, Fence, Reader, SendingPeer
from tercet.transport.backends.registered import RegisteredRegion, understood
from tercet.transport.memory.handles import MemoryKind, RdmaHandles
from tercet.transport.memory.staged import Landing, StagedMemory
from tercet.transport.peer_messages import BLOCK_NUMBER, ReadDescriptors
from tercet.transport.region import TAIL_BYTES, KVRegion, RegionShape, neighbours

# Number of chunks that may arrive at the same time; each landing holds one.
LANDINGS = 4
# Time limit in seconds. Every step of a chunk has a timeout, so a chunk takes less time.
WAIT_SECONDS = 60.0


class _DeviceOffer(msgspec.Struct, frozen=True, array_like=True):
    words: RegionOffer
    blocks: RdmaHandles


class RegisteredPlanes:
    """A worker's KV, registered with NIXL as long as this object lives. ``handles`` are the data that others need.

    ``planes`` lie in ``allocations``, given as (address, bytes). Raises :class:`BackendUnavailable`.
    """

    def __init__(
        self,
        allocations: Sequence[tuple[int, int]],
        planes: Sequence[tuple[int, int]],
        kind: MemoryKind = "VRAM",
        device: int = 0,
    ) -> None:
        nixl = load_bindings()
        try:
            self._agent = NixlAgent(nixl, [Registered(*each, kind, device) for each in allocations], answers=True)
            self.handles = RdmaHandles(self._agent.metadata(), tuple(planes), kind, device)
        except Exception as error:
            raise BackendUnavailable(
                f"nixl: cannot register this engine's KV: {error}; UCX_LOG_LEVEL=info logs more"
            ) from error


class NixlDeviceBackend(Backend):
    """Backend that reads device memory registered by its owners; the worker next to this process registers ours."""

    name = "nixl"
    stages = False

    def __init__(self, region: KVRegion, memory: StagedMemory) -> None:
        if memory.device.rdma is None:
            raise BackendUnavailable("nixl: the worker has not registered its KV")
        self._nixl, self._memory, self._blocks = load_bindings(), memory, memory.device.rdma
        self._ours = RegisteredRegion(region)
        # Only the words of the file are used; if the rest were registered, the kernel would allocate it.
        self._tail = [Registered(self._ours.address + region.shape.words, TAIL_BYTES)]
        self._landings = Landings(memory)
        with starting():
            self._agent: NixlAgent | None = NixlAgent(self._nixl, self._tail, answers=True)
            self._words(self._own_offer(), region.shape).require_own_word(self.name)
            with closing(self._reader(self._own_offer(), region.shape)) as reader:
                reader.require_block()

    def offer(self) -> bytes:
        return msgspec.msgpack.encode(self._own_offer())

    def connect(self, offer: bytes, sender: SendingPeer) -> Reader:
        theirs = understood(self.name, offer, _DeviceOffer)
        if len(theirs.blocks.planes) != len(sender.shape.planes):
            raise BackendUnavailable("nixl: the sender offers other planes than its region has")
        return self._reader(theirs, sender.shape)

    def close(self) -> None:
        """Destroy the agent from which others read words."""
        self._agent = None

    def _own_offer(self) -> _DeviceOffer:
        if self._agent is None:
            raise BackendUnavailable("nixl: this rank was closed")
        return _DeviceOffer(RegionOffer(self._ours.address, self._agent.metadata()), self._blocks)

    def _words(self, theirs: _DeviceOffer, shape: RegionShape) -> NixlReader:
        return NixlReader(self._nixl, self._ours, shape, theirs.words, self._tail)

    def _reader(self, theirs: _DeviceOffer, shape: RegionShape) -> NixlDeviceReader:
        words = self._words(theirs, shape)
        blocks = ReadingAgent(self._nixl, self._landings.registered, theirs.blocks.metadata)
        return NixlDeviceReader(words, blocks, theirs.blocks, shape, self._memory, self._landings)


class Landings:
    """The landings of one rank, :data:`LANDINGS` of a chunk's size; one reader at a time uses each of them.

    Thread-safe.
    """

    def __init__(self, memory: StagedMemory) -> None:
        found = [memory.device.landing(memory.buffer_bytes) for _ in range(LANDINGS)]
        self.registered = [Registered(each.address, each.size, each.kind, each.device) for each in found]
        self._free: queue.SimpleQueue[Landing] = queue.SimpleQueue()
        for each in found:
            self._free.put(each)

    @property
    def free(self) -> int:
        """Number of unused landings."""
        return self._free.qsize()

    @contextmanager
    def taken(self) -> Generator[Landing]:
        """Take a landing for a chunk while entered; raise :class:`~tercet.protocol.TransferFailed` at a timeout."""
        try:
            landing = self._free.get(timeout=WAIT_SECONDS)
        except queue.Empty:
            raise TransferFailed(f"nixl: no landing became free within {WAIT_SECONDS:.0f} s") from None
        try:
            yield landing
        finally:
            self._free.put(landing)


class NixlDeviceReader(Reader):
    """Reader of one sender's device; ``words`` reads its generation words, ``blocks`` its KV."""

    def __init__(
        self,
        words: NixlReader,
        blocks: ReadingAgent,
        theirs: RdmaHandles,
        shape: RegionShape,
        ours: StagedMemory,
        landings: Landings,
    ) -> None:
        self._words, self._blocks, self._theirs, self._shape = words, blocks, theirs, shape
        self._ours, self._landings = ours, landings

    def read(self, batch: Batch, fence: Fence) -> bool:
        for chunk, blocks in zip(batch.chunks, batch.blocks, strict=True):
            here = range(chunk.layer, chunk.layer + chunk.layers), blocks, chunk.part * chunk.size
            with self._landings.taken() as landing:
                self._fetch(chunk, landing)
                fence(
                    lambda landing=landing, here=here, size=chunk.size: self._ours.put_landed(
                        landing, here, size, batch.order
                    )
                )
        return self._words.read(Batch(batch.send, batch.lease, memoryview(b"")), fence)

    def require_block(self) -> None:
        """Check the reader: read the first block of each plane; raise :class:`~tercet.protocol.TransferFailed`."""
        block = np.zeros(1, dtype=BLOCK_NUMBER).tobytes()
        with self._landings.taken() as landing:
            for plane in range(len(self._shape.planes)):
                self._fetch(ReadDescriptors(0, "", 0, plane, 1, 0, 1, block, 0, self._shape.block_bytes), landing)

    def _fetch(self, chunk: ReadDescriptors, landing: Landing) -> None:
        """Read a chunk into a landing, layer by layer, block by block. Adjacent whole blocks are read together."""
        self._ours.device.attach()  # UCX uses the calling thread's device
        numbers, counts = np.frombuffer(chunk.blocks, BLOCK_NUMBER).astype(np.int64), 1
        planes = self._theirs.planes[chunk.sources.start : chunk.sources.stop]
        if all(stride == chunk.size for _, stride in planes):
            numbers, counts = neighbours(numbers)
        sizes = np.tile(np.broadcast_to(np.asarray(counts) * chunk.size, numbers.shape), len(planes)).astype(np.uint64)
        there = np.concatenate([begin + numbers * stride + chunk.offset for begin, stride in planes]).astype(np.uint64)
        here = np.uint64(landing.address) + np.cumsum(sizes) - sizes
        self._blocks.read(
            pieces(there, sizes, self._theirs.kind, self._theirs.device),
            pieces(here, sizes, landing.kind, landing.device),
        )

    def close(self) -> None:
        self._blocks.drop()
        self._words.close()
