"""The process that tries grammars before the core compiles them, so that a try can be ended.

An engine's core forks it before it loads a model, when the core has no device and almost no private memory. It
forks one child for each try: the child compiles the grammar and lets it follow a few tokens, within limits of CPU time
and memory, which the kernel enforces. Nothing of a child remains, and the core compiles only what was fine.

Who ends it: the end of the core, however it ends, kills the process, and the end of the process kills its children.
Who starts it again: :class:`GrammarProcess`, with the next try, as a new process that imports vLLM.

Relies on ``StructuredOutputManager.grammar_init`` making a backend, taking requests of the same one, and compiling at
once if ``_use_async_grammar_compilation`` is false.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import resource
import signal
import socket
import threading
import time
from contextlib import suppress
from enum import Enum
from types import SimpleNamespace
from typing import Any, NoReturn

import msgspec
import vllm.envs
from vllm.utils.system_utils import set_process_title

from tercet.settings.process_settings import PARALLEL_TOKENIZERS

logger = logging.getLogger(__name__)
PR_SET_PDEATHSIG = 1
M_ARENA_MAX = -8
MEMORY = 512 * 1024 * 1024
"""Bytes that a try may allocate."""
STEPS, FOLLOWING_SECONDS, TEXT_OF_STEPS = 32, 2.0, 2000
"""Tokens that a grammar follows in a try, and the CPU seconds that it may take for them."""
LONG_SECONDS, MOST_LONG = 0.1, 3
"""A token that takes more CPU seconds than the first is long: others wait for it. The second ends a try as too slow."""
START_SECONDS, STALL_SECONDS = 180.0, 60.0
NICE = 5
PID_BYTES = 4


class TryOutcome(Enum):
    """What a try came to; ``LOST``: the process ended for a reason that has nothing to do with the grammar."""

    FINE = "fine"
    OVER_LIMIT = "over limit"
    REFUSED = "refused"
    LOST = "lost"


class TryJob(msgspec.Struct, frozen=True):
    """A grammar to try: vLLM's name of its kind, its text, and the CPU seconds of the try; ``level`` of its tries."""

    kind: str
    text: str
    limit: float
    level: int


class Result(msgspec.Struct, frozen=True):
    """What a try came to: "" in ``refused`` if the grammar is fine. ``tried`` is false without a backend."""

    refused: str
    tried: bool = True


