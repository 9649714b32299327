"""What makes KV of one engine meaningful in another: the same weights and the same arrangement in memory."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig

from tercet.protocol import KVLayout
from tercet.vllm_plugin.memory import LayerPlanes

# Three windows of each weights file: enough to tell a fine-tune from its base without reading gigabytes.
WINDOW_BYTES = 64 * 1024
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt")
# Where a config was loaded from, or by what, does not change the model.
IGNORED_CONFIG_KEYS = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")


def model_fingerprint(model: str, hf_config: dict[str, Any]) -> str:
    """A short hash of a model's config and, for a local checkpoint, of samples of its weights."""
    digest = hashlib.sha256()
    kept = {key: value for key, value in hf_config.items() if key not in IGNORED_CONFIG_KEYS}
    digest.update(json.dumps(kept, sort_keys=True, default=str).encode())
    path = Path(model)
    files = sorted(file for pattern in WEIGHTS for file in path.glob(pattern)) if path.is_dir() else []
    for file in files:
        _sample(file, digest)
    if not files:
        digest.update(model.encode())
    return digest.hexdigest()[:16]


def _sample(file: Path, digest: hashlib._Hash) -> None:
    size = file.stat().st_size
    digest.update(f"{file.name}:{size}".encode())
    with file.open("rb") as opened:
        for offset in (0, max(0, size // 2), max(0, size - WINDOW_BYTES)):
            opened.seek(offset)
            digest.update(opened.read(WINDOW_BYTES))


def packing_of(config: VllmConfig, block_size: int, dtype: torch.dtype, device: torch.device) -> str:
    """How keys and values lie inside a block: CPU kernels pack them for their instruction set."""
    if device.type == "cpu":
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # the same choice that the kernels make

        head_size = config.model_config.get_head_size()
        return f"cpu-{_get_attn_isa(dtype, block_size, head_size, config.cache_config.cache_dtype)}"
    layout = getattr(config.cache_config, "kv_cache_layout", None)
    return f"{device.type}-{layout or 'default'}"


def _splits_by_head(plane: torch.Tensor, block_size: int) -> bool:
    """Whether a block holds one head after the other: ``(blocks, kv_heads, block_size, ...)``, as on CPU."""
    return plane.device.type == "cpu" and plane.dim() == 4 and plane.shape[2] == block_size


def layout_of(config: VllmConfig, block_size: int, planes: LayerPlanes) -> KVLayout:
    """The layout of this rank's KV cache."""
    model = config.model_config
    first = planes.tensors[0]
    cache_dtype = first.dtype
    return KVLayout(
        model=model_fingerprint(str(model.model), model.hf_config.to_dict()),
        dtype=str(cache_dtype).removeprefix("torch."),
        num_layers=len(planes.planes_of),
        num_kv_heads=model.get_total_num_kv_heads(),
        head_size=model.get_head_size(),
        block_size=block_size,
        block_bytes=planes.block_bytes,
        tp_size=config.parallel_config.tensor_parallel_size,
        packing=packing_of(config, block_size, model.dtype, first.device),
        splits_by_head=_splits_by_head(first, block_size),
    )
