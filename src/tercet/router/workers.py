"""Several router processes behind one port: a supervisor starts workers and replaces workers that end.

Each worker has its own view of the fleet, its own programs and its own token streams. Operators' changes reach all
workers by the state that they follow: see :mod:`tercet.router.state.shared_state`. A warm parent imports vLLM once for
all workers, and forks each of them: see :mod:`tercet.aio.warm_parent`.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import multiprocess

from tercet.aio.tasks import signals_to
from tercet.aio.warm_parent import ForkedChild, Forks, NoFork, serve_forks, unforkable
from tercet.logs import ROUTER_READY, WORKER_ENDED, log_to_stderr
from tercet.protocol import TercetError
from tercet.settings import RouterConfig, Source, decode_settings, encode_settings
from tercet.settings.process_settings import COLD, WARM_PARENT_VARIABLE


def listening_socket(config: RouterConfig) -> socket.socket:
    """Return a socket that is bound to the host and port for clients."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((config.host, config.port))
    return sock


logger = logging.getLogger(__name__)

LOAD_BYTES = 4
# Folder in which the workers of one router count together.
METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
# What a worker reports, a byte each: it accepts connections, and its event loop runs.
SERVING = b"s"
BEAT = b"."
HURRY = b"!"
BEAT_SECONDS = 5.0
# Seconds without a report after which a worker that has served is killed: clients wait for its answers in vain.
MOST_SILENT_S = 30.0


class Started(msgspec.Struct, frozen=True):
    """What a worker reads from its standard input: settings by key, and the file descriptors that it inherits."""

    settings: dict[str, Any]
    index: int
    line: int
    listening: int
    loads: int


@dataclass(frozen=True)
class Shared:
    """The objects that all workers share: the port, the number of connections of each, and a line to the supervisor."""

    index: int
    listening: socket.socket
    loads: memoryview[int]
    line: socket.socket

    def serving(self) -> None:
        """Tell the supervisor that this worker accepts connections."""
        self.line.sendall(SERVING)

    async def follow_supervisor(self, hurry: Callable[[], object]) -> None:
        """Report that the event loop runs, call ``hurry`` at a message, end this process if the supervisor is gone."""
        self.line.setblocking(False)
        beating = asyncio.create_task(self._beat())
        try:
            with suppress(ConnectionError):
                while await asyncio.get_running_loop().sock_recv(self.line, len(HURRY)):
                    hurry()
        finally:
            beating.cancel()
        # The supervisor is gone, and nothing would replace this worker or pass it a signal: end as after a signal.
        os.kill(os.getpid(), signal.SIGTERM)

    async def _beat(self) -> None:
        while True:
            with suppress(OSError):  # a supervisor that does not read, or that is gone: the other end of the line says
                self.line.send(BEAT)
            await asyncio.sleep(BEAT_SECONDS)


def main() -> None:
    """Serve as a worker until a signal, or until the supervisor is gone."""
    work(sys.stdin.buffer.read())


def work(settings: bytes, descriptors: tuple[int, int, int] | None = None) -> None:
    """Run the worker of ``settings``; ``descriptors`` replace those of its line, port and loads, if given."""
    from tercet.router.server import serve

    started = msgspec.json.decode(settings, type=Started)
    if descriptors is not None:
        line, port, loads = descriptors
        started = msgspec.structs.replace(started, line=line, listening=port, loads=loads)
    config = decode_settings(RouterConfig, Source(started.settings))
    loads = memoryview(mmap.mmap(started.loads, LOAD_BYTES * config.workers)).cast("i")
    with socket.socket(fileno=started.line) as line, socket.socket(fileno=started.listening) as listening:
        try:
            serve(config, Shared(started.index, listening, loads, line))
        except TercetError as error:
            print(f"tercet: {error.message}", file=sys.stderr)
            raise SystemExit(error.exit_code) from None


# Seconds for a worker to free its resources after its requests have ended.
GRACE_SECONDS = 20.0
RETRY_DELAY_S = 1.0
# Number of consecutive replacements that may end before they serve; then the supervisor gives up.
MOST_FAILURES = 5
NOT_ACCEPTING = (2**31 - 1).to_bytes(LOAD_BYTES, sys.byteorder)
COMMAND = "from tercet.router.workers import main; main()"


def supervise(config: RouterConfig) -> int:
    """Run ``config.workers`` routers until SIGINT or SIGTERM; return an exit code.

    After the first signal they finish running requests; any further signal ends them at once. The code is not 0 if a
    worker ends before it serves, at the start or repeatedly later.
    """
    log_to_stderr(config.log_level, config.log_format)
    with tempfile.TemporaryDirectory(prefix="tercet-workers-") as directory, ExitStack() as stack:
        metrics = Path(directory) / "metrics"
        metrics.mkdir()
        # A worker without vLLM starts in a second: it needs no parent that has imported vLLM.
        cold = config.serves_without_vllm or os.environ.get(WARM_PARENT_VARIABLE) == COLD
        channel = None if cold else stack.enter_context(warm_parent(metrics))
        return asyncio.run(_supervise(config, Path(directory), channel))


