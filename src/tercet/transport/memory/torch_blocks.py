"""The thin shell around PyTorch: a rank's KV as tensors in the agent's process, and copies from and to them.

The one file of the transport that imports torch; only agents of ranks with staged memory do. On an accelerator, the
worker's memory is mapped here by a handle (CUDA IPC), and each direction has a stream and room for one chunk on the
device. Host tensors in the device's role go through the same calls; their copies are over when they have begun.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from tercet.protocol import TransferFailed
from tercet.protocol.wire import UNREADABLE
from tercet.transport.memory.block_order import BlockOrder
from tercet.transport.memory.handles import DeviceHandles, MemoryKind, RdmaHandles
from tercet.transport.memory.staged import DeviceBlocks, IsOver, Landing, Places, wait_until
from tercet.transport.region import KVRegion, Numbers, RegionShape

# The widest item first: gathering moves one item at a time.
ITEMS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
# A forward pass is not over after so long: its device has failed.
FORWARD_SECONDS = 600.0


def host_planes(region: KVRegion) -> list[torch.Tensor]:
    """The host's pages in the device's role."""
    shape = region.shape
    memory = torch.frombuffer(region.bytes, dtype=torch.uint8)
    return [_blocks_of(memory, plane, shape.block_bytes, shape) for plane in shape.planes]


def device_planes(handles: DeviceHandles, shape: RegionShape) -> list[torch.Tensor]:
    """The worker's KV, mapped; raises :class:`~tercet.protocol.TransferFailed` if it cannot be."""
    try:
        torch.cuda.set_device(handles.device)
        storage_class: Any = torch.UntypedStorage  # what PyTorch's own reductions call, and has no public name
        opened = [storage_class._new_shared_cuda(handles.device, *each) for each in handles.storages]
        tensors = [torch.empty(0, dtype=torch.uint8, device=f"cuda:{handles.device}").set_(each) for each in opened]
    except RuntimeError as error:
        raise TransferFailed(
            f"the worker's KV cannot be mapped into its agent (CUDA IPC): {error}; PYTORCH_CUDA_ALLOC_CONF must not "
            "say expandable_segments:True, and vLLM's --enable-sleep-mode must be off"
        ) from error
    return [_blocks_of(tensors[storage], begin, stride, shape) for storage, begin, stride in handles.planes]


def _blocks_of(memory: torch.Tensor, begin: int, stride: int, shape: RegionShape) -> torch.Tensor:
    return memory.as_strided((shape.num_blocks, shape.block_bytes), (stride, 1), begin)


OpenPlanes = Callable[[bytes, RegionShape], Sequence[torch.Tensor]]


def open_device_planes(offer: bytes, shape: RegionShape) -> Sequence[torch.Tensor]:
    """The planes that a rank on this machine offers; raises :class:`~tercet.protocol.TransferFailed`."""
    try:
        handles = msgspec.msgpack.decode(offer, type=DeviceHandles)
    except UNREADABLE as error:
        raise TransferFailed(f"ipc: the sender's offer cannot be understood: {error}") from error
    if len(handles.planes) != len(shape.planes):
        raise TransferFailed("ipc: the sender offers other planes than its region has")
    return device_planes(handles, shape)


@dataclass(frozen=True)
class PeerBlocks:
    """Another rank's planes, mapped here; nothing but a source of copies."""

    planes: Sequence[torch.Tensor]


