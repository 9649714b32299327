"""vLLM's KV cache tensors, as the bytes that the transport moves, and how a worker shares them with its agent.

A plane is one layer's memory, one block after the other; blocks of all planes with one number belong together::

    plane 0, layer 0 keys    | block 0 | block 1 | block 2 | ...     one block of vLLM is the same
    plane 1, layer 0 values  | block 0 | block 1 | block 2 | ...     number in every plane of its group
    plane 2, layer 1         | block 0 | block 1 | block 2 | ...
                             '---------- extent: whole pages ------'

On CPUs the pages of each extent are exchanged for pages of one file, at the same addresses, which the agent maps::

    worker   0x7f..0000 [pages of plane 0 and 1]   0x7f..8000 [pages of plane 2]
                           |  mmap(MAP_FIXED)            |
    file     0 [plane 0|plane 1.................][plane 2..........][generation words, core's words]

On accelerators the agent gets a handle of the memory, and events by which it waits for a layer.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from msgspec.structs import replace

from tercet.transport import AUTO, PAGE_BYTES, TAIL_BYTES, BlockOrder, DeviceHandles, RegionShape, create_file, shape_of
from tercet.transport.backends import BackendUnavailable
from tercet.transport.backends.nixl import RegisteredPlanes
from tercet.transport.backends.reading import has_rdma
from tercet.vllm_plugin.hooks import UnsupportedVLLM

logger = logging.getLogger(__name__)
# glibc gives every allocation of this size or more a separate mapping, whatever its adaptive threshold is.
OWN_MAPPING_BYTES = 32 * 1024 * 1024
MAP_FIXED = 0x10


class LayerPlanes:
    """The KV cache cut into planes: one per layer, or two if keys and values are separate.

    A plane holds one block after the other, so a block is one run of bytes in it. ``planes_of[layer_name]`` lists the
    planes that a layer writes; of layers that share one cache (cross-layer KV sharing) only the first one writes any.
    The planes of each of ``groups``, which are layers that share block tables, follow one another; ``group_planes`` has
    their numbers. Planes of different groups may use the same memory.
    """

    def __init__(
        self, kv_caches: Mapping[str, torch.Tensor], num_blocks: int, groups: Sequence[Sequence[str]]
    ) -> None:  # fmt: skip
        self.planes_of: dict[str, tuple[int, ...]] = dict.fromkeys(kv_caches, ())
        self.group_planes: list[int] = []
        self.tensors: list[torch.Tensor] = []
        self.num_blocks = num_blocks
        for names in groups:
            first, seen = len(self.tensors), set[int]()
            for name in (each for each in kv_caches if each in names):
                cache = kv_caches[name]
                if cache.data_ptr() not in seen:
                    seen.add(cache.data_ptr())
                    self.planes_of[name] = tuple(self._add(name, plane) for plane in _split(name, cache, num_blocks))
            self.group_planes.append(len(self.tensors) - first)
        self.device = self.tensors[0].device
        if any(plane.device != self.device for plane in self.tensors):
            raise UnsupportedVLLM("this engine's KV lies on several devices in one worker, which Tercet does not move")
        self.block_bytes = self.tensors[0].nbytes // num_blocks
        if any(plane.nbytes != self.block_bytes * num_blocks for plane in self.tensors):
            raise UnsupportedVLLM("layers with KV blocks of different sizes are not supported by Tercet yet")

    def _add(self, name: str, plane: torch.Tensor) -> int:
        plane = _whole_pages(plane)
        if plane.device.type not in ("cpu", "cuda"):
            raise UnsupportedVLLM(f"Tercet moves KV of CPUs and of CUDA devices, and this cache is on {plane.device}")
        if not (plane.is_contiguous() if plane.device.type == "cpu" else is_in_blocks(plane, self.num_blocks)):
            raise UnsupportedVLLM(
                f"the KV cache of {name} does not hold one block after the other: shape {tuple(plane.shape)}, "
                f"strides {plane.stride()}"
            )
        self.tensors.append(plane)
        return len(self.tensors) - 1

    def block_stride(self, plane: torch.Tensor) -> int:
        return plane.stride(0) * plane.itemsize * (plane.shape[0] // self.num_blocks)

    def share_words(self) -> tuple[int, RegionShape]:
        """Return a file, and its shape, for KV on a device: it has only generation words, and no memory for blocks."""
        length = self.block_bytes * self.num_blocks
        shape = shape_of([length] * len(self.tensors), self.num_blocks, self.block_bytes)
        shape = replace(shape, groups=tuple(self.group_planes), order=self.order)
        return create_file(shape), shape

    @property
    def order(self) -> BlockOrder | None:
        """The order of the items of all blocks; None if it differs in some layers, such as those that keep states.

        Blocks without an order are moved unchanged, between engines with the same order.
        """
        orders = {order_of(plane, self.num_blocks) for plane in self.tensors}
        return orders.pop() if len(orders) == 1 else None

    def tensors_without(self, layers: Sequence[str]) -> list[torch.Tensor]:
        left_out = {plane for name in layers for plane in self.planes_of[name]}
        return [plane for number, plane in enumerate(self.tensors) if number not in left_out]

    def share(self) -> tuple[int, RegionShape]:
        """Move the KV cache, at its address, into a file that other processes can map.

        Call this once, before the cache holds any KV. The tensors keep their addresses: only the pages behind them are
        exchanged. Code that uses a tensor, or a view of it, is not affected. Returns the file's descriptor, and its
        shape.
        """
        extents = list[tuple[int, int]]()  # each plane's allocation in whole pages: addresses [begin, end)
        for plane in self.tensors:
            start, length = plane.untyped_storage().data_ptr(), plane.untyped_storage().nbytes()
            # Otherwise the first and the last page may hold other data, which can change while pages are exchanged.
            if length < OWN_MAPPING_BYTES and (start % PAGE_BYTES or length % PAGE_BYTES):
                raise UnsupportedVLLM(
                    f"a KV cache tensor of {length} bytes is too small to be shared; it needs {OWN_MAPPING_BYTES} "
                    "bytes: increase VLLM_CPU_KVCACHE_SPACE, or --num-gpu-blocks-override if that is given"
                )
            end = -(-(start + length) // PAGE_BYTES) * PAGE_BYTES
            extents.append((start // PAGE_BYTES * PAGE_BYTES, end))
        offsets, size = dict[tuple[int, int], int](), 0
        for begin, end in sorted(set(extents)):
            offsets[begin, end] = size
            size += end - begin
        pairs = zip(self.tensors, extents, strict=True)
        planes = tuple(offsets[extent] + plane.data_ptr() - extent[0] for plane, extent in pairs)
        groups = tuple(self.group_planes)
        shape = RegionShape(planes, self.num_blocks, self.block_bytes, size, size + TAIL_BYTES, groups)
        fd = create_file(shape)
        for (begin, end), offset in offsets.items():
            _exchange(begin, end - begin, fd, offset)
        return fd, shape


def is_in_blocks(plane: torch.Tensor, num_blocks: int) -> bool:
    """True if each of ``num_blocks`` blocks of a plane, which is ``(blocks, ...)``, is one run of bytes.

    Its items may have any order, and other layers' blocks may lie between it and the next block.
    """
    block, together = plane[0], plane.shape[0] // num_blocks
    inside = sorted((stride, size) for stride, size in zip(block.stride(), block.shape, strict=True) if size > 1)
    expected = 1
    for stride, size in inside:
        if stride != expected:
            return False
        expected *= size
    # Blocks that the kernel splits must follow one another, to be one of vLLM's.
    return plane.stride(0) == expected or (together == 1 and plane.stride(0) > expected)


def order_of(plane: torch.Tensor, num_blocks: int) -> BlockOrder | None:
    """Return the order of a block's items in a plane of ``(blocks, heads, tokens, content)``, the shape for kernels.

    None for another shape, of which only the run of bytes is known, and for blocks that the kernel splits.
    """
    if plane.dim() != 4 or plane.shape[0] != num_blocks or plane.stride(3) != 1:
        return None
    _, heads, tokens, content = plane.shape
    outer_heads = plane.stride(1) >= plane.stride(2)
    return BlockOrder("HN" if outer_heads else "NH", heads, tokens, content * plane.itemsize)


def arrangement_of(plane: torch.Tensor, num_blocks: int) -> str:
    """Return shape and memory order of a plane without :func:`order_of`: KV moves only where it is equal."""
    inside = sorted(zip(plane.stride()[1:], plane.shape[1:], range(1, plane.dim()), strict=True), reverse=True)
    in_memory = [f"{size}@{dimension}" for _, size, dimension in inside if size > 1]
    return "x".join([str(plane.shape[0] // num_blocks), *in_memory])


def _exchange(begin: int, size: int, fd: int, offset: int) -> None:
    """Replace an allocation's pages by the file's; the allocator's notes at both ends are copied, not KV."""
    # MAP_FIXED replaces the pages at the address that vLLM's tensors already have, so nothing in vLLM has to know.
    for page in (0, size - PAGE_BYTES):
        os.pwrite(fd, ctypes.string_at(begin + page, PAGE_BYTES), offset + page)
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    )  # fmt: skip
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED
    found = library.mmap(begin, size, protection, flags, fd, offset)
    if found != begin:
        error = ctypes.get_errno()
        raise UnsupportedVLLM(f"the KV cache cannot be shared: mmap: {os.strerror(error)}")