async def _supervise(config: RouterConfig, common: Path, channel: socket.socket | None) -> int:
    stopped, hurried = asyncio.Event(), asyncio.Event()
    with ExitStack() as stack:
        stack.enter_context(signals_to(stopped.set, hurried.set))
        # Bound here, once: all workers inherit it, so a port in use is one error of the command.
        listening = stack.enter_context(listening_socket(config))
        if config.state is None:
            config = msgspec.structs.replace(config, state=str(common / "state.json"))
        loads = os.memfd_create("tercet-loads")
        stack.callback(os.close, loads)
        os.ftruncate(loads, LOAD_BYTES * config.workers)
        # In this table vLLM's servers compare their connections, so that the least loaded one accepts the next.
        os.pwrite(loads, NOT_ACCEPTING * config.workers, 0)
        forks = None if channel is None else stack.enter_context(closing(Forks(channel)))
        serving: set[int] = set()

        # Once, when all workers accept: a worker that is replaced later does not make the router ready again.
        def on_serving(index: int) -> None:
            first = len(serving) < config.workers
            serving.add(index)
            if first and len(serving) == config.workers:
                log_ready(config)

        slots = [
            WorkerSlot(config, index, listening, loads, common / "metrics", hurried, forks, on_serving)
            for index in range(config.workers)
        ]
        keeping = [asyncio.create_task(place.keep()) for place in slots]
        waiting = asyncio.create_task(stopped.wait())
        try:
            done, _ = await asyncio.wait([waiting, *keeping], return_when=asyncio.FIRST_COMPLETED)
            codes = [task.result() for task in keeping if task in done]
        finally:
            for task in (waiting, *keeping):
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)
    return next((code for code in codes if code), 0)


