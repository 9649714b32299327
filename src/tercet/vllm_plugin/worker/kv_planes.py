"""vLLM's KV cache tensors, as the bytes that the transport moves."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from msgspec.structs import replace

from tercet.transport import PAGE_BYTES, TAIL_BYTES, BlockOrder, RegionShape, create_file, shape_of
from tercet.vllm_plugin.hooks import UnsupportedVLLM

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
        """Return the number of bytes from one of vLLM's blocks of a plane to the next."""
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
        """Return the planes of all other layers than ``layers``."""
        left_out = {plane for name in layers for plane in self.planes_of[name]}
        return [plane for number, plane in enumerate(self.tensors) if number not in left_out]

    def share(self) -> tuple[int, RegionShape]:
        """Move the KV cache, at its address, into a file that other processes can map.

        Call this once, before the cache holds any KV. The tensors keep their addresses: only the pages behind them are
        exchanged. Code that uses a tensor, or a view of it, is not affected. Returns the file's descriptor, and its
        shape.
        """
        extents = [_extent_of(plane) for plane in self.tensors]
        offsets, size = dict[_Extent, int](), 0
        for extent in sorted(set(extents)):
            offsets[extent] = size
            size += extent.end - extent.begin
        pairs = zip(self.tensors, extents, strict=True)
        planes = tuple(offsets[extent] + plane.data_ptr() - extent.begin for plane, extent in pairs)
        groups = tuple(self.group_planes)
        shape = RegionShape(planes, self.num_blocks, self.block_bytes, size, size + TAIL_BYTES, groups)
        fd = create_file(shape)
        for extent, offset in offsets.items():
            _exchange(extent, fd, offset)
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
    """Return a description of shape and memory order, for planes whose blocks have no :func:`order_of`.

    KV moves between two such planes only if it is equal.
    """
    inside = sorted(zip(plane.stride()[1:], plane.shape[1:], range(1, plane.dim()), strict=True), reverse=True)
    in_memory = [f"{size}@{dimension}" for _, size, dimension in inside if size > 1]
    return "x".join([str(plane.shape[0] // num_blocks), *in_memory])


@dataclass(frozen=True, order=True)
class _Extent:
    """An allocation in whole pages: the addresses ``[begin, end)``."""

    begin: int
    end: int


def _extent_of(plane: torch.Tensor) -> _Extent:
    storage = plane.untyped_storage()
    start, size = storage.data_ptr(), storage.nbytes()
    alone = size >= OWN_MAPPING_BYTES or (start % PAGE_BYTES == 0 and size % PAGE_BYTES == 0)
    if not alone:
        # The first and the last page may hold other data, which can change while pages are exchanged.
        raise UnsupportedVLLM(
            f"a KV cache tensor of {size} bytes is too small to be shared; it needs {OWN_MAPPING_BYTES} bytes: "
            "increase VLLM_CPU_KVCACHE_SPACE, or --num-gpu-blocks-override if that is given"
        )
    return _Extent(start // PAGE_BYTES * PAGE_BYTES, -(-(start + size) // PAGE_BYTES) * PAGE_BYTES)


def _exchange(extent: _Extent, fd: int, offset: int) -> None:
    """Replace an allocation's pages by the file's pages.

    The allocator's notes at both ends are copied; the KV in between need not be.
    """
    size = extent.end - extent.begin
    for page in (0, size - PAGE_BYTES):
        os.pwrite(fd, ctypes.string_at(extent.begin + page, PAGE_BYTES), offset + page)
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    )  # fmt: skip
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED
    found = library.mmap(extent.begin, size, protection, flags, fd, offset)
    if found != extent.begin:
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
