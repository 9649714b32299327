"""The command of an engine, vLLM's or a simulated one's: a pure function of its description.

And the flags that callers pass on to vLLM: which are set, and which are not theirs to set.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from tercet.cluster.compute import as_cpu_list, default_dtype, split_cores
from tercet.protocol import BadRequest
from tercet.protocol.bearer import key_of
from tercet.settings import SECRET_VARIABLE
from tercet.settings.prefill_settings import PREFILL_HOSTS_VARIABLE
from tercet.settings.variables import API_KEY_VARIABLE, ENGINE_NAME_VARIABLE
from tercet.vllm_plugin.worker.queue_waiting import spin_seconds
from tercet.wire.exported_spans import TRACES_PROTOCOL, are_spans_wanted, endpoint_of, protocol_of
from tercet.wire.serving.server_access import require_key_beyond_loopback

KV_TRANSFER = "--kv-transfer-config"
# Tercet uses these to find the server; as vLLM flags they would move it elsewhere.
_TERCETS_OWN = ("--model", "--served-model-name", "--host", "--port")


def check_flags(args: Sequence[str], where: str) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for flags that cannot be passed on; ``where`` names their source.

    vLLM checks everything else.
    """
    if args and not args[0].startswith("-"):
        raise BadRequest(f"{where}: {args[0]!r} is not a flag; vLLM's own flags begin with one", where)
    for flag, _ in _flags(args):
        if flag in _TERCETS_OWN:
            raise BadRequest(f"{where}: {flag} is Tercet's own; give it before the --, or as a separate key", where)


def value_of(args: Sequence[str], *names: str) -> str | None:
    """The last value of a flag under any of its ``names`` in ``args``; ``""`` if it has none."""
    return next((value for flag, value in reversed(list(_flags(args))) if flag in names), None)


def without(args: Sequence[str], name: str) -> list[str]:
    """Return ``args`` without one flag that takes a value."""
    kept: list[str] = []
    skip = False
    for arg in args:
        if skip:
            skip = False
        elif _spelling(arg) == name:
            skip = "=" not in arg
        else:
            kept.append(arg)
    return kept


