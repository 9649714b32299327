"""``tercet engine``: run one engine in the foreground."""

from __future__ import annotations

import os

import msgspec
import typer

from tercet.cli.engine_flags import EngineFlags
from tercet.cli.flag_records import flags_as_records
from tercet.cli.given_names import PARTS, given_as
from tercet.cli.joining import join_router, joining_specs
from tercet.cli.setting_flags import VLLM_FLAGS
from tercet.cli.simulated import simulated_engine
from tercet.cli.terminal import note
from tercet.cluster.compute import devices_for_engines
from tercet.cluster.device_plan import pick_devices
from tercet.cluster.engine_command import (
    EngineSpec,
    as_shell,
    check_engine_flags,
    engine_argv,
    engine_env,
    gpu_memory_of,
    plain_argv,
    ranks_of,
    require_private,
    value_of,
)
from tercet.cluster.foresight import require_memory, shared_cores
from tercet.cluster.model import BUILT_IN, resolve_model, resolve_tokenizer
from tercet.cluster.model_hub import known_model
from tercet.cluster.ports import require_free
from tercet.protocol.hosts import AllowedPrefillers
from tercet.protocol.names import require_engine_name
from tercet.settings import key_values
from tercet.settings.variables import THREADS_BIND


@flags_as_records
def engine(given: EngineFlags) -> None:
    """Run one engine: a standard vLLM server that also offers the verbs.

    On a CPU the engine computes on every core that this command may use. Choose them with `taskset`; or, to leave some
    cores to its other processes, with `VLLM_CPU_OMP_THREADS_BIND`, as for vLLM. This command becomes the server:
    signals go to vLLM itself.

    Examples:
    - `tercet engine --port 8001`
    - `taskset -c 0-7 tercet engine --model ~/models/qwen --port 8002 --name p0 -- --max-num-seqs 32`
    - `tercet engine --model Qwen/Qwen3-0.6B --print`
    - `tercet engine --simulate llama-3.1-8b-h100-tp1 --port 8002`
    - `tercet engine --host 10.0.0.7 --join http://10.0.0.9:8000 --role decode`
    """
    given.require_consistent()
    spec = _spec_of(given)
    _require_usable(spec)
    if given.join is not None:
        _require_model(spec)
        # The conversion of the built-in model takes long, so what prevents a start is found before it.
        specs = joining_specs(spec, given.join, given.instances)
        join_router([_with_model(each) for each in specs], given.join, given.role, given.drain_timeout)
    elif given.print_only:
        _print(_with_devices(_with_model(spec)))
    else:
        require_private(spec)
        _require_model(spec)
        require_free(spec.host, spec.port)
        serve = _become_vllm if spec.simulate is None else simulated_engine().serve
        serve(_with_model(spec))


def _spec_of(given: EngineFlags) -> EngineSpec:
    """Return the engine of these flags, without cores or devices; its model is the name that was given."""
    if given.name is not None:
        require_engine_name(given.name, "--name")
    return EngineSpec(
        name=given.name or f"{given.host}:{given.port}",
        model=given.model,
        served_model_name=given.served_model_name or given.model,
        host=given.host,
        port=given.port,
        dtype=given.dtype,
        built_in=given.model == BUILT_IN,
        kv_cache_gib=given.kv_cache_gib,
        extra_args=tuple(given.vllm_args or ()),
        simulate=given.simulate,
        options=key_values(given.option, "--option"),
        prefill_hosts=given.prefill_hosts or "",
    )


@given_as(PARTS)
def _require_usable(spec: EngineSpec) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for flags with wrong values, whatever runs on this machine."""
    AllowedPrefillers(spec.prefill_hosts, "--prefill-hosts")
    check_engine_flags(spec.extra_args, VLLM_FLAGS)
    if spec.simulate is not None:
        simulated_engine().require_usable(spec.simulate, spec.options)


def _require_model(spec: EngineSpec) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for a model that does not exist; the built-in one is not converted."""
    if spec.simulate is None:
        known_model(spec.model)
    else:
        resolve_tokenizer(spec.model)


def _with_model(spec: EngineSpec) -> EngineSpec:
    """Return ``spec`` with the model to load; the built-in model may be converted first."""
    resolved = resolve_model(spec.model, note) if spec.simulate is None else resolve_tokenizer(spec.model)
    return msgspec.structs.replace(spec, model=resolved)


def _print(spec: EngineSpec) -> None:
    typer.echo(as_shell(plain_argv(spec), _environment(spec)))


def _become_vllm(spec: EngineSpec) -> None:
    spec = _with_devices(spec)
    require_memory([spec])
    if (slow := shared_cores([spec])) is not None:
        note(slow)
    argv = engine_argv(spec)
    os.execvpe(argv[0], argv, {**os.environ, **_environment(spec)})


def _environment(spec: EngineSpec) -> dict[str, str]:
    """Return the variables of the engine's process; the caller's own binding of threads to cores is kept."""
    env = engine_env(spec)
    if THREADS_BIND in os.environ:
        return {name: value for name, value in env.items() if name not in (THREADS_BIND, "OMP_NUM_THREADS")}
    return {**env}


def _with_devices(spec: EngineSpec) -> EngineSpec:
    """Return ``spec`` with its cores or devices. Data-parallel ranks choose by number among all visible devices."""
    devices, args = devices_for_engines(), spec.extra_args
    if not devices:
        return msgspec.structs.replace(spec, cores=tuple(sorted(os.sched_getaffinity(0))))
    if value_of(args, "--data-parallel-size", "-dp") is not None:
        return spec
    picked = pick_devices(devices, ranks_of(args), gpu_memory_of(args))
    return msgspec.structs.replace(spec, gpus=picked.devices, gpu_memory=picked.memory)
