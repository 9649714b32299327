"""``nixl``: the receiver lets NIXL (over UCX) read the sender's KV.

A rank has one agent that others read from, and one more for each sender that it reads from. The latter is what makes
a read that does not end harmless: NIXL cannot be relied on to cancel it, but nothing is written for an agent that is
gone. So a reader whose transfer fails or is late drops its agent before it says so, and makes a new one for the next
read.

The agent that is read from has to act where UCX has no hardware to do so, and while connections are made. NIXL's thread
for this spins if it is set up as NIXL's Python class does it. With a wake-up interval it sleeps on UCX's events, which
costs nothing while idle; that setting is in the bindings only, hence these are used and not the class. Agents that read
have no thread: they make progress while a transfer is under way.
"""

from __future__ import annotations

import importlib
import os
import secrets
import time
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tercet.protocol import TransferFailed
from tercet.transport.backends.reading import BackendUnavailable, Batch, Copies, Fence, SendingPeer, in_steps
from tercet.transport.backends.registered import READ_BYTES, Placed, WordSlots
from tercet.transport.region import WORD_BYTES, KVRegion, RegionShape

REMEDY = "run scripts/install-transport-extras, or pip install --no-deps nixl nixl-cu12"
# The answering thread wakes up at UCX's events, and so often without one.
WAKE_MICROSECONDS = 1_000_000
# A transfer is a few MiB. One that takes so long will not end: the sender is gone or stopped.
READ_SECONDS = 10.0
# How often a transfer is looked at without a pause, and the pause after that.
SPINS, PAUSE_SECONDS = 2000, 20e-6


class _NixlOffer(msgspec.Struct, frozen=True, array_like=True):
    address: int
    metadata: bytes


class NixlBackend:
    """Reads regions that their owners registered with NIXL."""

    name = "nixl"
    stages = False

    def __init__(self, region: KVRegion) -> None:
        self._nixl = load_bindings()
        self._placed = Placed(region)
        self._slots = WordSlots(region)
        try:
            self._agent: NixlAgent | None = NixlAgent(self._nixl, self._placed, answers=True)
            reader = NixlReader(self._nixl, self._placed, self._slots, region.shape, self._own_offer())
            try:
                self._slots.require_readable(reader.word, self.name)
            finally:
                reader.close()
        except TransferFailed as error:
            raise BackendUnavailable(f"{error.message}; UCX_LOG_LEVEL=info tells more") from error
        except Exception as error:
            raise BackendUnavailable(f"nixl: it does not start: {error}; UCX_LOG_LEVEL=info tells more") from error

    def offer(self) -> bytes:
        """See :meth:`~tercet.transport.backends.reading.Backend.offer`."""
        return msgspec.msgpack.encode(self._own_offer())

    def connect(self, offer: bytes, sender: SendingPeer) -> NixlReader:
        """See :meth:`~tercet.transport.backends.reading.Backend.connect`."""
        try:
            found = msgspec.msgpack.decode(offer, type=_NixlOffer)
            return NixlReader(self._nixl, self._placed, self._slots, sender.shape, found)
        except msgspec.MsgspecError as error:
            raise BackendUnavailable(f"nixl: the sender's offer cannot be understood: {error}") from error

    def close(self) -> None:
        """Drop the agent, and with it its thread and registrations."""
        self._agent = None

    def _own_offer(self) -> _NixlOffer:
        if self._agent is None:
            raise BackendUnavailable("nixl: this rank was closed")
        return _NixlOffer(self._placed.address, self._agent.metadata())


