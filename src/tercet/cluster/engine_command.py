"""Command line of an engine, vLLM's or a simulated one's, as a pure function of the engine's description.

It also checks what engines would find only after minutes: flags for vLLM, data-parallel ranks, memory and cores.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import msgspec
import psutil

from tercet.cluster.devices import as_cpu_list, default_dtype, devices_for_engines, plan_devices, split_cores
from tercet.cluster.model import cached_snapshot
from tercet.cluster.vllm_flags import (
    GPU_MEMORY,
    KV_TRANSFER,
    STAGES,
    flags_in,
    gpu_memory_of,
    kv_transfer_config,
    ranks_of,
    value_of,
    without,
)
from tercet.protocol import BadRequest
from tercet.protocol.access import given_key, key_of
from tercet.protocol.entry_points import PARTS, provided
from tercet.settings import SECRET_VARIABLE
from tercet.settings.process_settings import (
    API_KEY_VARIABLE,
    ENGINE_NAME_VARIABLE,
    NO_DYNAMO,
    PREFILL_HOSTS_VARIABLE,
    PRELOAD,
    THREADS_BIND,
    spin_seconds,
)
from tercet.wire.exported_spans import TRACES_PROTOCOL, are_spans_wanted, endpoint_of, protocol_of
from tercet.wire.serving.server_access import require_key_beyond_loopback

PLAIN_SERVER = "vllm.entrypoints.openai.api_server"
FURTHER_NODE = "tercet.vllm_plugin.start.node"
HEADLESS = "--headless"
WITH_ONE_IMPORT = "tercet.vllm_plugin.start.server"
FLAGS_CHECK = "tercet.vllm_plugin.start.flags"
KV_EVENTS = "--kv-events-config"
_PUBLISHERS = {"0.0.0.0": "*", "": "*", "localhost": "127.0.0.1"}
_IPV4 = re.compile(r"[0-9]+(\.[0-9]+){3}")
# A verb waits for the running step, so on a CPU, where a step of 2048 tokens takes seconds, steps are short.
CPU_MAX_BATCHED_TOKENS = "512"
BUILT_IN_MAX_LEN = "2048"
DEVICE_ORDER = "CUDA_DEVICE_ORDER"
# Start method of vLLM's core and workers. By default vLLM forks them after this plugin has imported the worker's code
# with many libraries: if one of these calls CUDA during its import, the forked process cannot use CUDA.
START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
# These variables hide Python's warnings about vLLM's and PyTorch's code and about shared memory of a killed process,
# which Tercet removes, and PyTorch's C++ messages below errors.
_QUIET: Mapping[str, str] = {
    "PYTHONWARNINGS": ",".join((
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:multiprocessing.resource_tracker",
    )),
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}  # fmt: skip
# On a CPU vLLM allocates buffers for a pipeline stage's input while it warms up for compilation. `--enforce-eager`
# skips that, and the engine ends at its first request. This configuration warms up without compiling.
EAGER_STAGES: Mapping[str, str] = {"--compilation-config": '{"mode":1,"backend":"eager"}'}


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Description of one engine."""

    name: str
    model: str
    served_model_name: str
    host: str
    port: int
    # None means :func:`~tercet.cluster.devices.default_dtype`.
    dtype: str | None = None
    # The model is Tercet's built-in one.
    built_in: bool = False
    # Empty if an accelerator computes; ``gpus`` are then its devices.
    cores: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()
    # The engine's share of its devices' memory, from 0 to 1; None means vLLM's default.
    gpu_memory: float | None = None
    # KV memory of a CPU engine.
    kv_cache_gib: int = 1
    extra_args: tuple[str, ...] = ()
    # The profile of a simulated engine, which has ``options``.
    simulate: str | None = None
    options: Mapping[str, str] = {}
    # Engines that a request may name to prefill for this engine.
    prefill_hosts: str = ""


def with_places(specs: Sequence[EngineSpec]) -> list[EngineSpec]:
    """Return the specs of engines that start together, each with its cores on CPUs, or its devices or shares of them.

    The engines have the same flags; simulated ones get nothing. Raises :class:`~tercet.protocol.BadRequest` if the
    devices do not suffice.
    """
    replace, like = msgspec.structs.replace, specs[0]
    if like.simulate is not None:
        return list(specs)
    if devices := devices_for_engines():
        shares = plan_devices(devices, len(specs), ranks_of(like.extra_args), gpu_memory_of(like.extra_args))
        both = zip(specs, shares, strict=True)
        return [replace(spec, gpus=share.devices, gpu_memory=share.memory) for spec, share in both]
    groups = split_cores(sorted(os.sched_getaffinity(0)), len(specs))
    return [replace(spec, cores=cores) for spec, cores in zip(specs, groups, strict=True)]


