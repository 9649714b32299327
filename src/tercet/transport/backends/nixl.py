"""``nixl``: the receiver reads the sender's KV with NIXL (over UCX).

A rank has one agent that others read from, and one more for each sender that it reads from. The latter makes a read
that does not end harmless: NIXL cannot be relied on to cancel it, but it writes no bytes for an agent that was
destroyed. So a reader whose transfer fails or is late destroys its agent before it reports that, and makes a new one
for the next read.

The agent that others read from must make progress while connections are made, and always if UCX has no hardware for it.
NIXL's Python class sets up a thread for this that busy-waits. With a wake-up interval the thread sleeps on UCX's
events, which costs nothing while idle; only the bindings have that setting, so they are used instead of the class.
Agents that read have no thread: they make progress during a transfer.

KV on devices: a library registers memory in the process that owns it. So the worker, which owns the KV, has an agent
that others read from (:class:`RegisteredPlanes`), and the process that moves KV has separate memory on its device, the
landings: a chunk arrives in one of them, and is copied into its blocks from there while the lease is held, like a chunk
over ``ipc``. A late read writes to a landing, never to KV, and the landing is reused once the agent that read is
destroyed. Generation words are in host memory, and are read as ``nixl`` reads host memory.
"""

from __future__ import annotations

import importlib
import os
import queue
import secrets
import time
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tercet.protocol import TransferFailed
from tercet.transport.backends.reading import (
    Backend,
    BackendUnavailable,
    Batch,
    Copies,
    Reader,
    RegisteredReader,
    RegisteredRegion,
    SendingPeer,
    UnderLease,
    understood,
)
from tercet.transport.peer_messages import BLOCK_NUMBER, ReadDescriptors
from tercet.transport.region import TAIL_BYTES, KVRegion, RegionShape, neighbours
from tercet.transport.staged import Landing, MemoryKind, RdmaHandles, StagedMemory

REMEDY = (
    "run scripts/install-transport-extras, or pip install --no-deps nixl nixl-cu12; with a PyTorch for CUDA 13 "
    "nixl-cu13"
)
# Longest sleep of the answering thread; UCX's events wake it up earlier.
WAKE_MICROSECONDS = 1_000_000
# A transfer has a few MiB. One that takes this long, in seconds, will not end: the sender has died or is stopped.
READ_SECONDS = 10.0
# Number of polls of a transfer without a pause, and the pause between later polls, in seconds.
SPINS, PAUSE_SECONDS = 2000, 20e-6


class RegionOffer(msgspec.Struct, frozen=True, array_like=True):
    """The address of a region in its owner's memory, and the metadata of its agent."""

    address: int
    metadata: bytes


class Registered(NamedTuple):
    """Memory that an agent registers: NIXL's name of its ``kind``, and the number of its ``device``."""

    address: int
    size: int
    kind: MemoryKind = "DRAM"
    device: int = 0


class Pieces(NamedTuple):
    """Rows of address, bytes and device in memory of one kind, in the form that NIXL takes."""

    rows: NDArray[np.uint64]
    kind: MemoryKind = "DRAM"


@contextmanager
def starting() -> Generator[None]:
    """Convert any error that NIXL raises at its start into :class:`BackendUnavailable`."""
    try:
        yield
    except TransferFailed as error:
        raise BackendUnavailable(f"{error.message}; UCX_LOG_LEVEL=info logs more") from error
    except Exception as error:
        raise BackendUnavailable(f"nixl: does not start: {error}; UCX_LOG_LEVEL=info logs more") from error


