"""A fleet that runs on this machine: dead engines are restarted, and all processes are stopped in order.

Here is also what it needs of its processes: the stages of a start by its log, the rotation of logs, the pauses between
restarts (decided without I/O), the calls to its router, and :class:`EngineProvisioner`, which scales any kind of fleet.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Protocol
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec

from tercet.aio.tasks import keep_running, repeat
from tercet.cluster.child_process import Process, StartFailed, describe_exit
from tercet.logs import serious_event
from tercet.protocol import (
    EngineNotReached,
    EngineUnreachable,
    Role,
    ShuttingDown,
    TercetError,
    UnknownEngine,
    from_wire,
)
from tercet.protocol.wire import UNREADABLE
from tercet.vllm_plugin.start.process_output import MARK
from tercet.wire.client.bounded_answers import ask_router

AWAY_SECONDS = 30.0
"""Longest wait in seconds for a router that does not listen: it has ended, and is restarted."""
ROUTER_POLL_INTERVAL_S = 0.2


class RouterAdmin:
    """Client of the router at ``url`` with ``key``, which waits while the router is restarted.

    Every method raises :class:`~tercet.protocol.TercetError`.
    """

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._key = key

    async def engines(self) -> list[dict[str, Any]]:
        return await self._ask("GET", "/engines")

    async def engine(self, name: str) -> dict[str, Any]:
        """Return one engine; raise :class:`~tercet.protocol.UnknownEngine` if the router does not have it."""
        for each in await self.engines():
            if each["name"] == name:
                return each
        raise UnknownEngine(f"{name} is not in the fleet", "name")

    async def add(self, name: str, url: str, role: Role) -> None:
        await self._ask("POST", "/engines", {"name": name, "url": url, "role": role})

    async def drain(self, name: str) -> dict[str, Any]:
        """Drain an engine: it gets no new requests, and its sequences move. Return its state."""
        return await self._ask("POST", f"/engines/{quote(name, safe='')}/drain")

    async def set_role(self, name: str, role: Role) -> None:
        await self._ask("PUT", f"/engines/{quote(name, safe='')}/role", {"role": role})

    async def remove(self, name: str) -> None:
        await self._ask("DELETE", f"/engines/{quote(name, safe='')}")

    async def _ask(self, method: str, path: str, body: Any = None) -> Any:
        clock = asyncio.get_running_loop().time
        deadline = clock() + AWAY_SECONDS
        while True:
            try:
                # The router is on this machine, and its certificate is for its clients' names.
                return await ask_router(self._url, method, path, body, self._key, checks_certificate=False)
            except EngineUnreachable as error:
                # A call that may have reached the router is not repeated: it may have been carried out.
                if not isinstance(error, EngineNotReached) or clock() > deadline:
                    raise EngineUnreachable(f"the router does not answer: {error.message}") from error
            await asyncio.sleep(ROUTER_POLL_INTERVAL_S)


logger = logging.getLogger(__name__)
LARGEST = 64 * 1024 * 1024
"""Largest size of a log in bytes; together with its previous part it has at most twice this size."""
POLL_INTERVAL_S = 5.0
BEFORE = ".1"


def rotate(log: Path, largest: int = LARGEST) -> bool:
    """Move a log's content to ``LOG.1`` if it is larger than ``largest`` bytes; return True if it was moved.

    The writer continues: it appends, and therefore writes at the new end. Lines written during the copy may be lost.
    """
    try:
        if log.stat().st_size <= largest:
            return False
        before = log.with_name(log.name + BEFORE)
        # Copied and cut, not renamed: the writers have the file open, and would go on writing to the old one.
        with log.open("rb") as found, before.open("wb") as kept:
            found.seek(-largest, os.SEEK_END)  # the log may have grown in the meantime
            shutil.copyfileobj(found, kept)
        os.truncate(log, 0)
    except OSError as error:
        logger.warning("%s is not rotated: %s", log, error)
        return False
    return True


async def rotate_logs(logs: Callable[[], Iterable[Path]]) -> None:
    """Check the logs every ``POLL_INTERVAL_S`` seconds, and rotate large ones, until cancelled."""

    async def look() -> None:
        for log in list(logs()):
            await asyncio.to_thread(rotate, log)

    await repeat(look, POLL_INTERVAL_S, "log rotation")


STARTING = "starting"
# Shorter stages are not reported.
SHORT_SECONDS = 1.0


class StartProgress:
    """Progress of one start, whose output goes to ``log`` from byte ``begin`` on; time counts from the construction."""

    def __init__(self, log: Path, begin: int = 0) -> None:
        self.stage = STARTING
        self._log = log
        self._read = begin
        self._began = self._since = time.monotonic()
        self._took: dict[str, float] = {}

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def look(self) -> bool:
        """Read the complete lines that were written since the last call; return True if there is a new stage."""
        try:
            with self._log.open("rb") as log:
                log.seek(self._read)
                written = log.read()
        except OSError:
            return False
        whole = written[: written.rfind(b"\n") + 1]
        # An unfinished line is read again when it is whole: its stage may have half of its name.
        self._read += len(whole)
        lines = whole.decode(errors="replace").splitlines()
        found = [line.partition(MARK)[2].strip() for line in lines if MARK in line]
        for stage in found:
            self._enter(stage)
        return bool(found)

    def summary(self) -> str:
        """Return the total time and the times of long stages: ``31 s (starting 22 s, weights 3 s)``."""
        self._enter(self.stage)
        slow = [f"{stage} {took:.0f} s" for stage, took in self._took.items() if took >= SHORT_SECONDS]
        return f"{self.seconds:.0f} s" + (f" ({', '.join(slow)})" if len(self._took) > 1 and slow else "")

    def _enter(self, stage: str) -> None:
        now = time.monotonic()
        self._took[self.stage] = self._took.get(self.stage, 0.0) + now - self._since
        self.stage, self._since = stage, now


# Seconds: the pause before the first restart, the longest pause, and the serving time after which restarts are reset.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
LIVED_SECONDS = 60.0


@dataclass
class Restarts:
    """One process's restarts, limited to ``limit``. Times are seconds of one clock.

    The pause doubles each time. After it has served for :data:`LIVED_SECONDS`, the count starts again at 0.
    """

    limit: int
    used: int = 0
    _ready_at: float | None = None

    def ready(self, now: float) -> None:
        self._ready_at = now

    def ended(self, now: float) -> float | None:
        """Record that the process has ended; return the seconds until its restart, or None for no restart."""
        ready_at, self._ready_at = self._ready_at, None
        # It has served for a while, so what ended it before is over.
        if ready_at is not None and now - ready_at >= LIVED_SECONDS:
            self.used = 0
        if self.used >= self.limit:
            return None
        self.used += 1
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (self.used - 1))


READY_SECONDS = 900.0
ASK_SECONDS = 0.5
START_POLL_SECONDS = 0.2
STOP_ON_RAY_SECONDS = 240.0
"""Longest time that engines on Ray take to stop."""
LOADING = "loading"
HEALTH, LIVE = "/health", "/live"
LOOK_SECONDS, MOST_SILENT = 5.0, 6
"""Seconds of one look at whether a router is alive, and looks in a row without an answer before it is killed."""
OnEvent = Callable[[str, str], None]


@dataclass
class KeptProcess:
    """A process that serves at ``url`` and is restarted when it ends; ``process`` is its last start."""

    name: str
    url: str
    process: Process
    restarts: Restarts
    starts: int = 1
    meanwhile: ClassVar[str] = ""
    """What happens until the process has been restarted, for its users."""

    async def until_ready(self, on_event: OnEvent) -> None:
        """Wait until the process serves; raise the errors of :func:`until_ready`."""
        await until_ready(self.process, self.url, on_event)
        self.process.remember_shared_memory()
        self.restarts.ready(time.monotonic())

    async def until_it_stays_dead(self, on_event: OnEvent) -> str:
        """Restart the process when it ends, up to its limit; return a description of its last end.

        A restart that fails, or that the system refuses, counts as another end.
        """
        how = await self._end()
        while (pause := self.restarts.ended(time.monotonic())) is not None:
            count = f"restart {self.restarts.used} of {self.restarts.limit} in {pause:g} s{self.meanwhile}"
            on_event(self.name, f"{how}; {count}; log: {self.process.log}")
            await asyncio.sleep(pause)
            dead, self.starts = self.process, self.starts + 1
            # Replaced before the old one is stopped: a stop of the fleet in between must find the new process.
            self.process = dead.again(self.next_log())
            await dead.stop()
            # The system refused (no memory, no descriptors): that counts as an end, with the next, longer pause.
            if how := await self.process.refusal_of_start():
                continue
            on_event(self.name, LOADING)
            try:
                await self.until_ready(on_event)
            except StartFailed:
                await self.process.stop()  # the process has ended, or the timeout has passed
            how = await self._end()
        return how

    def next_log(self) -> Path:
        """Return the log of the next start; the log of the last start is continued."""
        return self.process.log

    async def _end(self) -> str:
        """Wait until the process ends; return a description of its end."""
        return describe_exit(await self.process.ended())


@dataclass
class RunningEngine(KeptProcess):
    """An engine with a ``role``; each start has a separate log."""

    role: Role = field(kw_only=True)
    # The engine is a member, and is restarted when it ends.
    is_kept: bool = True
    # It has ended and is not restarted.
    given_up: bool = False
    keeping: asyncio.Task[str] | None = None

    def next_log(self) -> Path:
        return self.process.log.with_name(f"{self.name}-{self.starts}.log")

    async def leave(self) -> None:
        """Stop the engine for good: it is not restarted."""
        self.is_kept = False
        if self.keeping is not None:
            self.keeping.cancel()
            await asyncio.gather(self.keeping, return_exceptions=True)
        await self.process.stop()


class KeptRouter(KeptProcess):
    """The router of a fleet; all its starts write one log, and its state is in a file that outlives them.

    A restarted router is ready once it answers, also while no engine can be picked. From then on it must answer: one
    that is alive without answering, such as a stopped process, is killed.
    """

    meanwhile = "; the engines continue to run"

    async def until_ready(self, on_event: OnEvent) -> None:
        """Wait until the router serves; a restarted one may serve errors, for example while all engines load."""
        path = HEALTH if self.starts == 1 else LIVE
        await until_ready(self.process, self.url, on_event, path)
        self.restarts.ready(time.monotonic())

    async def _end(self) -> str:
        ended = asyncio.ensure_future(super()._end())
        silent = asyncio.ensure_future(self._until_silent())
        try:
            await asyncio.wait((ended, silent), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return ended.result()
            silent.result()
            # A stopped process (SIGSTOP) handles no other signal: only SIGKILL ends it.
            self.process.kill()
            await ended
            return f"did not answer for {MOST_SILENT * LOOK_SECONDS:g} s and was killed"
        finally:
            for task in (ended, silent):
                task.cancel()
            await asyncio.gather(ended, silent, return_exceptions=True)

    async def _until_silent(self) -> None:
        """Return once the router has not answered :data:`MOST_SILENT` times in a row.

        Other failures, such as a lack of descriptors in this process, say nothing about the router.
        """
        silent = 0
        async with _asking(LOOK_SECONDS) as session:
            while silent < MOST_SILENT:
                began = time.monotonic()
                try:
                    async with session.get(self.url + LIVE):
                        silent = 0
                except TimeoutError:  # it accepts connections, or its kernel does, and does not answer
                    silent += 1
                except (aiohttp.ClientError, OSError):
                    silent = 0
                await asyncio.sleep(began + LOOK_SECONDS - time.monotonic())

    async def until_broken(self, on_event: OnEvent) -> NoReturn:
        """Restart the router when it ends, up to its limit; then raise :class:`StartFailed` with the last end."""
        how = await self.until_it_stays_dead(on_event)
        many = f"; it has been restarted {self.restarts.used} times in a row" if self.restarts.used else ""
        raise self.process.failure(f"{how}{many}")


class StartedEngine(Protocol):
    """What is shown of an engine when its fleet is ready."""

    @property
    def name(self) -> str: ...
    @property
    def role(self) -> Role: ...
    @property
    def url(self) -> str: ...


class StartedFleet(Protocol):
    """A fleet that ``tercet up`` started: a :class:`RunningFleet`, or one whose engines run elsewhere."""

    @property
    def url(self) -> str: ...
    @property
    def engines(self) -> Sequence[StartedEngine]: ...
    @property
    def router(self) -> Process: ...
    @property
    def log_dir(self) -> Path: ...
    @property
    def provisioner(self) -> EngineProvisioner: ...

    async def until_broken(self, on_event: OnEvent) -> None:
        """Keep the fleet running until the router reaches its limit of restarts; then raise :class:`StartFailed`."""
        ...


@dataclass
class RunningFleet:
    """A fleet that answers at ``url``. ``provisioner`` starts and stops engines, and sets ``changed`` after a start."""

    url: str
    engines: list[RunningEngine]
    kept_router: KeptRouter
    log_dir: Path
    provisioner: EngineProvisioner
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def router(self) -> Process:
        return self.kept_router.process

    async def until_broken(self, on_event: OnEvent) -> None:
        """Restart engines and router until the router, or the last engine, reaches its limit of restarts.

        The call never returns: it then raises :class:`~tercet.cluster.child_process.StartFailed`. ``on_event`` receives
        every end and every start, and the router's log events of level WARNING or ERROR.
        """
        router = asyncio.create_task(self.kept_router.until_broken(on_event))
        reading = asyncio.create_task(read_events(self.router.log, partial(on_event, self.router.name)))
        rotating = asyncio.create_task(rotate_logs(self.logs))
        kept = dict[asyncio.Task[str], RunningEngine]()
        changed = asyncio.create_task(self.changed.wait())
        forgetting = list[asyncio.Task[None]]()
        try:
            while True:
                for engine in self.engines:
                    if engine.is_kept and engine.keeping is None:  # a new one
                        engine.keeping = asyncio.create_task(engine.until_it_stays_dead(on_event))
                        kept[engine.keeping] = engine
                await asyncio.wait([router, changed, *kept], return_when=asyncio.FIRST_COMPLETED)
                if router.done():
                    # It raises: a router that stays dead ends the fleet.
                    router.result()
                if changed.done():
                    self.changed.clear()
                    changed = asyncio.create_task(self.changed.wait())
                for task in [task for task in kept if task.done()]:
                    engine = kept.pop(task)
                    if task.cancelled():  # the engine leaves the fleet
                        continue
                    how, engine.given_up = task.result(), True
                    # Without engines a router can only refuse: the fleet ends, and its supervisor learns of it.
                    if not kept:
                        raise engine.process.failure(f"{how}; no engine is left")
                    on_event(engine.name, f"{how}; no further restart; log: {engine.process.log}")
                    # In the background: the router may be away, and the other engines must still be watched.
                    forgetting.append(asyncio.create_task(self._forget(engine, on_event)))
        finally:
            ending = router, reading, rotating, changed, *kept, *forgetting
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)

    async def _forget(self, engine: RunningEngine, on_event: OnEvent) -> None:
        """Remove an engine that is not restarted from the router, once the router answers."""
        while True:
            try:
                await self.provisioner.router.remove(engine.name)
                return
            except EngineUnreachable:  # the router is restarted, or began to end during the call
                await asyncio.sleep(ASK_SECONDS)
            except TercetError as error:
                on_event(self.router.name, f"cannot remove {engine.name}: {error.message}")
                return

    def logs(self) -> Sequence[Path]:
        return [self.router.log, *(engine.process.log for engine in self.engines)]

    async def stop(self, on_event: OnEvent, hurry: asyncio.Event) -> None:
        """Stop the router, which finishes running requests unless ``hurry`` is set, and then the engines.

        Once ``hurry`` is set, processes that do not end within some seconds are killed.
        """
        engines = [engine.process for engine in self.engines]
        try:
            # The router first: its running requests need the engines.
            with _meanwhile(_hurry([self.router], hurry), _say_what_is_left(self.url, on_event)):
                await self.router.stop()
        finally:
            with _meanwhile(_hurry(engines, hurry)):
                await asyncio.gather(*(engine.stop() for engine in engines))


@contextlib.contextmanager
def _meanwhile(*coroutines: Coroutine[Any, Any, None]) -> Generator[None]:
    """Run the coroutines in the background until the block ends."""
    tasks = [asyncio.create_task(each) for each in coroutines]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


async def _hurry(processes: Sequence[Process], hurry: asyncio.Event) -> None:
    await hurry.wait()
    await asyncio.gather(*(process.hurry() for process in processes))


async def _say_what_is_left(url: str, on_event: OnEvent) -> None:
    """Report the remaining requests of a stopping router, from the answers to health checks."""
    # Said once for each number, and not at each look.
    said = ""
    async with _asking() as session:
        while True:
            await asyncio.sleep(ASK_SECONDS)
            with contextlib.suppress(aiohttp.ClientError, OSError, *UNREADABLE):
                # The refusal of a router that stops says how many requests are left.
                async with session.get(f"{url}/health") as response:
                    error = from_wire(response.status, msgspec.json.decode(await response.read()))
                if isinstance(error, ShuttingDown) and error.message != said:
                    said = error.message
                    on_event("router", said)


def _asking(seconds: float = 5.0) -> aiohttp.ClientSession:
    """Return a session for requests to the fleet's processes on this machine, without checks of their certificates.

    Each request has its own connection, so it does not always reach the same one of several workers.
    """
    connector = aiohttp.TCPConnector(ssl=False, force_close=True)
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=seconds), connector=connector)


async def read_events(log: Path, say: Callable[[str], object]) -> None:
    """Pass new events of level WARNING or ERROR in a log to ``say``, until cancelled."""
    await keep_running(_EventLog(log, say).follow, f"reading of {log}")


class _EventLog:
    """A log whose later lines are read. An error of reading loses no line: the next start reads on."""

    def __init__(self, log: Path, say: Callable[[str], object]) -> None:
        self._log, self._say = log, say
        self._read_to = log.stat().st_size if log.exists() else 0

    async def follow(self) -> None:
        with self._log.open("rb") as lines:
            while True:
                if os.fstat(lines.fileno()).st_size < self._read_to:  # the log was rotated
                    self._read_to = 0
                lines.seek(self._read_to)
                *whole, _ = lines.read().split(b"\n")
                for line in whole:
                    self._read_to += len(line) + 1
                    event = serious_event(line.decode(errors="replace"))
                    if event is not None:
                        self._say(event)
                await asyncio.sleep(ASK_SECONDS)


async def until_ready(process: Process, url: str, on_event: OnEvent, path: str = HEALTH) -> None:
    """Wait until a server answers 200 at ``path``.

    Raises :class:`~tercet.cluster.child_process.StartFailed` if the server ends or is too slow.

    ``on_event`` receives each stage that the server reaches: :data:`LOADING` with the stage's name.
    """
    progress = StartProgress(process.log, process.log_begin)
    port, somebody_else = urlsplit(url).port or 80, False
    async with _asking() as session:
        while progress.seconds < READY_SECONDS:
            if process.returncode is not None:
                raise process.failure(f"{describe_exit(process.returncode)} while it was starting")
            with contextlib.suppress(aiohttp.ClientError, OSError):  # includes timeouts
                async with session.get(url + path) as response:
                    # If two fleets start on one port, the later one would poll the other's router.
                    somebody_else = response.status == 200 and not await asyncio.to_thread(process.listens_at, port)
                    if response.status == 200 and not somebody_else:
                        # Once more, since the last stages may have been logged after the last look.
                        progress.look()
                        on_event(process.name, f"ready in {progress.summary()}")
                        return
            if progress.look():
                on_event(process.name, f"{LOADING}: {progress.stage}")
            await asyncio.sleep(START_POLL_SECONDS)
    if somebody_else:
        raise process.failure(f"does not listen at {url}: another process answers there")
    raise process.failure(f"was not ready after {READY_SECONDS:.0f} s")


class EngineProvisioner(Protocol):
    """Interface to the engines of one kind of fleet. At most one task at a time calls the methods for an engine."""

    @property
    def router(self) -> RouterAdmin:
        """The router of the fleet."""
        ...

    @property
    def engines(self) -> Sequence[str]:
        """Names of the present engines without those that are given up."""
        ...

    @property
    def used(self) -> Sequence[str]:
        """All names of present and past engines."""
        ...

    def require_room(self, count: int) -> None:
        """Raise :class:`~tercet.protocol.BadRequest` if ``count`` more engines cannot be started."""
        ...

    async def start(self, name: str, role: Role) -> None:
        """Start an engine, and return when it serves and the router has added it; stop it if that fails."""
        ...

    async def set_role(self, name: str, role: Role) -> None:
        """Change the role of a member."""
        ...

    async def stop(self, name: str) -> None:
        """Remove an engine from the router, and stop it."""
        ...
