"""The thin layer around PyTorch: a rank's KV as tensors in the agent's process, and copies from and to them.

Only this module, and :mod:`.cuda_copies` for it, import torch in the transport; only agents of ranks with staged memory
load them. On an accelerator, the worker's memory is mapped here by a handle (CUDA IPC), and each direction has a stream
and space for one chunk on the device. Host tensors in the device's role go through the same calls.

Work on a stream runs later, in order, and concurrently with other streams. So the caller keeps the source unchanged
until :meth:`Stream.mark` reports the end. Tests have a third kind of device, which runs work as late as CUDA may.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from tercet.protocol import TransferFailed
from tercet.protocol.wire import UNREADABLE
from tercet.transport.region import BlockOrder, KVRegion, Numbers, RegionShape
from tercet.transport.staged import (
    DeviceBlocks,
    DeviceHandles,
    DeviceLost,
    IsOver,
    Landing,
    MemoryKind,
    Places,
    RdmaHandles,
    wait_until,
)


class Stream(Protocol):
    """A queue of a device's work."""

    def entered(self) -> AbstractContextManager[object]:
        """Use this stream for the thread's work on the device while entered."""
        ...

    def mark(self) -> IsOver:
        """Return a check for the end of all work so far; the check raises :class:`~.staged.DeviceLost` if it fails."""
        ...


class CopyDevice(Protocol):
    """One device, as this process sees it. ``where`` is PyTorch's name for it."""

    where: torch.device

    def attach(self) -> None:
        """Make this device the default for this thread.

        CUDA starts each thread with device 0. A thread that touches it gets a context there: hundreds of MiB of a
        device that another process may own.
        """
        ...

    def stream(self) -> Stream:
        """Return a new stream, which waits for no other stream."""
        ...

    def host_room(self, nbytes: int) -> torch.Tensor:
        """Return host memory that the device copies from and to directly, and asynchronously."""
        ...

    def numbers(self, found: Numbers) -> torch.Tensor:
        """Return numbers on the device for the entered stream, copied without waiting for the stream."""
        ...

    def copy(self, source: Side, target: Side, size: int) -> None:
        """Begin to copy ``size`` bytes of each block on the entered stream, by PyTorch's kernels."""
        # A receiver that has a block already leaves it out by -1: both sides then drop the same places.
        wanted = (target.blocks >= 0).nonzero()[0]
        there, here = self.numbers(source.blocks[wanted]), self.numbers(target.blocks[wanted])
        for their_layer, layer in zip(source.layers, target.layers, strict=True):
            found, place = source.rows(their_layer, size), target.rows(layer, size)
            numbers = (number for each in (found, place) for number in (size, each.stride(0), each.data_ptr()))
            item = ITEMS[widest_item(*numbers)]
            # Gather and scatter by index: one launch per layer, however far apart the blocks lie.
            place.view(item).index_copy_(0, here, found.view(item).index_select(0, there))


class HostStream(Stream):
    """A stream whose work ends at once."""

    def entered(self) -> AbstractContextManager[object]:
        return nullcontext()

    def mark(self) -> IsOver:
        return lambda: True


class HostDevice(CopyDevice):
    """Host memory in a device's role."""

    where = torch.device("cpu")

    def attach(self) -> None:
        """Do nothing: threads need no preparation."""

    def stream(self) -> Stream:
        return HostStream()

    def host_room(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def numbers(self, found: Numbers) -> torch.Tensor:
        return torch.as_tensor(found.astype(np.int64))


class CudaDevice(CopyDevice):
    """A GPU, by its number among those that this process sees."""

    def __init__(self, index: int) -> None:
        self.where = torch.device("cuda", index)

    def attach(self) -> None:
        torch.cuda.set_device(self.where)

    def stream(self) -> Stream:
        self.attach()
        return CudaStream(self)

    def host_room(self, nbytes: int) -> torch.Tensor:
        self.attach()
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def numbers(self, found: Numbers) -> torch.Tensor:
        # From pinned memory, which PyTorch does not reuse before the copy has ended. A copy from other memory would
        # wait for all earlier work of the stream.
        return torch.as_tensor(found.astype(np.int64)).pin_memory().to(self.where, non_blocking=True)

    def copy(self, source: Side, target: Side, size: int) -> None:
        """Begin the copy by one kernel for all layers (:mod:`.cuda_copies`)."""
        try:
            from tercet.transport.cuda_copies import begin_copy
        except ImportError as error:
            raise TransferFailed(
                f"copies of KV on a GPU need Triton, which cannot be imported: {error}; pip install triton in the "
                "version that this PyTorch requires"
            ) from error
        begin_copy(source, target, size, self.numbers)


class CudaStream(Stream):
    """One of PyTorch's streams, which does not wait for the default stream."""

    def __init__(self, device: CudaDevice) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device.where)

    @contextmanager
    def entered(self) -> Generator[None]:
        self._device.attach()  # otherwise leaving the stream would switch to device 0, and create a context there
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> IsOver:
        event = torch.cuda.Event()
        try:
            event.record(self._stream)
        except RuntimeError as error:
            raise DeviceLost(f"the device no longer works for this process: {error}") from error
        return answers(self._device, event.query)


