"""A tiny Qwen 3 that sorts prompts into two classes: seeded random weights. Any checkpoint of a family embeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tercet.cluster.model import resolve_model

from .checkpoints import SEED, made_once, randomized
from .families import SIZES


def classifier_checkpoint() -> Path:
    """The directory of the checkpoint."""
    return made_once("classifier", __file__, _write)


def _write(destination: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen3Config

    torch.manual_seed(SEED)
    config = Qwen3Config(**SIZES)
    config.num_labels = 2
    model: Any = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    randomized(model, SEED)
    model.save_pretrained(destination)
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("smollm2"))
    tokenizer.model_max_length = SIZES["max_position_embeddings"]
    tokenizer.save_pretrained(destination)
