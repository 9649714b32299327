"""A tiny Qwen 3 that sorts prompts into two classes: seeded random weights. Any checkpoint of a family embeds."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from tercet.cluster.model import cache_root, cached_directory, resolve_model

from .checkpoints import SEED, randomized
from .families import SIZES


def classifier_checkpoint() -> Path:
    """The directory of the checkpoint, made first if this machine does not have it yet."""
    made_from = Path(__file__).read_bytes() + (Path(__file__).parent / "checkpoints.py").read_bytes()
    source = f"classifier {SEED} {hashlib.sha256(made_from).hexdigest()}"
    return cached_directory(cache_root() / "tests" / "tiny-classifier", source, _write, lambda _: None)


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
