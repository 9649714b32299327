"""The HTTP server of router, sidecar, model router and picker: uvicorn's connection with limits, and a port.

The limits: a head of at most 64 KiB within 10 s, a minimum rate of bodies, and timeouts. httptools copies the received
part of a header each time more of it arrives, so one long header costs the square of its size: the limit is checked
before the header's end. Trailers are dropped.

A client that asks for the connection's end after its request is answered may still send its body. If the connection
were closed with unread bytes, it would be reset, and the client would lose the answer: the rest is read and dropped.

The tokens of one step arrive together, and their frames are written in a row: the code stays in the caches, and a
client of several streams is woken up once for all of them. The fast path writes to :class:`ClientConnection`.

Relies on uvicorn's ``HttpToolsProtocol``: httptools calls its ``on_message_begin``, ``on_header``,
``on_headers_complete``, ``on_body`` and ``on_message_complete``; it has ``url``, ``headers``, ``cycle``, ``flow`` and
``transport``; it starts each request's task in ``_start_asgi_task(cycle, app)``; ``handle_websocket_upgrade`` gives the
connection to another protocol. A cycle has ``scope``, ``transport``, ``flow``, ``disconnected`` and ``keep_alive``, and
calls ``transport.close()`` after an answer with which the connection ends. Whole chunks may be written between its own.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tercet.aio.incoming import LONGEST_HEAD, Breach, Incoming, Part, deadlines_of_connections
from tercet.protocol.errors import BadRequest, TercetError
from tercet.wire.serving.answers import breach_error, last_answer

if TYPE_CHECKING:
    from starlette.types import Message, Send

LAST_SECONDS = 2.0
"""Seconds for a refused client to read the error; data that it sends in that time is dropped."""
LINGER_SECONDS = 30.0
"""Seconds in which the rest of a body is dropped after the answer that ends a connection."""
# Bytes of a header in addition to its name and value: ": " and the line end.
BESIDE = 4
TARGET = "tercet.target"
"""The key of a request's target in an ASGI scope, as the client wrote it."""


class RequestParser(httptools.HttpRequestParser):
    """httptools' parser, for a server that speaks HTTP/1.1 and, if ``protocol`` says so, websockets.

    A server may ignore an offer to change the protocol (RFC 9110, 7.8); Java's client makes one (``h2c``) with each
    request. httptools takes what follows such a head for the other protocol: the body would be lost. So the head is
    read again, without the offer.
    """

    def __init__(self, protocol: BoundedProtocol) -> None:
        super().__init__(protocol)
        self._protocol = protocol
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does

    @property
    def skips(self) -> bool:
        """True at the end of a head that will be read again."""
        return self.should_upgrade() and self.get_method() != b"CONNECT" and not self._protocol.is_websocket()

    def feed_data(self, data: Any) -> None:
        rest = memoryview(data)
        while rest:
            try:
                super().feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if self._protocol.is_websocket():
                    raise
                rest = rest[upgrade.args[0] :]
                if self.skips:
                    head = self._protocol.head_without(b"upgrade")
                    self.__init__(self._protocol)  # else it drops everything after a request with "connection: close"
                    super().feed_data(head)


