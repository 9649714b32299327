"""How KV of models with latent KV or states lies in memory, as vLLM's own specs say it, and what is made of that."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator, MambaStateShapeCalculator
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from tercet.protocol import KVLayout, LayoutMismatch, TransferFailed
from tercet.transport import BlockOrder, RegionShape, shape_of
from tercet.transport.region import HeadSlice, RankRoute, rearranged, routes
from tercet.transport.staged import StagedMemory
from tercet.transport.torch_blocks import TorchBlocks
from tercet.vllm_plugin.core.cache_groups import require_movable_groups, state_layers
from tercet.vllm_plugin.differences import ZEROED_BY_BLOCK
from tercet.vllm_plugin.hooks import UnsupportedVLLM
from tercet.vllm_plugin.start import start_checks
from tercet.vllm_plugin.worker.kv_layout import AllStages, StageContents, layout_of, packing_of
from tercet.vllm_plugin.worker.kv_planes import LayerPlanes, StepLayers, is_in_blocks, order_of

BLOCK, BLOCKS = 16, 8
LATENT = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
STATE = MambaSpec(
    block_size=BLOCK, shapes=((3, 40), (2, 8, 16)), dtypes=(torch.float32, torch.float32), mamba_cache_mode="align",
    page_size_padded=FULL.page_size_bytes,
)  # fmt: skip


def caches(*specs: KVCacheSpec) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"{number}.a", f"{number}.b"], spec) for number, spec in enumerate(specs)]
    return KVCacheConfig(BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)


def tensor_of(spec: KVCacheSpec) -> torch.Tensor:
    """A layer's cache as vLLM's model runner hands it to a connector."""
    raw = torch.zeros(BLOCKS * spec.page_size_bytes, dtype=torch.int8)
    if isinstance(spec, MambaSpec):
        page = spec.page_size_bytes
        return torch.as_strided(raw, (BLOCKS, 1, 1, spec.state_content_size_bytes), (page, page, page, 1))
    if isinstance(spec, MLAAttentionSpec):
        return raw.view(spec.dtype).view(BLOCKS, BLOCK, spec.head_size)
    assert isinstance(spec, FullAttentionSpec)
    return raw.view(spec.dtype).view(BLOCKS, spec.num_kv_heads, BLOCK, 2 * spec.head_size)


def planes_of(config: KVCacheConfig) -> LayerPlanes:
    groups = [group.layer_names for group in config.kv_cache_groups]
    tensors = {name: tensor_of(group.kv_cache_spec) for group in config.kv_cache_groups for name in group.layer_names}
    return LayerPlanes(tensors, BLOCKS, groups)


def layout(tp_size: int, heads: int, head_size: int, *specs: KVCacheSpec) -> KVLayout:
    config, use_mla = caches(*specs), any(isinstance(spec, MLAAttentionSpec) for spec in specs)
    model = SimpleNamespace(
        model="m", hf_config=SimpleNamespace(to_dict=dict[str, Any]), use_mla=use_mla, dtype=torch.bfloat16,
        get_total_num_kv_heads=lambda: heads, get_head_size=lambda: head_size,
    )  # fmt: skip
    vllm: Any = SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(tensor_parallel_size=tp_size),
        speculative_config=None,
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )
    planes, groups = planes_of(config), [group.layer_names for group in config.kv_cache_groups]
    with patch("tercet.vllm_plugin.worker.kv_layout.packing_of", return_value="cpu-vec"):
        return layout_of(vllm, config, planes, AllStages([StageContents.of(groups, planes)]), staged=False)


def test_blocks_of_which_nothing_is_known_are_exchanged_if_they_lie_alike() -> None:
    """Kernels may cut vLLM's blocks smaller; then the transport cannot put one order of items into another.

    Nor can it where layers keep states, whose blocks have no such items.
    """

    def packing(*attention: torch.Tensor, states: bool = False) -> str:
        vllm: Any = SimpleNamespace(cache_config=SimpleNamespace(cache_dtype="auto"))
        orders = {order_of(plane, BLOCKS) for plane in attention} | ({None} if states else set())
        order = orders.pop() if len(orders) == 1 else None
        planes: Any = SimpleNamespace(device=attention[0].device, num_blocks=BLOCKS, order=order)
        return packing_of(vllm, BLOCK, torch.bfloat16, planes, attention)

    def plane(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta")

    heads_first, tokens_first = plane(BLOCKS, 2, BLOCK, 64), plane(BLOCKS, BLOCK, 2, 64).transpose(1, 2)
    assert packing(heads_first) == packing(tokens_first) == "meta-auto"
    cut = [plane(BLOCKS * 2, 2, 8, 64), plane(BLOCKS * 2, 8, 2, 64).transpose(1, 2), plane(BLOCKS * 4, 2, 4, 64)]
    assert len({packing(each) for each in (heads_first, *cut)}) == 4
    assert packing(plane(BLOCKS * 2, 2, 8, 64)) == packing(cut[0])
    beside_states = [packing(each, each, states=True) for each in (heads_first, tokens_first)]
    assert len({*beside_states, "meta-auto"}) == 3
    assert packing(heads_first, tokens_first) != packing(tokens_first, heads_first)


# ---- MLA -----------------------------------------------------------------------------------------------------------


def test_latent_kv_is_one_plane_and_one_head_whatever_the_models_config_says() -> None:
    found = layout(4, 128, 576, LATENT)
    assert (found.num_kv_heads, found.head_size, found.heads_per_rank) == (1, 576, 1)
    assert found.block_bytes == LATENT.page_size_bytes == BLOCK * 576 * 2
    assert found.splits_by_head
    assert not found.splits_by_token
    assert found.groups == ()


def test_latent_kv_goes_between_any_degrees_from_the_first_rank_that_has_it() -> None:
    two, four = layout(2, 128, 576, LATENT), layout(4, 128, 576, LATENT)
    two.require_mappable(four, "the other")
    whole = HeadSlice(0, LATENT.page_size_bytes)
    assert [routes(two, four, rank) for rank in range(2)] == [[RankRoute(rank, whole) for rank in range(4)], []]
    assert [routes(four, two, rank) for rank in range(4)] == [[RankRoute(rank, whole) for rank in range(2)], [], [], []]
    assert [routes(four, four, rank) for rank in range(4)] == [[RankRoute(rank, whole)] for rank in range(4)]


# ---- states --------------------------------------------------------------------------------------------------------


def test_states_are_planes_with_their_padding_beside_those_of_attention() -> None:
    config = caches(STATE, FULL)
    planes = planes_of(config)
    assert planes.block_bytes == FULL.page_size_bytes
    assert planes.group_planes == [2, 2]
    assert state_layers(config) == ["0.a", "0.b"]
    assert [plane.shape for plane in planes.tensors_without(state_layers(config))] == [(BLOCKS, 2, BLOCK, 64)] * 2
    assert all(plane.is_contiguous() for plane in planes.tensors)


SHAPES, DTYPES = MambaStateShapeCalculator, MambaStateDtypeCalculator
STATES = {
    "Jamba": (
        MambaAttentionBackendEnum.MAMBA1, SHAPES.mamba1_state_shape(1, 64, 16, 4),
        DTYPES.mamba1_state_dtype(torch.bfloat16, "auto", "float32"),
    ),
    "Qwen 3 Next": (
        MambaAttentionBackendEnum.GDN_ATTN, SHAPES.gated_delta_net_state_shape(1, 2, 4, 16, 16, 4),
        DTYPES.gated_delta_net_state_dtype(torch.bfloat16, "auto", "float32"),
    ),
}  # fmt: skip


@pytest.mark.skipif(ZEROED_BY_BLOCK.is_here, reason="this vLLM's models with states are refused")
@pytest.mark.parametrize(("kind", "shapes", "dtypes"), STATES.values(), ids=STATES)
def test_families_that_cpus_do_not_run_are_mapped(kind: Any, shapes: Any, dtypes: Any) -> None:
    """With the states that vLLM says they have, of several precisions in one block."""
    full = replace(FULL, dtype=torch.bfloat16, head_size=128, head_size_v=128)
    states = MambaSpec(
        block_size=BLOCK, shapes=shapes, dtypes=dtypes, mamba_type=kind, mamba_cache_mode="align",
        page_size_padded=full.page_size_bytes,
    )  # fmt: skip
    config = caches(states, full)
    require_movable_groups(config)
    planes = planes_of(config)
    assert (planes.block_bytes, planes.group_planes) == (full.page_size_bytes, [2, 2])
    here = layout(1, 2, 128, states, full)
    assert [(group.kind, group.window) for group in here.groups] == [("mamba", 0), ("full_attention", 0)]
    assert all(f"{dtype}{list(shape)}" in here.packing for shape, dtype in zip(shapes, dtypes, strict=True))
    with pytest.raises(LayoutMismatch, match="packing"):
        here.require_mappable(layout(1, 2, 128, replace(states, dtypes=dtypes[::-1]), full), "the other")


def test_on_a_device_blocks_of_states_go_as_they_are_and_so_do_those_beside_them() -> None:
    for specs, order in (((FULL,), order_of(tensor_of(FULL), BLOCKS)), ((STATE, FULL), None)):
        planes = planes_of(caches(*specs))
        fd, shape = planes.share_words()
        os.close(fd)
        assert planes.order == shape.order == order
        shape.require_sane()


def test_mamba_1_is_refused_where_vllm_has_no_kernel_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    mamba_1 = caches(FULL, replace(STATE, mamba_type=MambaAttentionBackendEnum.MAMBA1))
    monkeypatch.setattr(start_checks, "_scans_states", lambda: False)
    with pytest.raises(UnsupportedVLLM, match="no kernel for Mamba-1"):
        start_checks.require_kernels_of_states(mamba_1)
    start_checks.require_kernels_of_states(caches(FULL, STATE))
    start_checks.require_kernels_of_states(caches(FULL))
    monkeypatch.setattr(start_checks, "_scans_states", lambda: True)
    start_checks.require_kernels_of_states(mamba_1)
    monkeypatch.setattr(start_checks, "_scans_states", lambda: False)
    monkeypatch.setattr(start_checks, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    start_checks.require_kernels_of_states(mamba_1)


def test_engines_that_keep_states_otherwise_exchange_nothing() -> None:
    here = layout(1, 2, 32, STATE, FULL)
    assert here.dtype == "float32"
    assert not here.splits_by_head
    assert not here.splits_by_token
    assert "float32[2, 8, 16]" in here.packing
    here.require_mappable(layout(1, 2, 32, STATE, FULL), "the other")
    other = layout(1, 2, 32, replace(STATE, dtypes=(torch.float32, torch.bfloat16)), FULL)
    with pytest.raises(LayoutMismatch, match="packing"):
        here.require_mappable(other, "the other")
    with pytest.raises(LayoutMismatch, match="tp_size"):
        here.require_mappable(layout(2, 2, 32, STATE, FULL), "the other")


def test_a_block_that_its_heads_do_not_divide_goes_as_a_whole() -> None:
    padded = layout(2, 6, 32, STATE, FULL)
    assert padded.block_bytes % padded.heads_per_rank
    assert [routes(padded, padded, rank) for rank in range(2)] == [
        [RankRoute(rank, HeadSlice(0, padded.block_bytes))] for rank in range(2)
    ]


def test_states_are_told_when_the_step_is_over_since_no_hook_runs_behind_their_layers() -> None:
    planes = planes_of(caches(STATE, FULL))
    step = StepLayers(len(planes.tensors))
    step.begin(1)
    assert step.saved(planes.planes_of["1.a"]) == step.saved(planes.planes_of["1.b"]) == ()
    assert step.ended() == (2, 3, 0, 1)


# ---- what is refused -----------------------------------------------------------------------------------------------


def test_steps_of_which_vllm_keeps_no_state_are_refused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def config(steps: int) -> Any:
        return SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=steps))

    mamba_2 = caches(FULL, replace(STATE, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=1))
    with pytest.raises(UnsupportedVLLM, match="--max-num-batched-tokens 16"):
        start_checks.require_states_to_be_kept(config(BLOCK + 1), mamba_2)
    start_checks.require_states_to_be_kept(config(BLOCK), mamba_2)
    start_checks.require_states_to_be_kept(config(BLOCK + 1), caches(FULL, STATE))
    monkeypatch.setattr(start_checks, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    start_checks.require_states_to_be_kept(config(BLOCK + 1), mamba_2)


def test_prefixes_are_matched_in_whole_blocks() -> None:
    def config(unit: int | None) -> Any:
        return SimpleNamespace(cache_config=SimpleNamespace(block_size=BLOCK, prefix_match_unit=unit))

    with pytest.raises(UnsupportedVLLM, match="--prefix-match-unit is 8"):
        start_checks.require_whole_blocks(config(8))
    start_checks.require_whole_blocks(config(None))
    start_checks.require_whole_blocks(config(BLOCK))


# What pipeline stages hold, put together: the layout that every rank of an engine has.

HELD_BLOCKS = 4


def stage(groups: list[list[str]], apart: bool = False, width: int = 8) -> StageContents:
    """A worker's; ``apart``: keys and values are."""
    shape = (2, HELD_BLOCKS, width) if apart else (HELD_BLOCKS, width)
    caches = {name: torch.zeros(shape) for names in groups for name in names}
    return StageContents.of(groups, LayerPlanes(caches, HELD_BLOCKS, groups))


