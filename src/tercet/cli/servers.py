"""``tercet engine``, ``tercet router`` and ``tercet rescheduler``: run one server in the foreground."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tercet.cli.given_names import PARTS, given_as
from tercet.cli.joining import join_router
from tercet.cli.router_access import require_private_router
from tercet.cli.setting_flags import VLLM_FLAGS, Dtype, Host, Model, ServedModelName, VLLMArgs, settings_command
from tercet.cli.terminal import note
from tercet.cluster.compute import devices_for_engines
from tercet.cluster.device_plan import pick_devices
from tercet.cluster.engine_command import (
    THREADS_BIND,
    EngineSpec,
    as_shell,
    check_flags,
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
from tercet.cluster.model_hub import known_model, require_model
from tercet.cluster.ports import require_free, url_of
from tercet.decisions.migration import policies_of
from tercet.decisions.scheduling import load_scheduling
from tercet.lab.sim import EngineOptions, Profile, load_profile, options_from
from tercet.lab.sim.sim_server import ServerConfig
from tercet.lab.sim.sim_server import serve as serve_simulated
from tercet.programs import load_program
from tercet.protocol import BadRequest, Role
from tercet.protocol.prefill_hosts import AllowedPrefillers
from tercet.router import serve
from tercet.router.rescheduler_server import serve_rescheduler
from tercet.router.workers import supervise
from tercet.settings import ReschedulerConfig, RouterConfig, key_values, require_url
from tercet.settings.prefill_settings import PREFILL_HOSTS_VARIABLE
from tercet.settings.verb_log import log_as_the_environment_says
from tercet.wire.client import engine_tls


def engine(
    model: Model = "smollm2",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the HTTP server.")] = 8001,
    host: Host = "127.0.0.1",
    name: Annotated[str | None, typer.Option(help="Name of the engine.", show_default="HOST:PORT")] = None,
    dtype: Dtype = None,
    served_model_name: ServedModelName = None,
    kv_cache_gib: Annotated[int, typer.Option(min=1, help="KV memory of a CPU engine (GiB).")] = 1,
    print_only: Annotated[bool, typer.Option("--print", help="Print the plain vLLM command and exit.")] = False,
    simulate: Annotated[
        str | None,
        typer.Option(
            metavar="PROFILE", help="Profile of a simulated engine, which computes nothing; see `tercet bench profile`."
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Option of the simulated engine; needs --simulate. Repeatable."),
    ] = None,
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
    ] = None,
    join: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="URL of a running router; the engine joins its fleet, and leaves it when it is stopped."
        ),
    ] = None,
    role: Annotated[Role, typer.Option(help="Role of the engine in that fleet; needs --join.")] = "both",
    instances: Annotated[
        int, typer.Option(min=1, max=1024, help="Number of engines, at --port and the ports after it; needs --join.")
    ] = 1,
    drain_timeout: Annotated[
        float,
        typer.Option(
            min=0, help="Longest time to move or finish sequences before the engine leaves (seconds); needs --join."
        ),
    ] = 25.0,
    vllm_args: VLLMArgs = None,
) -> None:
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
    _require_consistent(join, role, instances, print_only, option, simulate, vllm_args)
    spec = EngineSpec(
        name=name or f"{host}:{port}",
        model=resolve_model(model, note) if simulate is None else resolve_tokenizer(model),
        served_model_name=served_model_name or model,
        host=host,
        port=port,
        dtype=dtype,
        built_in=model == BUILT_IN,
        kv_cache_gib=kv_cache_gib,
        extra_args=tuple(vllm_args or ()),
        simulate=simulate,
        options=key_values(option, "--option"),
        prefill_hosts=prefill_hosts or "",
    )
    AllowedPrefillers(prefill_hosts or "", "--prefill-hosts")
    if join is not None:
        _join(spec, join, role, instances, drain_timeout)
    elif simulate is not None:
        require_private(spec)
        with given_as(PARTS):
            _simulate(spec, load_profile(simulate))
    else:
        _become_vllm(spec, print_only)


def _require_consistent(
    join: str | None, role: Role, instances: int, print_only: bool, option: list[str] | None, simulate: str | None,
    vllm_args: list[str] | None,
) -> None:  # fmt: skip
    """Raise :class:`~tercet.protocol.BadRequest` for flags of an engine that exclude or need one another."""
    if join is None and (role != "both" or instances != 1):
        raise BadRequest("--role, --instances: need --join", "--join")
    if join is not None and print_only:
        raise BadRequest("--print: cannot be combined with --join", "--print")
    if option and simulate is None:
        raise BadRequest("--option: needs --simulate", "--option")
    if simulate is not None and (vllm_args or print_only):
        refused = "--print" if print_only else VLLM_FLAGS
        raise BadRequest(f"{refused}: cannot be combined with --simulate, which runs no vLLM", refused)


def _join(spec: EngineSpec, router: str, role: Role, instances: int, drain_timeout: float) -> None:
    if spec.simulate is None:
        check_flags(spec.extra_args, VLLM_FLAGS)
        require_model(spec.model)
    else:
        load_profile(spec.simulate)
        options_from(EngineOptions(), spec.options)
    join_router(spec, router, role, instances, drain_timeout)


def _become_vllm(spec: EngineSpec, print_only: bool) -> None:
    check_flags(spec.extra_args, VLLM_FLAGS)
    spec = _with_devices(spec)
    argv, env = plain_argv(spec) if print_only else engine_argv(spec), engine_env(spec)
    if THREADS_BIND in os.environ:
        env = {name: value for name, value in env.items() if name not in (THREADS_BIND, "OMP_NUM_THREADS")}
    if print_only:
        typer.echo(as_shell(argv, env))
        return
    require_private(spec)
    require_model(spec.model)
    require_free(spec.host, spec.port)
    require_memory([spec])
    if (slow := shared_cores([spec])) is not None:
        note(slow)
    os.execvpe(argv[0], argv, {**os.environ, **env})


def _with_devices(spec: EngineSpec) -> EngineSpec:
    """Return ``spec`` with its cores or devices. Data-parallel ranks choose by number among all visible devices."""
    devices, args = devices_for_engines(), spec.extra_args
    if not devices:
        return msgspec.structs.replace(spec, cores=tuple(sorted(os.sched_getaffinity(0))))
    if value_of(args, "--data-parallel-size", "-dp") is not None:
        return spec
    picked = pick_devices(devices, ranks_of(args), gpu_memory_of(args))
    return msgspec.structs.replace(spec, gpus=picked.devices, gpu_memory=picked.memory)


def _simulate(spec: EngineSpec, profile: Profile) -> None:
    """Serve a simulated engine; the router uses the model's tokenizer and its longest sequence."""
    longest = min(profile.max_model_len, _positions(Path(spec.model)) or profile.max_model_len)
    config = ServerConfig(
        name=spec.name,
        profile=msgspec.structs.replace(profile, max_model_len=longest),
        options=options_from(EngineOptions(stream_every=1), spec.options),
        host=spec.host,
        port=spec.port,
        url=url_of(spec.host, spec.port),
        model=spec.served_model_name,
        root=spec.model,
        prefill_hosts=spec.prefill_hosts,
    )
    require_free(spec.host, spec.port)
    log_as_the_environment_says("info")
    serve_simulated(config)