class GrammarProcess:
    """The core's side of the process, for any thread."""

    def __init__(self, vllm_config: Any) -> None:
        self._config = vllm_config
        self._lock = threading.Lock()
        self._channel: socket.socket | None = None
        self.pid: int | None = None
        """The process's id, None before it has started."""

    def fork(self) -> None:
        """Fork the process from this one, which must have no device and no thread that matters."""
        self.close()
        ours, theirs = _pair()
        parent = os.getpid()
        pid = os.fork()
        if not pid:
            ours.close()
            _become(theirs, self._config, parent)
        theirs.close()
        self._channel, self.pid = ours, pid

    def attempt(self, backend: str, job: TryJob) -> tuple[TryOutcome, str]:
        """Return what a try of ``job`` comes to, with the reason if it is refused. Wait as long as it takes."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                channel = self._ask(backend, theirs)
            if channel is None:
                return TryOutcome.LOST, ""
            ours.settimeout(START_SECONDS)
            with suppress(OSError):
                if pid := int.from_bytes(ours.recv(PID_BYTES), "big"):
                    return self._result(ours, pid, job)
            self._kill(channel)  # the process has ended, is stopped, or is occupied
            return TryOutcome.LOST, ""

    def warm(self, backend: str) -> None:
        """Make the process load a backend, without waiting for it."""
        with self._lock, suppress(OSError):
            if self._channel is not None:
                self._channel.sendall(backend.encode())

    def close(self) -> None:
        if self._channel is not None:
            self._kill(self._channel)

    def _ask(self, backend: str, theirs: socket.socket) -> socket.socket | None:
        with self._lock:
            if self._channel is None:
                self._spawn()
            channel = self._channel
            assert channel is not None
            try:
                channel.settimeout(START_SECONDS)
                socket.send_fds(channel, [backend.encode()], [theirs.fileno()])
            except OSError:
                pass
            else:
                return channel
        self._kill(channel)
        return None

    def _result(self, ours: socket.socket, pid: int, job: TryJob) -> tuple[TryOutcome, str]:
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return TryOutcome.OVER_LIMIT, ""
        # The kernel ends the child at its limit of CPU time; a child that is stopped, or gets no CPU, is ended here.
        try:
            ours.settimeout(STALL_SECONDS)
            _send(ours, job)
            answer = _receive(ours)
            if not answer:
                return TryOutcome.OVER_LIMIT, ""
            result = msgspec.msgpack.decode(answer, type=Result)
        except ConnectionError:
            return TryOutcome.OVER_LIMIT, ""
        except (OSError, msgspec.MsgspecError):
            return TryOutcome.LOST, ""
        finally:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        if not result.tried:
            return TryOutcome.LOST, ""
        return (TryOutcome.REFUSED, result.refused) if result.refused else (TryOutcome.FINE, "")

    def _spawn(self) -> None:
        """Start the process as a new one: this one cannot be forked any more."""
        logger.warning("the process that tries grammars has ended; starting it again")
        ours, theirs = _pair()
        with theirs:
            context = multiprocessing.get_context("spawn")
            process = context.Process(target=_serve, args=(theirs, self._config, os.getpid()), name="Grammars")
            process.start()
        self._channel, self.pid = ours, process.pid

    def _kill(self, channel: socket.socket) -> None:
        with self._lock:
            if self._channel is not channel:
                return
            self._channel, pid, self.pid = None, self.pid, None
            channel.close()
            if pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(pid, 0)


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _send(connection: socket.socket, message: TryJob | Result) -> None:
    """Send the only message in this direction; its end is that of the stream."""
    connection.sendall(msgspec.msgpack.encode(message))
    connection.shutdown(socket.SHUT_WR)


def _receive(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as file:
        return file.read()


# ---- the process ----------------------------------------------------------------------------------------------------


def _become(channel: socket.socket, vllm_config: Any, parent: int) -> NoReturn:
    """Serve in a fork of the core: keep none of its descriptors, and never return into its code."""
    try:
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) != channel.fileno():
                with suppress(OSError):  # that of the list
                    os.close(int(name))
        _serve(channel, vllm_config, parent)
    except BaseException:
        logger.exception("the process that tries grammars has failed; the next try starts it again")
    finally:
        os._exit(0)


def _serve(channel: socket.socket, vllm_config: Any, parent: int) -> None:
    _end_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are not waited for
    os.environ[PARALLEL_TOKENIZERS] = "false"
    set_process_title("Grammars")
    compile_without_own_timeout()
    managers = dict[str, Any]()
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, 100, 1)
        if not message:
            return
        name = message.decode()
        if name not in managers:
            try:
                managers[name] = _manager(name, vllm_config)
            except Exception:
                logger.exception(
                    "structured outputs are refused with 503: their process cannot load the backend %s; "
                    "name another one by --structured-outputs-config.backend",
                    name,
                )
                managers[name] = None
        if not descriptors:
            continue
        me, connection = os.getpid(), socket.socket(fileno=descriptors[0])
        if not os.fork():
            try:
                channel.close()
                _end_with(me)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                _try(connection, managers[name], name)
            finally:
                os._exit(0)
        connection.close()


def _end_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(0)


def compile_without_own_timeout() -> None:
    """Switch off vLLM's timeout for regular expressions in this process: it counts the time that others compute."""
    vllm.envs.VLLM_REGEX_COMPILATION_TIMEOUT_S = 0


