"""A fleet of processes on this machine: a router, and engines behind proxies that can be killed and restarted."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec

from tercet.cluster.child_process import Process
from tercet.cluster.engine_command import EngineSpec, engine_argv, engine_env
from tercet.cluster.local import ENGINE_HOST, engine_specs, router_argv, router_config, router_env
from tercet.cluster.ports import free_ports, url_of
from tercet.cluster.running_fleet import OnEvent, until_ready
from tercet.cluster.up_config import UpConfig
from tercet.protocol import Role
from tercet.settings import EngineAddress
from tercet_lab.chaos.cuttable_proxy import CuttableProxy
from tercet_lab.chaos.engine_processes import alive, processes_of, send_signal
from tercet_lab.chaos.fault_schedule import ProcessKind
from tercet_lab.chaos.wrong_clock import WrongClock, build, can_be_built

# Grace period of the guard: in a run with faults, processes get little time to end.
GRACE_SECONDS = 5.0
GONE_SECONDS = 30.0
# An engine may drain itself before it ends.
TERMINATED_SECONDS = 90.0
POLL_INTERVAL_S = 0.2
IMPOSTOR_PROFILE = "qwen3-32b-h100-tp2"


class RealEngine:
    """An engine as :class:`~tercet_lab.chaos.arena.BreakableEngine`: a command, its proxies and its present process.

    The router reaches it at the address of its first proxy. ``seen`` has the ids of all its processes so far.
    """

    def __init__(
        self, spec: EngineSpec, role: Role, log_dir: Path, clock: WrongClock | None, on_event: OnEvent
    ) -> None:
        self.name = spec.name
        self.url = url_of(spec.host, spec.port)
        self.role: Role = role
        self.is_up = False
        self.proxies: tuple[CuttableProxy, ...] = ()
        self.seen: set[int] = set()
        self._spec = spec
        self._log_dir = log_dir
        self._clock = clock
        self._on_event = on_event
        self._starts = 0
        self._process: Process | None = None
        self._frozen: Sequence[int] = ()

    def processes(self) -> Mapping[ProcessKind, Sequence[int]]:
        """Return the ids of the processes that run now, by kind."""
        guard = self._process.pid if self._process is not None else None
        found: Mapping[ProcessKind, Sequence[int]] = {} if guard is None else processes_of(guard)
        self.seen.update(found.get("engine", ()))
        return found

    def has(self, process: ProcessKind) -> bool:
        return bool(self.processes().get(process))

    async def launch(self, spec: EngineSpec | None = None) -> Process:
        """Start the engine, or another one in its place, without waiting until it is ready. Return its process."""
        self._starts += 1
        chosen = spec or self._spec
        env: dict[str, str | None] = {**engine_env(chosen), **(self._clock.env if self._clock is not None else {})}
        log = self._log_dir / f"{self.name}-{self._starts}.log"
        self._process = Process(self.name, engine_argv(chosen), env, log, GRACE_SECONDS)
        await self._process.start()
        return self._process

    async def start(self, is_impostor: bool = False) -> None:
        spec = self._spec
        if is_impostor:
            spec = msgspec.structs.replace(spec, simulate=IMPOSTOR_PROFILE, options={}, extra_args=(), cores=())
        await until_ready(await self.launch(spec), self.url, self._on_event)
        self.is_up = not is_impostor

    async def terminate(self) -> Sequence[str]:
        self.is_up = False
        pids = self.processes()
        send_signal(pids.get("api", ())[:1], signal.SIGTERM)
        still = await _ended(pids.get("engine", ()), TERMINATED_SECONDS)
        await self.stop()
        return [f"process {pid}" for pid in still]

    async def kill(self, process: ProcessKind = "engine") -> Sequence[str]:
        self.is_up = False
        pids = self.processes()
        send_signal(pids.get(process, ()), signal.SIGKILL)
        still = await _ended(pids.get("engine", ()))
        await self.stop()
        return [f"process {pid}" for pid in still]

    async def stop(self) -> None:
        """End all processes of the engine."""
        process, self._process, self.is_up = self._process, None, False
        if process is not None:
            await process.stop()

    def freeze(self, process: ProcessKind) -> None:
        self._frozen = self.processes().get(process, ())
        send_signal(self._frozen, signal.SIGSTOP)

    def thaw(self) -> None:
        send_signal(self._frozen, signal.SIGCONT)

    def cut_off(self, is_cut: bool) -> None:
        for proxy in self.proxies:
            proxy.cut() if is_cut else proxy.heal()

    def step_clock(self, seconds: float) -> None:
        if self._clock is not None:
            self._clock.step(seconds)


async def _ended(pids: Sequence[int], seconds: float = GONE_SECONDS) -> list[int]:
    """Wait until all these processes have ended. Return those that still run after ``seconds``."""
    for _ in range(round(seconds / POLL_INTERVAL_S)):
        if not alive(pids):
            break
        await asyncio.sleep(POLL_INTERVAL_S)
    return alive(pids)


class RealFleet:
    """A fleet with a router at ``url``. Every engine is reached through its proxies."""

    def __init__(self, url: str, engines: Mapping[str, RealEngine], router: Process, log_dir: Path) -> None:
        self.url = url
        self.engines = engines
        self.router = router
        self.log_dir = log_dir


@asynccontextmanager
async def running_fleet(
    config: UpConfig, model: str, log_dir: Path, note: Callable[[str], object]
) -> AsyncGenerator[RealFleet]:
    """Start the fleet, and stop it at the end of the context.

    Raise :class:`~tercet.cluster.child_process.StartFailed` if a process does not become ready.
    """

    def tell(name: str, state: str) -> None:
        note(f"{name}: {state}")

    library = await asyncio.to_thread(build, log_dir) if can_be_built() else None
    port, stream_port = free_ports(config.host, 2)
    config = msgspec.structs.replace(config, stream_port=stream_port)
    async with AsyncExitStack() as stack:
        engines: dict[str, RealEngine] = {}
        for spec, (_, role) in zip(engine_specs(config, model), config.engine_roles, strict=True):
            clock = None
            if library is not None:
                clock = stack.enter_context(WrongClock(library, log_dir / f"{spec.name}.clock"))
            engine = engines[spec.name] = RealEngine(spec, role, log_dir, clock, tell)
            stack.push_async_callback(engine.stop)
            (back_port,) = free_ports(ENGINE_HOST, 1)
            told = (f"{ENGINE_HOST}:{stream_port}".encode(), f"{ENGINE_HOST}:{back_port}".encode())
            back = await stack.enter_async_context(CuttableProxy(ENGINE_HOST, stream_port, told, back_port))
            forth = await stack.enter_async_context(CuttableProxy(ENGINE_HOST, spec.port, told))
            engine.proxies = (forth, back)
        processes = {name: await engine.launch() for name, engine in engines.items()}
        known = [
            EngineAddress(name, url_of(ENGINE_HOST, engine.proxies[0].port), engine.role)
            for name, engine in engines.items()
        ]
        argv = router_argv(router_config(config, model, port, known), log_dir)
        router = Process("router", argv, router_env(model), log_dir / "router.log")
        stack.push_async_callback(router.stop)
        await router.start()
        url = url_of(config.host, port)

        async with asyncio.TaskGroup() as group:
            for name, engine in engines.items():
                group.create_task(until_ready(processes[name], engine.url, tell))
            group.create_task(until_ready(router, url, tell))
        for engine in engines.values():
            engine.is_up = True
        yield RealFleet(url, engines, router, log_dir)


@asynccontextmanager
async def slow_disk(directory: Path) -> AsyncGenerator[None]:
    """Run a process that writes and syncs in ``directory`` continuously, while the context is open."""
    file = directory / "written-without-end"
    process = await asyncio.create_subprocess_exec(
        "dd", "if=/dev/zero", f"of={file}", "bs=4M", "count=100000", "oflag=dsync", "conv=notrunc",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        file.unlink(missing_ok=True)
