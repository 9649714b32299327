"""What opens an accelerator's memory in another process."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

# As NIXL calls them: host memory, and a device's.
MemoryKind = Literal["DRAM", "VRAM"]


class RdmaHandles(msgspec.Struct, frozen=True, array_like=True):
    """By what others read a worker's KV over RDMA, after the worker has registered it.

    ``metadata`` is what the worker's NIXL agent says of itself. For each of the ``planes``: the address of its block 0
    in the worker, and how far it is from one block to the next. ``kind`` and ``device``: where they lie.
    """

    metadata: bytes
    planes: tuple[tuple[int, int], ...]
    kind: MemoryKind
    device: int


class DeviceHandles(msgspec.Struct, frozen=True):
    """What opens a worker's KV in another process of its machine.

    ``storages`` are the allocations, as PyTorch shares them between processes; ``planes`` says of each plane in which
    allocation, how many bytes into it its block 0 begins, and from there how far it is from one block to the next,
    which is more than a block where the blocks of all layers lie side by side. ``events`` are those that the worker
    records when KV of a layer is computed, in a ring.
    """

    device: int
    storages: tuple[tuple[Any, ...], ...]
    planes: tuple[tuple[int, int, int], ...]
    events: tuple[bytes, ...]