def _manager(backend: str, vllm_config: Any) -> Any:
    """Return vLLM's manager with the ``backend``, which compiles at once."""
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.structured_output.backend_types import StructuredOutputOptions

    manager: Any = StructuredOutputManager(vllm_config)
    manager._use_async_grammar_compilation = False
    _compiled(manager, backend, StructuredOutputOptions.REGEX, "a")
    return manager


def _compiled(manager: Any, backend: str, kind: Any, text: str) -> Any:
    structured = SimpleNamespace(structured_output_key=(kind, text), grammar=None)
    params = SimpleNamespace(structured_outputs=SimpleNamespace(_backend=backend), all_stop_token_ids=None)
    request = SimpleNamespace(
        structured_output_request=structured, sampling_params=params, request_id="tried", use_structured_output=True
    )
    init = type(manager).grammar_init
    getattr(init, "__wrapped__", init)(manager, request)  # vLLM's own, without the hook
    found = structured.grammar
    return found.result() if hasattr(found, "result") else found


def _try(connection: socket.socket, manager: Any, backend: str) -> None:
    connection.sendall(os.getpid().to_bytes(PID_BYTES, "big"))
    # A fork of the process that has the backend, for one try: what the try breaks or uses up ends with it, and the
    # kernel enforces its limits.
    job = msgspec.msgpack.decode(_receive(connection), type=TryJob)
    logging.disable(logging.CRITICAL)
    os.nice(NICE * job.level)
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    # Limit all of the address space: the limit of data alone is not enforced on every kernel.
    with open("/proc/self/status") as status:
        size = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmSize"))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    wanted = size + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard < 0 else min(wanted, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_time(job.limit)
    refused = ""
    if manager is not None:
        try:
            refused = _why_refused(manager, backend, job)
        except MemoryError:
            refused = "takes too much memory to compile"
        except Exception as error:
            out = "bad_alloc" in str(error)
            refused = "takes too much memory to compile" if out else f"cannot be compiled: {str(error)[:300]}"
    signal.setitimer(signal.ITIMER_PROF, 0)
    _send(connection, Result(refused, manager is not None))


def _limit_time(seconds: float) -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _why_refused(manager: Any, name: str, job: TryJob) -> str:
    """Compile and follow the grammar; return why it is refused, or ""."""
    import numpy as np
    from vllm.v1.structured_output.backend_types import StructuredOutputOptions

    began = time.process_time()
    grammar = _compiled(manager, name, StructuredOutputOptions[job.kind], job.text)
    backend = manager.backend
    mask = backend.allocate_token_bitmask(1)
    grammar.fill_bitmask(mask, 0)
    if not mask.any():
        return NO_TEXT
    # What a grammar needs to follow a text counts apart: the limit begins again.
    _limit_time(max(job.limit - (time.process_time() - began), min(job.limit, FOLLOWING_SECONDS)))
    began, long = time.process_time(), 0
    own = np.array(manager.tokenizer.encode(job.text[:TEXT_OF_STEPS], add_special_tokens=False) or [0])
    for step in range(STEPS):
        allowed = np.unpackbits(mask.numpy().view(np.uint8)[0], bitorder="little")
        # Tokens of the structure's own text reach its repetitions; any tokens reach the rest.
        preferred = own[allowed[own] > 0] if step % 2 else own[:0]
        choices = preferred if len(preferred) else np.flatnonzero(allowed)
        token = int(choices[(step * 7919) % len(choices)])
        begins = time.process_time()
        if not grammar.accept_tokens("tried", [token]) or grammar.is_terminated():
            return ""
        grammar.fill_bitmask(mask, 0)
        if not mask.any():
            return ""
        ends = time.process_time()
        long += ends - begins > LONG_SECONDS
        if long >= MOST_LONG or ends - began > FOLLOWING_SECONDS:
            return TOO_SLOW
    return ""


NO_TEXT = "no text matches this structure"
TOO_SLOW = "takes too long for each token: its repetitions can match the same text in too many ways"
