"""The query of step times in aiconfigurator's measured operator tables, run by an interpreter with that package.

Standard input is a JSON object with model, system, backend, tp_size, modes, prefills and decodes. The answer, a JSON
object, is written to the file descriptor that the argument names. The script does not import Tercet, which need not be
installed for this interpreter.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any


def config_of(root: Path, model: str) -> dict[str, Any]:
    """Return the model's configuration that the package ships."""
    return json.loads((root / "model_configs" / f"{model.replace('/', '--')}_config.json").read_text())


def parameters_of(config: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of parameters of a dense Llama-like model, in its layers and in its embeddings."""
    hidden = config["hidden_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    attention = hidden * head * 2 * (config["num_attention_heads"] + config["num_key_value_heads"])
    layers = config["num_hidden_layers"] * (attention + 3 * hidden * config["intermediate_size"])
    return layers, (1 if config.get("tie_word_embeddings") else 2) * config["vocab_size"] * hidden


def main() -> None:
    """Answer one query."""
    query = json.load(sys.stdin)
    package = importlib.import_module("aiconfigurator_core")
    engine = importlib.import_module("aiconfigurator_core.sdk.engine")
    root = Path(str(package.__file__)).parent
    config = config_of(root, query["model"])
    handle = engine.EngineHandle.compile(
        query["model"], query["system"], query["backend"], tp_size=query["tp_size"], **query["modes"]
    )
    layers, embeddings = parameters_of(config)
    answer = {
        "version": importlib.metadata.version("aiconfigurator-core"),
        "config": config,
        "layer_parameters": layers,
        "embedding_parameters": embeddings,
        # In milliseconds. The package counts cached tokens as a part of the input's length.
        "prefills": [handle.predict_prefill_latency(1, new + old, old) for new, old in query["prefills"]],
        "decodes": [handle.predict_decode_latency(batch, context, 2) for batch, context in query["decodes"]],
    }
    with os.fdopen(int(sys.argv[1]), "w") as out:
        json.dump(answer, out)


if __name__ == "__main__":
    main()
