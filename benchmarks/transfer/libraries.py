"""NIXL and Mooncake, called directly and with care: registered memory, prepared lists, one large request."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from tercet.protocol import TransferFailed
from tercet.transport import KVRegion
from tercet.transport.backends.mooncake import begin_engine
from tercet.transport.backends.nixl import NixlAgent, Registered, load_bindings
from tercet.transport.backends.reading import RegisteredRegion
from tercet.transport.region import RegionShape

LOCALHOST = "127.0.0.1"
# With more parts, Mooncake's queue for a peer is full.
MOONCAKE_PARTS = 2048
Blocks = NDArray[np.int32]


class Offered(msgspec.Struct, frozen=True, array_like=True):
    """The data of the offering side that the reading side needs."""

    address: int
    shape: RegionShape
    handle: bytes


class Library(Protocol):
    """A library with a registered region; each side has one."""

    def offer(self) -> Offered:
        """Return the offer for the reading side."""
        ...

    def connect(self, offered: Offered) -> None:
        """Prepare reads of whole blocks of the offered region."""
        ...

    def read(self, sources: Blocks, targets: Blocks) -> None:
        """Read blocks of each layer. Return when they have arrived."""
        ...


class DirectNixl:
    """NIXL with a prepared list of all blocks on both sides; a read names rows of it."""

    def __init__(self, region: KVRegion) -> None:
        self._nixl = load_bindings()
        self._region, self._ours = region, RegisteredRegion(region)
        self._registered = Registered(self._ours.address, self._ours.size)
        self._agent = NixlAgent(self._nixl, [self._registered], answers=True)
        self._reading: tuple[Any, str, int, int] | None = None

    def offer(self) -> Offered:
        """Do as :class:`Library` says."""
        return Offered(self._ours.address, self._region.shape, self._agent.metadata())

    def connect(self, offered: Offered) -> None:
        """Do as :class:`Library` says."""
        self._agent = NixlAgent(self._nixl, [self._registered], answers=False)  # the reading side needs no thread
        name = self._agent.connect(offered.handle)
        agent, memory = self._agent.bare, self._nixl.DRAM_SEG
        here = agent.prepXferDlist(self._nixl.NIXL_INIT_AGENT, memory, _strides(self._ours.address, self._region.shape))
        there = agent.prepXferDlist(name, memory, _strides(offered.address, offered.shape))
        self._reading = agent, name, here, there

    def read(self, sources: Blocks, targets: Blocks) -> None:
        """Do as :class:`Library` says."""
        if self._reading is None:
            raise RuntimeError("read was called before connect")
        agent, _, here, there = self._reading
        nixl, shape = self._nixl, self._region.shape
        layers = np.arange(len(shape.planes), dtype=np.int32)[:, None] * shape.num_blocks
        ours, theirs = ((layers + blocks).ravel() for blocks in (targets, sources))
        request = agent.makeXferReq(nixl.NIXL_READ, here, ours, there, theirs, "", [], False)
        state = agent.postXferReq(request, "")
        while state == nixl.NIXL_IN_PROG:
            state = agent.getXferStatus(request)
        agent.releaseXferReq(request)
        if state != nixl.NIXL_SUCCESS:
            raise TransferFailed(f"NIXL called directly: {state}")


class DirectMooncake:
    """Mooncake, with as many blocks per request as its queue accepts."""

    def __init__(self, region: KVRegion) -> None:
        self._region, self._ours = region, RegisteredRegion(region)
        self._engine = begin_engine(self._ours, LOCALHOST)
        self._theirs: Offered | None = None

    def offer(self) -> Offered:
        """Do as :class:`Library` says."""
        return Offered(self._ours.address, self._region.shape, f"{LOCALHOST}:{self._engine.get_rpc_port()}".encode())

    def connect(self, offered: Offered) -> None:
        """Do as :class:`Library` says."""
        self._theirs = offered

    def read(self, sources: Blocks, targets: Blocks) -> None:
        """Do as :class:`Library` says."""
        if self._theirs is None:
            raise RuntimeError("read was called before connect")
        size, engine = self._region.shape.block_bytes, self._theirs.handle.decode()
        there = _addresses(self._theirs.address, self._theirs.shape, sources)
        here = _addresses(self._ours.address, self._region.shape, targets)
        parts = [slice(start, start + MOONCAKE_PARTS) for start in range(0, len(here), MOONCAKE_PARTS)]
        batches = [(here[part], there[part], [size] * len(here[part])) for part in parts]
        states = [self._engine.batch_transfer_sync_read(engine, *batch) for batch in batches]
        if any(states):
            raise TransferFailed(f"Mooncake called directly: {states}")


LIBRARIES = {"nixl": DirectNixl, "mooncake": DirectMooncake}


def _strides(base: int, shape: RegionShape) -> NDArray[np.uint64]:
    """Return all blocks as rows of address, length, device, stride and count, one row per layer."""
    rows = [(base + plane, shape.block_bytes, 0, shape.block_bytes, shape.num_blocks) for plane in shape.planes]
    return np.array(rows, dtype=np.uint64)


def _addresses(base: int, shape: RegionShape, blocks: Blocks) -> list[int]:
    planes = base + np.array(shape.planes, dtype=np.int64)[:, None]
    return (planes + blocks.astype(np.int64) * shape.block_bytes).ravel().tolist()