def _whole_pages(plane: torch.Tensor) -> torch.Tensor:
    """Return the states of a layer with vLLM's padding, so that their blocks are as large as those of attention.

    Their shape is then ``(blocks, 1, 1, bytes)``; other planes stay unchanged.
    """
    blocks, page = plane.shape[0], plane.stride(0)
    states = plane.dtype == torch.int8 and plane.dim() == 4 and plane.shape[1:3] == (1, 1) and plane.stride(3) == 1
    begin = plane.storage_offset()
    if not states or page <= plane.shape[3] or begin + blocks * page > plane.untyped_storage().nbytes():
        return plane
    return torch.as_strided(plane, (blocks, page), (page, 1), begin)


def _split(name: str, cache: torch.Tensor, num_blocks: int) -> list[torch.Tensor]:
    # The kernel may split vLLM's blocks into smaller ones; they stay adjacent, so only divisibility matters.
    if cache.shape[0] % num_blocks == 0:
        return [cache]
    if cache.shape[0] == 2 and cache.shape[1] % num_blocks == 0:
        return [cache[0], cache[1]]
    raise UnsupportedVLLM(f"the KV cache of {name} has shape {tuple(cache.shape)}, which is not cut into blocks")


# Fewest bytes of KV in one note to the agent; the remainder is reported at the end of a step.
NOTE_BYTES = 1024 * 1024