class NixlBackend(Backend):
    """Backend that reads regions that their owners registered with NIXL."""

    name = "nixl"
    stages = False

    def __init__(self, region: KVRegion) -> None:
        self._nixl = load_bindings()
        self._ours = RegisteredRegion(region)
        self._whole = Registered(self._ours.address, self._ours.size)
        with starting():
            self._agent: NixlAgent | None = NixlAgent(self._nixl, [self._whole], answers=True)
            # A read of this process's memory: what UCX lacks is found here, and not at the first send.
            self._reader(region.shape, self._own_offer()).require_own_word(self.name)

    def offer(self) -> bytes:
        return msgspec.msgpack.encode(self._own_offer())

    def connect(self, offer: bytes, sender: SendingPeer) -> NixlReader:
        return self._reader(sender.shape, understood(self.name, offer, RegionOffer))

    def close(self) -> None:
        """Destroy the agent, with its thread and registrations."""
        self._agent = None

    def _reader(self, theirs: RegionShape, offer: RegionOffer) -> NixlReader:
        return NixlReader(self._nixl, self._ours, theirs, offer, [self._whole])

    def _own_offer(self) -> RegionOffer:
        if self._agent is None:
            raise BackendUnavailable("nixl: this rank was closed")
        return RegionOffer(self._ours.address, self._agent.metadata())


class NixlAgent:
    """One of NIXL's agents, with registered memory; its last reference destroys it. ``bare`` is NIXL's object."""

    def __init__(self, nixl: Any, memories: Sequence[Registered], *, answers: bool) -> None:
        settings = nixl.nixlAgentConfig()
        settings.useProgThread = answers
        settings.pthrDelay = WAKE_MICROSECONDS
        # One thread uses an agent at a time, so NIXL needs no locks.
        settings.syncMode = nixl.NIXL_THREAD_SYNC_NONE
        self._nixl = nixl
        self.bare = nixl.nixlAgent(f"tercet-{os.getpid()}-{secrets.token_hex(8)}", settings)
        self._ucx = [self.bare.createBackend("UCX", {})]
        for each in memories:
            memory = nixl.nixlRegDList(segment(nixl, each.kind))
            memory.addDesc((each.address, each.size, each.device, ""))
            self.bare.registerMem(memory, self._ucx)

    def metadata(self) -> bytes:
        """Return the data that others need to read from this agent."""
        return self.bare.getLocalMD()

    def connect(self, metadata: bytes) -> str:
        """Begin a connection to another agent; return its name."""
        name = self.bare.loadRemoteMD(metadata).decode()
        self.bare.makeConnection(name, self._ucx)
        return name

    def read(self, name: str, there: Pieces, here: Pieces) -> None:
        """Copy each piece of agent ``name`` to the piece with the same number here.

        Raises :class:`TransferFailed` at a timeout, and any error of NIXL. In both cases the agent must be destroyed:
        otherwise the transfer may continue.
        """
        nixl, agent = self._nixl, self.bare
        ours, theirs = (nixl.nixlXferDList(segment(nixl, each.kind), each.rows) for each in (here, there))
        request = agent.createXferReq(nixl.NIXL_READ, ours, theirs, name, "", self._ucx)
        self._wait(request, agent.postXferReq(request, ""))
        agent.releaseXferReq(request)

    def _wait(self, request: int, state: Any) -> None:
        deadline, looks = time.monotonic() + READ_SECONDS, 0
        while state == self._nixl.NIXL_IN_PROG:
            looks += 1
            if looks > SPINS:
                time.sleep(PAUSE_SECONDS)
            if time.monotonic() > deadline:
                raise TransferFailed(f"nixl: the sender's memory was not read within {READ_SECONDS:.0f} s")
            state = self.bare.getXferStatus(request)
        if state != self._nixl.NIXL_SUCCESS:
            raise TransferFailed(f"nixl: the transfer ended as {state}")