def test_one_stage_is_not_spoken_of() -> None:
    alone = AllStages([stage([["l.0", "l.1"], ["l.2"]])])
    assert (alone.layers, alone.plane_counts) == ([2, 1], ())


@pytest.mark.parametrize("apart", [False, True])
def test_stages_are_the_model_cut_up(apart: bool) -> None:
    whole = AllStages([stage([["l.0", "l.3"], ["l.1", "l.2"]], apart)])
    cut = AllStages([stage([["l.0"], ["l.1"]], apart), stage([["l.3"], ["l.2"]], apart)])
    assert cut.layers == whole.layers == [2, 2]
    assert cut.order == whole.order
    planes = 2 if apart else 1
    assert cut.plane_counts == ((planes, planes), (planes, planes))


def test_a_stage_may_have_no_layers_of_a_group() -> None:
    cut = AllStages([stage([["l.0", "l.1"], []]), stage([["l.2"], ["l.3"]])])
    assert cut.plane_counts == ((2, 0), (1, 1))
    assert cut.order == AllStages([stage([["l.0", "l.1", "l.2"], ["l.3"]])]).order


def test_layers_in_another_order_are_other_layers() -> None:
    orders = {
        AllStages([stage([["l.0", "l.1"]])]).order,
        AllStages([stage([["l.1", "l.0"]])]).order,
        AllStages([stage([["l.1"]]), stage([["l.0"]])]).order,
        AllStages([stage([["l.0"], ["l.1"]])]).order,
        AllStages([stage([["l.0", "l.1"]], apart=True)]).order,
    }
    assert len(orders) == 4  # the second and the third are the same