class StepLayers:
    """The planes of one rank during a step, each reported once if the step pushes anything; without I/O.

    Layer hooks run if a step runs layer by layer: eagerly, or as piecewise CUDA graphs. A full graph, which decode-only
    steps use, calls none of them; its KV is reported when the step ends. So both kinds of graphs work, and no code here
    checks which kind it was.
    """

    def __init__(self, num_planes: int) -> None:
        self._all = range(num_planes)
        self._plane_bytes = 0
        self._done: list[int] = []
        self._reported: set[int] = set()

    def begin(self, plane_bytes: int) -> None:
        """Begin a step that pushes ``plane_bytes`` of each plane; with 0, nothing is reported."""
        self._plane_bytes = plane_bytes
        self._done, self._reported = [], set()

    def saved(self, planes: Sequence[int]) -> tuple[int, ...]:
        """Record that a layer's hook ran, for its ``planes``; return the planes to report now.

        Planes are reported together once they are large enough: waking the agent costs time of the cores that compute.
        """
        if not self._plane_bytes:
            return ()
        self._done += [plane for plane in planes if plane not in self._reported and plane not in self._done]
        return self._report() if len(self._done) * self._plane_bytes >= NOTE_BYTES else ()

    def ended(self) -> tuple[int, ...]:
        """End the step; return the planes still to report, including those whose hooks did not run."""
        if not self._plane_bytes:
            return ()
        seen = self._reported.union(self._done)
        self._done += [plane for plane in self._all if plane not in seen]
        self._plane_bytes, found = 0, self._report()
        return found

    def _report(self) -> tuple[int, ...]:
        found, self._done = tuple(self._done), []
        self._reported.update(found)
        return found


