"""Where routers keep the state that they share, and whose turn it is among them; in files of one file system.

A store is the smallest that sharing needs: read the content, replace it unless it has changed since, and have one
process at a time do something. :mod:`.state_configmap` is another one, :mod:`.state_ray` a third.
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

from tercet.aio.whole_files import read_whole, stamp_of, write_whole
from tercet.protocol import BadRequest, EngineError

LOCK_SECONDS = 10.0
RETRY_DELAY_S = 0.01


def name_of_this_process() -> str:
    """A name that no other process has, of this machine or another; each call gives another one."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


class Stored(NamedTuple):
    """The content at one moment, None if there is none, and a ``mark`` that no other content has."""

    content: bytes | None
    mark: object


class SharedTurn(Protocol):
    """One process at a time has it, of all that share a store."""

    @property
    def name(self) -> str:
        """What it is called in messages."""
        ...

    def take(self) -> bool:
        """Whether this process has it now, and for some seconds from now on; to be called again before they are over.

        Raises ``OSError`` or :class:`~tercet.protocol.TercetError` if that is not known.
        """
        ...

    def release(self) -> None:
        """Give it back, if it was taken."""
        ...


class StateStore(Protocol):
    """Every method does I/O, and may be called by any process; errors are :class:`~tercet.protocol.TercetError`."""

    @property
    def name(self) -> str:
        """What it is called in messages."""
        ...

    def load(self) -> Stored:
        """The content."""
        ...

    def store(self, content: bytes, since: object) -> bool:
        """Replace the content if its mark is still ``since``; False, and nothing is changed, if it is not."""
        ...

    def stamp(self) -> object:
        """Differs from one call to the next if there is another content; it may be some time late."""
        ...

    def turn(self, what: str) -> SharedTurn:
        """The turn to do ``what``."""
        ...


class FileStore:
    """A file, which is replaced as a whole; the kernel's locks tell whose turn it is, and end with their process."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def name(self) -> str:
        """The path."""
        return str(self._path)

    def load(self) -> Stored:
        """The content, which is its own mark."""
        try:
            content = read_whole(self._path)
        except FileNotFoundError:
            return Stored(None, None)
        except OSError as error:
            raise BadRequest(f"state: {self._path} cannot be read: {error.strerror or error}", "state") from error
        return Stored(content, content)

    def store(self, content: bytes, since: object) -> bool:
        """As :meth:`StateStore.store`; one writer at a time looks and replaces."""
        with self._locked():
            if self.load().mark != since:
                return False
            try:
                write_whole(self._path, content, lasting=True)
            except OSError as error:
                raise BadRequest(f"state: {self._path} cannot be written: {error.strerror}", "state") from error
            return True

    def stamp(self) -> object:
        """Of the file."""
        return stamp_of(self._path)

    def turn(self, what: str) -> SharedTurn:
        """A lock on a file next to this one."""
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
    """The lock on a file. Its methods are called by one thread, also for callers that have stopped waiting."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held: int | None = None

    @property
    def name(self) -> str:
        """The path."""
        return str(self._path)

    def take(self) -> bool:
        """As :meth:`SharedTurn.take`; it is this process's until that ends."""
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
        """Give it back, if it was taken."""
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