def test_blocks_of_different_sizes_are_refused() -> None:
    with pytest.raises(UnsupportedVLLM, match="different sizes"):
        AllStages([stage([["l.0"]]), stage([["l.1"]], width=16)])


# Every arrangement that vLLM has for its caches, in real tensors on the host: mapped onto each other, or refused.

LAYERS, TENSOR_BLOCKS = 3, 6
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
    logical = (LAYERS, TENSOR_BLOCKS, heads, tokens, width)
    sizes = [logical[dim] for dim in layout.stride_order]
    random = torch.Generator().manual_seed(seed)
    nbytes = int(np.prod(sizes)) * dtype.itemsize
    physical = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=random).view(dtype).view(sizes)
    back = [layout.stride_order.index(dim) for dim in range(5)]
    return list(physical.permute(back))


def memory_of(layers: list[torch.Tensor]) -> StagedMemory:
    """A rank with this cache in the device's role."""
    order, block_bytes = order_of(layers[0], TENSOR_BLOCKS), layers[0].nbytes // TENSOR_BLOCKS
    shape = described(layers)
    planes = [as_blocks(layer, block_bytes) for layer in layers]
    chunk = LAYERS * TENSOR_BLOCKS * block_bytes
    return StagedMemory(TorchBlocks(planes, chunk, order), shape, chunk)