def engine_argv(spec: EngineSpec, inherited: Mapping[str, str] = os.environ) -> list[str]:
    """Return the command line of the server process; the caller's vLLM flags come last and have precedence.

    The command is that of plain vLLM, unless one import of vLLM can serve all processes of the engine. Raises
    :class:`~tercet.protocol.BadRequest` for a ``--kv-transfer-config`` that cannot be merged with Tercet's.
    """
    argv = plain_argv(spec)
    # One import serves the processes of an engine that runs on cores that Tercet chose, if all of them read the same
    # values at import: without a pipeline, several servers or nodes, compiling, or another OpenMP than PyTorch's.
    given = {flag for flag, _ in flags_in(spec.extra_args)}
    several = {"--data-parallel-size", "-dp", "--nnodes", HEADLESS, "--api-server-count", "-asc",
               "--distributed-executor-backend"}  # fmt: skip
    compiled = {"--no-enforce-eager", "-O", "--optimization-level", "--compilation-config", "-cc"}
    if not spec.cores or spec.simulate is not None or value_of(spec.extra_args, *STAGES) not in (None, "1"):
        return argv
    if given & (several | compiled) or THREADS_BIND in inherited or "omp" in inherited.get(PRELOAD, ""):
        return argv
    return [WITH_ONE_IMPORT if part == PLAIN_SERVER else part for part in argv]


def plain_argv(spec: EngineSpec) -> list[str]:
    """Return :func:`engine_argv` with vLLM's own server, or without a server on further machines of an engine."""
    where = [
        "--model", spec.model, "--served-model-name", spec.served_model_name,
        "--host", spec.host, "--port", str(spec.port),
    ]  # fmt: skip
    if spec.simulate is not None:
        options = [part for key, value in spec.options.items() for part in ("--option", f"{key}={value}")]
        command = [sys.executable, "-m", "tercet.cli", "engine", "--simulate", spec.simulate, "--name", spec.name]
        return [*command, *where, *options]
    server = PLAIN_SERVER if value_of(spec.extra_args, HEADLESS) is None else FURTHER_NODE
    defaults = {"--uvicorn-log-level": "warning"}
    if (dtype := spec.dtype or default_dtype(cpu=bool(spec.cores))) is not None:
        defaults |= {"--dtype": dtype}
    if value_of(spec.extra_args, "--use-tqdm-on-load") is None:
        defaults |= {"--no-use-tqdm-on-load": ""}  # a progress bar is not a log line
    if spec.cores:
        staged = value_of(spec.extra_args, *STAGES) not in (None, "1")
        defaults |= EAGER_STAGES if staged else {"--enforce-eager": ""}
        defaults |= {"--max-num-batched-tokens": CPU_MAX_BATCHED_TOKENS}
    if spec.gpu_memory is not None:
        defaults |= {GPU_MEMORY: f"{spec.gpu_memory:g}"}
    if spec.built_in:
        defaults |= {"--max-model-len": BUILT_IN_MAX_LEN}
    # KV events at ports that the system chooses: engines of one machine must not compete for a number. Routers find
    # them in the engine's status. Not for data-parallel ranks, which need numbered ports, nor at an address that is not
    # IPv4, which vLLM's publisher needs.
    host, kv_events = _PUBLISHERS.get(spec.host, spec.host), list[str]()
    own = any(value_of(spec.extra_args, flag) is not None for flag in (KV_EVENTS, "--data-parallel-size", "-dp"))
    if not own and (host == "*" or _IPV4.fullmatch(host)):
        address = f"tcp://{host}:*"
        config = {"enable_kv_cache_events": True, "endpoint": address, "replay_endpoint": address}
        kv_events = [KV_EVENTS, json.dumps(config, separators=(",", ":"))]
    if are_spans_wanted():
        defaults |= {"--otlp-traces-endpoint": endpoint_of()}
    return [
        sys.executable, "-m", server, *where, "--disable-uvicorn-access-log",
        *(part for flag, value in defaults.items() if value_of(spec.extra_args, flag) is None
          for part in (flag, value) if part),
        KV_TRANSFER, kv_transfer_config(spec.extra_args), *kv_events,
        *without(spec.extra_args, KV_TRANSFER),
    ]  # fmt: skip


