"""Every arrangement that vLLM has for its caches, in real tensors on the host: mapped onto each other, or refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_cache_layout import KVCacheLayout

from tercet.protocol import TransferFailed
from tercet.transport import BlockOrder, RegionShape, shape_of
from tercet.transport.region import rearranged
from tercet.transport.staged import StagedMemory
from tercet.transport.torch_blocks import TorchBlocks
from tercet.vllm_plugin.worker.kv_planes import LayerPlanes, is_in_blocks, order_of

LAYERS, BLOCKS = 3, 6
IN_BLOCKS = [layout for layout in KVCacheLayout if layout.is_block_compact]
# Heads, tokens, numbers of one token in one head, and their type: what backends keep in a block.
CONTENTS = {
    "FlashAttention, FlashInfer, Triton": (4, 16, 2 * 8, torch.bfloat16),
    "fp8 with a scale beside each token's head": (4, 16, 2 * 8 + 4, torch.uint8),
    "fp8": (2, 8, 2 * 8, torch.uint8),
    "MLA, one latent": (1, 16, 72, torch.bfloat16),
    "float32": (3, 4, 10, torch.float32),
}
Content = tuple[int, int, int, torch.dtype]


def cache(layout: KVCacheLayout, content: Content, seed: int) -> list[torch.Tensor]:
    """Each layer's cache as kernels see it, ``(blocks, heads, tokens, content)``, in one allocation like vLLM's."""
    heads, tokens, width, dtype = content
    logical = (LAYERS, BLOCKS, heads, tokens, width)
    sizes = [logical[dim] for dim in layout.stride_order]
    random = torch.Generator().manual_seed(seed)
    nbytes = int(np.prod(sizes)) * dtype.itemsize
    physical = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=random).view(dtype).view(sizes)
    back = [layout.stride_order.index(dim) for dim in range(5)]
    return list(physical.permute(back))


def memory_of(layers: list[torch.Tensor]) -> StagedMemory:
    """A rank with this cache in the device's role."""
    order, block_bytes = order_of(layers[0], BLOCKS), layers[0].nbytes // BLOCKS
    shape = described(layers)
    planes = [as_blocks(layer, block_bytes) for layer in layers]
    chunk = LAYERS * BLOCKS * block_bytes
    return StagedMemory(TorchBlocks(planes, chunk, order), shape, chunk)


def as_blocks(layer: torch.Tensor, block_bytes: int) -> torch.Tensor:
    """As an agent has it, that knows no more than where blocks are."""
    whole = torch.empty(0, dtype=torch.uint8).set_(layer.untyped_storage())
    size = layer.itemsize
    return whole.as_strided((BLOCKS, block_bytes), (layer.stride(0) * size, 1), int(layer.storage_offset()) * size)


def described(layers: list[torch.Tensor]) -> RegionShape:
    block_bytes = layers[0].nbytes // BLOCKS
    return shape_of([block_bytes * BLOCKS] * LAYERS, BLOCKS, block_bytes)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """For comparison: random bytes are no numbers, and not equal to themselves."""
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
@pytest.mark.parametrize(("theirs", "ours"), [*itertools.product(IN_BLOCKS, IN_BLOCKS)], ids=lambda each: each.name)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_two_caches_in_different_order_exchange_blocks(
    theirs: KVCacheLayout, ours: KVCacheLayout, content: Content, data: st.DataObject
) -> None:
    source, target = cache(theirs, content, 1), cache(ours, content, 2)
    sources = data.draw(st.permutations(range(BLOCKS)))[: data.draw(st.integers(1, BLOCKS))]
    targets = data.draw(st.permutations(range(BLOCKS)))[: len(sources)]
    expected = [layer.clone() for layer in target]
    for layer in range(LAYERS):
        for there, here in zip(sources, targets, strict=True):
            expected[layer][here] = source[layer][there]
    sender, receiver = memory_of(source), memory_of(target)
    order = rearranged(order_of(source[0], BLOCKS), order_of(target[0], BLOCKS))
    size, room = described(source).block_bytes, receiver.room()
    with sender.reading(range(LAYERS), np.array(sources), 0, size) as found:
        owner = found._owners
        assert isinstance(owner, memoryview)
        room.bytes[: len(owner)] = owner
    receiver.put(room, range(LAYERS), np.array(targets), 0, size, order)
    for got, wanted in zip(target, expected, strict=True):
        assert torch.equal(bits(got), bits(wanted))


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
@pytest.mark.parametrize("layout", KVCacheLayout, ids=lambda each: each.name)
def test_a_cache_is_taken_if_its_blocks_are_runs_of_bytes(layout: KVCacheLayout, content: Content) -> None:
    (layer, *_) = cache(layout, content, 1)
    one_head = content[0] == 1  # then there is nothing between a block's tokens
    assert is_in_blocks(layer, BLOCKS) is (layout in IN_BLOCKS or one_head)


@pytest.mark.parametrize("layout", IN_BLOCKS, ids=lambda each: each.name)
def test_the_order_is_vllms(layout: KVCacheLayout) -> None:
    content = CONTENTS["FlashAttention, FlashInfer, Triton"]
    order = order_of(cache(layout, content, 1)[0], BLOCKS)
    assert order == BlockOrder("HN" if "HNC" in layout.name else "NH", 4, 16, 32)


def test_blocks_that_a_kernel_cuts_smaller_are_one_where_they_follow_one_another() -> None:
    compact = torch.zeros(BLOCKS * 4, 2, 8, 16)
    assert is_in_blocks(compact, BLOCKS)
    assert order_of(compact, BLOCKS) is None
    beside_others = torch.zeros(BLOCKS * 4, LAYERS, 2, 8, 16)[:, 1]
    assert not is_in_blocks(beside_others, BLOCKS)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"heads": 8}, "heads is 8 there and 4 here"),
        ({"tokens": 32}, "tokens is 32 there and 16 here"),
        ({"item_bytes": 16}, "item_bytes is 16 there and 32 here"),
    ],
)
def test_other_items_are_refused_with_the_difference(change: dict[str, int], says: str) -> None:
    ours = BlockOrder("HN", 4, 16, 32)
    fields = {"order": "NH", "heads": 4, "tokens": 16, "item_bytes": 32, **change}
    with pytest.raises(TransferFailed, match=says):
        rearranged(BlockOrder(**fields), ours)  # type: ignore[arg-type]


def test_a_block_that_one_side_does_not_describe_is_refused() -> None:
    with pytest.raises(TransferFailed, match="does not describe"):
        rearranged(None, BlockOrder("HN", 4, 16, 32))


@pytest.mark.parametrize("sizes", [(1, 16), (8, 1)])
def test_with_one_head_or_one_token_there_is_one_order(sizes: tuple[int, int]) -> None:
    assert rearranged(BlockOrder("HN", *sizes, 32), BlockOrder("NH", *sizes, 32)) is None


def test_planes_of_a_layer_are_those_of_its_cache() -> None:
    layers = {f"layer.{index}": torch.zeros(BLOCKS, 2, 8, 16) for index in range(LAYERS)}
    planes = LayerPlanes(layers, BLOCKS, [list(layers)])
    assert (planes.block_bytes, planes.device.type) == (2 * 8 * 16 * 4, "cpu")
    assert planes.block_stride(planes.tensors[0]) == planes.block_bytes