def as_blocks(layer: torch.Tensor, block_bytes: int) -> torch.Tensor:
    """As an agent has it, that knows no more than where blocks are."""
    whole = torch.empty(0, dtype=torch.uint8).set_(layer.untyped_storage())
    size = layer.itemsize
    return whole.as_strided(
        (TENSOR_BLOCKS, block_bytes), (layer.stride(0) * size, 1), int(layer.storage_offset()) * size
    )


def described(layers: list[torch.Tensor]) -> RegionShape:
    block_bytes = layers[0].nbytes // TENSOR_BLOCKS
    return shape_of([block_bytes * TENSOR_BLOCKS] * LAYERS, TENSOR_BLOCKS, block_bytes)


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
    sources = data.draw(st.permutations(range(TENSOR_BLOCKS)))[: data.draw(st.integers(1, TENSOR_BLOCKS))]
    targets = data.draw(st.permutations(range(TENSOR_BLOCKS)))[: len(sources)]
    expected = [layer.clone() for layer in target]
    for layer in range(LAYERS):
        for there, here in zip(sources, targets, strict=True):
            expected[layer][here] = source[layer][there]
    sender, receiver = memory_of(source), memory_of(target)
    order = rearranged(order_of(source[0], TENSOR_BLOCKS), order_of(target[0], TENSOR_BLOCKS))
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
    assert is_in_blocks(layer, TENSOR_BLOCKS) is (layout in IN_BLOCKS or one_head)