def _flags(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each flag with its value, whether written ``--flag value`` or ``--flag=value``."""
    for index, arg in enumerate(args):
        if not arg.startswith("-"):
            continue
        _, equals, value = arg.partition("=")
        following = args[index + 1] if index + 1 < len(args) else ""
        yield _spelling(arg), value if equals else "" if following.startswith("-") else following


def _spelling(arg: str) -> str:
    """A flag's name as vLLM documents it; ``--max_model_len`` is accepted too."""
    return arg.split("=", 1)[0].replace("_", "-") if arg.startswith("--") else arg.split("=", 1)[0]


PLAIN_SERVER = "vllm.entrypoints.openai.api_server"
FURTHER_NODE = "tercet.vllm_plugin.start.node"
HEADLESS = "--headless"
WITH_ONE_IMPORT = "tercet.vllm_plugin.start.server"
KV_EVENTS = "--kv-events-config"
_PUBLISHERS = {"0.0.0.0": "*", "": "*", "localhost": "127.0.0.1"}
_IPV4 = re.compile(r"[0-9]+(\.[0-9]+){3}")
THREADS_BIND = "VLLM_CPU_OMP_THREADS_BIND"
# With `--enforce-eager`, PyTorch still compiles the code that samples tokens and ranks log probabilities, at the first
# use of each, while the engine is blocked for up to half a minute.
NO_DYNAMO = "TORCHDYNAMO_DISABLE"
KV_TRANSFER_CONFIG: Mapping[str, str] = {
    "kv_connector": "TercetConnector",
    "kv_connector_module_path": "tercet.vllm_plugin.connector",
    "kv_role": "kv_both",
}
# A verb waits for the running step, so on a CPU, where a step of 2048 tokens takes seconds, steps are short.
CPU_MAX_BATCHED_TOKENS = "512"
BUILT_IN_MAX_LEN = "2048"
GPU_MEMORY = "--gpu-memory-utilization"
DEVICE_ORDER = "CUDA_DEVICE_ORDER"
# vLLM's start method of its core and its workers. By its default it forks them, after this plugin has imported the
# worker's code with many libraries: if one of them calls CUDA when it is imported, the forked process cannot use CUDA.
START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
# Python's warnings about vLLM's and PyTorch's code, and about shared memory of a killed owner, which is removed here;
# and PyTorch's C++ messages below errors.
_QUIET: Mapping[str, str] = {
    "PYTHONWARNINGS": ",".join((
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:multiprocessing.resource_tracker",
    )),
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}  # fmt: skip
STAGES = ("--pipeline-parallel-size", "-pp")
# On a CPU vLLM allocates buffers for a pipeline stage's input when it warms up for compilation, which `--enforce-eager`
# leaves out: such an engine ends at its first request. This compiles nothing, and warms up.
EAGER_STAGES: Mapping[str, str] = {"--compilation-config": '{"mode":1,"backend":"eager"}'}


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One engine. ``cores`` are empty if an accelerator computes; ``gpus`` are then its devices.

    ``gpu_memory`` is its share of their memory, vLLM's default if not given.

    ``dtype`` is :func:`~tercet.cluster.compute.default_dtype` by default, if that is not None. ``kv_cache_gib`` is the
    KV memory of a CPU engine. ``built_in``: the model is Tercet's small one. ``simulate``: the profile of a simulated
    engine, with its ``options``. ``prefill_hosts`` are the engines that may be named to prefill for it.
    """

    name: str
    model: str
    served_model_name: str
    host: str
    port: int
    dtype: str | None = None
    built_in: bool = False
    cores: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()
    gpu_memory: float | None = None
    kv_cache_gib: int = 1
    extra_args: tuple[str, ...] = ()
    simulate: str | None = None
    options: Mapping[str, str] = {}
    prefill_hosts: str = ""


def engine_argv(spec: EngineSpec, inherited: Mapping[str, str] = os.environ) -> list[str]:
    """Arguments of the server process; the caller's vLLM flags come last and have precedence.

    It is the plain vLLM command, unless one import of vLLM can serve all processes of the engine. Raises
    :class:`~tercet.protocol.BadRequest` for a ``--kv-transfer-config`` that cannot be merged with Tercet's.
    """
    argv = plain_argv(spec)
    return (
        [WITH_ONE_IMPORT if part == PLAIN_SERVER else part for part in argv]
        if _one_import_serves(spec, inherited)
        else argv
    )


def plain_argv(spec: EngineSpec) -> list[str]:
    """:func:`engine_argv` with vLLM's own server in any case, or without one: on an engine's further machines."""
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
    if are_spans_wanted():
        defaults |= {"--otlp-traces-endpoint": endpoint_of()}
    return [
        sys.executable, "-m", server, *where, "--disable-uvicorn-access-log",
        *(part for flag, value in defaults.items() if value_of(spec.extra_args, flag) is None
          for part in (flag, value) if part),
        KV_TRANSFER, kv_transfer_config(spec.extra_args), *kv_events_flag(spec),
        *without(spec.extra_args, KV_TRANSFER),
    ]  # fmt: skip


def _one_import_serves(spec: EngineSpec, inherited: Mapping[str, str]) -> bool:
    """Whether the engine runs on cores that Tercet chose, and all its processes read the same values at import.

    That is so if it has no pipeline and compiles nothing, and if no other OpenMP than PyTorch's is requested.
    """
    given = [flag for flag, _ in _flags(spec.extra_args)]
    several = {"--data-parallel-size", "-dp", "--nnodes", HEADLESS, "--api-server-count", "-asc",
               "--distributed-executor-backend"}  # fmt: skip
    compiled = {"--no-enforce-eager", "-O", "--optimization-level", "--compilation-config", "-cc"}
    return (
        bool(spec.cores)
        and spec.simulate is None
        and value_of(spec.extra_args, *STAGES) in (None, "1")
        and not {*given} & (several | compiled)
        and THREADS_BIND not in inherited
        and "omp" not in inherited.get("LD_PRELOAD", "")
    )


def require_private(spec: EngineSpec, inherited: Mapping[str, str] = os.environ) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` at once for what the engine would refuse after loading its model.

    That is: verbs that other machines could call without a key, and several API servers.
    """
    given: dict[str, Any] = json.loads(kv_transfer_config(spec.extra_args)).get("kv_connector_extra_config") or {}
    keys = [key_of(inherited.get(name, ""), name) for name in (SECRET_VARIABLE, API_KEY_VARIABLE)]
    keys.append(key_of(str(given.get("secret", "")), "secret"))
    keys.append(key_of(value_of(spec.extra_args, "--api-key") or "", "--api-key"))
    if value_of(spec.extra_args, "--uds") is None:
        require_key_beyond_loopback(spec.host, keys)
    servers = value_of(spec.extra_args, "--api-server-count", "-asc")
    if servers not in (None, "1"):
        raise BadRequest(
            f"--api-server-count: is {servers}, and one API server keeps the leases of an engine; leave it out",
            "--api-server-count",
        )


def kv_transfer_config(args: Sequence[str]) -> str:
    """Tercet's ``--kv-transfer-config``, with the caller's keys (such as ``kv_connector_extra_config``) added."""
    text = value_of(args, KV_TRANSFER)
    if text is None:
        return json.dumps(KV_TRANSFER_CONFIG, separators=(",", ":"))
    try:
        given = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise BadRequest(f"{KV_TRANSFER}: {error}", KV_TRANSFER) from error
    for key, needed in KV_TRANSFER_CONFIG.items():
        if given.get(key, needed) != needed:
            raise BadRequest(f"{KV_TRANSFER}: {key} must be {needed}, not {given[key]}", KV_TRANSFER)
    return json.dumps({**KV_TRANSFER_CONFIG, **given}, separators=(",", ":"))


def kv_events_flag(spec: EngineSpec) -> list[str]:
    """vLLM's KV events at ports that the system chooses; routers find them in the engine's status.

    Not added if the caller configures them, with several data-parallel ranks, which need numbered ports, or if vLLM's
    publisher cannot listen: it needs an IPv4 address.
    """
    host = _PUBLISHERS.get(spec.host, spec.host)
    own = any(value_of(spec.extra_args, flag) is not None for flag in (KV_EVENTS, "--data-parallel-size", "-dp"))
    if own or not (host == "*" or _IPV4.fullmatch(host)):
        return []
    address = f"tcp://{host}:*"
    config = {"enable_kv_cache_events": True, "endpoint": address, "replay_endpoint": address}
    return [KV_EVENTS, json.dumps(config, separators=(",", ":"))]


def engine_env(spec: EngineSpec, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment variables of the server process, in addition to those that it inherits.

    Raises :class:`~tercet.protocol.BadRequest` for an invalid one of Tercet's variables.
    """
    spin_seconds(inherited, on_cpu=bool(spec.cores))
    env = {"VLLM_PLUGINS": "tercet", ENGINE_NAME_VARIABLE: spec.name, "VLLM_NO_USAGE_STATS": "1"}
    if spec.prefill_hosts:
        env[PREFILL_HOSTS_VARIABLE] = spec.prefill_hosts
    if Path(spec.model).exists():
        env["HF_HUB_OFFLINE"] = "1"
    env |= {name: value for name, value in _QUIET.items() if name not in inherited}
    if are_spans_wanted(inherited):  # vLLM has another default than the standard's
        env[TRACES_PROTOCOL] = protocol_of(inherited)
        env |= _named_in_traces(spec.name, inherited)
    if spec.cores:
        groups = split_cores(spec.cores, ranks_of(spec.extra_args))
        env["VLLM_CPU_KVCACHE_SPACE"] = str(spec.kv_cache_gib)
        env[THREADS_BIND] = "|".join(as_cpu_list(group) for group in groups)
        env["OMP_NUM_THREADS"] = str(len(groups[0]))
        if NO_DYNAMO not in inherited and not any(_spelling(arg) == "--no-enforce-eager" for arg in spec.extra_args):
            env[NO_DYNAMO] = "1"
    if not spec.cores and spec.simulate is None and START_METHOD not in inherited:
        env[START_METHOD] = "spawn"
    if spec.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(spec.gpus)
        if DEVICE_ORDER not in inherited:  # otherwise CUDA numbers the fastest first, unlike nvidia-smi
            env[DEVICE_ORDER] = "PCI_BUS_ID"
    return env


def _named_in_traces(name: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """What gives vLLM's own spans the engine's name, as Tercet's have it, unless the user's variables name them."""
    given, env = inherited.get("OTEL_RESOURCE_ATTRIBUTES", ""), dict[str, str]()
    if "service.name" not in given:
        env["OTEL_SERVICE_NAME"] = inherited.get("OTEL_SERVICE_NAME") or "tercet-engine"
    if "service.instance.id" not in given:
        env["OTEL_RESOURCE_ATTRIBUTES"] = ",".join(filter(None, (given, f"service.instance.id={quote(name)}")))
    return env


def ranks_of(args: Sequence[str]) -> int:
    """How many workers vLLM starts for an engine with these flags."""
    ranks = 1
    for flag, short in (("--tensor-parallel-size", "-tp"), STAGES):
        value = value_of(args, flag, short)
        if value is None:
            continue
        if not value.isdigit() or int(value) < 1:
            raise BadRequest(f"{flag}: {value!r} is not a positive number", flag)
        ranks *= int(value)
    return ranks


def gpu_memory_of(args: Sequence[str]) -> float | None:
    """An engine's share of a device's memory in these flags, if set."""
    value = value_of(args, GPU_MEMORY)
    if value is None:
        return None
    try:
        share = float(value)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise BadRequest(f"{GPU_MEMORY}: {value!r} is not a share from 0 to 1", GPU_MEMORY)
    return share


def as_shell(argv: Sequence[str], env: Mapping[str, str]) -> str:
    """The command as a shell command line."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in env.items()]
    return " ".join([*variables, shlex.join(["python", *argv[1:]])])
