"""Small files that other processes replace, and a thread for file systems that may hang.

A read sees one version, and a write is never seen in part. :class:`FileThread` keeps file I/O off the event loop, with
a timeout: a file system that hangs blocks only one thread. That thread is a daemon, so the process can still end.

A server whose process has no free descriptor cannot accept connections, and each kind of server says so differently:
uvloop accepts and closes them in silence, asyncio logs a traceback for each place of the listener's backlog each
second, gRPC and ZeroMQ wait. :func:`descriptors_watched` says it once.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import queue
import resource
import select
import stat
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tercet.aio.tasks import repeat

MOST_NAMED = 256 * 1024 * 1024
"""Largest file of a user, in bytes, unless its reader has another limit."""
PIPE_SECONDS = 10.0
"""Seconds for all contents of a pipe to arrive."""
_PART = 64 * 1024
T = TypeVar("T")
BOUND_SECONDS = 5.0
"""Timeout of one call, in seconds. A call takes about a millisecond on a working file system."""
STUCK_SECONDS = 1.0
"""Time after which a running call counts as stuck, in seconds."""


def read_named(path: Path, most: int = MOST_NAMED) -> bytes:
    """Return the contents of a file that a user names, at most ``most`` bytes; every such file is read by this.

    It may be a regular file, or a pipe such as that of a shell's ``<(command)``, whose writer has :data:`PIPE_SECONDS`.
    Raise ``OSError`` with a reason in words.
    """
    return read_whole(path, most, PIPE_SECONDS)


def read_whole(path: Path, most: float = math.inf, pipe_s: float = 0.0) -> bytes:
    """Return the contents of a file, at most ``most`` bytes. Raise ``OSError`` with a reason in words.

    It is a regular file or, if ``pipe_s`` is given, a pipe whose writer ends within these seconds: the read of any
    other file might never end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if not (stat.S_ISREG(mode) or (pipe_s and stat.S_ISFIFO(mode))):
            raise OSError(errno.EINVAL, "is neither a file nor a pipe" if pipe_s else "is not a regular file")
        found, size = list[bytes](), 0
        deadline = time.monotonic() + pipe_s
        arrives = select.poll()
        arrives.register(descriptor, select.POLLIN)
        while True:
            left = deadline - time.monotonic()
            if stat.S_ISFIFO(mode) and (left <= 0 or not arrives.poll(left * 1000)):
                raise OSError(errno.ETIMEDOUT, f"is a pipe whose writer does not end within {pipe_s:g} s")
            # Ever larger parts: a large file is read in few calls, a small one needs little memory.
            part = os.read(descriptor, _PART if size < _PART else size)
            if not part:
                return b"".join(found)
            found.append(part)
            size += len(part)
            if size > most:
                raise OSError(errno.EFBIG, f"has more than {most} bytes")
    finally:
        os.close(descriptor)


def require_regular(path: Path) -> None:
    """Raise ``OSError`` unless a file that a library will read is a regular one: the read of a pipe may never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))


def write_whole(path: Path, content: bytes, lasting: bool = False) -> None:
    """Replace a file: readers find the old content or the new one. ``lasting``: the file survives a power cut.

    Only this user can read the file. Raise ``OSError`` on failure.
    """
    partial = Path(f"{path}.{os.getpid()}.tmp")
    try:
        partial.unlink(missing_ok=True)  # of a killed process, or one that other users prepared to read it
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(partial, flags, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            if lasting:
                os.fsync(file.fileno())
        # Atomic, since both names are in one directory.
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    if lasting:  # the new name is on the disk only once its directory is
        directory = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def stamp_of(path: Path) -> object:
    """Return a value that differs after each change of the file, or None if the file does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


class FileThread:
    """A thread that runs calls one after the other, each with a timeout of ``bound_s``; none starts after a stuck one.

    A call is stuck when it has run for ``stuck_s`` seconds.
    """

    def __init__(self, bound_s: float = BOUND_SECONDS, stuck_s: float = STUCK_SECONDS) -> None:
        self._bound_s = bound_s
        self._stuck_s = stuck_s
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._began: float | None = None

    @property
    def is_stuck(self) -> bool:
        """True if a call has run for more than ``stuck_s`` seconds: start no other call, here or elsewhere."""
        began = self._began
        return began is not None and time.monotonic() - began > self._stuck_s

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """Return the result of ``function``. The call continues if its caller is cancelled.

        Raise ``TimeoutError`` after ``bound_s`` seconds, or at once if an earlier call is stuck.
        """
        if self.is_stuck:
            raise TimeoutError
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def call() -> None:
            try:
                answer = partial(result.set_result, function(*args))
            except BaseException as error:  # raised to the caller
                answer = partial(result.set_exception, error)
            with suppress(RuntimeError):  # the loop ended before the call
                loop.call_soon_threadsafe(lambda: None if result.done() else answer())

        self._calls.put(call)
        # At the first call: most processes with such an object never need the thread.
        if self._thread is None:
            # A daemon: a call that is stuck in a dead file system must not keep the process alive.
            self._thread = threading.Thread(target=self._work, name="tercet-files", daemon=True)
            self._thread.start()
        async with asyncio.timeout(self._bound_s):
            return await result

    def close(self, last: Callable[[], None] | None = None) -> None:
        """Finish the calls that were requested, then run ``last``; later calls are not accepted.

        ``last`` releases resources that calls acquired after their callers had stopped waiting.
        """
        if last is not None:
            self._calls.put(last)
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            # Set by the thread itself: the time in the queue says nothing about the call.
            self._began = time.monotonic()
            try:
                call()
            finally:
                self._began = None


logger = logging.getLogger("tercet.descriptors")
LOOK_INTERVAL_S = 1.0
MISSING = errno.EMFILE, errno.ENFILE


class _Descriptors:
    """The last state that was logged: whether a descriptor was free."""

    def __init__(self) -> None:
        self._are_missing = False

    async def look(self) -> None:
        """Open a descriptor and close it again; log once that none is free, and once that some are free again."""
        try:
            # The only sure question: limits of the process and of the system count together.
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            if error.errno in MISSING:
                self.are_missing()
            return
        if self._are_missing:
            self._are_missing = False
            logger.warning("descriptors are free again, and connections are accepted")

    def are_missing(self) -> None:
        """Log once that no descriptor is free."""
        if not self._are_missing:
            self._are_missing = True
            most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            logger.error(
                "all %d descriptors of this process are in use: new connections wait or are closed, until some are "
                "free again; raise the limit (ulimit -n)", most,
            )  # fmt: skip

    def heed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle what an event loop reports: failed accepts count as missing descriptors, the rest is logged."""
        error = context.get("exception")
        if "socket" in context and isinstance(error, OSError) and error.errno in MISSING:
            self.are_missing()
        elif "_start_serving" not in context["message"]:  # asyncio tries to accept again, but the listener is closed
            loop.default_exception_handler(context)


@asynccontextmanager
async def descriptors_watched() -> AsyncGenerator[None]:
    """Log once when no descriptor is free, instead of at each connection that cannot be accepted, while entered."""
    loop, descriptors = asyncio.get_running_loop(), _Descriptors()
    before = loop.get_exception_handler()
    loop.set_exception_handler(descriptors.heed)
    watching = asyncio.create_task(repeat(descriptors.look, LOOK_INTERVAL_S, "watch of descriptors"))
    try:
        yield
    finally:
        loop.set_exception_handler(before)
        watching.cancel()
        await asyncio.wait({watching})
