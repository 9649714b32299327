"""``nixl``: the receiver reads the sender's KV with NIXL (over UCX).

A rank has one agent that others read from, and one more for each sender that it reads from. The latter makes a read
that does not end harmless: NIXL cannot be relied on to cancel it, but it writes no bytes for an agent that was
destroyed. So a reader whose transfer fails or is late destroys its agent before it reports that, and makes a new one
for the next read.

The agent that others read from must make progress while connections are made, and always if UCX has no hardware for it.
NIXL's Python class sets up a thread for this that busy-waits. With a wake-up interval the thread sleeps on UCX's
events, which costs nothing while idle; only the bindings have that setting, so they are used instead of the class.
Agents that read have no thread: they make progress during a transfer.
"""

from __future__ import annotations

import importlib
import os
import secrets
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tercet.protocol import TransferFailed
from tercet.transport.backends.reading import Backend, BackendUnavailable, Copies, SendingPeer
from tercet.transport.backends.registered import RegisteredReader, RegisteredRegion, understood
from tercet.transport.memory.handles import MemoryKind
from tercet.transport.region import KVRegion, RegionShape

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
        """Destroy the agent, which ends its reads."""
        self._agent = None

    def _connected(self) -> NixlAgent:
        if self._agent is None:
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
