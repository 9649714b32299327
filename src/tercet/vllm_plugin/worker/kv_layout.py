"""Conditions under which KV of one engine is valid in another: the same weights and memory layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from tercet.protocol import KVLayout
from tercet.vllm_plugin.core.cache_groups import described, state_formats, state_layers
from tercet.vllm_plugin.hooks import UnsupportedVLLM
from tercet.vllm_plugin.worker.drafters import drafter_of
from tercet.vllm_plugin.worker.kv_planes import LayerPlanes, arrangement_of
from tercet.vllm_plugin.worker.model_fingerprint import model_fingerprint
from tercet.vllm_plugin.worker.stages import AllStages


def packing_of(
    config: VllmConfig, block_size: int, dtype: torch.dtype, planes: LayerPlanes, attention: Sequence[torch.Tensor]
) -> str:
    """Return the order of keys and values in a block: CPU kernels pack them for their instruction set.

    ``attention`` are the ``planes`` that hold keys and values.
    """
    if planes.device.type == "cpu":
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # the same choice that the kernels make

        head_size = config.model_config.get_head_size()
        return f"cpu-{_get_attn_isa(dtype, block_size, head_size, config.cache_config.cache_dtype)}"
    packing = f"{planes.device.type}-{config.cache_config.cache_dtype}"
    # The transport can convert the order of heads and tokens. It handles other blocks only as bytes.
    if planes.order is not None:
        return packing
    arrangements = dict.fromkeys(arrangement_of(plane, planes.num_blocks) for plane in attention)
    return "-".join([packing, *arrangements])


def _splits_by_head(plane: torch.Tensor, block_size: int) -> bool:
    """True if a block holds one head after the other: ``(blocks, kv_heads, block_size, ...)``, as on CPU."""
    return plane.device.type == "cpu" and plane.dim() == 4 and plane.shape[2] == block_size


def _splits_by_token(config: VllmConfig, block_size: int, plane: torch.Tensor) -> bool:
    """True if keys are ordered by dimension and values by token; the test lets the kernel write a block.

    Relies on ``cpu_attn_reshape_and_cache`` filling the cache, as ``CPUAttentionBackendImpl`` calls it.
    """
    if not _splits_by_head(plane, block_size):
        return False
    from vllm import _custom_ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model, size = config.model_config, config.model_config.get_head_size()
    if plane.dtype != model.dtype or plane.nbytes // plane.shape[0] % (2 * size * block_size * plane.itemsize):
        return False
    isa = _get_attn_isa(model.dtype, block_size, size, config.cache_config.cache_dtype)
    written = torch.arange(block_size * size).remainder(251).to(model.dtype).view(block_size, 1, size)
    cache = torch.zeros(1, 1, block_size * 2, size, dtype=model.dtype)
    keys, values = cache.chunk(2, dim=2)
    slots = torch.arange(block_size)
    _custom_ops.cpu_attn_reshape_and_cache(
        written, written, keys, values, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
    )
    by_dimension = keys.reshape(size, block_size).T.reshape(written.shape)
    return torch.equal(by_dimension, written) and torch.equal(values.reshape(written.shape), written)


def layout_of(
    config: VllmConfig, caches: KVCacheConfig, planes: LayerPlanes, stages: AllStages, *, staged: bool
) -> KVLayout:
    """Return the layout of this rank's KV cache, as a part of the engine's layout.

    With ``staged``, blocks are moved whole, and are not cut between tokens.
    """
    model, groups = config.model_config, described(caches, stages.layers)
    block_size = caches.kv_cache_groups[0].kv_cache_spec.block_size
    states = state_formats(caches)
    if states and stages.plane_counts:
        raise UnsupportedVLLM("this model's layers keep states, which Tercet moves only with one pipeline stage")
    attention = planes.tensors_without(state_layers(caches))
    first = attention[0]
    cache_dtype = first.dtype
    alike = not states and all(plane.shape == first.shape for plane in attention)
    packing = packing_of(config, block_size, model.dtype, planes, attention)
    return KVLayout(
        model=model_fingerprint(str(model.model), model.hf_config.to_dict()),
        dtype=str(cache_dtype).removeprefix("torch."),
        num_layers=sum(stages.layers),
        # MLA's latent KV is one head, which every rank keeps; the heads in the model's config are computed from it.
        num_kv_heads=1 if model.use_mla else model.get_total_num_kv_heads(),
        head_size=model.get_head_size(),
        block_size=block_size,
        block_bytes=planes.block_bytes,
        tp_size=config.parallel_config.tensor_parallel_size,
        packing="; states ".join([packing, *states]),
        splits_by_head=alike and (model.use_mla or _splits_by_head(first, block_size)),
        # Cutting between tokens needs a single table with all blocks.
        splits_by_token=not groups and not staged and _splits_by_token(config, block_size, first),
        groups=groups,
        stages=stages.plane_counts,
        plane_order=stages.order,
        drafter=drafter_of(config),
    )
