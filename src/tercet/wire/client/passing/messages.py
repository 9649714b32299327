"""HTTP/1.1 messages on one connection: h11 implements the protocol, asyncio transports the bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import h11

from tercet.wire.client.passing.fields import Fields, values

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
            self.trailers = _raw(event.headers)
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
            if sum(len(name) + len(value) for name, value in _raw(event.headers)) > self._max_head:
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


def raw_fields(event: h11.Request | h11.Response | h11.InformationalResponse) -> list[tuple[bytes, bytes]]:
    """Return the fields of a head, with names as they were written."""
    return _raw(event.headers)


def framing(fields: Fields) -> list[tuple[bytes, bytes]]:
    """Return the framing of a message with these fields when it is passed on: chunked, or with its length."""
    if values(fields, b"transfer-encoding"):
        return [(b"Transfer-Encoding", b"chunked")]
    return [(b"Content-Length", value) for value in values(fields, b"content-length")[:1]]


def _raw(headers: Any) -> list[tuple[bytes, bytes]]:
    found: Sequence[tuple[bytes, bytes]] = headers.raw_items() if hasattr(headers, "raw_items") else headers
    return [(bytes(name), bytes(value)) for name, value in found]


def _require_one_length(event: h11.Request | h11.Response | h11.InformationalResponse) -> None:
    """Refuse a second definition of a message's end: it allows request smuggling (RFC 9112, 6.3)."""
    names = {name for name, _ in event.headers}
    if {b"content-length", b"transfer-encoding"} <= names:
        raise NotReadable("a message has both Content-Length and Transfer-Encoding")
    if b"transfer-encoding" in names and event.http_version < b"1.1":
        raise NotReadable("a message of HTTP/1.0 has a Transfer-Encoding")