def log_ready(config: RouterConfig) -> None:
    """Log that the router accepts requests, with its address."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    ROUTER_READY.tell(model=config.public_name, address=f"{host}:{config.port}", program=config.program)


class Reports:
    """The reports of one worker on its ``line``; ``on_serving`` is called at the first that says that it serves."""

    def __init__(self, line: socket.socket, on_serving: Callable[[], object]) -> None:
        self._line = line
        self._on_serving = on_serving
        self.served = False
        self.count = 0

    def read(self) -> None:
        """Read what has arrived; a child of a worker that ended may keep the line open for longer."""
        try:
            arrived = self._line.recv(4096)
        except BlockingIOError:
            return
        except ConnectionError:
            arrived = b""
        if not arrived:
            asyncio.get_running_loop().remove_reader(self._line)
            return
        self.count += len(arrived)
        if SERVING in arrived and not self.served:
            self.served = True
            self._on_serving()


@dataclass(frozen=True)
class WorkerSlot:
    """One worker's slot: its process is started, watched and replaced."""

    config: RouterConfig
    index: int
    listening: socket.socket
    # Descriptor of the servers' numbers of connections.
    loads: int
    # Folder of workers' metrics.
    metrics: Path
    # When it is set, a worker that is stopping ends at once.
    hurried: asyncio.Event
    forks: Forks | None = None
    # Called with ``index`` when a worker accepts connections.
    on_serving: Callable[[int], object] = lambda _: None

    async def keep(self) -> int:
        """Keep a worker running until cancelled; return an exit code if that fails."""
        failures, ever_served = 0, False
        while True:
            try:
                code, served = await self._one()
            except OSError as error:
                logger.error("worker %d cannot be started: %s", self.index, error)
                code, served = 1, False
            ever_served |= served
            failures = 0 if served else failures + 1
            # At the start the command ends with the failure; a worker that has served is worth several tries.
            if not ever_served or failures >= MOST_FAILURES:
                WORKER_ENDED.tell(worker=self.index, code=code, reason=f"it ended with code {code} before it served")
                return code or 1
            WORKER_ENDED.tell(
                worker=self.index, code=code, reason=f"it ended with code {code}; another worker replaces it"
            )
            await asyncio.sleep(RETRY_DELAY_S)

    async def _one(self) -> tuple[int, bool]:
        """Run one worker to its end; return its exit code, and whether it served."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:  # only the worker keeps its end, so that its death closes the line
                process = await self._start(theirs)
            ours.setblocking(False)
            reports = Reports(ours, partial(self.on_serving, self.index))
            loop = asyncio.get_running_loop()
            loop.add_reader(ours, reports.read)
            silent = asyncio.create_task(self._kill_when_silent(process, reports))
            try:
                code = await process.wait()
                reports.read()  # what it reported just before its end
                return code, reports.served
            finally:
                silent.cancel()
                loop.remove_reader(ours)
                await self._stop(process, ours)
                # Its gauges must not count on, and no other worker may wait for it to take a connection.
                multiprocess.mark_process_dead(process.pid, str(self.metrics))  # pyright: ignore[reportUnknownMemberType]
                os.pwrite(self.loads, NOT_ACCEPTING, LOAD_BYTES * self.index)

    async def _kill_when_silent(self, process: asyncio.subprocess.Process | ForkedChild, reports: Reports) -> None:
        """Kill a worker that served and does not report any more, such as a stopped process: it is then replaced."""
        reported, silent = reports.count, 0
        while not reports.served or silent < MOST_SILENT_S:
            # In steps: a supervisor that was stopped itself has not looked, and does not count that time.
            await asyncio.sleep(1)
            silent = silent + 1 if reports.count == reported else 0
            reported = reports.count
        logger.error("worker %d did not answer for %g s and is killed", self.index, MOST_SILENT_S)
        process.kill()

    async def _start(self, line: socket.socket) -> asyncio.subprocess.Process | ForkedChild:
        """Start a worker: a fork of the warm parent, or its own process if the parent is not available."""
        fds = line.fileno(), self.listening.fileno(), self.loads
        content = msgspec.json.encode(Started(encode_settings(self.config), self.index, *fds))
        if self.forks is not None:
            try:
                with tempfile.TemporaryFile() as settings:
                    settings.write(content)
                    settings.seek(0)
                    return await self.forks.fork([settings.fileno(), *fds])
            except NoFork as refusal:
                logger.warning("worker %d imports vLLM itself: %s", self.index, refusal)
        # The settings may have keys: they go through a pipe, since other users of the machine can read command lines.
        env = {**os.environ, METRICS_VARIABLE: str(self.metrics)}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", COMMAND, pass_fds=fds, env=env, stdin=asyncio.subprocess.PIPE
        )
        if process.stdin is not None:
            process.stdin.write(content)
            process.stdin.close()
        return process

    async def _stop(self, process: asyncio.subprocess.Process | ForkedChild, line: socket.socket) -> None:
        """Send SIGTERM and wait for the shutdown's timeout; send SIGKILL if the worker has not ended then."""
        if process.returncode is not None:
            return
        # The worker ends its requests by itself after the shutdown's timeout; SIGKILL is for one that hangs.
        with suppress(ProcessLookupError):
            process.terminate()
        hurrying = asyncio.create_task(self._hurry(line))
        try:
            async with asyncio.timeout(self.config.shutdown_timeout_s + GRACE_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        finally:
            hurrying.cancel()

    async def _hurry(self, line: socket.socket) -> None:
        await self.hurried.wait()
        with suppress(OSError):
            line.send(HURRY)


# ---- the warm parent -------------------------------------------------------------------------------------------------

WARM_PARENT = "from tercet.router.workers import warm_main; warm_main()"
IMPORTED = ("tercet.router.server", "tercet.wire.serving.server_access", "tercet.router.openai.openai_server", "uvloop")
# Makes libraries start no threads at their import, since threads do not survive a fork.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}


def warm_main() -> None:
    """Import the modules that workers need, and fork workers until the supervisor closes its end."""
    _leave_signals_to_the_supervisor()
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        from tercet.vllm_plugin.start.before_forks import light_import

        with light_import(compiles=False):
            for module in IMPORTED:
                importlib.import_module(module)
            from tercet.router.openai.openai_server import import_vllm
            from tercet.vllm_plugin.start.process_output import errors_only

            errors_only()
            import_vllm()
        serve_forks(channel, _worker)


def _worker(descriptors: list[int]) -> int:
    settings, line, listening, loads = descriptors
    with open(settings, "rb") as pipe:
        work(pipe.read(), (line, listening, loads))
    return 0


@contextmanager
def warm_parent(metrics: Path) -> Generator[socket.socket]:
    """Start a warm parent, yield the channel to it, and stop it at the exit; call this before an event loop runs.

    Its workers write their metrics to ``metrics``.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            variables = {METRICS_VARIABLE: str(metrics)}
            # A fork of this process saves the import of vLLM once more; it must have no threads, which a fork loses.
            has_imported = "vllm" in sys.modules and unforkable([ours.fileno(), theirs.fileno()]) is None
            if has_imported:
                stop = _forked(ours, theirs, variables)
            else:
                fd = theirs.fileno()
                process = subprocess.Popen(
                    [sys.executable, "-c", WARM_PARENT, str(fd)],
                    pass_fds=[fd],
                    env={**os.environ, **ONE_THREAD, **variables},
                )

                def stop() -> None:
                    process.kill()
                    process.wait()

        try:
            yield ours
        finally:
            stop()


def _forked(ours: socket.socket, channel: socket.socket, variables: Mapping[str, str]) -> Callable[[], None]:
    """Fork this process, which has imported vLLM, into a warm parent; return the function that stops it."""
    pid = os.fork()
    if pid:

        def stop() -> None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

        return stop
    # The child never returns into the caller's stack, whose contexts the supervisor leaves itself.
    code = 1
    try:
        _leave_signals_to_the_supervisor()
        # Without this the channel would stay open when the supervisor is gone, and this process would never end.
        ours.close()
        os.environ.update(variables)
        # Make Prometheus keep metrics in files; it chose otherwise when it was imported.
        values: Any = importlib.import_module("prometheus_client.values")
        values.ValueClass = values.get_value_class()
        serve_forks(channel, _worker)
        code = 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(code)


def _leave_signals_to_the_supervisor() -> None:
    """Ignore signals, which reach the whole group: this process ends when the supervisor closes its end."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
