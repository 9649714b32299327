"""A fleet on this machine: engines and a router, started together and stopped together."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tercet.aio.files import write_whole
from tercet.cluster.child_process import (
    GRACE_SECONDS,
    ROUTER,
    Process,
    StartFailed,
    can_fork,
    describe_exit,
    warm_parent,
)
from tercet.cluster.detached_fleets import log_directory, usable_directory
from tercet.cluster.devices import Device, devices_for_engines, pick_devices
from tercet.cluster.engine_command import (
    EngineSpec,
    engine_argv,
    engine_env,
    flags_argv,
    require_memory,
    shared_cores,
    with_places,
)
from tercet.cluster.model import BUILT_IN
from tercet.cluster.ports import free_ports, require_free, url_of
from tercet.cluster.running_fleet import (
    LOADING,
    READY_SECONDS,
    KeptRouter,
    OnEvent,
    Restarts,
    RouterAdmin,
    RunningEngine,
    RunningFleet,
)
from tercet.cluster.up_config import UpConfig
from tercet.cluster.vllm_flags import gpu_memory_of, is_group, rank_flags, ranks_of, value_of
from tercet.protocol import BadRequest, Role
from tercet.settings import DiscoverySettings, EngineAddress, RouterConfig, RouterSettings, declared, encode_settings
from tercet.settings.process_settings import (
    ALL_ENGINES_VARIABLE,
    API_KEY_VARIABLE,
    COLD,
    LOGS_VARIABLE,
    WARM_PARENT_VARIABLE,
)

T = TypeVar("T")
# Only the router calls engines, and their control endpoints need no key.
ENGINE_HOST = "127.0.0.1"
STATE = "router-state.json"
NOTHING_TO_FIND = DiscoverySettings()
SHARED = frozenset({"secret", "access-log", "log-format"})


@asynccontextmanager
async def local_fleet(
    config: UpConfig, model: str, on_event: OnEvent, hurry: asyncio.Event | None = None
) -> AsyncGenerator[RunningFleet]:
    """Start the fleet that ``config`` describes, with the checkpoint at ``model``; stop all of it on exit.

    The caller keeps the engines running by :meth:`~tercet.cluster.running_fleet.RunningFleet.until_broken`. The router
    is stopped first, and finishes running requests; once ``hurry`` is set it ends at once. ``on_event(process, state)``
    is called with each process's states. Raises :class:`~tercet.cluster.child_process.StartFailed` if a process does
    not become ready, and :class:`~tercet.protocol.BadRequest` for an unusable address or log directory.
    """
    specs = engine_specs(config, model)
    # Everything that may be refused is checked before the first process starts.
    if config.port:
        require_free(config.host, config.port)
    for index in range(config.workers if config.stream_port else 0):
        require_free(ENGINE_HOST, config.stream_port + index, "stream-port")
    require_memory(specs)
    if (slow := shared_cores(specs)) is not None:
        on_event("note", slow)
    log_dir = log_directory(config.log_dir)
    if config.batches.directory is not None:
        with usable_directory(Path(config.batches.directory).expanduser(), "batches"):  # noqa: ASYNC240 - at start
            pass  # the router makes its files there
    # The warm parent of these engines: the one in a variable, or a new one; None if no engine can use it. Engines with
    # the same number of cores as the first one use it; others import vLLM themselves. Simulated engines alone get no
    # new one, since they do not import vLLM.
    named, warm = os.environ.get(WARM_PARENT_VARIABLE, ""), None
    usable = [spec for spec in specs if can_fork(engine_argv(spec))]
    async with AsyncExitStack() as imports:
        if named and named != COLD and usable:
            warm = Path(named)
        elif not named and any(spec.simulate is None for spec in usable):
            parent = warm_parent(engine_env(specs[0]), specs[0].model, log_dir / "imports.log")
            warm = await imports.enter_async_context(parent)
        await require_flags(specs[0], shared_environment(config), log_dir / "flags.log", warm, on_event)
        fleet = fleet_of(config, model, specs, log_dir, warm, on_event)
        try:
            # The router loads in parallel to the engines and waits for them.
            queues = starting_queues(specs, fleet.engines)
            for process in (*(queue[0].process for queue in queues), fleet.router):
                await process.start()
                on_event(process.name, LOADING)
            async with asyncio.TaskGroup() as group:
                for queue in queues:
                    group.create_task(_until_all_ready(queue, on_event))
                group.create_task(fleet.kept_router.until_ready(on_event))
            yield fleet
        except* StartFailed as failures:
            raise failures.exceptions[0] from None
        finally:
            # Shielded: a second cancellation must not leave engines behind that hold devices and ports.
            await asyncio.shield(fleet.stop(on_event, hurry or asyncio.Event()))


async def require_flags(
    spec: EngineSpec, environment: Mapping[str, str], log: Path, warm: Path | None, on_event: OnEvent
) -> None:
    """Have vLLM read the flags of the fleet's engines before one starts.

    Raises :class:`~tercet.cluster.child_process.StartFailed` for flags or a model that vLLM refuses.
    """
    if not (argv := flags_argv(spec)):
        return
    forks = warm if can_fork(engine_argv(spec)) else None
    check = Process("engines", argv, {**engine_env(spec), **environment}, log, warm=forks)
    try:
        await check.start()
        on_event(check.name, f"{LOADING}: vLLM checks the flags")
        async with asyncio.timeout(READY_SECONDS):
            code = await check.ended()
    except TimeoutError:
        raise check.failure(f"were not checked after {READY_SECONDS:.0f} s") from None
    finally:
        await asyncio.shield(check.stop())
    if code:
        raise check.failure(describe_exit(code))
    on_event(check.name, "vLLM accepts the flags")


def fleet_of(
    config: UpConfig, model: str, specs: Sequence[EngineSpec], log_dir: Path, warm: Path | None, on_event: OnEvent
) -> RunningFleet:
    """Return the fleet that ``config`` describes; its processes are not started yet."""
    environment = shared_environment(config)

    def launch(spec: EngineSpec, role: Role) -> RunningEngine:
        argv, log = engine_argv(spec), log_dir / f"{spec.name}.log"
        forks = warm if can_fork(argv) else None
        process = Process(spec.name, argv, {**engine_env(spec), **environment}, log, warm=forks)
        restarts = Restarts(0 if is_group(spec.extra_args) else config.engine_restarts)
        return RunningEngine(spec.name, url_of(spec.host, spec.port), process, restarts, role=role)

    engines = [launch(spec, role) for spec, (_, role) in zip(specs, config.engine_roles, strict=True)]
    port = config.port or free_ports(config.host, 1)[0]
    # For this process's own calls of the router: it adds and removes engines, whatever keys operators have set.
    key = secrets.token_urlsafe()
    addresses = [EngineAddress(engine.name, engine.url, engine.role) for engine in engines]
    settings = router_config(config, model, port, addresses, log_dir, supervisor_key=key)
    router = router_of(config, settings, log_dir, warm)
    changed = asyncio.Event()
    provisioner = LocalProvisioner(engines, changed, specs, launch, RouterAdmin(router.url, key), on_event)
    return RunningFleet(router.url, engines, router, log_dir, provisioner, changed)


def shared_environment(config: UpConfig) -> dict[str, str]:
    """Return the variables of every engine: the fleet's secret and the log settings. An engine's flags are vLLM's."""
    given = encode_settings(config)
    return {each.env: _as_text(given[each.key]) for each in declared(UpConfig) if each.key in SHARED & given.keys()}


