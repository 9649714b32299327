"""HTTP/1.1 that is passed on byte for byte, for proxies: header fields, messages of a connection, the server behind.

Only the fields for the next hop are left out (RFC 9110, 7.6.1). Nothing is decoded, decompressed, merged, renamed or
added on the way; cookies and redirects are not handled. h11 implements the protocol, asyncio transports the bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import Any, cast
from urllib.parse import urlsplit

import h11

Fields = Sequence[tuple[bytes, bytes]]
"""Header fields: names as they were written, in any case, and values without surrounding white space."""

HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
     b"transfer-encoding", b"upgrade"}
)  # fmt: skip
# Fields for the length of a message: each sender sets them again.
FRAMING = frozenset({b"content-length", b"transfer-encoding"})
# Fields that must be known before the body, and may not be trailers (RFC 9110, 6.5.1).
NO_TRAILERS = frozenset(
    {b"age", b"authorization", b"cache-control", b"content-encoding", b"content-range", b"content-type", b"cookie",
     b"date", b"expect", b"expires", b"host", b"if-match", b"if-modified-since", b"if-none-match", b"if-range",
     b"if-unmodified-since", b"location", b"max-forwards", b"origin", b"pragma", b"range", b"retry-after",
     b"set-cookie", b"trailer", b"vary", b"warning", b"www-authenticate", b"x-request-id"}
)  # fmt: skip


def values(fields: Fields, name: bytes) -> list[bytes]:
    """Return the values of all fields with that lower-case name."""
    return [value for each, value in fields if each.lower() == name]


def first(fields: Fields, name: bytes) -> str | None:
    """Return the first value of a field, one character per byte; None without one."""
    return next((value.decode("latin-1") for each, value in fields if each.lower() == name), None)


def end_to_end(fields: Fields, but: Collection[bytes] = ()) -> list[tuple[bytes, bytes]]:
    """Return the fields that a proxy passes on.

    Left out are fields for the next hop, fields named by ``Connection``, fields of framing, and those in ``but``.
    """
    dropped = HOP_BY_HOP | FRAMING | _named_by_connection(fields) | set(but)
    return [(name, value) for name, value in fields if name.lower() not in dropped]


def passed_on(fields: Fields, but: Collection[bytes] = ()) -> list[tuple[bytes, bytes]]:
    """Return the fields of :func:`end_to_end` and of framing, for a message whose body is passed on as it arrives."""
    dropped = (HOP_BY_HOP | _named_by_connection(fields) | set(but)) - FRAMING
    found, seen = list[tuple[bytes, bytes]](), set[bytes]()
    for name, value in fields:
        known = name.lower()
        if known in dropped or known in seen:
            continue
        if known in FRAMING:  # h11 has refused contradictory fields
            seen.add(known)
        found.append((name, value))
    return found


def with_forwarder(fields: Fields, peer: str, host: bytes, scheme: str, version: bytes) -> list[tuple[bytes, bytes]]:
    """Return the fields with those by which a proxy says that it forwards a request (RFC 9110, 7.6.3; RFC 7239).

    ``peer`` is the address of the client, empty if it is not known; ``host``, ``scheme`` and ``version`` are those of
    its request. They follow what the client itself said in such fields: the last values are the ones to believe.
    """
    node = (peer or "unknown").encode()
    forwarded = b"for=" + (b'"[%b]"' % node if b":" in node else node) + b";proto=" + scheme.encode()
    if host:
        forwarded += b';host="%b"' % host.replace(b"\\", b"\\\\").replace(b'"', b'\\"')
    chain = b", ".join([*values(fields, b"x-forwarded-for"), node])
    kept = [(name, value) for name, value in fields if name.lower() != b"x-forwarded-for"]
    return [*kept, (b"X-Forwarded-For", chain), (b"Forwarded", forwarded), (b"Via", version + b" tercet")]


def passed_trailers(fields: Fields, but: Collection[bytes] = ()) -> list[tuple[bytes, bytes]]:
    """Return the trailers that a proxy passes on.

    Some fields are not allowed as trailers, since some servers treat a trailer like a header field.
    """
    return end_to_end(fields, NO_TRAILERS | set(but))


def _named_by_connection(fields: Fields) -> set[bytes]:
    return {each.strip().lower() for value in values(fields, b"connection") for each in value.split(b",")}


def is_encoded(fields: Fields) -> bool:
    """True if the content is compressed, or encoded otherwise."""
    return any(value.strip().lower() not in (b"", b"identity") for value in values(fields, b"content-encoding"))


READ_BYTES = 65536
HEADS = h11.Request, h11.Response, h11.InformationalResponse
MOST_JOINED = 256 * 1024
"""Most bytes of a body that are passed on at once: chunks that arrive together are sent together."""

UNREAD_SECONDS = 60.0
"""Longest time for the other side to read enough of what was sent that more can be; then the connection is aborted."""
ALWAYS_ROOM = 16 * 1024
"""Most unsent bytes with which no transport of asyncio or uvloop pauses: below, a drain does not wait."""


class BrokeOff(ConnectionError):
    """An error: the other side closed the connection before its message was complete."""


class NotReadable(Exception):
    """An error: the other side did not send valid HTTP/1.1; ``status`` is the HTTP status for it."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class MessageTooLarge(NotReadable):
    """An error: a head, or the lines between chunks, are longer than the limit."""