def answers(device: CopyDevice, query: Callable[[], bool]) -> IsOver:
    """Return a check that queries an event from any thread; an error of the device is raised, not returned."""

    def is_over() -> bool:
        device.attach()
        try:
            return query()
        except RuntimeError as error:
            raise DeviceLost(f"the device no longer works for this process: {error}") from error

    return is_over


class Direction:
    """One direction's stream, and its space for ``nbytes``, which copies reuse one after the other, in stream order."""

    def __init__(self, device: CopyDevice, nbytes: int) -> None:
        self._stream = device.stream()
        self.room = torch.empty(nbytes, dtype=torch.uint8, device=device.where)
        self._lock = threading.Lock()

    @contextmanager
    def next(self) -> Generator[torch.Tensor]:
        """Begin copies after those that have begun: the stream keeps their order, so the space may be reused.

        If one cannot begin (for example without memory on the device), earlier ones end before
        :class:`~tercet.protocol.TransferFailed` is raised: no byte is written after that.
        """
        with self._lock, self._stream.entered():
            try:
                yield self.room
            except RuntimeError as error:
                # After this error the caller gives its blocks to others: copies that have begun must write no more.
                wait_until(self._stream.mark())
                raise TransferFailed(f"the device did not copy KV: {error}") from error

    def mark(self) -> IsOver:
        """Return a check for the end of all copies so far."""
        return self._stream.mark()


# The widest item first: a copy moves one item at a time.
ITEMS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Planes:
    """Blocks of several layers; ``tensors[layer]`` has the shape ``(blocks, bytes)``.

    ``addresses`` has the address of each layer's first block, ``strides`` the bytes from one block to the next.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors: Sequence[torch.Tensor] | torch.Tensor = tensors
        self.addresses = np.array([each.data_ptr() for each in tensors], dtype=np.int64)
        self.strides = np.array([each.stride(0) for each in tensors], dtype=np.int64)

    @classmethod
    def of_chunk(cls, memory: torch.Tensor, layers: int, blocks: int, size: int) -> Planes:
        """Return the beginning of ``memory`` as a chunk: ``size`` bytes of each block, one layer after the other."""
        chunk = cls.__new__(cls)
        chunk.tensors = memory[: layers * blocks * size].view(layers, blocks, size)
        chunk.addresses = memory.data_ptr() + np.arange(layers, dtype=np.int64) * (blocks * size)
        chunk.strides = np.full(layers, size, dtype=np.int64)
        return chunk


@dataclass(frozen=True)
class Side:
    """One side of a copy: the bytes from ``offset`` on of some blocks in each of some layers.

    A negative number on the target's side leaves out its block, and the block of the source at the same place.
    """

    planes: Planes
    layers: range
    blocks: Numbers
    offset: int = 0

    @classmethod
    def of_chunk(cls, memory: torch.Tensor, layers: int, blocks: int, size: int) -> Side:
        """Return a side with all of a chunk, which is at the beginning of ``memory``."""
        return cls(Planes.of_chunk(memory, layers, blocks, size), range(layers), np.arange(blocks))

    def rows(self, layer: int, size: int) -> torch.Tensor:
        """Return ``size`` bytes of each block of a layer's plane."""
        return self.planes.tensors[layer][:, self.offset : self.offset + size]

    def first_bytes(self) -> Any:
        """Return the address of block 0's first byte in each layer."""
        return self.planes.addresses[list(self.layers)] + self.offset

    def strides(self) -> Any:
        """Return the distance in bytes from one block to the next, in each layer."""
        return self.planes.strides[list(self.layers)]


def widest_item(*numbers: int) -> int:
    """Return the bytes of the widest item of which sizes, strides and addresses are multiples."""
    return next(each for each in ITEMS if all(number % each == 0 for number in numbers))


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
        # Mapped, not copied: the worker keeps the memory, and these tensors must not outlive it.
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
        self, planes: Sequence[torch.Tensor], chunk_bytes: int, order: BlockOrder | None = None, offer: bytes = b"",
        open_planes: OpenPlanes = open_device_planes, rdma: RdmaHandles | None = None,
        device: CopyDevice | None = None,
    ) -> None:  # fmt: skip
        self._planes, self._order, self.rdma = Planes(planes), order, rdma
        self.offer, self._open_planes = offer, open_planes
        where = planes[0].device
        self._device = device or (HostDevice() if where.type == "cpu" else CudaDevice(where.index or 0))
        # Each direction has its own stream: an engine that sends and receives at once waits for neither by the other.
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
        self, theirs: object, there: Places, here: Places, size: int, order: BlockOrder | None,
    ) -> IsOver:  # fmt: skip
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
