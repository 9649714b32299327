"""A fleet of processes on this machine: a router, and engines behind proxies, and what can be done to them.

A proxy between an engine and its router can stop passing data; an engine's processes, found by their parents and
command lines, get signals and are restarted; a library that is loaded before the C library sets their wall clock wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import shutil
import signal
import struct
import subprocess
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import psutil

from tercet.aio.tasks import TaskSet
from tercet.cluster import guard as guard_module
from tercet.cluster.child_process import Process
from tercet.cluster.engine_command import EngineSpec, engine_argv, engine_env
from tercet.cluster.local import ENGINE_HOST, engine_specs, router_argv, router_config, router_env
from tercet.cluster.ports import free_ports, url_of
from tercet.cluster.running_fleet import OnEvent, until_ready
from tercet.cluster.up_config import UpConfig
from tercet.protocol import EngineError, Role
from tercet.settings import EngineAddress
from tercet_checks.chaos.chaos_report import ProcessKind

AGENT_MODULE = "tercet.transport.agent"
# The title of the process in which a core tries grammars, and of its children.
GRAMMARS_TITLE = "::Grammars"
HELPERS = ("resource_tracker", "forkserver", "semaphore_tracker")
# Kind of process by its depth below the server, which has depth 0.
BY_DEPTH: tuple[ProcessKind, ...] = ("api", "core", "worker", "agent")


class RunningProcess(NamedTuple):
    """A process of a tree."""

    pid: int
    parent: int
    command: str


def classify(server: int, tree: Sequence[RunningProcess]) -> Mapping[ProcessKind, Sequence[int]]:
    """Return the process ids of an engine by kind. ``server`` is the id of its API server.

    The server starts the core, the core starts the workers, and each worker starts an agent. Python's helper processes
    are siblings of them and do not belong to the engine. The core's process for grammars has no separate kind.
    """
    parents = {each.pid: each.parent for each in tree if not any(helper in each.command for helper in HELPERS)}
    grammars = {each.pid for each in tree if GRAMMARS_TITLE in each.command}
    agents = {each.pid for each in tree if AGENT_MODULE in each.command}
    found: defaultdict[ProcessKind, list[int]] = defaultdict(list)
    for pid in sorted({server, *parents}):
        depth, at = 0, pid
        while at != server and at in parents:
            depth, at = depth + 1, parents[at]
        if at == server and pid in grammars:
            found["engine"].append(pid)
        elif at == server:
            found["agent" if pid in agents else BY_DEPTH[min(depth, len(BY_DEPTH) - 1)]].append(pid)
            found["engine"].append(pid)
    return found


def processes_of(guard: int) -> Mapping[ProcessKind, Sequence[int]]:
    """Return the process ids, by kind, of the engine in the process group of ``guard``; empty if it has ended.

    The server's parent is the guard, or the process that forked the server, which is not in the group. The guard's
    watcher is in the group and does not belong to the engine.
    """
    tree: list[RunningProcess] = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if process.pid != guard and os.getpgid(process.pid) == guard:
                command = " ".join(process.cmdline())
                if guard_module.__file__ not in command:
                    tree.append(RunningProcess(process.pid, process.ppid(), command))
    members = {each.pid for each in tree}
    server = next((each.pid for each in tree if each.parent not in members), None)
    return {} if server is None else classify(server, tree)


def send_signal(pids: Sequence[int], number: int) -> int:
    """Send a signal to each process. Return the number of processes that still existed."""
    reached = 0
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            reached += 1
    return reached


def alive(pids: Sequence[int]) -> list[int]:
    """Return the processes that have not ended. A zombie has ended."""
    found: list[int] = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                found.append(pid)
    return found


SOURCE = Path(__file__).with_name("wrong_clock.c")
COMPILER = "cc"


def can_be_built() -> bool:
    """True if this machine has a C compiler."""
    return shutil.which(COMPILER) is not None


def build(directory: Path) -> Path:
    """Compile the library into ``directory`` and return its path. Raise ``EngineError`` if that fails."""
    library = directory / "wrong_clock.so"
    command = [COMPILER, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EngineError(f"cannot compile the wrong clock: {done.stderr.strip()[-400:]}")
    return library


class WrongClock:
    """The clock offset, in whole seconds, of processes that are started with :attr:`env`. Use as a context manager."""

    def __init__(self, library: Path, file: Path) -> None:
        self._file = file
        self.env = {"LD_PRELOAD": str(library), "TERCET_CLOCK_OFFSET": str(file)}

    def __enter__(self) -> Self:
        self._file.write_bytes(struct.pack("d", 0.0))
        with self._file.open("r+b") as opened:
            self._page = mmap.mmap(opened.fileno(), 8)
        return self

    def __exit__(self, *_: object) -> None:
        self._page.close()

    def step(self, seconds: float) -> None:
        """Set the clock ``seconds`` ahead of the machine's; 0 makes it right."""
        self._page[:] = struct.pack("d", seconds)


