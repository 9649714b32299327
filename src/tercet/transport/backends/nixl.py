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
from tercet.transport.backends.reading import Backend, BackendUnavailable, Copies, SendingPeer
from tercet.transport.backends.registered import RegisteredReader, RegisteredRegion, understood
from tercet.transport.region import KVRegion, RegionShape

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


class NixlBackend(Backend):
    """Reads regions that their owners registered with NIXL."""

    name = "nixl"
    stages = False

    def __init__(self, region: KVRegion) -> None:
        self._nixl = load_bindings()
        self._ours = RegisteredRegion(region)
        try:
            self._agent: NixlAgent | None = NixlAgent(self._nixl, self._ours, answers=True)
            NixlReader(self._nixl, self._ours, region.shape, self._own_offer()).require_own_word(self.name)
        except TransferFailed as error:
            raise BackendUnavailable(f"{error.message}; UCX_LOG_LEVEL=info tells more") from error
        except Exception as error:
            raise BackendUnavailable(f"nixl: it does not start: {error}; UCX_LOG_LEVEL=info tells more") from error

    def offer(self) -> bytes:
        return msgspec.msgpack.encode(self._own_offer())

    def connect(self, offer: bytes, sender: SendingPeer) -> NixlReader:
        return NixlReader(self._nixl, self._ours, sender.shape, understood(self.name, offer, _NixlOffer))

    def close(self) -> None:
        """Drop the agent, and with it its thread and registrations."""
        self._agent = None

    def _own_offer(self) -> _NixlOffer:
        if self._agent is None:
            raise BackendUnavailable("nixl: this rank was closed")
        return _NixlOffer(self._ours.address, self._agent.metadata())


class NixlAgent:
    """One of NIXL's agents, with a region registered; gone with its last reference. ``bare`` is NIXL's own."""

    def __init__(self, nixl: Any, region: RegisteredRegion, *, answers: bool) -> None:
        settings = nixl.nixlAgentConfig()
        settings.useProgThread = answers
        settings.pthrDelay = WAKE_MICROSECONDS
        settings.syncMode = nixl.NIXL_THREAD_SYNC_NONE
        self._nixl = nixl
        self._region = region
        self.bare = nixl.nixlAgent(f"tercet-{os.getpid()}-{secrets.token_hex(8)}", settings)
        self._ucx = [self.bare.createBackend("UCX", {})]
        memory = nixl.nixlRegDList(nixl.DRAM_SEG)
        memory.addDesc((region.address, region.size, 0, ""))
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
        here = nixl.nixlXferDList(nixl.DRAM_SEG, _descriptors(copies[:, 2] + np.uint64(self._region.address), copies))
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


class NixlReader(RegisteredReader):
    """Has an agent of its own, from the first read on and again after one that failed."""

    def __init__(self, nixl: Any, ours: RegisteredRegion, theirs: RegionShape, offer: _NixlOffer) -> None:
        super().__init__(ours, theirs)
        self._nixl, self._offer = nixl, offer
        self._agent: NixlAgent | None = None
        self._name = ""

    def copy(self, copies: Copies) -> None:
        try:
            self._connected().read(copies.astype(np.uint64), self._name, self._offer.address)
        except TransferFailed:
            self._agent = None
            raise
        except Exception as error:
            self._agent = None
            raise TransferFailed(f"nixl: the sender's memory cannot be read: {error}") from error

    def close(self) -> None:
        self._agent = None
        super().close()

    def _connected(self) -> NixlAgent:
        if self._agent is None:
            agent = NixlAgent(self._nixl, self._ours, answers=False)
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
