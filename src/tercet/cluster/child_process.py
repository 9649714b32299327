"""A child process in its own process group, with its output in a log file; it ends with this process."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import runpy
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tercet.aio.importing import without_collections
from tercet.aio.warm_parent import serve_forks
from tercet.cluster import guard
from tercet.cluster.engine_command import FLAGS_CHECK, WITH_ONE_IMPORT
from tercet.protocol import TercetError
from tercet.settings.process_settings import NO_DYNAMO, PRELOAD, THREADS_BIND

GRACE_SECONDS = 20.0
HURRY_SECONDS = 5.0
SHARED_MEMORY = "/dev/shm/"
# Exit code of commands with invalid arguments, vLLM's server among them.
REFUSED = 2
# How a process of Tercet begins the line that says why it ends.
ERROR_LINE = "tercet: "
TAIL_LINES = 15
TAIL_BYTES = 64 * 1024
_STRAGGLER_SECONDS = 3.0
_ASK_SECONDS = 0.05


class StartFailed(TercetError):
    """A process of the fleet ended or did not become ready; the message has the end of its log."""

    code = "start_failed"


class StartRefused(StartFailed):
    """A process refused its arguments; the message has the end of its log."""

    @property
    def exit_code(self) -> int:
        return REFUSED


class Process:
    """A child process called ``name``. Call :meth:`start`, and :meth:`stop` on every exit.

    ``env`` is added to this process's environment; None removes a variable. ``grace`` is the time in seconds between
    SIGTERM and SIGKILL when the child is stopped. The child runs under :mod:`tercet.cluster.guard`, which ends the
    child and all its children when this process ends, even by SIGKILL. Guard, command and children are one process
    group, so that each can be signalled after the others' end. If ``warm`` is given, the warm parent that listens there
    forks the child. The child inherits the descriptors ``inherited``. Its output
    begins at the byte ``log_begin`` of the log. ``at_first`` are variables that a restart of the command does not get.
    """

    def __init__(
        self, name: str, argv: Sequence[str], env: Mapping[str, str | None], log: Path, grace: float = GRACE_SECONDS,
        warm: Path | None = None, inherited: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.name = name
        self.log = log
        self.log_begin = 0
        self._continues_log = False
        self._argv = argv
        self._env = env
        self._grace = grace
        self._warm = warm
        self._inherited = inherited
        self.at_first: Mapping[str, str] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._lifeline: int | None = None
        self._shared_memory: set[Path] = set()
        self._sockets: str | None = None

    def again(self, log: Path) -> Process:
        """Return a new process for the same command, with the log file ``log``; it continues this process's log."""
        found = Process(self.name, self._argv, self._env, log, self._grace, self._warm)
        found._continues_log = log == self.log
        return found

    async def start(self) -> None:
        """Start the process; its output goes to the log. Raises :class:`StartFailed` if the system refuses it."""
        try:
            await self._spawn()
        except BaseException as error:
            self._cut_lifeline()
            self._remove_sockets()
            if isinstance(error, OSError):
                raise StartFailed(f"{self.name} cannot be started: {error}") from error
            raise

    async def refusal_of_start(self) -> str:
        """Start the process; return why the system refuses it, as :func:`describe_exit` does, or an empty string."""
        try:
            await self.start()
        except StartFailed as error:
            return error.message.removeprefix(f"{self.name} ")
        return ""

    async def _spawn(self) -> None:
        # The guard reads the other end of this pipe, which the kernel closes if this process is killed: then the guard
        # ends the group.
        guards_end, self._lifeline = os.pipe()
        try:
            # vLLM does not remove its sockets' files when it ends.
            self._sockets = tempfile.mkdtemp(prefix=guard.SOCKETS_PREFIX)
            env = {**os.environ, guard.SOCKETS: self._sockets, **self._env, **self.at_first}
            if not self._continues_log:
                self.log.write_bytes(b"")
            with self.log.open("ab") as log:  # append mode, so that the file can be truncated during writing
                self.log_begin = log.tell()
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", guard.__file__, str(self._grace)),
                    *(() if self._warm is None else (guard.FROM, str(self._warm))),
                    *self._argv,
                    stdin=guards_end,
                    stdout=log,
                    stderr=asyncio.subprocess.STDOUT,
                    env={name: value for name, value in env.items() if value is not None},
                    # Not a separate session: Linux's autogroup schedules each session as one, and a router or an
                    # engine core in another session may wait until a prefill has ended.
                    process_group=0,
                    pass_fds=self._inherited,
                )
        finally:
            os.close(guards_end)

    @property
    def pid(self) -> int | None:
        """Process id of the guard, which is also the id of the group; ``None`` before the start."""
        return None if self._process is None else self._process.pid

    @property
    def returncode(self) -> int | None:
        return None if self._process is None else self._process.returncode

    async def ended(self) -> int:
        """Wait for the end of the command, end the processes that remain in its group, and return the exit code."""
        if self._process is None:
            raise RuntimeError(f"{self.name} was not started")
        code = await self._process.wait()
        await self._end_stragglers()
        return code

    def listens_at(self, port: int) -> bool:
        """True if this command or one of its children listens on the port, or if the system does not show sockets."""
        import psutil

        for process in psutil.process_iter() if self._process is not None else ():
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):  # the process has ended in the meantime
                if os.getpgid(process.pid) != self.pid:
                    continue
                try:
                    found = process.net_connections("tcp")
                except psutil.AccessDenied:
                    return True
                if any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in found):
                    return True
        return False

    def tail(self) -> str:
        """Return the last lines of this process's output that are not empty."""
        try:
            with self.log.open("rb") as log:
                size = self.log.stat().st_size
                begin = self.log_begin if self.log_begin <= size else 0  # the log may have been rotated
                log.seek(max(begin, size - TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join([line for line in lines if line.strip()][-TAIL_LINES:])

    def failure(self, what: str) -> StartFailed:
        """Return an error that says ``what`` happened, with the end and the path of the log."""
        kind = StartRefused if self.returncode == REFUSED else StartFailed
        last = self.tail().rpartition("\n")[2]
        if last.startswith(ERROR_LINE):  # a sentence that says it all
            return kind(f"{self.name}: {last.removeprefix(ERROR_LINE)} (log: {self.log})")
        return kind("\n".join(filter(None, [f"{self.name} {what}", self.tail(), f"(whole log: {self.log})"])))

    async def stop(self) -> None:
        """Send SIGTERM to the process group, and SIGKILL after the grace period."""
        process = self._process
        try:
            if process is None:
                return
            with contextlib.suppress(ProcessLookupError):
                process.terminate()  # the guard forwards the signal to the group
            try:
                # wait_for would lose a cancellation that comes when the process ends (CPython 3.11).
                async with asyncio.timeout(self._grace):
                    await process.wait()
            except TimeoutError:
                self._signal_group(signal.SIGKILL)
                await process.wait()
            await self._end_stragglers()
        finally:
            self._cut_lifeline()

    def kill(self) -> None:
        """Kill the process group; :meth:`ended` returns when it has ended."""
        self._signal_group(signal.SIGKILL)

    async def hurry(self) -> None:
        """Make a running :meth:`stop` end soon: send SIGTERM again, and SIGKILL after ``HURRY_SECONDS``."""
        self._signal_group(signal.SIGTERM)
        await asyncio.sleep(HURRY_SECONDS)
        self._signal_group(signal.SIGKILL)

    def remember_shared_memory(self) -> None:
        """Record the group's files in shared memory; those that remain after the group's end are removed.

        A process removes its files when it ends, but not when it is killed.
        """
        if self._process is not None:
            self._shared_memory |= shared_memory_of(self._process.pid)

    async def _end_stragglers(self) -> None:
        """End the processes that remain in the group after the command's end: SIGTERM, then SIGKILL."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._signal_group(number)
            alive = True
            for _ in range(round(_STRAGGLER_SECONDS / _ASK_SECONDS)):
                alive = self._process is not None and _any_alive(self._process.pid)
                if not alive:
                    break
                await asyncio.sleep(_ASK_SECONDS)
            if not alive:
                break
        # Only now: a process of the group would go on writing to files that another process could then take over.
        for left in self._shared_memory:
            with contextlib.suppress(OSError):
                left.unlink(missing_ok=True)
        self._remove_sockets()

    def _signal_group(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def _remove_sockets(self) -> None:
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)
            self._sockets = None

    def _cut_lifeline(self) -> None:
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None


def shared_memory_of(group: int) -> set[Path]:
    """Return the files of shared memory that processes of this group have mapped.

    They are found by inode: glibc creates a semaphore's file under a temporary name.
    """
    import psutil

    mapped: set[int] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            if os.getpgid(process.pid) == group:
                maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
                mapped |= {int(line.split()[4]) for line in maps if SHARED_MEMORY in line}
    with os.scandir(SHARED_MEMORY) as files:
        return {Path(file.path) for file in files if file.inode() in mapped}


def _any_alive(group: int) -> bool:
    """True if a process of this group still runs; a zombie does not count."""
    # Imported here: commands that start no process do not need it.
    import psutil

    ended = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):  # the process has ended in the meantime
            if os.getpgid(process.pid) == group and process.status() not in ended:
                return True
    return False


def describe_exit(code: int) -> str:
    """Return an exit code as text: ``ended with exit code 3``, ``was killed by SIGKILL``."""
    number = -code if code < 0 else code - 128
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(number).name}"
    return f"ended with exit code {code}"


COMMAND = (sys.executable, "-m", "tercet.cluster.child_process")
# Code of `python -c` that runs the router of `tercet up`, and modules that routers import in addition to engines'.
ROUTER = "from tercet.cli.up import serve_router; serve_router()"
COMMAND_LINE = "tercet.cli"
OF_ROUTER = (
    "tercet.cli.app",
    "tercet.router.server",
    "tercet.wire.serving.server_access",
    "tercet.router.openai.openai_server",
    "uvloop",
)
# Some libraries start threads during their import, and threads do not survive a fork: they must not start any.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
READ_LATE = frozenset({
    "VLLM_API_KEY", "VLLM_CPU_KVCACHE_SPACE", THREADS_BIND, "VLLM_NO_USAGE_STATS", "VLLM_PLUGINS",
    "VLLM_LOGGING_LEVEL", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "PWD", "OLDPWD", "SHLVL",
    "_", "PYTEST_CURRENT_TEST", "VLLM_RPC_BASE_PATH", "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES", PRELOAD,
    *ONE_THREAD,
})  # fmt: skip
"""Variables that are read after a fork; those with a prefix of :data:`LATE_PREFIXES` are read after it too.

``LD_PRELOAD`` is one of them, since the warm parent has the command's value and PyTorch's OpenMP in addition.
"""
LATE_PREFIXES = ("TERCET_", "OTEL_EXPORTER_OTLP_", "OTEL_TRACES_", "OTEL_BSP_")
"""Prefixes of further variables that are read after a fork: span exporters are created when a process serves."""
OF_ENGINES = frozenset({"OMP_NUM_THREADS", "PYTHONWARNINGS", NO_DYNAMO, "TORCH_CPP_LOG_LEVEL"})
"""Variables that matter to engines only: a router computes nothing."""


class ForkedCommand(msgspec.Struct, frozen=True):
    """A guard's request: arguments including the interpreter, environment and working directory."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str


def main() -> None:
    """Import the modules, then fork on request until the process ends."""
    import setproctitle  # vLLM's dependency: without it nothing is imported for engines

    setproctitle.getproctitle()  # it must read the environment before that changes
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        from tercet.vllm_plugin.hooks import SIDES
        from tercet.vllm_plugin.start.before_forks import check_hooks, load_tokenizer
        from tercet.vllm_plugin.start.process_output import without_noise
        from tercet.vllm_plugin.start.server import import_engine

        began_with = dict(os.environ)
        without_noise()
        import_engine()
        with without_collections():
            for module in OF_ROUTER:
                importlib.import_module(module)
            check_hooks(*SIDES)
            for model in sys.argv[2:]:
                load_tokenizer(Path(model))
        serve_forks(listening, partial(be, began_with))


def be(began_with: Mapping[str, str], descriptors: list[int]) -> int:
    """Run the command of a request in this fork; the warm parent started with the variables ``began_with``.

    The descriptors are the request and the three standard streams.
    """
    from tercet.vllm_plugin.start.before_forks import forget_changed_tokenizer

    with open(descriptors[0], "rb") as request:
        command = msgspec.json.decode(request.read(), type=ForkedCommand)
    for stream, fd in enumerate(descriptors[1:]):
        os.dup2(fd, stream)
        os.close(fd)
    module = command.argv[2]
    # Values that modules read at their import cannot be changed in a fork: such a command starts as a new process.
    is_router = module in (ROUTER, COMMAND_LINE)
    others = early_differences(began_with, command.env, READ_LATE | OF_ENGINES if is_router else READ_LATE)
    os.chdir(command.cwd)
    if others:
        print(
            f"tercet: starting without shared imports: the process needs other values of {', '.join(others)}",
            flush=True,
        )
        os.execve(command.argv[0], command.argv, command.env)
    set_by_imports = {name: value for name, value in os.environ.items() if began_with.get(name) != value}
    os.environ.clear()
    os.environ.update({**command.env, **set_by_imports})
    forget_changed_tokenizer()
    sys.argv[:] = command.argv[2:]
    sys.orig_argv[:] = command.argv
    setproctitle: Any = sys.modules["setproctitle"]
    setproctitle.setproctitle(" ".join(command.argv))
    if module == WITH_ONE_IMPORT:
        from tercet.vllm_plugin.start.server import serve_imported

        os.environ[PRELOAD] = began_with[PRELOAD]
        serve_imported()
    elif module == ROUTER:
        exec(ROUTER, {})
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def can_fork(argv: Sequence[str]) -> bool:
    """True if a warm parent has imported the modules of this command."""
    return list(argv[1:3]) in (["-m", WITH_ONE_IMPORT], ["-m", FLAGS_CHECK], ["-m", COMMAND_LINE], ["-c", ROUTER])


def early_differences(here: Mapping[str, str], wanted: Mapping[str, str], late: frozenset[str]) -> list[str]:
    """Return the names of variables that differ and are not in ``late``."""
    names = {*here, *wanted} - late
    return sorted(name for name in names if not name.startswith(LATE_PREFIXES) and here.get(name) != wanted.get(name))


@asynccontextmanager
async def warm_parent(env: Mapping[str, str | None], model: str, log: Path) -> AsyncGenerator[Path]:
    """Run a warm parent for engines with ``model`` and the environment ``env``, and yield the path of its socket.

    Requests may be sent at once: they are answered after the import. Raises :class:`OSError`.
    """
    with listening_for_guards() as (address, listening):
        fd = listening.fileno()
        parent = Process("imports", [*COMMAND, str(fd), model], {**env, **loaded_with()}, log, inherited=(fd,))
        try:
            await parent.start()
            listening.close()
            yield address
        finally:
            await asyncio.shield(parent.stop())


@contextmanager
def listening_for_guards() -> Generator[tuple[Path, socket.socket]]:
    """Yield a socket that guards connect to and that a warm parent inherits, with its path.

    The caller closes its copy of the socket, so that guards notice the end of the warm parent.
    """
    directory = Path(tempfile.mkdtemp(prefix="tercet-warm-"))  # only this user may open it, since clients run commands
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(str(directory / "socket"))
            listening.listen(128)
            yield directory / "socket", listening
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def loaded_with() -> dict[str, str]:
    """Return the variables of a warm parent's environment in addition to those of its engines."""
    from tercet.vllm_plugin.start.server import openmp, with_openmp

    return {**ONE_THREAD, PRELOAD: with_openmp(os.environ.get(PRELOAD, ""), openmp())}


if __name__ == "__main__":
    main()
