"""Models with random weights, for machines that have neither a model nor a hub; their tokens mean nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SMALL = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip
# Llama 3.1 8B's layers.
LARGE = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
# vLLM makes the large one's weights, the same ones in every engine.
MADE_BY_VLLM = ("--load-format", "dummy")


def make(directory: Path) -> Path:
    """Write a checkpoint of a small Llama, of some MB, always the same; its tokenizer has one token for each byte."""
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(1)
    LlamaForCausalLM(_config(directory, SMALL)).to(torch.bfloat16).save_pretrained(directory)
    return directory


def make_large(directory: Path) -> Path:
    """Write what vLLM needs to make a model of 8B parameters, less its vocabulary, by :data:`MADE_BY_VLLM`."""
    config = _config(directory, LARGE)
    (directory / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": ["LlamaForCausalLM"]}))
    return directory


def _config(directory: Path, shape: dict[str, int]) -> Any:
    """The configuration of a shape; writes its tokenizer."""
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
