"""A fleet on this machine: engines and a front door, started together and stopped together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from tercet.cluster.child_process import GRACE_SECONDS, Process, StartFailed, describe_exit
from tercet.cluster.compute import split_cores, split_devices, visible_devices
from tercet.cluster.engine_command import EngineSpec, engine_argv, engine_env, ranks_of
from tercet.cluster.model import BUILT_IN, cache_root
from tercet.cluster.ports import free_ports, require_free, url_of
from tercet.cluster.up_config import UpConfig
from tercet.protocol import BadRequest, Role, ShuttingDown, from_wire
from tercet.protocol.wire import UNREADABLE
from tercet.settings import SECRET_VARIABLE, EngineAddress, FrontDoorConfig, RouterConfig, declared, encode_settings

READY_SECONDS = 900.0
ASK_SECONDS = 0.5
# Engines serve the front door alone, and their control endpoints ask for no password.
ENGINE_HOST = "127.0.0.1"
OnEvent = Callable[[str, str], None]


@dataclass(frozen=True)
class RunningEngine:
    """An engine that answers."""

    name: str
    role: Role
    url: str
    process: Process


@dataclass(frozen=True)
class RunningFleet:
    """A fleet that answers at ``url``."""

    url: str
    engines: Sequence[RunningEngine]
    router: Process
    log_dir: Path

    async def until_broken(self, on_event: OnEvent) -> None:
        """Wait for the end of the front door or of the last engine, reporting engines that end before.

        Raises :class:`~tercet.cluster.child_process.StartFailed` then; it does not return.
        """
        processes = [self.router, *(engine.process for engine in self.engines)]
        waiting = {asyncio.ensure_future(process.ended()): process for process in processes}
        try:
            while True:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    process, how = waiting.pop(task), describe_exit(task.result())
                    if process is self.router:
                        raise process.failure(how)
                    if list(waiting.values()) == [self.router]:
                        raise process.failure(f"{how}; no engine is left")
                    on_event(process.name, f"{how}; log: {process.log}")
        finally:
            for task in waiting:
                task.cancel()


@asynccontextmanager
async def local_fleet(
    config: UpConfig, model: str, on_event: OnEvent, hurry: asyncio.Event | None = None
) -> AsyncGenerator[RunningFleet]:
    """Start the fleet that ``config`` describes, with the checkpoint at ``model``; stop all of it on exit.

    The front door is stopped first, and finishes what runs; once ``hurry`` is set it ends at once.
    ``on_event(process, state)`` is told how each process gets on. Raises
    :class:`~tercet.cluster.child_process.StartFailed` when one does not become ready, and
    :class:`~tercet.protocol.BadRequest` for an address or a log directory that cannot be used.
    """
    if config.port:
        require_free(config.host, config.port)
    log_dir = _log_dir(config)
    specs = engine_specs(config, model)
    secret = {SECRET_VARIABLE: config.secret} if config.secret else {}
    engines = [
        RunningEngine(
            spec.name,
            role,
            url_of(spec.host, spec.port),
            Process(spec.name, engine_argv(spec), {**engine_env(spec), **secret}, log_dir / f"{spec.name}.log"),
        )
        for spec, (_, role) in zip(specs, config.roles, strict=True)
    ]
    port = config.port or free_ports(config.host, 1)[0]
    url = url_of(config.host, port)
    argv = router_argv(router_config(config, model, port, engines), log_dir)
    grace = config.shutdown_timeout_s + GRACE_SECONDS
    router = Process("router", argv, router_env(model), log_dir / "router.log", grace=grace)
    processes = [*(engine.process for engine in engines), router]
    try:
        # The front door loads beside the engines and waits for them.
        for process in processes:
            await process.start()
            on_event(process.name, "loading")
        async with asyncio.TaskGroup() as group:
            for engine in engines:
                group.create_task(until_ready(engine.process, engine.url, on_event))
            group.create_task(until_ready(router, url, on_event))
        yield RunningFleet(url, engines, router, log_dir)
    except* StartFailed as failures:
        raise failures.exceptions[0] from None
    finally:
        await asyncio.shield(
            _stop(router, url, [engine.process for engine in engines], on_event, hurry or asyncio.Event())
        )


async def _stop(router: Process, url: str, engines: Sequence[Process], on_event: OnEvent, hurry: asyncio.Event) -> None:
    """Engines end when the front door, which finishes what runs on them, has ended."""
    hurrying, saying = asyncio.create_task(_hurry(router, hurry)), asyncio.create_task(_say_what_is_left(url, on_event))
    try:
        await router.stop()
    finally:
        hurrying.cancel()
        saying.cancel()
        await asyncio.gather(*(engine.stop() for engine in engines))


async def _hurry(router: Process, hurry: asyncio.Event) -> None:
    await hurry.wait()
    await router.hurry()


async def _say_what_is_left(url: str, on_event: OnEvent) -> None:
    """A front door that shuts down says so where it is asked for its health."""
    said = ""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        while True:
            await asyncio.sleep(ASK_SECONDS)
            with contextlib.suppress(aiohttp.ClientError, OSError, *UNREADABLE):
                async with session.get(f"{url}/health") as response:
                    error = from_wire(response.status, msgspec.json.decode(await response.read()))
                if isinstance(error, ShuttingDown) and error.message != said:
                    said = error.message
                    on_event("router", said)


def engine_specs(config: UpConfig, model: str) -> list[EngineSpec]:
    """Every engine's description: on CPUs each gets cores of its own, on GPUs devices, and simulated, nothing."""
    count = len(config.roles)
    ports = free_ports(ENGINE_HOST, count)
    nothing: list[tuple[()]] = [()] * count
    computes = config.simulate is None
    devices = visible_devices() if computes else ()
    gpus = split_devices(devices, count, ranks_of(config.engine_args)) if devices else nothing
    cores = split_cores(sorted(os.sched_getaffinity(0)), count) if computes and not devices else nothing
    return [
        EngineSpec(
            name=name,
            model=model,
            served_model_name=config.public_name,
            host=ENGINE_HOST,
            port=ports[index],
            dtype=config.dtype,
            built_in=config.model == BUILT_IN,
            cores=cores[index],
            gpus=gpus[index],
            kv_cache_gib=config.kv_cache_gib,
            extra_args=config.engine_args,
            simulate=config.simulate,
            options=config.options,
        )
        for index, (name, _) in enumerate(config.roles)
    ]


