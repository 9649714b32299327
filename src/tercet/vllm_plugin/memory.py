"""vLLM's KV cache tensors as the bytes that the transport moves."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch

from tercet.transport import BufferMemory
from tercet.vllm_plugin.compat import UnsupportedVLLM


class LayerPlanes:
    """The KV cache cut into planes: per layer one, or two where keys and values are apart.

    A plane holds one block after the other, so a block is one run of bytes in it. ``planes_of[layer_name]`` lists the
    planes that a layer writes.
    """

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> None:
        self.planes_of: dict[str, list[int]] = {}
        self.tensors: list[torch.Tensor] = []
        seen: dict[int, list[int]] = {}
        for name, cache in kv_caches.items():
            # Layers that share one cache (cross-layer KV sharing) are one plane.
            indices = seen.get(cache.data_ptr())
            if indices is None:
                indices = [self._add(name, plane) for plane in _split(name, cache, num_blocks)]
                seen[cache.data_ptr()] = indices
            self.planes_of[name] = indices
        self.block_bytes = self.tensors[0].nbytes // num_blocks
        if any(plane.nbytes != self.block_bytes * num_blocks for plane in self.tensors):
            raise UnsupportedVLLM("layers with KV blocks of different sizes are not supported by Tercet yet")

    def _add(self, name: str, plane: torch.Tensor) -> int:
        if not plane.is_contiguous():
            raise UnsupportedVLLM(f"the KV cache of {name} is not contiguous: shape {tuple(plane.shape)}")
        self.tensors.append(plane)
        return len(self.tensors) - 1

    def memory(self, num_blocks: int) -> BufferMemory:
        """The planes as byte buffers; valid while the tensors live."""
        return BufferMemory([_bytes_of(plane) for plane in self.tensors], num_blocks)


def _split(name: str, cache: torch.Tensor, num_blocks: int) -> list[torch.Tensor]:
    # The kernel may cut vLLM's blocks into smaller ones; they stay adjacent, so only divisibility matters.
    if cache.shape[0] % num_blocks == 0:
        return [cache]
    if cache.shape[0] == 2 and cache.shape[1] % num_blocks == 0:
        return [cache[0], cache[1]]
    raise UnsupportedVLLM(f"the KV cache of {name} has shape {tuple(cache.shape)}, which is not cut into blocks")


def _bytes_of(plane: torch.Tensor) -> memoryview:
    if plane.device.type != "cpu":
        raise UnsupportedVLLM(f"the TCP transport reaches KV on the CPU only, and this cache is on {plane.device}")
    return memoryview((ctypes.c_ubyte * plane.nbytes).from_address(plane.data_ptr())).cast("B")