def flags_argv(spec: EngineSpec) -> list[str]:
    """Return the command by which vLLM checks the engine's flags; empty if the user gave it nothing to refuse."""
    if spec.simulate is not None or (spec.built_in and not spec.extra_args and spec.dtype is None):
        return []
    return [sys.executable, "-m", FLAGS_CHECK, *plain_argv(spec)[3:]]


def require_private(spec: EngineSpec, inherited: Mapping[str, str] = os.environ) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for settings that the engine would refuse after loading its model.

    Refused are verbs that other machines could call without a key, and several API servers.
    """
    given: dict[str, Any] = json.loads(kv_transfer_config(spec.extra_args)).get("kv_connector_extra_config") or {}
    keys = [key_of(inherited.get(name, ""), name) for name in (SECRET_VARIABLE, API_KEY_VARIABLE)]
    keys.append(key_of(str(given.get("secret", "")), "secret"))
    keys.append(given_key(value_of(spec.extra_args, "--api-key"), "--api-key"))
    if value_of(spec.extra_args, "--uds") is None:
        require_key_beyond_loopback(spec.host, keys)
    servers = value_of(spec.extra_args, "--api-server-count", "-asc")
    if servers not in (None, "1"):
        raise BadRequest(
            f"--api-server-count: must be 1, is {servers}: one API server keeps an engine's leases; leave it out",
            "--api-server-count",
        )


def engine_env(spec: EngineSpec, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables of the server process, in addition to inherited ones.

    Raises :class:`~tercet.protocol.BadRequest` if a variable of Tercet is invalid.
    """
    spin_seconds(inherited, on_cpu=bool(spec.cores))
    env = {"VLLM_PLUGINS": "tercet", ENGINE_NAME_VARIABLE: spec.name, "VLLM_NO_USAGE_STATS": "1"}
    if spec.prefill_hosts:
        env[PREFILL_HOSTS_VARIABLE] = spec.prefill_hosts
    if Path(spec.model).exists():
        env["HF_HUB_OFFLINE"] = "1"
    env |= {name: value for name, value in _QUIET.items() if name not in inherited}
    if are_spans_wanted(inherited):  # vLLM's default differs from the standard's
        env[TRACES_PROTOCOL] = protocol_of(inherited)
        # vLLM's spans get the engine's name, as Tercet's have, unless the user's variables name it.
        given = inherited.get("OTEL_RESOURCE_ATTRIBUTES", "")
        if "service.name" not in given:
            env["OTEL_SERVICE_NAME"] = inherited.get("OTEL_SERVICE_NAME") or "tercet-engine"
        if "service.instance.id" not in given:
            instance = f"service.instance.id={quote(spec.name)}"
            env["OTEL_RESOURCE_ATTRIBUTES"] = f"{given},{instance}" if given else instance
    if spec.cores:
        groups = split_cores(spec.cores, ranks_of(spec.extra_args))
        env["VLLM_CPU_KVCACHE_SPACE"] = str(spec.kv_cache_gib)
        env[THREADS_BIND] = "|".join(as_cpu_list(group) for group in groups)
        env["OMP_NUM_THREADS"] = str(len(groups[0]))
        # Even with `--enforce-eager`, PyTorch compiles the code that samples tokens and ranks log probabilities at its
        # first use, and blocks the engine for up to half a minute.
        if NO_DYNAMO not in inherited and value_of(spec.extra_args, "--no-enforce-eager") is None:
            env[NO_DYNAMO] = "1"
    # CUDA cannot be used in a forked process.
    if not spec.cores and spec.simulate is None and START_METHOD not in inherited:
        env[START_METHOD] = "spawn"
    if spec.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(spec.gpus)
        if DEVICE_ORDER not in inherited:  # otherwise CUDA numbers the fastest first, unlike nvidia-smi
            env[DEVICE_ORDER] = "PCI_BUS_ID"
    return env