# Number of layer notes in flight, after which a later note reuses the event of an earlier one.
EVENTS = 64


class DeviceExport:
    """The handles of one rank's KV on an accelerator, and its ring of events, which signal finished layers.

    Relies on PyTorch's way to share CUDA memory between processes (``UntypedStorage._share_cuda_``), which its
    ``torch.multiprocessing`` uses, and on events for which another process can wait (``interprocess=True``).

    With ``transport`` ``nixl``, or ``auto`` if there is an RDMA device, KV is also registered with NIXL, and ``rdma``
    has the handles by which other processes read it. Raises :class:`~tercet.transport.backends.BackendUnavailable` if
    the registration is required and fails.
    """

    def __init__(self, planes: LayerPlanes, transport: str = "tcp") -> None:
        self._device = planes.device
        self._events = [torch.cuda.Event(interprocess=True) for _ in range(EVENTS)]
        self._next = 0
        storages: dict[int, tuple[int, tuple[Any, ...]]] = {}
        places: list[tuple[int, int, int]] = []
        for plane in planes.tensors:
            storage: Any = plane.untyped_storage()
            if storage.data_ptr() not in storages:
                storages[storage.data_ptr()] = len(storages), _shared(storage)
            number, _ = storages[storage.data_ptr()]
            begin = int(plane.storage_offset()) * plane.itemsize
            places.append((number, begin, planes.block_stride(plane)))
        handles: list[bytes] = [event.ipc_handle() for event in self._events]
        self.handles = DeviceHandles(
            self._device.index or 0, tuple(found for _, found in storages.values()), tuple(places), tuple(handles)
        )
        # vLLM's earlier work on its cache, above all zeroing it, must end before other processes see the cache.
        torch.cuda.current_stream(self._device).synchronize()
        self._registered = _registered(planes, self.handles, transport)
        self.rdma = self._registered and self._registered.handles

    def computed(self) -> int:
        # The agent waits for the event of the last note it has. A reused event is recorded later, so waiting for it
        # waits for more, never for less.
        number, self._next = self._next, (self._next + 1) % EVENTS
        self._events[number].record()
        return number


def _registered(planes: LayerPlanes, handles: DeviceHandles, transport: str) -> RegisteredPlanes | None:
    if transport != "nixl" and not (transport == AUTO and has_rdma()):
        return None
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in planes.tensors}
    places = [(each.data_ptr(), planes.block_stride(each)) for each in planes.tensors]
    try:
        return RegisteredPlanes(list(storages.items()), places, "VRAM", handles.device)
    except BackendUnavailable as error:
        if transport != AUTO:
            raise
        logger.warning("auto continues without %s", error.message)
        return None


def _shared(storage: Any) -> tuple[Any, ...]:
    """Return the arguments of ``UntypedStorage._new_shared_cuda`` in another process, without the device's number."""
    try:
        _, *found, _event_to_wait_for = storage._share_cuda_()
    except RuntimeError as error:
        raise UnsupportedVLLM(
            f"this engine's KV cannot be shared with the process that moves it (CUDA IPC): {error}; "
            "PYTORCH_CUDA_ALLOC_CONF must not contain expandable_segments:True, and --enable-sleep-mode and "
            "--enable-cumem-allocator must be off"
        ) from error
    # The other process need not wait, and the event to wait for belongs to a device that it may not see.
    return (*found, False)
