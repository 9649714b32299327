"""The server behind a proxy: it gets the client's bytes, and its answer is returned unchanged."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import urlsplit

import h11

from tercet.wire.client.passing.fields import Fields
from tercet.wire.client.passing.messages import READ_BYTES, BrokeOff, Connection, raw_fields

MOST_IDLE = 256
REPEATABLE = frozenset({b"GET", b"HEAD", b"OPTIONS", b"TRACE", b"PUT", b"DELETE"})
"""Idempotent methods: a second request has no further effect (RFC 9110, 9.2.2)."""
Told = Callable[[int, bytes, Fields], Awaitable[object]]
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
        told: Told | None = None, trailers: Callable[[], Fields] = tuple,
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
                return await self._asked(connection, request, body, told, trailers)
            except BaseException as error:
                connection.abort()
                # The server closed an idle connection just when it was reused.
                if not (is_used and may_repeat and isinstance(error, OSError)):
                    raise

    async def _asked(
        self, connection: Connection, request: h11.Request, body: bytes | AsyncIterator[bytes] | None,
        told: Told | None, trailers: Callable[[], Fields],
    ) -> OriginAnswer:  # fmt: skip
        if not isinstance(body, AsyncIterator):
            # A server may refuse a large body before reading it: do not wait until it reads.
            data = connection.http.send(request) or b""
            data += connection.http.send(h11.Data(data=body)) or b"" if body else b""
            connection.writer.write(data + (connection.http.send(h11.EndOfMessage()) or b""))
            return OriginAnswer(connection, await self._head(connection, told), self, None)
        await connection.send(request)
        sending = asyncio.ensure_future(self._send(connection, body, trailers))
        sending.add_done_callback(_heard)  # retrieves a failure after the answer has begun
        reading = asyncio.ensure_future(self._head(connection, told))
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

    async def _head(self, connection: Connection, told: Told | None) -> h11.Response:
        while True:
            event = await connection.event()
            if isinstance(event, h11.Response):
                return event
            if not isinstance(event, h11.InformationalResponse):
                raise BrokeOff("it closed the connection")
            if told is not None:
                await told(event.status_code, bytes(event.reason), raw_fields(event))

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