CHUNK = 64 * 1024


class CuttableProxy:
    """A proxy from :attr:`port` (0: any free port) to ``host:target_port``. Use as an async context manager.

    In all data, the first text of ``replaced`` becomes the second one, which has the same length: an engine thereby
    gets another proxy's address to connect back to. The text must be within one write.
    """

    def __init__(self, host: str, target_port: int, replaced: tuple[bytes, bytes], port: int = 0) -> None:
        self.port = port
        self._host = host
        self._target_port = target_port
        self._replaced = replaced
        self._passing = asyncio.Event()
        self._passing.set()
        self._connections = TaskSet()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accepted, self._host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        await self._connections.close()

    def cut(self) -> None:
        """Stop passing data in both directions. Connections stay open, and new ones get no answer."""
        self._passing.clear()

    def heal(self) -> None:
        """Pass data again, the delayed data first."""
        self._passing.set()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.spawn(self._connect(reader, writer))

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._passing.wait()
            far_reader, far_writer = await asyncio.open_connection(self._host, self._target_port)
        except OSError:
            writer.transport.abort()  # a proxy cannot refuse a connection that it has accepted: reset it
            return
        except asyncio.CancelledError:
            writer.transport.abort()
            raise
        passing = [
            asyncio.ensure_future(self._pass_on(reader, far_writer)),
            asyncio.ensure_future(self._pass_on(far_reader, writer)),
        ]
        try:
            await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
            await self._passing.wait()
        finally:
            for task in passing:
                task.cancel()
            await asyncio.wait(passing)
            for each in (writer, far_writer):
                each.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(CHUNK):
                await self._passing.wait()
                writer.write(data.replace(*self._replaced))
                await writer.drain()
        except OSError:
            writer.transport.abort()


# Grace period of the guard: in a run with faults, processes get little time to end.
GRACE_SECONDS = 5.0
GONE_SECONDS = 30.0
# An engine may drain itself before it ends.
TERMINATED_SECONDS = 90.0
POLL_INTERVAL_S = 0.2
IMPOSTOR_PROFILE = "qwen3-32b-h100-tp2"


class RealEngine:
    """An engine as :class:`~tercet_checks.chaos.arena.BreakableEngine`: a command, its proxies and its present process.

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
        return await self._end(signal.SIGTERM, "api", 1, TERMINATED_SECONDS)

    async def kill(self, process: ProcessKind = "engine") -> Sequence[str]:
        return await self._end(signal.SIGKILL, process, None, GONE_SECONDS)

    async def _end(self, number: int, process: ProcessKind, most: int | None, seconds: float) -> Sequence[str]:
        """Send a signal to ``most`` processes of a kind, None for all.

        Wait until all of the engine have ended; return those that then still run.
        """
        self.is_up = False
        pids = self.processes()
        all_pids = pids.get("engine", ())
        send_signal(pids.get(process, ())[:most], number)
        for _ in range(round(seconds / POLL_INTERVAL_S)):
            if not alive(all_pids):
                break
            await asyncio.sleep(POLL_INTERVAL_S)
        still = alive(all_pids)
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


class RealFleet(NamedTuple):
    """A fleet with a router at ``url``. Every engine is reached through its proxies."""

    url: str
    engines: Mapping[str, RealEngine]
    router: Process
    log_dir: Path


@asynccontextmanager
async def running_fleet(
    config: UpConfig, model: str, log_dir: Path, note: Callable[[str], object]
) -> AsyncGenerator[RealFleet]:
    """Start the fleet, and stop it at the end of the context.

    Raise :class:`~tercet.cluster.child_process.StartFailed` if a process does not become ready.
    """

    def on_event(name: str, state: str) -> None:
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
            engine = engines[spec.name] = RealEngine(spec, role, log_dir, clock, on_event)
            stack.push_async_callback(engine.stop)
            (back_port,) = free_ports(ENGINE_HOST, 1)
            address = (f"{ENGINE_HOST}:{stream_port}".encode(), f"{ENGINE_HOST}:{back_port}".encode())
            back = await stack.enter_async_context(CuttableProxy(ENGINE_HOST, stream_port, address, back_port))
            forth = await stack.enter_async_context(CuttableProxy(ENGINE_HOST, spec.port, address))
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
                group.create_task(until_ready(processes[name], engine.url, on_event))
            group.create_task(until_ready(router, url, on_event))
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