@pytest.mark.parametrize("layout", IN_BLOCKS, ids=lambda each: each.name)
def test_the_order_is_vllms(layout: KVCacheLayout) -> None:
    content = CONTENTS["FlashAttention, FlashInfer, Triton"]
    order = order_of(cache(layout, content, 1)[0], TENSOR_BLOCKS)
    assert order == BlockOrder("HN" if "HNC" in layout.name else "NH", 4, 16, 32)


def test_blocks_that_a_kernel_cuts_smaller_are_one_where_they_follow_one_another() -> None:
    compact = torch.zeros(TENSOR_BLOCKS * 4, 2, 8, 16)
    assert is_in_blocks(compact, TENSOR_BLOCKS)
    assert order_of(compact, TENSOR_BLOCKS) is None
    beside_others = torch.zeros(TENSOR_BLOCKS * 4, LAYERS, 2, 8, 16)[:, 1]
    assert not is_in_blocks(beside_others, TENSOR_BLOCKS)


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
    layers = {f"layer.{index}": torch.zeros(TENSOR_BLOCKS, 2, 8, 16) for index in range(LAYERS)}
    planes = LayerPlanes(layers, TENSOR_BLOCKS, [list(layers)])
    assert (planes.block_bytes, planes.device.type) == (2 * 8 * 16 * 4, "cpu")
    assert planes.block_stride(planes.tensors[0]) == planes.block_bytes
