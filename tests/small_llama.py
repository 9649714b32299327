"""A checkpoint that computes a step in a few milliseconds, for tests in which it does not matter what the text says."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tercet.cluster.model import BUILT_IN, cache_root, cached_directory, resolve_model

VOCABULARY, HIDDEN, INTERMEDIATE, LAYERS, HEADS = 49152, 256, 512, 4, 8
# Larger than a checkpoint's first weights usually are, so that what comes next depends on what came before.
SPREAD = 0.06


@dataclass(frozen=True)
class Attention:
    """The size of a token's KV; an engine's share of it in a layer must be 32 MiB at least, to be shared."""

    kv_heads: int = 4
    head_dim: int = 32


WIDE = Attention(8, 256)
"""Twenty blocks of 128 tokens are enough for an engine."""


def small_llama(attention: Attention = Attention()) -> Path:
    """Four layers, SmolLM2's tokenizer, and random weights, the same ones each time; made once."""
    tokenizer = Path(resolve_model(BUILT_IN, lambda _: None))
    source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    name = f"small-llama-{attention.kv_heads}-{attention.head_dim}"
    write = partial(_write, tokenizer, attention)
    return cached_directory(cache_root() / "tests" / name, source, write, lambda _: None)


def _write(tokenizer: Path, attention: Attention, directory: Path) -> None:
    shutil.copytree(
        tokenizer, directory, ignore=shutil.ignore_patterns("*.safetensors", "config.json"), dirs_exist_ok=True
    )
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32",
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim, "max_position_embeddings": 4096, "tie_word_embeddings": True,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    chance = np.random.default_rng(0)
    save_file(
        {name: SPREAD * chance.standard_normal(shape, np.float32) for name, shape in _matrices(attention).items()}
        | {name: np.full(HIDDEN, 3, np.float32) for name in _norms()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )


def _matrices(attention: Attention) -> dict[str, tuple[int, int]]:
    queries, keys = HEADS * attention.head_dim, attention.kv_heads * attention.head_dim
    of_layer = {
        "self_attn.q_proj": (queries, HIDDEN),
        "self_attn.k_proj": (keys, HIDDEN),
        "self_attn.v_proj": (keys, HIDDEN),
        "self_attn.o_proj": (HIDDEN, queries),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    layers = {
        f"model.layers.{layer}.{name}.weight": shape for layer in range(LAYERS) for name, shape in of_layer.items()
    }
    return {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), **layers}


def _norms() -> list[str]:
    each = ("input_layernorm", "post_attention_layernorm")
    return ["model.norm.weight", *(f"model.layers.{n}.{name}.weight" for n in range(LAYERS) for name in each)]
