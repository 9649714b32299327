"""The client's end of a request: uvicorn's connection, which the short way writes to.

The tokens of one step arrive together, and their frames are written in a row: what a write needs stays in the caches,
and a client of several streams is woken up once for all of them.

Relies on uvicorn's ``HttpToolsProtocol``: it starts each request's task in ``_start_asgi_task(cycle, app)``, a cycle
has ``transport``, ``flow``, ``disconnected`` and ``chunked_encoding``, and whole chunks may be written between its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

# A client that reads nothing for so long, with the socket's buffers full, has its connection closed.
UNREAD_SECONDS = 60.0
# Frames: whoever has much to write without a pause shall learn from time to time whether clients read it.
MOST_GATHERED = 128


class Gathered:
    """Frames to be written as soon as what happens now on the running event loop is over."""

    def __init__(self) -> None:
        self._frames: list[tuple[RequestResponseCycle, bytes]] = []

    def add(self, cycle: RequestResponseCycle, frame: bytes) -> None:
        """One more."""
        if not self._frames:
            asyncio.get_running_loop().call_soon(self.write)
        self._frames.append((cycle, frame))
        if len(self._frames) == MOST_GATHERED:
            self.write()

    def write(self) -> None:
        """Write them; what is for clients that are gone is dropped."""
        frames, self._frames = self._frames, []
        for cycle, frame in frames:
            if not (cycle.disconnected or cycle.transport.is_closing()):
                cycle.transport.write(frame)


class Connection:
    """Where the answer to one request goes, on the running event loop."""

    def __init__(self, cycle: RequestResponseCycle, unread_seconds: float = UNREAD_SECONDS) -> None:
        self._cycle = cycle
        self._gathered = _gathered()
        self._unread_seconds = unread_seconds
        self._on_lost: Callable[[], object] | None = None

    @property
    def is_chunked(self) -> bool:
        """Whether the answer has begun, in chunks."""
        return bool(self._cycle.chunked_encoding)

    def write(self, frame: bytes) -> None:
        """Send one whole chunk, soon, with those of other connections; nothing happens if the client is gone."""
        self._gathered.add(self._cycle, frame)

    def flush(self) -> None:
        """Send what :meth:`write` was given now: before something else is sent, or asked about."""
        self._gathered.write()

    @property
    def is_full(self) -> bool:
        """Whether more is waiting for the client than it should."""
        return self._cycle.flow.write_paused and not self._cycle.disconnected

    async def has_room(self) -> None:
        """Wait until the client has read enough; a client that does not read is disconnected."""
        try:
            async with asyncio.timeout(self._unread_seconds):
                await self._cycle.flow.drain()
        except TimeoutError:
            self._cycle.transport.abort()

    @contextmanager
    def until_lost(self) -> Generator[None]:
        """What is entered by the current task is cancelled when the client leaves, and the task goes on behind it."""
        task = asyncio.current_task()
        self._on_lost = None if task is None else task.cancel
        if self._cycle.disconnected:
            self.lost()
        try:
            yield
        except asyncio.CancelledError:
            # Somebody else may have cancelled the task as well: then it stays cancelled.
            if task is None or not self._cycle.disconnected or task.uncancel() > 0:
                raise
        finally:
            self._on_lost = None

    def lost(self) -> None:
        """The client is gone."""
        if self._on_lost is not None:
            self._on_lost()


_gathered_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, Gathered] = WeakKeyDictionary()


def _gathered() -> Gathered:
    return _gathered_by_loop.setdefault(asyncio.get_running_loop(), Gathered())


_current: ContextVar[Connection | None] = ContextVar("tercet_connection", default=None)


def current_connection() -> Connection | None:
    """The connection of the request being served; None under another server."""
    return _current.get()


class StreamingProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which lets each request's task know its connection."""

    _connection: Connection | None = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._connection = Connection(cycle)
        token = _current.set(self._connection)
        try:
            super()._start_asgi_task(cycle, app)  # the task starts with a copy of this context
        finally:
            _current.reset(token)

    def connection_lost(self, exc: Exception | None) -> None:
        """uvicorn's, and the request's task hears of it."""
        super().connection_lost(exc)
        if self._connection is not None:
            self._connection.lost()