def router_config(config: UpConfig, model: str, port: int, engines: Sequence[RunningEngine]) -> RouterConfig:
    """The front door's settings: those of ``config`` that every front door has, and what is known of this one."""
    fields: dict[str, Any] = {name: getattr(config, name) for name in FrontDoorConfig.__struct_fields__}
    addresses = tuple(EngineAddress(engine.name, engine.url, engine.role) for engine in engines)
    fields |= {"model": model, "served_model_name": config.public_name, "port": port, "engines": addresses}
    return RouterConfig(**fields, log_level="warning")


def router_argv(config: RouterConfig, log_dir: Path) -> list[str]:
    """The front door's command. Its settings, which may hold keys, are in a file that nobody else can read."""
    file = log_dir / "router.json"
    file.unlink(missing_ok=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        out.write(msgspec.json.format(msgspec.json.encode(encode_settings(config))))
    return [sys.executable, "-m", "tercet.cli", "router", "--config", str(file)]


def router_env(model: str) -> dict[str, str | None]:
    """The front door's environment: no settings, since those of the file were made with the variables in mind."""
    env = {each.env: None for each in declared(RouterConfig)} | {"VLLM_NO_USAGE_STATS": "1"}
    return {**env, "HF_HUB_OFFLINE": "1"} if Path(model).is_dir() else env


def _log_dir(config: UpConfig) -> Path:
    default = cache_root() / "logs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    chosen = Path(config.log_dir).expanduser().absolute() if config.log_dir else default
    try:
        chosen.mkdir(parents=True, exist_ok=True)
        if not os.access(chosen, os.W_OK | os.X_OK):
            raise PermissionError(None, "it is not writable")
    except OSError as error:
        raise BadRequest(f"--log-dir: {chosen} cannot be used: {error.strerror}", "log-dir") from error
    return chosen


async def until_ready(process: Process, url: str, on_event: OnEvent) -> None:
    """Wait for a server; raises :class:`~tercet.cluster.child_process.StartFailed` if it ends or takes too long."""
    began = time.monotonic()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        while time.monotonic() - began < READY_SECONDS:
            if process.returncode is not None:
                raise process.failure(f"{describe_exit(process.returncode)} while it was starting")
            with contextlib.suppress(aiohttp.ClientError, OSError):  # a timeout is one, too
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        on_event(process.name, f"ready in {time.monotonic() - began:.0f} s")
                        return
            await asyncio.sleep(ASK_SECONDS)
    raise process.failure(f"was not ready after {READY_SECONDS:.0f} s")