class NixlAgent:
    """One of NIXL's agents, with a region registered; gone with its last reference. ``bare`` is NIXL's own."""

    def __init__(self, nixl: Any, placed: Placed, *, answers: bool) -> None:
        settings = nixl.nixlAgentConfig()
        settings.useProgThread = answers
        settings.pthrDelay = WAKE_MICROSECONDS
        settings.syncMode = nixl.NIXL_THREAD_SYNC_NONE
        self._nixl = nixl
        self._placed = placed
        self.bare = nixl.nixlAgent(f"tercet-{os.getpid()}-{secrets.token_hex(8)}", settings)
        self._ucx = [self.bare.createBackend("UCX", {})]
        memory = nixl.nixlRegDList(nixl.DRAM_SEG)
        memory.addDesc((placed.address, placed.size, 0, ""))
        self.bare.registerMem(memory, self._ucx)

    def metadata(self) -> bytes:
        """What others need to read from here."""
        return self.bare.getLocalMD()

    def connect(self, metadata: bytes) -> str:
        """Begin a connection to another agent; returns its name."""
        name = self.bare.loadRemoteMD(metadata).decode()
        self.bare.makeConnection(name, self._ucx)
        return name

    def read(self, copies: NDArray[np.uint64], name: str, base: int) -> None:
        """Copy each (size, there, here) in from the region at ``base`` of agent ``name``.

        Raises :class:`TransferFailed` when it takes too long, and whatever NIXL raises. In both cases the agent must be
        dropped: the transfer may go on otherwise.
        """
        nixl, agent = self._nixl, self.bare
        here = nixl.nixlXferDList(nixl.DRAM_SEG, _descriptors(copies[:, 2] + np.uint64(self._placed.address), copies))
        there = nixl.nixlXferDList(nixl.DRAM_SEG, _descriptors(copies[:, 1] + np.uint64(base), copies))
        request = agent.createXferReq(nixl.NIXL_READ, here, there, name, "", self._ucx)
        self._wait(request, agent.postXferReq(request, ""))
        agent.releaseXferReq(request)

    def _wait(self, request: int, state: Any) -> None:
        deadline, looks = time.monotonic() + READ_SECONDS, 0
        while state == self._nixl.NIXL_IN_PROG:
            looks += 1
            if looks > SPINS:
                time.sleep(PAUSE_SECONDS)
            if time.monotonic() > deadline:
                raise TransferFailed(f"nixl: the sender's memory did not come within {READ_SECONDS:.0f} s")
            state = self.bare.getXferStatus(request)
        if state != self._nixl.NIXL_SUCCESS:
            raise TransferFailed(f"nixl: the transfer ended as {state}")


class NixlReader:
    """See :class:`~tercet.transport.backends.reading.Reader`."""

    def __init__(self, nixl: Any, placed: Placed, slots: WordSlots, shape: RegionShape, offer: _NixlOffer) -> None:
        self._shape = shape
        self._nixl = nixl
        self._placed = placed
        self._slots = slots
        self._offer = offer
        self._agent: NixlAgent | None = None
        self._name = ""
        self._slot = slots.take()

    def read(self, batch: Batch, fence: Fence) -> bool:
        """See :meth:`~tercet.transport.backends.reading.Reader.read`."""
        for some, nbytes in in_steps(batch.rows, READ_BYTES):
            fence(lambda some=some, nbytes=nbytes: self._copy(some) or nbytes)
        return self.word(self._shape.word(batch.send)) == batch.send

    def _copy(self, copies: Copies) -> None:
        try:
            self._connected().read(copies.astype(np.uint64), self._name, self._offer.address)
        except TransferFailed:
            self._agent = None
            raise
        except Exception as error:
            self._agent = None
            raise TransferFailed(f"nixl: the sender's memory cannot be read: {error}") from error

    def word(self, there: int) -> int:
        """An aligned word of the sender's region, read after everything that was copied before."""
        self._slots.clear(self._slot)
        self._copy(np.array([(WORD_BYTES, there, self._slots.place(self._slot))]))
        return self._slots.value(self._slot)

    def close(self) -> None:
        """Drop the agent."""
        self._agent = None
        self._slots.give_back(self._slot)

    def _connected(self) -> NixlAgent:
        if self._agent is None:
            agent = NixlAgent(self._nixl, self._placed, answers=False)
            self._name = agent.connect(self._offer.metadata)
            self._agent = agent
        return self._agent


def load_bindings() -> Any:
    """NIXL's bindings; raises :class:`BackendUnavailable` if they are missing."""
    try:
        return importlib.import_module("nixl")._bindings
    except (ImportError, OSError, AttributeError) as error:
        raise BackendUnavailable(f"nixl: it cannot be loaded ({error}): {REMEDY}") from error


def _descriptors(addresses: NDArray[np.uint64], copies: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Rows of address, length and device, as NIXL takes them."""
    found = np.zeros((len(copies), 3), dtype=np.uint64)
    found[:, 0] = addresses
    found[:, 1] = copies[:, 0]
    return found
