"""Handles that open an accelerator's memory in another process."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

# NIXL's names of host memory and of a device's memory.
MemoryKind = Literal["DRAM", "VRAM"]


class RdmaHandles(msgspec.Struct, frozen=True, array_like=True):
    """Handles by which other machines read a worker's KV over RDMA, after the worker has registered it.

    ``metadata`` is that of the worker's NIXL agent. ``planes`` has for each plane the address of its block 0 in the
    worker, and the distance between two blocks in bytes. ``kind`` and ``device`` name the memory that holds them.
    """

    metadata: bytes
    planes: tuple[tuple[int, int], ...]
    kind: MemoryKind
    device: int


class DeviceHandles(msgspec.Struct, frozen=True):
    """Handles that open a worker's KV in another process of its machine.

    ``storages`` are the allocations, as PyTorch shares them between processes; ``planes`` has for each plane its
    allocation, the offset of its block 0 in bytes, and the distance between two blocks, which is more than a block if
    the blocks of all layers are interleaved. ``events`` is a ring of events: the worker records one when KV of a layer
    is computed.
    """

    device: int
    storages: tuple[tuple[Any, ...], ...]
    planes: tuple[tuple[int, int, int], ...]
    events: tuple[bytes, ...]
