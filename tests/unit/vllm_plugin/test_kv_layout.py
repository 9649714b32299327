"""How KV of models with latent KV or states lies in memory, as vLLM's own specs say it, and what is made of that."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
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

from tercet.protocol import KVLayout, LayoutMismatch
from tercet.transport.region import HeadSlice, RankRoute, routes
from tercet.vllm_plugin.core.cache_groups import require_movable_groups, state_layers
from tercet.vllm_plugin.differences import ZEROED_BY_BLOCK
from tercet.vllm_plugin.hooks import UnsupportedVLLM
from tercet.vllm_plugin.start import start_checks
from tercet.vllm_plugin.worker.kv_layout import AllStages, StageContents, layout_of, packing_of
from tercet.vllm_plugin.worker.kv_planes import LayerPlanes, StepLayers, order_of

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
