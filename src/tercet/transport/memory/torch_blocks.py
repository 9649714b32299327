"""The thin layer around PyTorch: a rank's KV as tensors in the agent's process, and copies from and to them.

Only this module and :mod:`.torch_devices` import torch in the transport; only agents of ranks with staged memory load
them. On an accelerator, the worker's memory is mapped here by a handle (CUDA IPC), and each direction has a stream and
space for one chunk on the device. Host tensors in the device's role go through the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from tercet.protocol import TransferFailed
from tercet.protocol.wire import UNREADABLE
from tercet.transport.memory.block_order import BlockOrder
from tercet.transport.memory.handles import DeviceHandles, MemoryKind, RdmaHandles
from tercet.transport.memory.staged import DeviceBlocks, IsOver, Landing, Places, wait_until
from tercet.transport.memory.torch_devices import CopyDevice, CudaDevice, Direction, answers, device_of
from tercet.transport.memory.torch_planes import Planes, Side
from tercet.transport.region import KVRegion, Numbers, RegionShape

# In seconds, longer than any forward pass: after this time the device has failed.
FORWARD_SECONDS = 600.0


def host_planes(region: KVRegion) -> list[torch.Tensor]:
    """Return the host's pages as tensors, in the device's role."""
    shape = region.shape
    memory = torch.frombuffer(region.bytes, dtype=torch.uint8)
    return [_blocks_of(memory, plane, shape.block_bytes, shape) for plane in shape.planes]


def device_planes(handles: DeviceHandles, shape: RegionShape, index: int | None = None) -> list[torch.Tensor]:
    """Return a worker's KV, mapped for our device ``index``; by default for the device with the worker's number.

    CUDA can map memory of another device if ours has access to it, even of a device that this process does not see. So
    the device numbers in another engine have no meaning here. Raises :class:`~tercet.protocol.TransferFailed` if the KV
    cannot be mapped.
    """
    device = CudaDevice(handles.device if index is None else index)
    try:
        device.attach()
        storage_class: Any = torch.UntypedStorage  # used by PyTorch's own reductions; there is no public name
        opened = [storage_class._new_shared_cuda(device.where.index, *each) for each in handles.storages]
        tensors = [torch.empty(0, dtype=torch.uint8, device=each.device).set_(each) for each in opened]
        return [_blocks_of(tensors[storage], begin, stride, shape) for storage, begin, stride in handles.planes]
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise TransferFailed(
            f"a worker's KV cannot be mapped (CUDA IPC): {error}; it needs one container or the same network and IPC "
            "namespaces, devices that reach each other, and no exclusive compute mode (nvidia-smi -q -d COMPUTE)"
        ) from error


def _blocks_of(memory: torch.Tensor, begin: int, stride: int, shape: RegionShape) -> torch.Tensor:
    return memory.as_strided((shape.num_blocks, shape.block_bytes), (stride, 1), begin)


OpenPlanes = Callable[[bytes, RegionShape, CopyDevice], Sequence[torch.Tensor]]


def open_device_planes(offer: bytes, shape: RegionShape, device: CopyDevice) -> Sequence[torch.Tensor]:
    """Return the planes that a rank on this machine offers, mapped for our device.

    Raises :class:`~tercet.protocol.TransferFailed`.
    """
    try:
        handles = msgspec.msgpack.decode(offer, type=DeviceHandles)
    except UNREADABLE as error:
        raise TransferFailed(f"ipc: the sender's offer cannot be decoded: {error}") from error
    if len(handles.planes) != len(shape.planes):
        raise TransferFailed("ipc: the sender offers other planes than its region has")
    return device_planes(handles, shape, device.where.index)


class PeerBlocks:
    """Another rank's planes, mapped here; only a source of copies."""

    def __init__(self, planes: Sequence[torch.Tensor]) -> None:
        self.planes = Planes(planes)