def _as_text(value: Any) -> str:
    return str(int(value) if isinstance(value, bool) else value)


def starting_queues(specs: Sequence[EngineSpec], engines: Sequence[T]) -> list[list[T]]:
    """Return queues of engines; the first engine of each queue starts at once, the next one when it is ready.

    The engines of a queue share their devices. vLLM reads a device's free memory while it starts, and would count
    another engine's allocations at that time as its own.
    """
    queues: dict[tuple[str, ...], list[T]] = {}
    alone: list[list[T]] = []
    for spec, engine in zip(specs, engines, strict=True):
        if spec.gpus:
            queues.setdefault(spec.gpus, []).append(engine)
        else:
            alone.append([engine])
    return [*queues.values(), *alone]


async def _until_all_ready(queue: Sequence[RunningEngine], on_event: OnEvent) -> None:
    """Start the engines of one queue one after the other; the first one has been started already."""
    for place, engine in enumerate(queue):
        if place:
            await engine.process.start()
            on_event(engine.name, LOADING)
        await engine.until_ready(on_event)


def engine_specs(config: UpConfig, model: str) -> list[EngineSpec]:
    """Return every engine's description: with cores on CPUs, devices or shares of them on GPUs, or for simulation."""
    count = len(config.engine_roles)
    ports = free_ports(ENGINE_HOST, count)
    ranks = rank_flags(config.engine_args, count, ENGINE_HOST)
    return with_places([
        EngineSpec(
            name=name, model=model, served_model_name=config.public_name, host=ENGINE_HOST, port=port,
            dtype=config.dtype, built_in=config.model == BUILT_IN, kv_cache_gib=config.kv_cache_gib,
            extra_args=(*lora_flags(config), *config.engine_args, *of_rank), simulate=config.simulate,
            options=config.options,
        )
        for (name, _), port, of_rank in zip(config.engine_roles, ports, ranks, strict=True)
    ])  # fmt: skip