def _positions(checkpoint: Path) -> int | None:
    """Return the model's longest sequence in tokens, which vLLM enforces; None if the model is not on this machine."""
    file = checkpoint / "config.json"
    return msgspec.json.decode(file.read_bytes()).get("max_position_embeddings") if file.is_file() else None


@settings_command(RouterConfig, rest="router-args")
def router(config: RouterConfig) -> None:
    """Run the router: one OpenAI endpoint for running engines.

    The router waits for engines that are still loading. Flags after `--` go to vLLM's OpenAI layer (chat template, tool
    parsers, API keys, ...).

    Examples:
    - `tercet router --engine http://127.0.0.1:8001,role=prefill --engine http://127.0.0.1:8002,role=decode`
    - `tercet router --engine http://10.0.0.5:8001,name=a --program data_parallel -- --api-key KEY`
    - `tercet router --engine http://127.0.0.1:8001 --engine http://127.0.0.1:8002 --program mine.py:split --dev`
    - `tercet router --engine http://127.0.0.1:8001,label.zone=a --scheduling my.yaml --program-arg pick=scheduled`
    - `tercet router --engine http://127.0.0.1:8001 --max-in-flight-per-engine 64 --max-queued 200 --queue-timeout 10`
    - `tercet router --endpoint-selector app=vllm`, in a pod of Kubernetes
    - `tercet router --config router.yaml`, with lines such as `engines: [http://127.0.0.1:8001]`
    """
    check_flags(config.vllm_args, VLLM_FLAGS)
    require_private_router(config)
    load_program(config.program, config.program_args)
    policies_of(config.reschedule)
    if config.scheduling is not None:
        load_scheduling(Path(config.scheduling).expanduser())
    engine_tls(config.engine_tls.ca, config.engine_tls.cert, config.engine_tls.key)
    known = known_model(config.model)
    require_free(config.host, config.port)
    model = resolve_tokenizer(known) if config.serves_without_vllm else resolve_model(known, note)
    config = msgspec.structs.replace(config, model=model, served_model_name=config.public_name)
    if config.workers > 1:
        raise typer.Exit(supervise(config))
    serve(config)


@settings_command(ReschedulerConfig)
def rescheduler(config: ReschedulerConfig) -> None:
    """Run one rescheduler for a fleet that several routers share.

    The rescheduler reads the sequences of all routers from the engines. When a policy proposes a move, it asks the
    router of the sequence to move it. The limits apply to all proposals together. A single router, also with several
    workers, runs its own rescheduler instead.

    Examples:
    - `tercet rescheduler --url http://10.0.0.1:8000 --reschedule decode_load`
    - `tercet rescheduler --reschedule binpack_consolidation --reschedule-interval 1 --max-moves-per-engine 4`
    """
    if not config.reschedule.policies:
        raise BadRequest("--reschedule: is required; give at least one policy", "--reschedule")
    policies_of(config.reschedule)
    require_url(config.url, "--url", "http://127.0.0.1:8000")
    serve_rescheduler(config)