class BoundedProtocol(HttpToolsProtocol):
    """A protocol that refuses heads that are too long or too slow, slow bodies, and connections without a request."""

    parser: RequestParser
    _incoming: Incoming | None = None
    _part: Part = "nothing"
    _progressed = False
    _feeding = 0
    _refused = False
    _lingers = False
    _linger_until = math.inf
    _ending: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.parser = RequestParser(self)
        self._incoming = Incoming(self, deadlines_of_connections())

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        if self._ending is not None:
            self._ending.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        incoming = self._incoming
        if incoming is None:
            if not self._refused:
                super().data_received(data)
            elif self._lingers:
                self._end_unless_data_comes()
            return
        self._progressed = False
        self._feeding = incoming.unfinished + len(data)
        super().data_received(data)
        if self._incoming is None or self.transport.is_closing():
            self._forget()
            return
        # Bytes that begin nothing, such as empty lines before a request, do not count as a request.
        part = "head" if self._part == "nothing" and not self._progressed else self._part
        incoming.fed(len(data), part, self._progressed)

    def handle_websocket_upgrade(self) -> None:
        """Stop the deadlines: the connection leaves this protocol. Overrides uvicorn's method."""
        self._forget()
        super().handle_websocket_upgrade()

    def is_websocket(self) -> bool:
        """True if the request whose head has been read opens a websocket, and this server has some."""
        return self._should_upgrade()

    def head_without(self, field: bytes) -> bytes:
        """Return the head that has been read, without one of its fields."""
        line = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        return line + b"".join(b"%b: %b\r\n" % each for each in self.headers if each[0] != field) + b"\r\n"

    # ---- calls by the parser --------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._part = "head"
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a field to the head; drop a trailer, which uvicorn would add there after the head was checked."""
        if self._part == "head":
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._part, self._progressed = "body", True
        if self._refused or self.parser.skips:
            return
        # Counted only if the fed bytes can exceed the limit: most heads have a few hundred bytes.
        if self._feeding > LONGEST_HEAD:
            head_bytes = len(self.url) + sum(len(name) + len(value) + BESIDE for name, value in self.headers)
            if head_bytes > LONGEST_HEAD:
                self.refuse(Breach.LONG_HEAD)
                return
        cast("dict[str, Any]", self.scope)[TARGET] = self.url
        super().on_headers_complete()
        cycle: Any = self.cycle
        if not cycle.keep_alive:
            cycle.transport = LastAnswer(self, self.transport)

    def on_body(self, body: bytes) -> None:
        self._progressed = True
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._part, self._progressed = "nothing", True
        if not (self._refused or self.parser.skips):
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Record that a request is answered; its body may not have ended."""
        if self._incoming is not None:
            self._incoming.answered()
        if self._lingers:
            self.flow.resume_reading()
            self.pipeline.clear()
        super().on_response_complete()

    def timeout_keep_alive_handler(self) -> None:
        if not self._lingers:
            super().timeout_keep_alive_handler()

    # ---- refusals -------------------------------------------------------------------------------------------

    def is_held(self) -> bool:
        """True if this server has stopped reading, or still answers an earlier request of the connection."""
        cycle: Any = self.cycle
        answers = cycle is not None and not cycle.response_complete
        return self.flow.read_paused or (answers and self._part == "head")

    def refuse(self, breach: Breach) -> None:
        """Send the reason, if an answer can still be begun, and close the connection."""
        if breach is Breach.SILENT:
            self._refused = True
            self._forget()
            self.transport.abort()
        else:
            self._refuse(breach_error(breach))

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP/1.1, in the form of other errors. Overrides uvicorn's method."""
        self._refuse(BadRequest("the request is not valid HTTP/1.1: its head or the framing of its body"))

    def _refuse(self, error: TercetError) -> None:
        self._refused = True
        self._forget()
        cycle: Any = self.cycle
        under_way = bool(cycle) and not cycle.response_complete
        # An answer that has begun cannot become an error: closing shows the client that it is incomplete.
        if (under_way and cycle.response_started) or self.transport.is_closing():
            self.transport.abort()
            return
        if under_way:  # the application is notified that its client has left
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.write(last_answer(error))
        self._end_output()

    def end(self) -> None:
        """Close the connection after its last answer; if its request still arrives, once the client has read that."""
        # A socket that is closed with unread data sends a reset, which may destroy the answer before the client has
        # read it: so a request that is still arriving is read to its end, or for a bounded time, and dropped.
        if self._part == "nothing" or self._refused or self.transport.is_closing():
            self.transport.close()
            return
        self._refused = self._lingers = True
        self._forget()
        self._linger_until = asyncio.get_running_loop().time() + LINGER_SECONDS
        self._end_output()

    def _end_output(self) -> None:
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._end_unless_data_comes()

    def _end_unless_data_comes(self) -> None:
        """Close the connection after LAST_SECONDS without data, at the latest LINGER_SECONDS after its last answer."""
        if self._ending is not None:
            self._ending.cancel()
        loop = asyncio.get_running_loop()
        self._ending = loop.call_at(min(loop.time() + LAST_SECONDS, self._linger_until), self.transport.abort)

    def _forget(self) -> None:
        if self._incoming is not None:
            self._incoming.closed()
            self._incoming = None


class LastAnswer:
    """The transport of ``protocol`` for the answer with which the connection ends: closing it lets the client read."""

    def __init__(self, protocol: BoundedProtocol, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.write = transport.write
        self.close = protocol.end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


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
        # All tokens of one engine step arrive in one pass of the loop, and are written together at its end.
        if not self._frames:
            asyncio.get_running_loop().call_soon(self.write)
        self._frames.append((cycle, frame))
        if len(self._frames) == LARGEST_BATCH:
            self.write()

    def write(self) -> None:
        frames, self._frames = self._frames, []
        for cycle, frame in frames:
            if not (cycle.disconnected or cycle.transport.is_closing()):
                cycle.transport.write(frame)
                # Most producers do not wait until a client has read: it is disconnected if too many bytes wait for it.
                if cycle.flow.write_paused and cycle.transport.get_write_buffer_size() > MOST_UNREAD:
                    logger.warning(
                        "disconnecting a client that does not read its answer: %d bytes wait for it", MOST_UNREAD
                    )
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

    def abort(self) -> None:
        """Close the connection now, so that the client sees that its answer is incomplete."""
        self._cycle.disconnected = True
        self._cycle.transport.abort()

    def without_chunks(self, send: Send) -> Send:
        """Return a ``send`` whose answer ends with the connection: a client of HTTP/1.0 would take chunks for text."""
        cycle: Any = self._cycle

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                cycle.chunked_encoding, cycle.expected_content_length = False, math.inf
            elif not message.get("more_body"):
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        return sent

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
        super().connection_lost(exc)
        self._forget_unread()
        if self._connection is not None:
            self._connection.lost()
