"""LoRA adapters of tiny checkpoints, made at test time: seeded random weights, wide enough that they change tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RANK = 8
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
SCALE = 0.6


def write_adapter(checkpoint: Path, destination: Path, seed: int) -> Path:
    """An adapter of all attention projections of the checkpoint, as PEFT writes one."""
    import torch
    from safetensors.torch import save_file

    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    hidden, head = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    outputs = {"q_proj": heads * head, "k_proj": kv_heads * head, "v_proj": kv_heads * head, "o_proj": hidden}
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Any:
        return torch.empty(shape).normal_(0.0, SCALE, generator=generator)

    tensors: dict[str, Any] = {}
    for layer in range(config["num_hidden_layers"]):
        for module in MODULES:
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            inputs = heads * head if module == "o_proj" else hidden
            tensors[f"{name}.lora_A.weight"] = drawn(RANK, inputs) / inputs**0.5
            tensors[f"{name}.lora_B.weight"] = drawn(outputs[module], RANK)
    destination.mkdir(parents=True, exist_ok=True)
    save_file(tensors, destination / "adapter_model.safetensors")
    about = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(checkpoint), "bias": "none",
        "r": RANK, "lora_alpha": RANK, "lora_dropout": 0.0, "target_modules": list(MODULES), "inference_mode": True,
    }  # fmt: skip
    (destination / "adapter_config.json").write_text(json.dumps(about))
    return destination