def lora_flags(config: UpConfig) -> tuple[str, ...]:
    """Return vLLM's flags for the fleet's LoRA adapters, which every engine loads at start."""
    modules = [f"{name}={path}" for name, path in config.lora_modules.items()]
    return ("--enable-lora", "--lora-modules", *modules) if modules else ()


def router_config(
    config: UpConfig, model: str, port: int, engines: Sequence[EngineAddress], log_dir: Path | None = None,
    discovery: DiscoverySettings = NOTHING_TO_FIND, supervisor_key: str = "",
) -> RouterConfig:  # fmt: skip
    """Return the router's settings: those of every router, and this fleet's; its state is in ``log_dir``, if given."""
    fields: dict[str, Any] = {name: getattr(config, name) for name in RouterSettings.__struct_fields__}
    # Without a secret, engines of this machine require the API key in their environment or flags.
    shown = value_of(config.engine_args, "--api-key") or os.environ.get(API_KEY_VARIABLE, "").strip()
    fields |= {
        "openai_layer": "small" if config.serves_without_vllm else "vllm", "secret": config.secret or shown,
        "model": model, "served_model_name": config.public_name, "port": port, "engines": tuple(engines),
        "discovery": discovery, "supervisor_key": supervisor_key,
        "state": None if log_dir is None else str(log_dir / STATE),
    }  # fmt: skip
    return RouterConfig(**fields)


def router_of(config: UpConfig, settings: RouterConfig, log_dir: Path, warm: Path | None = None) -> KeptRouter:
    """Return the router with these ``settings``; it is not started yet."""
    # A router that read the state of an earlier fleet would serve by engines that are not there any more.
    for old in log_dir.glob(f"{STATE}*"):  # of an earlier fleet with this log directory
        if old.is_file():
            old.unlink()
    argv = router_argv(settings, log_dir)
    env = {**router_env(settings.model), LOGS_VARIABLE: str(log_dir)}
    url = url_of(settings.host, settings.port)
    if value_of(settings.vllm_args, "--ssl-certfile") is not None:
        url = url.replace("http://", "https://", 1)
    log, grace = log_dir / "router.log", config.shutdown_timeout_s + GRACE_SECONDS
    process = Process("router", argv, env, log, grace=grace, warm=warm)
    process.at_first = {ALL_ENGINES_VARIABLE: "1"}
    return KeptRouter("router", url, process, Restarts(config.engine_restarts))


def router_argv(config: RouterConfig, log_dir: Path) -> list[str]:
    """Return the router's command, and write its settings, with keys, to a file that only this user can read."""
    file = log_dir / "router.json"
    write_whole(file, msgspec.json.format(msgspec.json.encode(encode_settings(config))))
    return [sys.executable, "-c", ROUTER, str(file)]


def router_env(model: str) -> dict[str, str | None]:
    """Return the router's environment without settings, since the file of settings already includes the variables."""
    env = {each.env: None for each in declared(RouterConfig)} | {"VLLM_NO_USAGE_STATS": "1"}
    return {**env, "HF_HUB_OFFLINE": "1"} if Path(model).is_dir() else env


LaunchEngine = Callable[[EngineSpec, Role], RunningEngine]


