"""The vLLM command that an engine amounts to: a pure function from its description to arguments and environment."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from tercet.cluster.pinning import as_cpu_list

SERVER_MODULE = "vllm.entrypoints.openai.api_server"
PLUGIN = "tercet"
KV_TRANSFER_CONFIG: Mapping[str, str] = {
    "kv_connector": "TercetConnector",
    "kv_connector_module_path": "tercet.vllm_plugin.connector",
    "kv_role": "kv_both",
}
# A verb waits for the step that is running, so on a CPU, where a step of 2048 tokens takes seconds, steps are short.
CPU_MAX_BATCHED_TOKENS = "512"
BUILT_IN_MAX_LEN = "2048"


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One vLLM engine. ``cores`` are empty where an accelerator computes; ``gpus`` are then its devices."""

    name: str
    model: str
    served_model_name: str
    host: str
    port: int
    dtype: str
    cores: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    kv_cache_gib: int = 1
    extra_args: tuple[str, ...] = ()


def has_gpu() -> bool:
    """Whether engines run on NVIDIA GPUs here."""
    return shutil.which("nvidia-smi") is not None and os.environ.get("CUDA_VISIBLE_DEVICES") != ""


def engine_argv(spec: EngineSpec) -> list[str]:
    """Arguments of the server process; the caller's own vLLM flags come last and win."""
    defaults = ["--enforce-eager", "--max-num-batched-tokens", CPU_MAX_BATCHED_TOKENS] if spec.cores else []
    if spec.served_model_name == "smollm2":
        defaults += ["--max-model-len", BUILT_IN_MAX_LEN]
    return [
        sys.executable, "-m", SERVER_MODULE,
        "--model", spec.model, "--served-model-name", spec.served_model_name,
        "--host", spec.host, "--port", str(spec.port), "--dtype", spec.dtype,
        "--disable-uvicorn-access-log",
        *_without(defaults, spec.extra_args),
        "--kv-transfer-config", json.dumps(KV_TRANSFER_CONFIG, separators=(",", ":")),
        *spec.extra_args,
    ]  # fmt: skip


def engine_env(spec: EngineSpec) -> dict[str, str]:
    """Environment variables of the server process, beside those that it inherits."""
    env = {"VLLM_PLUGINS": PLUGIN, "TERCET_ENGINE_NAME": spec.name, "VLLM_NO_USAGE_STATS": "1"}
    if Path(spec.model).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if spec.cores:
        env["VLLM_CPU_KVCACHE_SPACE"] = str(spec.kv_cache_gib)
        env["VLLM_CPU_OMP_THREADS_BIND"] = as_cpu_list(spec.cores)
        env["OMP_NUM_THREADS"] = str(len(spec.cores))
    if spec.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in spec.gpus)
    return env


def as_shell(argv: Sequence[str], env: Mapping[str, str]) -> str:
    """The command as one would type it."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in env.items()]
    return " ".join([*variables, shlex.join(["python", *argv[1:]])])


def _without(defaults: Sequence[str], given: Sequence[str]) -> list[str]:
    """``defaults`` less the flags that the caller set, in either spelling."""
    set_by_caller = {flag.split("=", 1)[0].replace("_", "-") for flag in given if flag.startswith("--")}
    kept: list[str] = []
    skip_value = False
    for item in defaults:
        if item.startswith("--"):
            skip_value = item in set_by_caller
        if not skip_value:
            kept.append(item)
    return kept