class NixlReader(RegisteredReader):
    """Reader of a sender's region into our ``memories``."""

    def __init__(
        self, nixl: Any, ours: RegisteredRegion, theirs: RegionShape, offer: RegionOffer, memories: Sequence[Registered]
    ) -> None:
        super().__init__(ours, theirs)
        self._address, self._reads = offer.address, ReadingAgent(nixl, memories, offer.metadata)

    def copy(self, copies: Copies) -> None:
        # NIXL takes arrays of this type as they are; lists would be converted piece by piece.
        rows = copies.astype(np.uint64)
        there = pieces(rows[:, 1] + np.uint64(self._address), rows[:, 0])
        self._reads.read(there, pieces(rows[:, 2] + np.uint64(self._ours.address), rows[:, 0]))

    def close(self) -> None:
        self._reads.drop()
        super().close()


class ReadingAgent:
    """An agent that reads from the agent with ``metadata``: made at the first read, and again after a failure.

    After a read has returned or raised, no byte is written to ``memories``.
    """

    def __init__(self, nixl: Any, memories: Sequence[Registered], metadata: bytes) -> None:
        self._nixl, self._memories, self._metadata = nixl, memories, metadata
        self._agent: NixlAgent | None = None
        self._name = ""

    def read(self, there: Pieces, here: Pieces) -> None:
        """Copy each piece there to the piece here; raise :class:`~tercet.protocol.TransferFailed`."""
        try:
            return self._connected().read(self._name, there, here)
        except TransferFailed as error:
            reason = error.message
        except Exception as error:
            reason = f"nixl: cannot read the sender's memory: {error}"
        # Not raised inside the handler: its traceback would keep the agent alive as long as the error.
        self.drop()
        raise TransferFailed(reason)

    def drop(self) -> None:
        self._agent = None

    def _connected(self) -> NixlAgent:
        if self._agent is None:
            # Kept only after the connection has begun: a half-made agent is dropped with the error.
            agent = NixlAgent(self._nixl, self._memories, answers=False)
            self._name = agent.connect(self._metadata)
            self._agent = agent
        return self._agent


def load_bindings() -> Any:
    """Return NIXL's bindings; raise :class:`BackendUnavailable` if they are missing."""
    try:
        return importlib.import_module("nixl")._bindings
    except (ImportError, OSError, AttributeError) as error:
        raise BackendUnavailable(f"nixl: cannot be loaded: {error}; {REMEDY}") from error


def segment(nixl: Any, kind: MemoryKind) -> Any:
    """Return NIXL's name for a kind of memory."""
    return nixl.VRAM_SEG if kind == "VRAM" else nixl.DRAM_SEG


def pieces(
    addresses: NDArray[np.uint64], sizes: NDArray[np.uint64], kind: MemoryKind = "DRAM", device: int = 0
) -> Pieces:  # fmt: skip
    """Return the pieces with these ``addresses`` and ``sizes``."""
    return Pieces(np.column_stack([addresses, sizes, np.full(len(sizes), device, dtype=np.uint64)]), kind)


# ---- Devices ---------------------------------------------------------------------------------------------------------


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
        self, allocations: Sequence[tuple[int, int]], planes: Sequence[tuple[int, int]], kind: MemoryKind = "VRAM",
        device: int = 0,
    ) -> None:  # fmt: skip
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
        self, words: NixlReader, blocks: ReadingAgent, theirs: RdmaHandles, shape: RegionShape, ours: StagedMemory,
        landings: Landings,
    ) -> None:  # fmt: skip
        self._words, self._blocks, self._theirs, self._shape = words, blocks, theirs, shape
        self._ours, self._landings = ours, landings

    def read(self, batch: Batch, under_lease: UnderLease) -> bool:
        for chunk, blocks in zip(batch.chunks, batch.blocks, strict=True):
            here = range(chunk.layer, chunk.layer + chunk.layers), blocks, chunk.part * chunk.size
            with self._landings.taken() as landing:
                self._fetch(chunk, landing)
                under_lease(
                    lambda landing=landing, here=here, size=chunk.size: self._ours.put_landed(
                        landing, here, size, batch.order
                    )
                )
        return self._words.read(Batch(batch.send, batch.lease, memoryview(b"")), under_lease)

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
