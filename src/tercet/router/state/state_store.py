"""The store of the state that routers share, and locks among them, in files of one file system.

A store has three operations: read the content, replace it unless it has changed since it was read, and let one process
at a time do a task. :mod:`.state_configmap` and :mod:`.state_ray` are other stores.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from tercet.aio.files import read_whole, stamp_of, write_whole
from tercet.protocol import BadRequest, EngineError

LOCK_SECONDS = 10.0
RETRY_DELAY_S = 0.01


def name_of_this_process() -> str:
    """Return a name that is unique among all processes of all machines; each call returns another name."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


class Stored(NamedTuple):
    """The content at one moment, None without content, and a ``mark`` that differs for every other content."""

    content: bytes | None
    mark: object


class SharedTurn(Protocol):
    """A lock that one process at a time holds, of all processes that share a store."""

    @property
    def name(self) -> str:
        """Name of the lock in messages."""
        ...

    def take(self) -> bool:
        """Take or keep the lock; return True if this process holds it now, and for some seconds.

        Call it again before these seconds are over. Raises ``OSError`` or :class:`~tercet.protocol.TercetError` if the
        holder is not known.
        """
        ...

    def release(self) -> None:
        """Release the lock if this process holds it."""
        ...


class StateStore(Protocol):
    """A store; every method does I/O, and any process may call it. Errors are :class:`~tercet.protocol.TercetError`."""

    @property
    def name(self) -> str:
        """Name of the store in messages."""
        ...

    def load(self) -> Stored:
        """Return the content."""
        ...

    def store(self, content: bytes, since: object) -> bool:
        """Replace the content if its mark is still ``since``; return False, without a change, if it is not."""
        ...

    def stamp(self) -> object:
        """Return a value that differs after a change of the content, maybe with some delay."""
        ...

    def turn(self, what: str) -> SharedTurn:
        """Return the lock for the task ``what``."""
        ...


class FileStore:
    """A store in a file that is replaced as a whole; its locks are the kernel's, which end with their process."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def name(self) -> str:
        """The path."""
        return str(self._path)

    def load(self) -> Stored:
        """Return the content, which is also its mark."""
        try:
            content = read_whole(self._path)
        except FileNotFoundError:
            return Stored(None, None)
        except OSError as error:
            raise BadRequest(f"state: {self._path} cannot be read: {error.strerror or error}", "state") from error
        return Stored(content, content)

    def store(self, content: bytes, since: object) -> bool:
        """Replace the content, see :meth:`StateStore.store`; one writer at a time compares and replaces."""
        with self._locked():
            if self.load().mark != since:
                return False
            try:
                write_whole(self._path, content, lasting=True)
            except OSError as error:
                raise BadRequest(f"state: {self._path} cannot be written: {error.strerror}", "state") from error
            return True

    def stamp(self) -> object:
        """Return the stamp of the file."""
        return stamp_of(self._path)

    def turn(self, what: str) -> SharedTurn:
        """Return a lock by a file next to this one."""
        return FileTurn(Path(f"{self._path}.{what}.lock"))

    @contextmanager
    def _locked(self) -> Generator[None]:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise BadRequest(f"state: {self._path} cannot be written: {error.strerror}", "state") from error
        try:
            _lock_within(lock, LOCK_SECONDS, self._path)
            yield
        finally:
            os.close(lock)


class FileTurn:
    """A lock by a file. One thread calls its methods, also for callers that have stopped waiting."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held: int | None = None

    @property
    def name(self) -> str:
        """The path."""
        return str(self._path)

    def take(self) -> bool:
        """Take the lock, see :meth:`SharedTurn.take`; this process holds it until it ends or releases it."""
        if self._held is None:
            found = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BaseException as error:
                os.close(found)
                if isinstance(error, BlockingIOError):
                    return False
                raise
            self._held = found
        return True

    def release(self) -> None:
        """Release the lock if this process holds it."""
        if self._held is not None:
            os.close(self._held)
            self._held = None


def _lock_within(lock: int, seconds: float, path: Path) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise EngineError(f"another process has held the lock of {path} for {seconds:.0f} s") from None
            time.sleep(RETRY_DELAY_S)
        except OSError as error:  # of network file systems
            raise EngineError(f"state: {path}.lock cannot be locked: {error.strerror}") from error
