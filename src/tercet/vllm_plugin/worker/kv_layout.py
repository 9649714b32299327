"""Conditions under which KV of one engine is valid in another: the same weights and memory layout.

A worker knows only the layers of its pipeline stage, and layouts describe all of them, so workers exchange what
they have (:class:`AllStages`). A drafter with its own KV has layers like any others, which are leased, sent and moved
with the model's. The model checks the drafter's guesses, so missing KV, or KV of another drafter, costs guesses and
never a token. KV of EAGLE and MTP drafters at a position also depends on the token after it; for the last position of a
send that is the token that the sender has sampled, so a receiver that continues with another one guesses a little worse
there. For that reason vLLM does not use the last block that it finds in its prefix cache, and the same holds for KV
that was sent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from tercet.protocol import KVLayout
from tercet.vllm_plugin.core.cache_groups import described, state_formats, state_layers
from tercet.vllm_plugin.hooks import UnsupportedVLLM
from tercet.vllm_plugin.worker.kv_planes import LayerPlanes, arrangement_of


def engine_rank() -> int:
    """Return this worker's rank in its engine; ranks of the first stage come first."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    tensor_parallel = get_tp_group()
    return get_pp_group().rank_in_group * tensor_parallel.world_size + tensor_parallel.rank_in_group


def over_stages(mine: Any) -> list[Any]:
    """Return the values of workers of this tensor-parallel rank, by pipeline stage; all must call at the same time."""
    from vllm.distributed.parallel_state import get_pp_group

    stages = get_pp_group()
    if stages.world_size == 1:
        return [mine]
    found: list[Any] = [None] * stages.world_size
    torch.distributed.all_gather_object(found, mine, group=stages.cpu_group)
    return found


@dataclass(frozen=True)
class StageContents:
    """Contents of one stage, by group of layers: the number of layers, and each plane's layer in order."""

    layers: list[int]
    planes: list[list[str]]
    block_bytes: int

    @classmethod
    def of(cls, groups: Sequence[Sequence[str]], planes: LayerPlanes) -> StageContents:
        names = [[""] * count for count in planes.group_planes]
        for group, layers in enumerate(groups):
            first = sum(planes.group_planes[:group])
            for name in layers:
                for plane in planes.planes_of[name]:
                    names[group][plane - first] = name
        return cls([len(layers) for layers in groups], names, planes.block_bytes)


class AllStages:
    """Contents of all stages together."""

    def __init__(self, stages: Sequence[StageContents]) -> None:
        if len({stage.block_bytes for stage in stages}) > 1:
            sizes = ", ".join(str(stage.block_bytes) for stage in stages)
            raise UnsupportedVLLM(f"the pipeline stages have KV blocks of different sizes ({sizes} bytes)")
        self._stages = stages

    @property
    def layers(self) -> list[int]:
        return [sum(counts) for counts in zip(*(stage.layers for stage in self._stages), strict=True)]

    @property
    def plane_counts(self) -> tuple[tuple[int, ...], ...]:
        """Number of planes of each group in each stage; empty if one stage holds all."""
        if len(self._stages) == 1:
            return ()
        return tuple(tuple(map(len, stage.planes)) for stage in self._stages)

    @property
    def order(self) -> str:
        """A hash of the layers' names in the order of their planes, group by group over all stages."""
        digest = hashlib.sha256()
        for group in zip(*(stage.planes for stage in self._stages), strict=True):
            digest.update("\n".join(name for names in group for name in names).encode() + b"\0")
        return digest.hexdigest()[:16]


# These methods draft from tokens, from the model's latest results or, with a custom class, from data outside of vLLM's
# KV cache.
WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator", "custom_class")


def require_drafter(config: VllmConfig) -> None:
    """Raise :class:`UnsupportedVLLM` for a speculation method that is not a drafter and needs another connector."""
    speculative = config.speculative_config
    if speculative is not None and speculative.method == "extract_hidden_states":
        raise UnsupportedVLLM(
            "--speculative-config: 'extract_hidden_states' needs a KV connector for hidden states, but an engine has "
            "one connector; use this method on an engine without Tercet"
        )


# Size of each of the three windows that are read of a weights file: enough to distinguish a fine-tune from its base
# without reading gigabytes.
WINDOW_BYTES = 64 * 1024
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt")
# The path of a config, and the library that loaded it, do not change the model.
IGNORED_CONFIG_KEYS = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")


def model_fingerprint(model: str, hf_config: dict[str, Any]) -> str:
    """Return a short hash of a model's config and, for a local checkpoint, of samples of its weights."""
    digest = hashlib.sha256()
    kept = {key: value for key, value in hf_config.items() if key not in IGNORED_CONFIG_KEYS}
    digest.update(json.dumps(kept, sort_keys=True, default=str).encode())
    path = Path(model)
    files = sorted(file for pattern in WEIGHTS for file in path.glob(pattern)) if path.is_dir() else []
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as opened:
            for offset in (0, max(0, size // 2), max(0, size - WINDOW_BYTES)):
                opened.seek(offset)
                digest.update(opened.read(WINDOW_BYTES))
    if not files:
        digest.update(model.encode())
    return digest.hexdigest()[:16]


def packing_of(
    config: VllmConfig, block_size: int, dtype: torch.dtype, planes: LayerPlanes, attention: Sequence[torch.Tensor]
) -> str:
    """Return the order of keys and values in a block: CPU kernels pack them for their instruction set."""
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
    """Return this rank's part of the engine's layout; ``staged`` blocks are moved whole, not cut between tokens."""
    model, groups = config.model_config, described(caches, stages.layers)
    block_size = caches.kv_cache_groups[0].kv_cache_spec.block_size
    states = state_formats(caches)
    if states and stages.plane_counts:
        raise UnsupportedVLLM("this model's layers keep states, which Tercet moves only with one pipeline stage")
    attention = planes.tensors_without(state_layers(caches))
    first = attention[0]
    alike = not states and all(plane.shape == first.shape for plane in attention)
    packing = packing_of(config, block_size, model.dtype, planes, attention)
    # A drafter with its own KV is part of the layout: engines whose drafters differ exchange no KV. Its config is
    # not used, since vLLM writes values into it that follow from the engine's flags.
    speculative, drafter = config.speculative_config, ""
    if speculative is not None and speculative.method not in WITHOUT_KV:
        drafter = f"{speculative.method}-{model_fingerprint(str(speculative.draft_model_config.model), {})}"
    return KVLayout(
        model=model_fingerprint(str(model.model), model.hf_config.to_dict()),
        dtype=str(first.dtype).removeprefix("torch."),
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
        drafter=drafter,
    )