class TorchBlocks(DeviceBlocks):
    """Copies between planes, each a tensor of ``(blocks, bytes)``, and host memory. Thread-safe.

    ``order`` is that of our blocks' items. On the device it needs memory for two chunks, :attr:`device_bytes`, and for
    another one if items are reordered.
    """

    def __init__(
        self,
        planes: Sequence[torch.Tensor],
        chunk_bytes: int,
        order: BlockOrder | None = None,
        offer: bytes = b"",
        open_planes: OpenPlanes = open_device_planes,
        rdma: RdmaHandles | None = None,
        device: CopyDevice | None = None,
    ) -> None:
        self._planes, self._order, self.rdma = Planes(planes), order, rdma
        self.offer, self._open_planes = offer, open_planes
        self._device = device or device_of(planes[0].device)
        self._out, self._in = (Direction(self._device, max(chunk_bytes, planes[0].shape[1])) for _ in range(2))

    @property
    def device_bytes(self) -> int:
        """Size in bytes of the device memory in use, in addition to KV and the process's context."""
        return self._out.room.nbytes + self._in.room.nbytes if self._device.where.type != "cpu" else 0

    def attach(self) -> None:
        self._device.attach()

    def buffer(self, nbytes: int) -> memoryview:
        return self._device.host_room(nbytes).numpy().data

    def opened(self, offer: bytes, shape: RegionShape) -> PeerBlocks:
        return PeerBlocks(self._open_planes(offer, shape, self._device))

    def begin_across(
        self,
        theirs: object,
        there: Places,
        here: Places,
        size: int,
        order: BlockOrder | None,
    ) -> IsOver:
        if not isinstance(theirs, PeerBlocks):
            raise TransferFailed("ipc: these blocks were not opened here")
        source = Side(theirs.planes, *there)
        with self._in.next() as room:
            if self._is_other(order):
                gathered = Side.of_chunk(room, len(source.layers), len(source.blocks), size)
                self._device.copy(source, gathered, size)
                self._scatter(room, here, size, order)
            else:
                self._device.copy(source, Side(self._planes, *here), size)
            return self._in.mark()

    def landing(self, nbytes: int) -> Landing:
        where = self._device.where
        self._device.attach()
        memory = torch.empty(nbytes, dtype=torch.uint8, device=where)
        kind: MemoryKind = "DRAM" if where.type == "cpu" else "VRAM"
        return Landing(memory.data_ptr(), nbytes, kind, where.index or 0, memory)

    def begin_landed(self, landing: Landing, here: Places, size: int, order: BlockOrder | None) -> IsOver:
        if not isinstance(landing.memory, torch.Tensor):
            raise TransferFailed("nixl: this landing does not belong to this rank")
        with self._in.next():
            self._scatter(landing.memory, here, size, order)
            return self._in.mark()

    def begin_out(self, layers: range, blocks: Numbers, offset: int, size: int, into: memoryview) -> IsOver:
        with self._out.next() as room:
            gathered = Side.of_chunk(room, len(layers), len(blocks), size)
            self._device.copy(Side(self._planes, layers, blocks, offset), gathered, size)
            torch.frombuffer(into, dtype=torch.uint8).copy_(room[: len(into)], non_blocking=True)
            return self._out.mark()

    def begin_in(
        self, layers: range, blocks: Numbers, offset: int, size: int, source: memoryview, order: BlockOrder | None
    ) -> IsOver:
        with self._in.next() as room:
            room[: len(source)].copy_(torch.frombuffer(source, dtype=torch.uint8), non_blocking=True)
            self._scatter(room, (layers, blocks, offset), size, order)
            return self._in.mark()

    def _is_other(self, order: BlockOrder | None) -> bool:
        """True if items that arrive in ``order`` must be converted to our order."""
        return order is not None and self._order is not None and order.order != self._order.order

    def _scatter(self, memory: torch.Tensor, here: Places, size: int, order: BlockOrder | None) -> None:
        """Copy a chunk's blocks from the beginning of ``memory``, on the device, to their places."""
        layers, blocks, offset = here
        if order is not None and self._is_other(order):
            arrived = memory[: len(layers) * len(blocks) * size].view(
                len(layers), len(blocks), *order.sizes, order.item_bytes
            )
            memory = arrived.transpose(2, 3).reshape(-1)
        chunk = Side.of_chunk(memory, len(layers), len(blocks), size)
        self._device.copy(chunk, Side(self._planes, layers, blocks, offset), size)


class ComputedEvents:
    """The events by which a worker signals that KV is computed, opened in this process."""

    def __init__(self, handles: DeviceHandles) -> None:
        event_class: Any = torch.cuda.Event
        device = CudaDevice(handles.device)
        device.attach()
        found = [event_class.from_ipc_handle(handles.device, each) for each in handles.events]
        self._over = [answers(device, each.query) for each in found]

    def wait(self, number: int) -> None:
        """Wait until the work before the worker's last record of event ``number`` is done.

        An event that was recorded again meanwhile stands for later work, which follows the awaited work.
        """
        wait_until(self._over[number], FORWARD_SECONDS)
