"""The process that owns the port: it starts workers, replaces those that end, and carries changes between them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import mmap
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import msgspec
from prometheus_client import multiprocess

from tercet.protocol import EngineError
from tercet.router.workers.agreement import Agreement, Lost
from tercet.router.workers.messages import (
    Call,
    Granted,
    Open,
    Perform,
    Performed,
    Reply,
    Serving,
    ToSupervisor,
    Wish,
    messages_of,
    write,
)
from tercet.settings import RouterConfig

logger = logging.getLogger("tercet.router")
GRACE_SECONDS = 20.0
PERFORM_SECONDS = 90.0
AGAIN_SECONDS = 1.0
# Replacements that end before they serve, in a row, after which something is wrong with more than a worker.
MOST_FAILURES = 5
LOAD_BYTES = 4
NOT_ACCEPTING = 2**31 - 1
_decoder: msgspec.msgpack.Decoder[ToSupervisor] = msgspec.msgpack.Decoder(ToSupervisor)


class Started(msgspec.Struct, frozen=True):
    """What a worker is given on its command line, as JSON: its place, and the file descriptors that it inherits."""

    config: RouterConfig
    index: int
    workers: int
    control: int
    listening: int
    loads: int
    replaces: bool


def supervise(config: RouterConfig) -> int:
    """Run ``config.workers`` front doors until SIGINT or SIGTERM; returns an exit code.

    It is not 0 if a worker ends before it serves, at the start or again and again later.
    """
    logging.basicConfig(level=config.log_level.upper())
    return asyncio.run(_supervise(config))


async def _supervise(config: RouterConfig) -> int:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stopped.set)
    async with AsyncExitStack() as stack:
        listening = stack.enter_context(_listen(config))
        metrics = stack.enter_context(tempfile.TemporaryDirectory(prefix="tercet-metrics-"))
        loads = os.memfd_create("tercet-loads")
        stack.callback(os.close, loads)
        _prepare_loads(loads, config.workers)
        agreement = Agreement()
        places = [Place(config, index, listening, loads, Path(metrics), agreement) for index in range(config.workers)]
        keeping = [asyncio.create_task(place.keep()) for place in places]
        waiting = asyncio.create_task(stopped.wait())
        try:
            done, _ = await asyncio.wait([waiting, *keeping], return_when=asyncio.FIRST_COMPLETED)
            codes = [task.result() for task in keeping if task in done]
        finally:
            for task in (waiting, *keeping):
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)
    return next((code for code in codes if code), 0)


def _listen(config: RouterConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((config.host, config.port))
    return sock


def _prepare_loads(loads: int, workers: int) -> None:
    """vLLM's servers compare their numbers of connections here, so that the least loaded one takes the next."""
    os.ftruncate(loads, LOAD_BYTES * workers)
    with mmap.mmap(loads, LOAD_BYTES * workers) as shared:
        shared[:] = NOT_ACCEPTING.to_bytes(LOAD_BYTES, sys.byteorder) * workers


class Place:
    """One worker's place: whoever holds it is started, watched, and replaced."""

    def __init__(
        self, config: RouterConfig, index: int, listening: socket.socket, loads: int, metrics: Path,
        agreement: Agreement,
    ) -> None:  # fmt: skip
        self._config = config
        self._index = index
        self._listening = listening
        self._loads = loads
        self._metrics = metrics
        self._agreement = agreement

    async def keep(self) -> int:
        """Have a worker here until cancelled; returns an exit code if that cannot be done."""
        failures, ever_served = 0, False
        while True:
            code, served = await self._one(replaces=ever_served)
            ever_served |= served
            failures = 0 if served else failures + 1
            if not ever_served or failures >= MOST_FAILURES:
                logger.error("workers: %d ended with %d before it served", self._index, code)
                return code or 1
            logger.error("workers: %d ended with %d; another one takes its place", self._index, code)
            await asyncio.sleep(AGAIN_SECONDS)

    async def _one(self, replaces: bool) -> tuple[int, bool]:
        """A worker's life: its exit code, and whether it served."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = Started(
                self._config, self._index, self._config.workers, theirs.fileno(), self._listening.fileno(),
                self._loads, replaces,
            )  # fmt: skip
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tercet.router.workers.worker", msgspec.json.encode(command).decode(),
                pass_fds=(theirs.fileno(), self._listening.fileno(), self._loads), env=self._env(),
                stdin=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        worker = Worker(process, reader, writer, self._agreement)
        try:
            await worker.attend()
            return await process.wait(), worker.served
        finally:
            worker.close()
            await _stopped(process)
            self._forget(process.pid)

    def _env(self) -> Mapping[str, str]:
        return {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(self._metrics)}

    def _forget(self, pid: int) -> None:
        multiprocess.mark_process_dead(pid, str(self._metrics))  # pyright: ignore[reportUnknownMemberType]
        os.pwrite(self._loads, NOT_ACCEPTING.to_bytes(LOAD_BYTES, sys.byteorder), LOAD_BYTES * self._index)


async def _stopped(process: asyncio.subprocess.Process) -> None:
    """End a process: SIGTERM, after the grace SIGKILL."""
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(GRACE_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


class Worker:
    """One worker process, at the other end of its line."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
        agreement: Agreement,
    ) -> None:  # fmt: skip
        self.served = False
        self._process = process
        self._reader = reader
        self._writer = writer
        self._agreement = agreement
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def attend(self) -> None:
        """Listen to it until its line closes."""
        async for message in messages_of(self._reader, _decoder):
            match message:
                case Serving():
                    self._spawn(self._join())
                case Wish(number, call):
                    self._spawn(self._grant(number, call))
                case Performed(number, reply):
                    waiting = self._calls.get(number)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(reply)
        self.close()

    async def perform(self, call: Call) -> Reply:
        """See :class:`~tercet.router.workers.agreement.Peer`."""
        number = next(self._numbers)
        waiting = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            write(self._writer, Perform(number, call))
            async with asyncio.timeout(PERFORM_SECONDS):
                return await waiting
        except TimeoutError as error:
            self.end(f"no answer to {call.method} {call.path} within {PERFORM_SECONDS:.0f} s")
            raise Lost from error
        finally:
            del self._calls[number]

    def end(self, why: str) -> None:
        """See :class:`~tercet.router.workers.agreement.Peer`."""
        logger.error("workers: process %d is ended: %s", self._process.pid, why)
        self._agreement.leave(self)
        with suppress(ProcessLookupError):
            self._process.terminate()

    def close(self) -> None:
        """Nothing is expected from it any more; may be called twice."""
        self._agreement.leave(self)
        for waiting in self._calls.values():
            if not waiting.done():
                waiting.set_exception(Lost())
        self._writer.close()

    async def _join(self) -> None:
        with suppress(Lost):
            await self._agreement.join(self)
            self.served = True
            write(self._writer, Open())

    async def _grant(self, number: int, call: Call) -> None:
        try:
            replies = await self._agreement.settle(self, call)
        except Lost:
            failure = EngineError("this worker of the front door did not make the change")
            replies = [Reply(failure.status, msgspec.json.encode(failure.to_wire()))]
        write(self._writer, Granted(number, replies))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
