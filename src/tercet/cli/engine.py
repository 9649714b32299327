"""``tercet engine``: run one engine in the foreground, or several that join a router and leave it at the end."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import typer

from tercet.aio import signals_to
from tercet.cli.setting_flags import (
    PARTS,
    VLLM_FLAGS,
    Dtype,
    Host,
    Model,
    ServedModelName,
    VLLMArgs,
    flags_as_records,
    given_as,
    require_defaults,
)
from tercet.cli.terminal import announce, note
from tercet.cluster.child_process import Process
from tercet.cluster.detached_fleets import log_directory
from tercet.cluster.devices import DeviceShare, devices_for_engines, pick_devices, plan_devices, split_cores
from tercet.cluster.engine_command import (
    EngineSpec,
    as_shell,
    check_engine_flags,
    engine_argv,
    engine_env,
    gpu_memory_of,
    plain_argv,
    ranks_of,
    require_memory,
    require_private,
    shared_cores,
    simulated_engine,
    value_of,
)
from tercet.cluster.joining import JoiningEngine, run_joined
from tercet.cluster.model import BUILT_IN, resolve_model, resolve_tokenizer
from tercet.cluster.model_hub import known_model
from tercet.cluster.ports import require_free, url_of
from tercet.protocol import BadRequest, Role
from tercet.protocol.access import key_of
from tercet.protocol.names import LAST_PORT, AllowedPrefillers, require_engine_name
from tercet.settings import SECRET_VARIABLE, key_values, require_url
from tercet.settings.process_settings import PREFILL_HOSTS_VARIABLE, THREADS_BIND


@dataclass(frozen=True)
class EngineFlags:
    """An engine to run, how to run it, and its membership of a running router's fleet."""

    model: Model = "smollm2"
    port: Annotated[int, typer.Option(min=1, max=LAST_PORT, help="Port of the HTTP server.")] = 8001
    host: Host = "127.0.0.1"
    name: Annotated[str | None, typer.Option(help="Name of the engine.", show_default="HOST:PORT")] = None
    dtype: Dtype = None
    served_model_name: ServedModelName = None
    kv_cache_gib: Annotated[int, typer.Option(min=1, help="KV memory of a CPU engine (GiB).")] = 1
    print_only: Annotated[bool, typer.Option("--print", help="Print the plain vLLM command and exit.")] = False
    simulate: Annotated[
        str | None,
        typer.Option(
            metavar="PROFILE", help="Profile of a simulated engine, which computes nothing; see `tercet bench profile`."
        ),
    ] = None
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Option of the simulated engine; needs --simulate. Repeatable."),
    ] = None
    prefill_hosts: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT,...",
            help="Engines that the header x-prefiller-host-port may name to prefill. HOST: an address, a network or "
            "a name, which may have *; PORT: a port, a range or *.",
            envvar=PREFILL_HOSTS_VARIABLE,
            show_envvar=False,
            show_default="none: the header is ignored",
        ),
    ] = None
    join: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="URL of a running router; the engine joins its fleet, and leaves it when it is stopped."
        ),
    ] = None
    role: Annotated[Role, typer.Option(help="Role of the engine in that fleet; needs --join.")] = "both"
    instances: Annotated[
        int, typer.Option(min=1, max=1024, help="Number of engines, at --port and the ports after it; needs --join.")
    ] = 1
    drain_timeout: Annotated[
        float,
        typer.Option(
            min=0, help="Longest time to move or finish sequences before the engine leaves (seconds); needs --join."
        ),
    ] = 25.0
    vllm_args: VLLMArgs = None

    def require_consistent(self) -> None:
        """Raise :class:`~tercet.protocol.BadRequest` for flags that exclude or need one another."""
        if self.join is None:
            require_defaults(self, "--join", "role", "instances", "drain_timeout")
        elif self.print_only:
            raise BadRequest("--print: cannot be combined with --join", "--print")
        if self.simulate is None:
            require_defaults(self, "--simulate", "option")
        if self.simulate is not None and (self.vllm_args or self.print_only):
            refused = "--print" if self.print_only else VLLM_FLAGS
            raise BadRequest(f"{refused}: cannot be combined with --simulate, which runs no vLLM", refused)


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
        shown = _with_devices(_with_model(spec))
        typer.echo(as_shell(plain_argv(shown), _environment(shown)))
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


_ANY_ADDRESS = ("", "0.0.0.0", "::")


def specs_of(spec: EngineSpec, instances: int) -> list[EngineSpec]:
    """Return ``instances`` specs like ``spec``, at consecutive ports, which share this machine's cores or devices."""
    shares, computes = [DeviceShare(())] * instances, spec.simulate is None
    devices = devices_for_engines() if computes else ()
    if devices:
        shares = plan_devices(devices, instances, ranks_of(spec.extra_args), gpu_memory_of(spec.extra_args))
    cores: Sequence[tuple[int, ...]] = [()] * instances
    if computes and not devices:
        cores = split_cores(sorted(os.sched_getaffinity(0)), instances)
    return [
        msgspec.structs.replace(
            spec,
            name=spec.name if instances == 1 else f"{spec.name}-{index}",
            port=spec.port + index,
            cores=cores[index],
            gpus=shares[index].devices,
            gpu_memory=shares[index].memory,
        )
        for index in range(instances)
    ]


def joining_specs(spec: EngineSpec, router: str, instances: int) -> list[EngineSpec]:
    """Return :func:`specs_of` engines that can join ``router``; raise :class:`~tercet.protocol.TercetError`."""
    require_url(router, "--join", "http://10.0.0.9:8000")
    if spec.host in _ANY_ADDRESS:
        raise BadRequest(
            f"--host: {spec.host!r} is not an address; give the one at which the router reaches the engine", "host"
        )
    specs = specs_of(spec, instances)
    for each in specs:
        require_private(each)
        require_free(each.host, each.port)
    return specs


def join_router(specs: Sequence[EngineSpec], router: str, role: Role, drain_seconds: float) -> None:
    """Run the engines of ``specs`` as members of the fleet of ``router`` until SIGINT or SIGTERM.

    Raises :class:`~tercet.protocol.TercetError`; exits with 130 or 143 after a signal.
    """
    require_memory(specs)
    logs = log_directory(None)
    announce(f"logs: {logs}")
    engines = [
        JoiningEngine(
            each.name,
            role,
            url_of(each.host, each.port),
            Process(each.name, engine_argv(each), {**engine_env(each)}, logs / f"{index}.log"),
        )
        for index, each in enumerate(specs)
    ]
    secret = key_of(os.environ.get(SECRET_VARIABLE, ""), SECRET_VARIABLE)
    asyncio.run(_run(engines, router, secret, drain_seconds))


async def _run(engines: Sequence[JoiningEngine], router: str, secret: str, drain_seconds: float) -> None:
    running = asyncio.ensure_future(
        run_joined(engines, router, secret, drain_seconds, lambda name, state: announce(f"  {name}: {state}"))
    )
    hurried: list[asyncio.Task[None]] = []

    def stop() -> None:
        announce("leaving the fleet; a second signal stops at once")
        running.cancel()

    def hurry() -> None:
        announce("stopping at once")
        hurried.extend(asyncio.ensure_future(each.process.hurry()) for each in engines)
        running.cancel()

    with signals_to(stop, hurry) as asked:
        try:
            await running
        except asyncio.CancelledError:
            await asyncio.gather(*hurried)
            sys.exit(128 + asked[0] if asked else 1)