def as_shell(argv: Sequence[str], env: Mapping[str, str]) -> str:
    """Return the command as a shell command line."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in env.items()]
    return " ".join([*variables, shlex.join(["python", *argv[1:]])])


GIB = 1 << 30
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
# With these flags the caller sets the KV memory, or the load format.
OWN_MEMORY = ("--kv-cache-memory-bytes", "--num-gpu-blocks-override", "--load-format")
BYTES: Mapping[str, int] = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
# Memory that an engine on CPUs maps before its weights and KV: PyTorch, vLLM, stacks of threads.
LIBRARIES = 5 * GIB // 2
CGROUP = Path("/sys/fs/cgroup")


def require_memory(specs: Sequence[EngineSpec], available: int | None = None) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` if the weights and KV of all CPU engines exceed the free memory.

    ``available`` is the free memory in bytes; None means the free memory of this machine and this control group.
    """
    needs = [needed for spec in specs if spec.cores and (needed := _needed(spec)) is not None]
    # A process that exceeds the limit of the address space fails in many ways, some after minutes.
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    mapped = LIBRARIES + max(map(sum, needs), default=0)
    if needs and allowed != resource.RLIM_INFINITY and allowed < mapped:
        raise BadRequest(
            f"ulimit: a process may map {allowed / GIB:.1f} GiB here (ulimit -v), and an engine maps at least "
            f"{mapped / GIB:.1f} GiB; run ulimit -v unlimited, or choose a smaller --kv-cache-gib or model",
            "kv-cache-gib",
        )
    free = available_memory() if available is None else available
    if not needs or sum(weights + kv for weights, kv in needs) <= free:
        return
    weights, kv = max(needs)
    engines = f"{len(needs)} engines with" if len(needs) > 1 else "an engine with"
    each = " each" if len(needs) > 1 else ""
    raise BadRequest(
        f"--kv-cache-gib: {engines} {weights / GIB:.1f} GiB of weights and {kv / GIB:.0f} GiB of KV{each} need "
        f"{sum(map(sum, needs)) / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free; choose a smaller --kv-cache-gib or "
        "model, or fewer engines",
        "kv-cache-gib",
    )


def shared_cores(specs: Sequence[EngineSpec]) -> str | None:
    """Return a warning if workers must share cores, which makes all of them slow; None otherwise."""
    workers = sum(ranks_of(spec.extra_args) for spec in specs if spec.cores)
    cores = len({core for spec in specs for core in spec.cores})
    if workers <= cores:
        return None
    return f"{workers} workers of engines share {cores} core{'s' if cores > 1 else ''}, so all of them will be slow"


def _needed(spec: EngineSpec) -> tuple[int, int] | None:
    """Return the least bytes of weights and of KV; None if the caller configures memory."""
    if any(value_of(spec.extra_args, flag) is not None for flag in OWN_MEMORY):
        return None
    checkpoint = Path(spec.model) if Path(spec.model).is_dir() else cached_snapshot(spec.model)
    weights = 0 if checkpoint is None else _weights(checkpoint, spec.dtype)
    return weights, spec.kv_cache_gib * GIB * ranks_of(spec.extra_args)


def _weights(checkpoint: Path, dtype: str | None) -> int:
    """Return the bytes of a checkpoint's weights in memory; of several file formats, only one is counted."""
    kinds = ([*checkpoint.glob(kind)] for kind in WEIGHTS)
    stored = next((files for files in kinds if files), list[Path]())
    size = sum(file.stat().st_size for file in stored)
    described: dict[str, Any] = {}
    with suppress(OSError, msgspec.DecodeError):
        described = msgspec.json.decode((checkpoint / "config.json").read_bytes(), type=dict[str, Any])
    had = BYTES.get(str(described.get("dtype") or described.get("torch_dtype")))
    wanted = BYTES.get(str(dtype))
    known = had is not None and wanted is not None and "quantization_config" not in described
    return size * wanted // had if known and wanted and had else size


def available_memory() -> int:
    """Return the bytes of memory that new processes can get on this machine."""
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError, KeyError):  # no control group, or one without a limit
        limit = int((CGROUP / "memory.max").read_text())
        used = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        free = min(free, limit - int(used["anon"]) - int(used["shmem"]) - int(used["kernel"]))
    return free


class SimulatedEnginePart(Protocol):
    """The part ``simulated-engine``."""

    def require_usable(self, profile: str, options: Mapping[str, str]) -> None:
        """Raise :class:`~tercet.protocol.BadRequest` for a profile that cannot be loaded, or wrong options."""
        ...

    def serve(self, spec: EngineSpec) -> None:
        """Serve a simulated engine until a signal."""
        ...


def simulated_engine() -> SimulatedEnginePart:
    """Import and return the part; raise :class:`~tercet.protocol.BadRequest` if its package is missing."""
    found: SimulatedEnginePart = provided(PARTS, "simulated-engine", "lab", "--simulate")
    return found
