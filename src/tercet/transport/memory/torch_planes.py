"""Memory that copies of KV read and write, as tensors and as addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tercet.transport.region import Numbers

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


def as_items(*rows: torch.Tensor) -> list[torch.Tensor]:
    """Return rows of bytes as rows of the widest items that all of them consist of."""
    item = widest_item(*(number for each in rows for number in (each.shape[1], each.stride(0), each.data_ptr())))
    return [each.view(ITEMS[item]) for each in rows]
