"""The client's end of a request: uvicorn's connection, to which the fast path writes.

The tokens of one step arrive together, and their frames are written in a row: the code stays in the caches, and a
client of several streams is woken up once for all of them.

Relies on uvicorn's ``HttpToolsProtocol``: it starts each request's task in ``_start_asgi_task(cycle, app)``, a cycle
has ``scope``, ``transport``, ``flow`` and ``disconnected``, and whole chunks may be written between its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tercet.wire.serving.bounded_connection import BoundedProtocol

logger = logging.getLogger(__name__)
# The key of the connection in an ASGI scope; other servers have none.
CONNECTION = "tercet.connection"
# Seconds for which a client may read nothing, with the socket's buffers full; then its connection is closed.
UNREAD_SECONDS = 60.0
# Most bytes that may wait for one client; beyond that the connection is closed at once.
MOST_UNREAD = 4 * 1024 * 1024
# Most frames of a batch: a producer without pauses must check from time to time whether clients read.
LARGEST_BATCH = 128


class FrameBatch:
    """The frames to write at the end of the present pass of the event loop."""

    def __init__(self) -> None:
        self._frames: list[tuple[RequestResponseCycle, bytes]] = []

    def add(self, cycle: RequestResponseCycle, frame: bytes) -> None:
        """Add a frame."""
        if not self._frames:
            asyncio.get_running_loop().call_soon(self.write)
        self._frames.append((cycle, frame))
        if len(self._frames) == LARGEST_BATCH:
            self.write()

    def write(self) -> None:
        """Write the frames; those for disconnected clients are dropped."""
        frames, self._frames = self._frames, []
        for cycle, frame in frames:
            if not (cycle.disconnected or cycle.transport.is_closing()):
                cycle.transport.write(frame)
                if cycle.flow.write_paused:
                    _require_reader(cycle)


def _require_reader(cycle: RequestResponseCycle) -> None:
    """Disconnect a client for which too many bytes wait: most producers do not wait until it has read."""
    if cycle.transport.get_write_buffer_size() > MOST_UNREAD:
        logger.warning("disconnecting a client that does not read its answer: %d bytes wait for it", MOST_UNREAD)
        cycle.transport.abort()


class ClientConnection:
    """The destination of the answer to one request, on the running event loop.

    ``write`` sends one whole chunk soon, with those of other connections; it does nothing if the client has left. A
    client that leaves more than ``MOST_UNREAD`` bytes unread is disconnected.
    """

    def __init__(self, cycle: RequestResponseCycle, unread_seconds: float = UNREAD_SECONDS) -> None:
        self._cycle = cycle
        self._batch = _batch()
        self.write: Callable[[bytes], None] = partial(self._batch.add, cycle)
        self._unread_seconds = unread_seconds
        self._on_lost: Callable[[], object] | None = None

    def flush(self) -> None:
        """Send the chunks of :meth:`write` now, before other data is sent or the connection's state is read."""
        self._batch.write()

    @property
    def is_full(self) -> bool:
        """True if more bytes wait for the client than allowed."""
        return self._cycle.flow.write_paused and not self._cycle.disconnected

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
        """Cancel the block when the client leaves; the task continues after it."""
        task = asyncio.current_task()
        self._on_lost = None if task is None else task.cancel
        if self._cycle.disconnected:
            self.lost()
        try:
            yield
        except asyncio.CancelledError:
            # If the task was also cancelled from elsewhere, it stays cancelled.
            if task is None or not self._cycle.disconnected or task.uncancel() > 0:
                raise
        finally:
            self._on_lost = None

    def lost(self) -> None:
        """Record that the client has left; for requests sent together uvicorn notifies only the last one's cycle."""
        self._cycle.disconnected = True
        self._cycle.message_event.set()
        if self._on_lost is not None:
            self._on_lost()


_batch_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, FrameBatch] = WeakKeyDictionary()


def _batch() -> FrameBatch:
    return _batch_by_loop.setdefault(asyncio.get_running_loop(), FrameBatch())


class StreamingProtocol(BoundedProtocol):
    """uvicorn's protocol with limits, which puts each request's connection into its scope.

    A client that reads nothing for :data:`UNREAD_SECONDS` is disconnected: its requests are then cancelled, and their
    output is dropped.
    """

    _connection: ClientConnection | None = None
    _unread: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """Start the timeout of a client that has not read its full buffers; uvicorn's writers wait from now on."""
        super().pause_writing()
        self._unread = asyncio.get_running_loop().call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """End the timeout: the client has read."""
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
        """Notify the request's task that the connection is lost. Overrides uvicorn's method."""
        super().connection_lost(exc)
        self._forget_unread()
        if self._connection is not None:
            self._connection.lost()
