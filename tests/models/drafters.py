"""Checkpoints of drafters with KV of their own, random as the models that they guess for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Drafter:
    """``method`` is vLLM's. ``family`` is what the drafter is a checkpoint of; None for what the model itself has.

    ``drops_a_block``: of what is found in a prefix cache vLLM takes the last block not, since KV there depends on the
    token behind it.
    """

    method: str
    family: str | None
    drops_a_block: bool = True

    def speculative_config(self, checkpoint: Callable[[str], Path]) -> str:
        """The value of vLLM's flag."""
        found: dict[str, Any] = {"method": self.method, "num_speculative_tokens": 3}
        if self.family is not None:
            found |= {"model": str(checkpoint(self.family)), "max_model_len": 1024}
        return json.dumps(found)


def eagle_head(state: dict[str, Any], config: Any) -> dict[str, Any]:
    """EAGLE: the model's own kind of layer, behind the next token's embedding and the model's last hidden state."""
    import torch

    layer = _without(state, "lm_head", "model.norm", "layers.0.input_layernorm")
    layer["fc.weight"] = torch.zeros(config.hidden_size, 2 * config.hidden_size)
    return {name.removeprefix("model."): weight for name, weight in layer.items()}


def eagle3_head(state: dict[str, Any], config: Any) -> dict[str, Any]:
    """EAGLE-3: behind hidden states of three of the model's layers; its attention sees the embedding beside them."""
    import torch

    hidden = config.hidden_size
    found = {
        name.removeprefix("model.").replace("layers.0.", "midlayer."): weight
        for name, weight in _without(state, "embed_tokens").items()
    }
    for each in ("q_proj", "k_proj", "v_proj"):
        name = f"midlayer.self_attn.{each}.weight"
        found[name] = torch.zeros(found[name].shape[0], 2 * hidden)
    found["midlayer.hidden_norm.weight"] = torch.ones(hidden)
    found["fc.weight"] = torch.zeros(hidden, 3 * hidden)
    return found


def with_predictor(state: dict[str, Any], config: Any) -> dict[str, Any]:
    """Multi-token prediction (MTP): one layer more than the model's, with its own way in, in the model's checkpoint."""
    import torch

    hidden, last, more = config.hidden_size, config.num_hidden_layers - 1, f"model.layers.{config.num_hidden_layers}."
    layer = f"model.layers.{last}."
    found = dict(state)
    found |= {more + name.removeprefix(layer): weight.clone() for name, weight in state.items() if layer in name}
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        found[f"{more}{norm}.weight"] = torch.ones(hidden)
    found[f"{more}eh_proj.weight"] = torch.zeros(hidden, 2 * hidden)
    found[f"{more}shared_head.head.weight"] = state["lm_head.weight"].clone()
    return found


def _without(state: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: weight for name, weight in state.items() if not any(each in name for each in names)}
