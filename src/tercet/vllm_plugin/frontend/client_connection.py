"""The client's end of a request: uvicorn's connection, which the fast path writes to.

The tokens of one step arrive together, and their frames are written in a row: what a write needs stays in the caches,
and a client of several streams is woken up once for all of them.

Relies on uvicorn's ``HttpToolsProtocol``: it starts each request's task in ``_start_asgi_task(cycle, app)``, a cycle
has ``scope``, ``transport``, ``flow`` and ``disconnected``, and whole chunks may be written between its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast
from weakref import WeakKeyDictionary

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tercet.vllm_plugin.frontend.bounded_connection import BoundedProtocol

logger = logging.getLogger(__name__)
# The connection's place in an ASGI scope; other servers have none.
CONNECTION = "tercet.connection"
# A client that reads nothing for so long, with the socket's buffers full, has its connection closed.
UNREAD_SECONDS = 60.0
# What may wait for one client, in bytes; beyond it the connection is closed at once.
MOST_UNREAD = 4 * 1024 * 1024
# Frames: whoever has much to write without a pause shall learn from time to time whether clients read it.
LARGEST_BATCH = 128


class FrameBatch:
    """Frames to be written as soon as what happens now on the running event loop is over."""

    def __init__(self) -> None:
        self._frames: list[tuple[RequestResponseCycle, bytes]] = []

    def add(self, cycle: RequestResponseCycle, frame: bytes) -> None:
        """One more."""
        if not self._frames:
            asyncio.get_running_loop().call_soon(self.write)
        self._frames.append((cycle, frame))
        if len(self._frames) == LARGEST_BATCH:
            self.write()

    def write(self) -> None:
        """Write them; what is for clients that are gone is dropped."""
        frames, self._frames = self._frames, []
        for cycle, frame in frames:
            if not (cycle.disconnected or cycle.transport.is_closing()):
                cycle.transport.write(frame)


class ClientConnection:
    """Where the answer to one request goes, on the running event loop."""

    def __init__(self, cycle: RequestResponseCycle, unread_seconds: float = UNREAD_SECONDS) -> None:
        self._cycle = cycle
        self._batch = _batch()
        self._unread_seconds = unread_seconds
        self._on_lost: Callable[[], object] | None = None

    def write(self, frame: bytes) -> None:
        """Send one whole chunk, soon, with those of other connections; nothing happens if the client is gone."""
        self._batch.add(self._cycle, frame)

    def flush(self) -> None:
        """Send what :meth:`write` was given now: before something else is sent, or asked about."""
        self._batch.write()

    @property
    def is_full(self) -> bool:
        """Whether more is waiting for the client than it should."""
        return self._cycle.flow.write_paused and not self._cycle.disconnected

    def require_reader(self) -> None:
        """Disconnect a client for which too much is waiting: those who produce without waiting call this."""
        if self._cycle.transport.get_write_buffer_size() > MOST_UNREAD:
            logger.warning("a client does not read its answer: %d bytes wait for it, and it is let go", MOST_UNREAD)
            self._cycle.transport.abort()

    async def has_room(self) -> None:
        """Wait until the client has read enough; a client that does not read is disconnected."""
        try:
            if self.is_full:
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
        """The client is gone; of several requests that it sent at once uvicorn tells only the last one's cycle."""
        self._cycle.disconnected = True
        self._cycle.message_event.set()
        if self._on_lost is not None:
            self._on_lost()


_batch_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, FrameBatch] = WeakKeyDictionary()


def _batch() -> FrameBatch:
    return _batch_by_loop.setdefault(asyncio.get_running_loop(), FrameBatch())


class StreamingProtocol(BoundedProtocol):
    """uvicorn's protocol with bounds, which has each request's connection in its scope.

    A client that reads nothing for :data:`UNREAD_SECONDS` is let go, whoever writes to it: what it asked for is
    cancelled then, and no longer kept for it.
    """

    _connection: ClientConnection | None = None
    _unread: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """The client has not read what fills its buffers; uvicorn's writers wait from now on."""
        super().pause_writing()
        self._unread = asyncio.get_running_loop().call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """It has read."""
        super().resume_writing()
        self._forget_unread()

    def _forget_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        scope: dict[str, Any] = cast(Any, cycle.scope)
        scope[CONNECTION] = self._connection = ClientConnection(cycle)
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        """uvicorn's, and the request's task hears of it."""
        super().connection_lost(exc)
        self._forget_unread()
        if self._connection is not None:
            self._connection.lost()
