"""Checkpoints of families, made once on a machine: seeded random weights, and the built-in model's tokenizer."""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path
from typing import Any

from tercet.cluster.model import cache_root, cached_directory, resolve_model

from .families import FAMILIES

SEED = 0


def checkpoint(name: str) -> Path:
    """The directory of a family's checkpoint, made first if this machine does not have it yet."""
    config = FAMILIES[name].config()
    made_from = Path(__file__).read_bytes() + config.to_json_string().encode()
    source = f"{name} {SEED} {hashlib.sha256(made_from).hexdigest()}"

    def build(destination: Path) -> None:
        _write(name, destination)

    return cached_directory(cache_root() / "tests" / f"tiny-{name}", source, build, lambda _: None)


def _write(name: str, destination: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = FAMILIES[name].config()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomized(model, SEED)
    model.save_pretrained(destination)
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("smollm2"))
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(destination)
    shutil.copy(Path(resolve_model("smollm2")) / "generation_config.json", destination)


def randomized(model: Any, seed: int) -> None:
    """Give a model's matrices other random weights."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for label, weight in model.named_parameters():
            if weight.dim() < 2:
                continue
            # Wide enough that what layers look back at decides the next token; and narrow in the embedding, so that it
            # does not decide by itself.
            scale = 0.1 if "embed" in label else 2.0 / weight.shape[-1] ** 0.5
            weight.normal_(0.0, scale, generator=generator)


if __name__ == "__main__":
    for each in sys.argv[1:] or FAMILIES:
        try:
            print(each, checkpoint(each))
        except Exception as error:
            print(each, "FAILED", repr(error)[:300])
