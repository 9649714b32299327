"""Models with random weights, for machines without a model and without a hub. Their tokens have no meaning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SMALL = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip
# The layers of Llama 3.1 8B.
LARGE = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
# Flags with which vLLM generates the weights of the large model, the same in every engine.
MADE_BY_VLLM = ("--load-format", "dummy")


def make(directory: Path) -> Path:
    """Write a checkpoint of a small Llama of a few MB, and return its directory.

    It is always the same. Its tokenizer has one token for each byte.
    """
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(1)
    LlamaForCausalLM(_config(directory, SMALL)).to(torch.bfloat16).save_pretrained(directory)
    return directory


def make_large(directory: Path) -> Path:
    """Write the configuration and tokenizer of a model with the layers of an 8B model, and return its directory.

    vLLM generates its weights with the flags :data:`MADE_BY_VLLM`. Its vocabulary is small.
    """
    config = _config(directory, LARGE)
    (directory / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": ["LlamaForCausalLM"]}))
    return directory


def _config(directory: Path, shape: dict[str, int]) -> Any:
    """Write the tokenizer, and return the configuration of a shape."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    vocabulary = {each: number for number, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    ends = "</s>"
    vocabulary[ends] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=ends).save_pretrained(directory)
    return LlamaConfig(
        vocab_size=len(vocabulary), max_position_embeddings=16384, initializer_range=0.2, bos_token_id=None,
        eos_token_id=vocabulary[ends], dtype="bfloat16", **shape,
    )  # fmt: skip