class TorchBlocks(DeviceBlocks):
    """Copies between planes, each a tensor of ``(blocks, bytes)``, and host memory. Thread-safe.

    ``order`` is how our blocks' items lie. On the device it takes room for two chunks, :attr:`device_bytes`, and for
    another one where items are rearranged.
    """

    def __init__(
        self,
        planes: Sequence[torch.Tensor],
        chunk_bytes: int,
        order: BlockOrder | None = None,
        offer: bytes = b"",
        open_planes: OpenPlanes = open_device_planes,
        rdma: RdmaHandles | None = None,
    ) -> None:
        self._planes, self._order, self.rdma = planes, order, rdma
        self.offer, self._open_planes = offer, open_planes
        self._device = planes[0].device
        self._out, self._in = (_Direction(self._device, max(chunk_bytes, planes[0].shape[1])) for _ in range(2))

    @property
    def device_bytes(self) -> int:
        """Memory of the device beside KV and the process's context."""
        return self._out.room.nbytes + self._in.room.nbytes if self._device.type != "cpu" else 0

    def buffer(self, nbytes: int) -> memoryview:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._device.type != "cpu").numpy().data

    def opened(self, offer: bytes, shape: RegionShape) -> PeerBlocks:
        return PeerBlocks(self._open_planes(offer, shape))

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
        (their_layers, sources, begin), (layers, blocks, offset) = there, here
        with self._in.next() as room:
            gathered = room[: len(layers) * len(sources) * size].view(len(layers), len(sources), size)
            # The gather runs where the sender's blocks are; to another device it is copied as a whole.
            for layer, rows in zip(their_layers, gathered, strict=True):
                plane = theirs.planes[layer]
                items, found = _items(plane[:, begin : begin + size], rows)
                numbers = torch.tensor(sources, device=plane.device)
                if plane.device == self._device:
                    torch.index_select(items, 0, numbers, out=found)
                else:
                    found.copy_(items.index_select(0, numbers), non_blocking=True)
            self._scatter(gathered, layers, blocks, offset, order)
            return self._in.mark()

    def landing(self, nbytes: int) -> Landing:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        kind: MemoryKind = "DRAM" if self._device.type == "cpu" else "VRAM"
        return Landing(memory.data_ptr(), nbytes, kind, self._device.index or 0, memory)

    def begin_landed(self, landing: Landing, here: Places, size: int, order: BlockOrder | None) -> IsOver:
        layers, blocks, offset = here
        if not isinstance(landing.memory, torch.Tensor):
            raise TransferFailed("nixl: this is no landing of this rank's")
        with self._in.next():
            arrived = landing.memory[: len(layers) * len(blocks) * size].view(len(layers), len(blocks), size)
            self._scatter(arrived, layers, blocks, offset, order)
            return self._in.mark()

    def begin_out(self, layers: range, blocks: Numbers, offset: int, size: int, into: memoryview) -> IsOver:
        with self._out.next() as room:
            numbers = self._numbers(blocks)
            gathered = room[: len(into)].view(len(layers), len(blocks), size)
            for layer, rows in zip(layers, gathered, strict=True):
                items, found = _items(self._planes[layer][:, offset : offset + size], rows)
                torch.index_select(items, 0, numbers, out=found)
            torch.frombuffer(into, dtype=torch.uint8).copy_(room[: len(into)], non_blocking=True)
            return self._out.mark()

    def _numbers(self, found: Numbers) -> torch.Tensor:
        return torch.tensor(found.astype(np.int64), device=self._device)

    def begin_in(
        self, layers: range, blocks: Numbers, offset: int, size: int, source: memoryview, order: BlockOrder | None
    ) -> IsOver:
        with self._in.next() as room:
            room[: len(source)].copy_(torch.frombuffer(source, dtype=torch.uint8), non_blocking=True)
            arrived = room[: len(source)].view(len(layers), len(blocks), size)
            self._scatter(arrived, layers, blocks, offset, order)
            return self._in.mark()

    def _scatter(
        self, arrived: torch.Tensor, layers: range, blocks: Numbers, offset: int, order: BlockOrder | None
    ) -> None:
        """Put a chunk's blocks, which are on the device, where they belong."""
        wanted, size = (blocks >= 0).nonzero()[0], arrived.shape[2]
        numbers, rows_of = self._numbers(blocks[wanted]), self._numbers(wanted)
        if order is not None and self._order is not None:
            arrived = _in_order(arrived, order, self._order)
        for layer, rows in zip(layers, arrived, strict=True):
            items, found = _items(self._planes[layer][:, offset : offset + size], rows)
            items.index_copy_(0, numbers, found if len(wanted) == len(blocks) else found[rows_of])


class _Direction:
    """One direction's stream and room; a copy's room is the next one's once the stream has come to it."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        on_host = device.type == "cpu"
        self._stream = None if on_host else torch.cuda.Stream(device)
        self.room = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._lock = threading.Lock()

    @contextmanager
    def next(self) -> Generator[torch.Tensor]:
        """Begin copies behind those that have begun: the stream keeps their order, so the room may be used again."""
        with self._lock, self._on_stream():
            yield self.room

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def mark(self) -> Callable[[], bool]:
        """Whether all that has begun until now is over."""
        if self._stream is None:
            return lambda: True
        event = torch.cuda.Event()
        event.record(self._stream)
        return event.query


def _in_order(blocks: torch.Tensor, theirs: BlockOrder, ours: BlockOrder) -> torch.Tensor:
    """Blocks of ``(layers, blocks, bytes)`` with their items in our order."""
    if theirs.order == ours.order:
        return blocks
    items = blocks.view(*blocks.shape[:2], *theirs.sizes, theirs.item_bytes)
    return items.transpose(2, 3).reshape(blocks.shape)


def _items(plane: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as the widest items that they consist of."""
    sizes = (plane.shape[1], plane.stride(0), plane.data_ptr(), rows.data_ptr())
    item = next(each for each in ITEMS if all(size % each == 0 for size in sizes))
    return plane.view(ITEMS[item]), rows.view(ITEMS[item])


class ComputedEvents:
    """The events by which a worker says that KV is computed, opened here."""

    def __init__(self, handles: DeviceHandles) -> None:
        event_class: Any = torch.cuda.Event
        self._events = [event_class.from_ipc_handle(handles.device, each) for each in handles.events]

    def wait(self, number: int) -> None:
        """Until the work is done behind which the worker recorded an event last.

        An event that has been recorded again meanwhile stands for later work, and what is waited for comes before that.
        """
        wait_until(self._events[number].query, FORWARD_SECONDS)