def next_spec(
    like: EngineSpec, name: str, port: int, taken: Sequence[EngineSpec], devices: Sequence[Device]
) -> EngineSpec:
    """Return the description of one more engine like ``like``, in addition to the engines ``taken``.

    On CPUs the engine gets the cores that the fewest engines use, on GPUs devices that no engine of this fleet uses.
    Raises :class:`~tercet.protocol.BadRequest` if there are too few devices.
    """
    spec = msgspec.structs.replace(like, name=name, port=port, cores=(), gpus=(), gpu_memory=None)
    if like.gpus:
        each = ranks_of(like.extra_args)
        used = {handle for other in taken for handle in other.gpus}
        free = [device for device in devices if device.handle not in used]
        if len(free) < each:
            raise BadRequest(
                f"COUNTS: one more engine needs {each} GPU{'s' if each > 1 else ''}, and {len(free)} of this machine "
                "are free; reduce another role in the same command, so that its engines change their role",
                "COUNTS",
            )
        share = pick_devices(free, each, gpu_memory_of(like.extra_args))
        return msgspec.structs.replace(spec, gpus=share.devices, gpu_memory=share.memory)
    if like.cores:
        groups = Counter(dict.fromkeys(_groups(taken), 0))
        groups.update(other.cores for other in taken if other.cores)
        return msgspec.structs.replace(spec, cores=min(groups, key=lambda cores: (groups[cores], cores)))
    return spec


def _groups(taken: Sequence[EngineSpec]) -> set[tuple[int, ...]]:
    """Return the groups of cores to choose from: free cores if there are enough, else the groups of running engines."""
    here = sorted(os.sched_getaffinity(0))
    size = max(len(spec.cores) for spec in taken)
    free = [core for core in here if not any(core in spec.cores for spec in taken)]
    return {tuple(free[:size])} if len(free) >= size else {spec.cores for spec in taken}


class LocalProvisioner:
    """The provisioner of a fleet on this machine. It changes the list ``engines``; a start also sets ``changed``.

    ``launch`` creates the process of an engine without starting it.
    """

    def __init__(
        self, engines: list[RunningEngine], changed: asyncio.Event, specs: Sequence[EngineSpec], launch: LaunchEngine,
        router: RouterAdmin, on_event: OnEvent,
    ) -> None:  # fmt: skip
        self.router = router
        self._engines = engines
        self._changed = changed
        self._specs = {spec.name: spec for spec in specs}
        self._like = specs[0]
        self._used = [spec.name for spec in specs]
        self._launch = launch
        self._on_event = on_event

    @property
    def engines(self) -> Sequence[str]:
        """Names of the engines that are restarted when they end."""
        return [engine.name for engine in self._engines if not engine.given_up]

    @property
    def used(self) -> Sequence[str]:
        """All names of present and past engines; each has its log."""
        return self._used

    def require_room(self, count: int) -> None:
        if not count:
            return
        if is_group(self._like.extra_args):
            raise BadRequest(
                "COUNTS: the number of engines cannot change: they are the data-parallel ranks of one group", "COUNTS"
            )
        taken = list(self._specs.values())
        for index in range(count):
            taken.append(next_spec(self._like, f"more-{index}", 0, taken, self._devices()))
        require_memory(taken[len(self._specs) :])

    async def start(self, name: str, role: Role) -> None:
        """Start an engine, and return when the router has added it."""
        (port,) = free_ports(self._like.host, 1)
        spec = next_spec(self._like, name, port, list(self._specs.values()), self._devices())
        self._used.append(name)
        self._specs[name] = spec
        # Not kept until the router has it: an engine that fails at its first start is an error of the command, and is
        # not restarted.
        engine = self._launch(spec, role)
        engine.is_kept = False
        self._engines.append(engine)
        try:
            await engine.process.start()
            self._on_event(name, LOADING)
            await engine.until_ready(self._on_event)
            await self.router.add(name, engine.url, role)
        except BaseException:
            self._engines.remove(engine)
            del self._specs[name]
            await engine.process.stop()
            raise
        engine.is_kept = True
        self._changed.set()

    async def set_role(self, name: str, role: Role) -> None:
        await self.router.set_role(name, role)
        self._engine(name).role = role

    async def stop(self, name: str) -> None:
        # First the router: an engine that ends while it is a member would fail requests.
        engine = self._engine(name)
        await self.router.remove(name)
        try:
            await engine.leave()
        finally:
            self._engines.remove(engine)
            del self._specs[name]

    def _engine(self, name: str) -> RunningEngine:
        return next(engine for engine in self._engines if engine.name == name)

    def _devices(self) -> Sequence[Device]:
        return devices_for_engines() if self._like.gpus else ()