class Connection:
    """One side of a connection. ``role`` is h11's; a head, or trailers, have at most ``max_head`` bytes."""

    def __init__(
        self, role: type[h11.CLIENT] | type[h11.SERVER], reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
        max_head: int,
    ) -> None:  # fmt: skip
        self.http = h11.Connection(role, max_incomplete_event_size=max_head)
        self.reader = reader
        self.writer = writer
        self.trailers: Fields = ()
        self.is_whole = asyncio.Event()
        """Set once the end of the other side's message was read."""
        self._max_head = max_head
        self._held: Any = None
        self._in_chunks = False
        self._is_dry = False
        self._at_end = False

    # ---- reading ---------------------------------------------------------------------------------------------

    async def event(self) -> Any:
        """Return the next h11 event.

        Raises :class:`BrokeOff`, :class:`NotReadable`, and :class:`OSError` of the socket.
        """
        if self._held is not None:
            event, self._held = self._held, None
            return event
        if self._is_dry:
            await self._more()
        while (event := self._read()) is h11.NEED_DATA:
            await self._more()
        return event

    async def part(self) -> bytes:
        """Return the body's next bytes; empty at its end, when ``trailers`` are set. Raises as :meth:`event` does."""
        event = await self.event()
        if type(event) is h11.EndOfMessage:
            self.trailers = raw_fields(event)
            self._held = event  # also for further calls
            self.is_whole.set()
            return b""
        if type(event) is not h11.Data:
            raise BrokeOff("it closed the connection")
        parts, size = [bytes(event.data)], len(event.data)
        while size < MOST_JOINED:
            if event.chunk_end and self.http.trailing_data[0] == b"\r\n":
                self._is_dry = True  # as after each token: seen here earlier than by h11
                break
            event = self._read()
            if type(event) is not h11.Data:
                self._held = None if event is h11.NEED_DATA else event
                break
            parts.append(bytes(event.data))
            size += len(event.data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read(self) -> Any:
        try:
            event = self.http.next_event()
        except h11.RemoteProtocolError as error:
            if self._at_end:
                raise BrokeOff("it closed the connection") from error
            kind = MessageTooLarge if error.error_status_hint == 431 else NotReadable
            raise kind(str(error), error.error_status_hint) from error
        if type(event) is not h11.Data and isinstance(event, HEADS):
            _require_one_length(event)
            if sum(len(name) + len(value) for name, value in raw_fields(event)) > self._max_head:
                raise MessageTooLarge(f"the head of a message has more than {self._max_head} bytes", 431)
        return event

    async def _more(self) -> None:
        data = await self.reader.read(READ_BYTES)
        self._at_end, self._is_dry = not data, False
        self.http.receive_data(data)

    async def begun(self) -> None:
        """Return once the other side has begun another message.

        Raises :class:`BrokeOff` if it closes the connection instead.
        """
        while not self.http.trailing_data[0]:
            if self._at_end:
                raise BrokeOff("it closed the connection")
            await self._more()

    async def gone(self) -> None:
        """Return once the other side has closed the connection; data that it sends before that is kept."""
        ahead = 0
        while data := await self.reader.read(READ_BYTES):
            self.http.receive_data(data)
            ahead += len(data)
            if ahead > READ_BYTES:  # more than one request ahead: it is alive, and its end is noticed later
                await asyncio.Event().wait()
        self._at_end = True
        self.http.receive_data(b"")

    def next_message(self) -> bool:
        """Prepare for another message; return whether this connection can have one."""
        if self.http.our_state is not h11.DONE or self.http.their_state is not h11.DONE or self._at_end:
            return False
        if self.http.our_role is h11.CLIENT and self.http.trailing_data[0]:
            return False  # unrequested data would be taken for the next answer
        self.http.start_next_cycle()
        self._held, self.trailers = None, ()
        self.is_whole.clear()
        return True

    # ---- writing ---------------------------------------------------------------------------------------------

    async def send(self, event: Any) -> None:
        """Write an h11 event, and wait until there is room for more.

        Raises :class:`OSError` of the socket, and if the other side makes no room for :data:`UNREAD_SECONDS`.
        """
        data = cast("bytes | None", self.http.send(event))
        if isinstance(event, (h11.Request, h11.Response)):
            self._in_chunks = b"\r\ntransfer-encoding: chunked\r\n" in (data or b"").lower()
        if data:
            self.writer.write(data)
            await self._drain()

    async def send_part(self, part: bytes) -> None:
        """Write a part of a body; do nothing if it is empty."""
        if self._in_chunks and part:  # h11 does not count chunked bytes, and would take a third of a token's time
            self.writer.write(b"%x\r\n%b\r\n" % (len(part), part))
            await self._drain()
        elif part:
            await self.send(h11.Data(data=part))

    async def send_end(self, trailers: Fields = ()) -> None:
        """End the body; trailers are sent with a chunked one, and dropped with others."""
        try:
            await self.send(h11.EndOfMessage(headers=list(trailers)))
        except h11.LocalProtocolError:
            if not trailers:
                raise
            await self.send(h11.EndOfMessage())

    async def _drain(self) -> None:
        """Wait until there is room for more."""
        if self.writer.transport.get_write_buffer_size() <= ALWAYS_ROOM:
            await self.writer.drain()
            return
        try:
            async with asyncio.timeout(UNREAD_SECONDS):
                await self.writer.drain()
        except TimeoutError:
            self.abort()
            raise ConnectionAbortedError(f"the other side has not read enough for {UNREAD_SECONDS:g} s") from None

    def close(self) -> None:
        """Close the connection after all written data is sent."""
        self.writer.close()

    def abort(self) -> None:
        """Close the connection now."""
        self.writer.transport.abort()


def framing(fields: Fields) -> list[tuple[bytes, bytes]]:
    """Return the framing of a message with these fields when it is passed on: chunked, or with its length."""
    if values(fields, b"transfer-encoding"):
        return [(b"Transfer-Encoding", b"chunked")]
    return [(b"Content-Length", value) for value in values(fields, b"content-length")[:1]]


def raw_fields(
    event: h11.Request | h11.Response | h11.InformationalResponse | h11.EndOfMessage,
) -> list[tuple[bytes, bytes]]:
    """Return the fields of a head, or trailers, with names as they were written."""
    headers: Any = event.headers
    found: Sequence[tuple[bytes, bytes]] = headers.raw_items() if hasattr(headers, "raw_items") else headers
    return [(bytes(name), bytes(value)) for name, value in found]


def _require_one_length(event: h11.Request | h11.Response | h11.InformationalResponse) -> None:
    """Refuse a second definition of a message's end: it allows request smuggling (RFC 9112, 6.3)."""
    names = {name for name, _ in event.headers}
    if {b"content-length", b"transfer-encoding"} <= names:
        raise NotReadable("a message has both Content-Length and Transfer-Encoding")
    if b"transfer-encoding" in names and event.http_version < b"1.1":
        raise NotReadable("a message of HTTP/1.0 has a Transfer-Encoding")


MOST_IDLE = 256
REPEATABLE = frozenset({b"GET", b"HEAD", b"OPTIONS", b"TRACE", b"PUT", b"DELETE"})
"""Idempotent methods: a second request has no further effect (RFC 9110, 9.2.2)."""
OnInformational = Callable[[int, bytes, Fields], Awaitable[object]]
"""A function that receives informational answers (1xx): status, reason and fields."""


class NotConnected(ConnectionError):
    """An error: there is no connection to the server; its cause is the reason."""


class OriginAnswer:
    """An answer whose body is read as it arrives. The caller closes it."""

    def __init__(self, connection: Connection, head: h11.Response, origin: Origin, sending: asyncio.Task[None] | None):
        self.status = head.status_code
        self.reason = bytes(head.reason)
        self.fields = raw_fields(head)
        self._connection: Connection | None = connection
        self._origin = origin
        self._sending = sending

    async def part(self) -> bytes:
        """Return the body's next bytes, empty at its end.

        Raises :class:`BrokeOff`, :class:`~tercet.wire.client.passing.NotReadable` and :class:`OSError`.
        """
        if self._connection is None:
            return b""
        return await self._connection.part()

    @property
    def trailers(self) -> Fields:
        """The trailers, after the body's end."""
        return () if self._connection is None else self._connection.trailers

    def close(self) -> None:
        """Stop reading. After the answer's end the connection is reused; before that, it is closed."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._sending is not None and not self._sending.done():
            self._sending.cancel()
            connection.abort()
        else:
            self._origin.give_back(connection)


class Origin:
    """One server. A connection that was idle for ``keep_alive_s`` seconds is not used any more.

    ``tls`` is for an ``https://`` server. Connecting takes at most ``connect_s`` seconds. An answer's head has at most
    ``max_head`` bytes. :meth:`close` closes all connections.
    """

    def __init__(
        self, url: str, tls: ssl.SSLContext | None, *, keep_alive_s: float, connect_s: float, max_head: int
    ) -> None:
        parts = urlsplit(url)
        self._tls = None if parts.scheme != "https" else tls or ssl.create_default_context()
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._tls is not None else 80)
        self._prefix = parts.path.rstrip("/").encode()
        self.host = parts.netloc.rpartition("@")[2].encode()
        """Value of ``Host``."""
        self._keep_alive_s = keep_alive_s
        self._connect_s = connect_s
        self._max_head = max_head
        self._idle: deque[tuple[Connection, float]] = deque()
        self._is_closed = False

    async def ask(
        self, method: bytes, target: bytes, fields: Fields, body: bytes | AsyncIterator[bytes] | None,
        on_informational: OnInformational | None = None, trailers: Callable[[], Fields] = tuple,
    ) -> OriginAnswer:  # fmt: skip
        """Return the server's answer as soon as its head has arrived, perhaps before the whole ``body`` was sent.

        ``fields`` define the body's framing. Raises :class:`NotConnected`, :class:`BrokeOff`,
        :class:`~tercet.wire.client.passing.NotReadable` and :class:`OSError`, and the errors of ``body``.
        """
        request = h11.Request(method=method, target=self._prefix + target, headers=list(fields))
        may_repeat = method in REPEATABLE and (body is None or isinstance(body, bytes))
        while True:
            connection, is_used = await self._connection()
            try:
                return await self._asked(connection, request, body, on_informational, trailers)
            except BaseException as error:
                connection.abort()
                # The server closed an idle connection just when it was reused.
                if not (is_used and may_repeat and isinstance(error, OSError)):
                    raise

    async def _asked(
        self, connection: Connection, request: h11.Request, body: bytes | AsyncIterator[bytes] | None,
        on_informational: OnInformational | None, trailers: Callable[[], Fields],
    ) -> OriginAnswer:  # fmt: skip
        if not isinstance(body, AsyncIterator):
            # A server may refuse a large body before reading it: do not wait until it reads.
            data = connection.http.send(request) or b""
            data += connection.http.send(h11.Data(data=body)) or b"" if body else b""
            connection.writer.write(data + (connection.http.send(h11.EndOfMessage()) or b""))
            return OriginAnswer(connection, await self._head(connection, on_informational), self, None)
        await connection.send(request)
        sending = asyncio.ensure_future(self._send(connection, body, trailers))
        sending.add_done_callback(_heard)  # retrieves a failure after the answer has begun
        reading = asyncio.ensure_future(self._head(connection, on_informational))
        reading.add_done_callback(_heard)
        try:
            await asyncio.wait({sending, reading}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await sending  # raises what the body raises
                await asyncio.wait({reading})
            return OriginAnswer(connection, reading.result(), self, sending)
        except BaseException:
            sending.cancel()
            reading.cancel()
            raise

    async def _send(self, connection: Connection, body: AsyncIterator[bytes], trailers: Callable[[], Fields]) -> None:
        async for part in body:
            try:
                await connection.send_part(part)
            except OSError:  # the server stopped reading; the reader sees whether it has answered
                return
        with contextlib.suppress(OSError):
            await connection.send_end(trailers())

    async def _head(self, connection: Connection, on_informational: OnInformational | None) -> h11.Response:
        while True:
            event = await connection.event()
            if isinstance(event, h11.Response):
                return event
            if not isinstance(event, h11.InformationalResponse):
                raise BrokeOff("it closed the connection")
            if on_informational is not None:
                await on_informational(event.status_code, bytes(event.reason), raw_fields(event))

    # ---- connections -----------------------------------------------------------------------------------------

    async def _connection(self) -> tuple[Connection, bool]:
        """Return a connection, and whether it was used before."""
        while self._idle and time.monotonic() - self._idle[0][1] >= self._keep_alive_s:
            self._idle.popleft()[0].close()
        while self._idle:
            connection, _ = self._idle.pop()
            if not connection.reader.at_eof():
                return connection, True
            connection.close()
        try:
            async with asyncio.timeout(self._connect_s):
                reader, writer = await asyncio.open_connection(
                    self._host, self._port, ssl=self._tls, limit=READ_BYTES,
                    server_hostname=self._host if self._tls is not None else None,
                )  # fmt: skip
        except OSError as error:  # includes TimeoutError and those of TLS
            raise NotConnected(str(error)) from error
        return Connection(h11.CLIENT, reader, writer, self._max_head), False

    def give_back(self, connection: Connection) -> None:
        """Reuse the connection if its message has ended."""
        if self._is_closed or len(self._idle) >= MOST_IDLE or not connection.next_message():
            connection.close()
        else:
            self._idle.append((connection, time.monotonic()))

    def close(self) -> None:
        """Close idle connections; others are closed when they are given back."""
        self._is_closed = True
        while self._idle:
            self._idle.pop()[0].close()


def _heard(task: asyncio.Task[object]) -> None:
    if not task.cancelled():
        task.exception()
