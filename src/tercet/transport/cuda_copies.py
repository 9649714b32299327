"""Copies of KV on a GPU, by one kernel for all layers and blocks of a chunk.

PyTorch has no such kernel: with one gathering and one scattering kernel per layer, starting kernels takes longer than
copying (docs/howto/gpu.md has figures). Triton comes with PyTorch's CUDA builds; only this file imports it.
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUnknownArgumentType=false
# pyright: reportUntypedFunctionDecorator=false, reportIndexIssue=false

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from tercet.transport.torch_blocks import Side, widest_item

# Number of items that one program of the kernel copies.
ITEMS_OF_A_PROGRAM = 1024


@triton.jit
def _copy_blocks(
    table, layers, blocks, items, item: tl.constexpr, aligned: tl.constexpr, count: tl.constexpr
):  # pragma: no cover
    """Copy items of one block of one layer.

    ``table`` has, for each layer, the address of its first block in the source and in the target, and the bytes from
    block to block in both; then the blocks' numbers in the source, and in the target.
    """
    block, layer = tl.program_id(0), tl.program_id(2)
    to_block = tl.load(table + 4 * layers + blocks + block)
    if to_block >= 0:
        from_block = tl.load(table + 4 * layers + block)
        source = tl.load(table + layer) + from_block * tl.load(table + 2 * layers + layer)
        target = tl.load(table + layers + layer) + to_block * tl.load(table + 3 * layers + layer)
        if item == 8:
            source, target = source.to(tl.pointer_type(tl.int64)), target.to(tl.pointer_type(tl.int64))
        elif item == 4:
            source, target = source.to(tl.pointer_type(tl.int32)), target.to(tl.pointer_type(tl.int32))
        elif item == 2:
            source, target = source.to(tl.pointer_type(tl.int16)), target.to(tl.pointer_type(tl.int16))
        else:
            source, target = source.to(tl.pointer_type(tl.int8)), target.to(tl.pointer_type(tl.int8))
        if aligned:
            source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
        at = tl.program_id(1) * count + tl.arange(0, count)
        inside = at < items
        tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)


def begin_copy(source: Side, target: Side, size: int, table_on_device: Any) -> None:
    """Begin to copy ``size`` bytes of each block, on the current stream.

    ``table_on_device`` copies numbers to the device. Raises ``RuntimeError`` if the device cannot begin.
    """
    sides = source.first_bytes(), target.first_bytes(), source.strides(), target.strides()
    numbers = size, *(int(np.bitwise_or.reduce(each)) for each in sides)
    item = widest_item(*numbers)
    aligned = all(number % 16 == 0 for number in numbers)
    table: torch.Tensor = table_on_device(np.concatenate([*sides, source.blocks, target.blocks]))
    items, blocks, layers = size // item, len(target.blocks), len(target.layers)
    grid = (blocks, triton.cdiv(items, ITEMS_OF_A_PROGRAM), layers)  # only the first may exceed 65,535
    _copy_blocks[grid](table, layers, blocks, items, item, aligned, ITEMS_OF_A_PROGRAM)
