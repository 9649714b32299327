"""Checkpoints of families, made once on a machine: seeded random weights, and the built-in model's tokenizer."""

from __future__ import annotations

import hashlib
import inspect
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tercet.cluster.model import cache_root, cached_directory, resolve_model

from .families import CHECKPOINTS, FAMILIES

SEED = 0


def checkpoint(name: str) -> Path:
    """The directory of a family's checkpoint, made first if this machine does not have it yet."""
    config, rewrite = CHECKPOINTS[name].config(), CHECKPOINTS[name].rewrite
    made_from = Path(__file__).read_bytes() + config.to_json_string().encode()
    if rewrite is not None:
        made_from += inspect.getsource(rewrite).encode()
    source = f"{name} {SEED} {hashlib.sha256(made_from).hexdigest()}"

    def build(destination: Path) -> None:
        _write(name, destination)

    return cached_directory(cache_root() / "tests" / f"tiny-{name}", source, build, lambda _: None)


def made_once(name: str, file: str, write: Callable[[Path], None]) -> Path:
    """The directory of the checkpoint that ``write`` in ``file`` makes, if this machine does not have it yet."""
    made_from = Path(file).read_bytes() + Path(__file__).read_bytes()
    source = f"{name} {SEED} {hashlib.sha256(made_from).hexdigest()}"
    return cached_directory(cache_root() / "tests" / f"tiny-{name}", source, write, lambda _: None)


def with_tokens(special: Sequence[str]) -> Any:
    """The built-in model's tokenizer with more special tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("smollm2"))
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    return tokenizer


def save(kind: Callable[[Any], Any], config: Any, destination: Path) -> None:
    """Save a model with seeded random weights."""
    import torch

    torch.manual_seed(SEED)
    model = kind(config)
    randomized(model, SEED)
    model.save_pretrained(destination)


def flags_of(name: str) -> tuple[str, ...]:
    """vLLM's flags that an engine of a family gets; its drafter's checkpoint is made first."""
    family = FAMILIES[name]
    if family.drafter is None:
        return family.flags
    return (*family.flags, "--speculative-config", family.drafter.speculative_config(checkpoint))


def _write(name: str, destination: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = CHECKPOINTS[name].config()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomized(model, SEED)
    model.save_pretrained(destination)
    rewrite = CHECKPOINTS[name].rewrite
    if rewrite is not None:
        _rewrite(destination / "model.safetensors", lambda saved: rewrite(saved, config))
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("smollm2"))
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(destination)
    shutil.copy(Path(resolve_model("smollm2")) / "generation_config.json", destination)


def _rewrite(weights: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Save other weights instead of those that were saved; matrices among them get random values again."""
    from safetensors.torch import load_file, save_file

    changed = change(load_file(weights))
    _randomize(sorted(changed.items()), SEED)
    save_file(changed, weights, metadata={"format": "pt"})


def randomized(model: Any, seed: int) -> None:
    """Give a model's matrices other random weights."""
    _randomize(model.named_parameters(), seed)


def _randomize(named: Iterable[tuple[str, Any]], seed: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for label, weight in named:
            if weight.dim() < 2:
                continue
            # Wide enough that what layers look back at decides the next token; and narrow in the embedding, so that it
            # does not decide by itself.
            scale = 0.1 if "embed" in label else 2.0 / weight.shape[-1] ** 0.5
            weight.normal_(0.0, scale, generator=generator)


if __name__ == "__main__":
    for each in sys.argv[1:] or CHECKPOINTS:
        try:
            print(each, checkpoint(each))
        except Exception as error:
            print(each, "FAILED", repr(error)[:300])
