"""The import of a profile from aiconfigurator's measured operator tables (Apache-2.0, by NVIDIA)."""

from __future__ import annotations

import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from tercet.protocol import BadRequest, EngineError
from tercet_lab.sim.step_times import DecodePoint, ModelShape, PrefillPoint, Profile, Provenance, Transfer, fit_steps

KNOTS = (1, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384)
CACHED = (0, 1024, 4096, 16384)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (128, 512, 1024, 2048, 4096, 8192, 16384)
# Decode points with more KV tokens in a batch would exceed the memory of one engine.
MAX_BATCH_TOKENS = 400_000
BLOCK_SIZE = 16
GIB = 2**30
# vLLM's default share of the memory, and the memory for activations and CUDA graphs.
MEMORY_SHARE, MEMORY_OVERHEAD_GIB = 0.9, 4.0


class SiliconQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The parameters of an import.

    ``model`` and ``system`` are names in the tables, ``python`` is the interpreter that has the tables.
    ``weight_bytes`` is the size of one weight of a layer. ``bytes_per_second`` and ``latency`` (seconds) of one GPU's
    link are not in the tables.
    """

    name: str
    model: str
    system: str
    tp_size: int
    python: str
    weight_bytes: int = 2
    gemm_quant_mode: str | None = None
    backend: str = "vllm"
    memory_gib: float = 80.0
    bytes_per_second: float = 50e9
    latency: float = 0.0005


class _SiliconAnswer(msgspec.Struct):
    version: str
    config: dict[str, Any]
    layer_parameters: int
    embedding_parameters: int
    prefills: list[float]
    decodes: list[float]


def import_profile(query: SiliconQuery, command: str) -> Profile:
    """Query the tables for a grid of steps, and return the profile of the fitted step model.

    ``command`` is recorded in the profile.
    """
    prefills = [(new, old) for new in KNOTS if new >= 16 for old in CACHED]
    decodes = [(batch, context) for batch in BATCHES for context in CONTEXTS if batch * context <= MAX_BATCH_TOKENS]
    answer = _ask(query, prefills, decodes)
    steps, errors = fit_steps(
        [PrefillPoint(*at, ms / 1000) for at, ms in zip(prefills, answer.prefills, strict=True)],
        [DecodePoint(*at, ms / 1000) for at, ms in zip(decodes, answer.decodes, strict=True)],
        KNOTS,
    )
    shape = _shape(query, answer.config)
    return Profile(
        name=query.name,
        model=shape,
        device=f"{query.tp_size} x {query.system}",
        tp_size=query.tp_size,
        block_size=BLOCK_SIZE,
        total_blocks=_blocks(query, answer, shape),
        max_model_len=int(answer.config["max_position_embeddings"]),
        steps=steps,
        transfer=Transfer(bytes_per_second=query.bytes_per_second * query.tp_size, latency=query.latency),
        provenance=Provenance(
            source=f"operator tables of aiconfigurator-core {answer.version} for {query.system}, {query.backend}",
            date=datetime.now(UTC).date().isoformat(),
            command=command,
            fit_error=errors,
            note=(
                f"{len(prefills)} prefill and {len(decodes)} decode steps. Not from the tables: transfer, "
                f"{query.bytes_per_second / 1e9:g} GB/s per GPU is the data sheet's rate of its network port, and "
                f"total_blocks, from {query.memory_gib:g} GiB per GPU less weights. Without host time between steps."
            ),
        ),
    )


def _ask(query: SiliconQuery, prefills: list[tuple[int, int]], decodes: list[tuple[int, int]]) -> _SiliconAnswer:
    modes = {"gemm_quant_mode": query.gemm_quant_mode} if query.gemm_quant_mode else {}
    asked = {
        "model": query.model,
        "system": query.system,
        "backend": query.backend,
        "tp_size": query.tp_size,
        "modes": {**modes, "kvcache_quant_mode": "bfloat16"},
        "prefills": prefills,
        "decodes": decodes,
    }
    script = Path(__file__).with_name("silicon_points.py")
    # The answer has a separate pipe, because the package writes notes to standard output.
    read, write = os.pipe()
    try:
        process = subprocess.Popen(
            [query.python, str(script), str(write)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(write,),
        )
    except OSError as error:
        os.close(read)
        raise BadRequest(f"--python: cannot run {query.python}: {error.strerror}", "--python") from error
    finally:
        os.close(write)
    with os.fdopen(read, "rb") as pipe:
        _, complaints = process.communicate(msgspec.json.encode(asked))
        data = pipe.read()
    if process.returncode != 0:
        raise EngineError(f"the query of the tables failed: {_last_line(complaints)}")
    return msgspec.json.decode(data, type=_SiliconAnswer)


def _last_line(text: bytes) -> str:
    lines = text.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no message"


def _shape(query: SiliconQuery, config: dict[str, Any]) -> ModelShape:
    heads = int(config["num_attention_heads"])
    return ModelShape(
        name=query.model,
        layers=int(config["num_hidden_layers"]),
        kv_heads=int(config["num_key_value_heads"]),
        head_size=int(config.get("head_dim") or config["hidden_size"] // heads),
        kv_dtype="bfloat16",
        kv_dtype_bytes=2,
    )


def _blocks(query: SiliconQuery, answer: _SiliconAnswer, shape: ModelShape) -> int:
    weights = answer.layer_parameters * query.weight_bytes + answer.embedding_parameters * 2
    memory = query.tp_size * (MEMORY_SHARE * query.memory_gib - MEMORY_OVERHEAD_GIB) * GIB
    blocks = int((memory - weights) // (shape.kv_bytes_per_token * BLOCK_SIZE))
    if blocks < 1:
        raise BadRequest(
            f"--tp: {query.model} does not fit on {query.tp_size} GPUs of {query.memory_gib:g} GiB; give more", "--tp"
        )
    return blocks
