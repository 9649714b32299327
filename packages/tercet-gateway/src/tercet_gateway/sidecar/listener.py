"""The connections of a proxy's clients: one request at a time on each, and the engine's answers unchanged.

What the sidecar and the model router share: reading a request's body within limits, and sending an engine's answer on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from http import HTTPStatus
from typing import Any

import h11

from tercet.aio.incoming import LEAST_OF_BODY, LONGEST_HEAD, SECONDS, Breach
from tercet.fleet.admission import ClientLeft
from tercet.protocol import BadRequest, HeadTooLarge, RequestTimeout, RequestTooLarge, TercetError
from tercet.protocol.errors import error_body, last_events
from tercet.protocol.headers import path_of
from tercet.protocol.sse import EVENTS, EventSplitter, object_of
from tercet.protocol.trace import VerbTrace
from tercet.router.limits.bodies import LARGEST_AT_ONCE, BodiesHeld, HeldBody
from tercet.wire.client.passing import (
    READ_BYTES,
    BrokeOff,
    Connection,
    Fields,
    NotReadable,
    OriginAnswer,
    end_to_end,
    first,
    framing,
    is_encoded,
    passed_on,
    raw_fields,
    values,
)
from tercet.wire.serving.answers import TracingSend, breach_error

logger = logging.getLogger("tercet.gateway")
IDLE_SECONDS = 75.0
"""Timeout of a connection between two requests, in seconds."""
LINGER_SECONDS = 2.0
"""Seconds for a client to read why the rest of its body is not read."""
NOTHING = [(b"Content-Length", b"0")]
Handler = Callable[["ClientCall"], Awaitable[None]]
_ERRORS: Mapping[int, type[TercetError]] = {HeadTooLarge.status: HeadTooLarge, RequestTimeout.status: RequestTimeout}


class ClientCall:
    """One request and the answer to it.

    ``fields`` are the request's headers, unchanged; ``target`` is its target, unchanged; ``path`` is the target as an
    engine's server reads it: decoded and without its query.
    """

    def __init__(self, connection: Connection, head: h11.Request) -> None:
        self.method = bytes(head.method)
        self.fields = raw_fields(head)
        self.http_version = bytes(head.http_version)
        self.target, host = _origin_form(bytes(head.target), self.method)
        if host is not None:
            self.fields = [(b"Host", host), *((name, value) for name, value in self.fields if name.lower() != b"host")]
        self.path = path_of(self.target.decode("ascii"))
        self.began = False
        self.has_body = framing(self.fields) not in ([], NOTHING)
        self.is_read = False
        self._connection = connection

    def header(self, name: str) -> str | None:
        """Return the first value of the header with this lower-case name; None without one."""
        return first(self.fields, name.encode())

    def headers(self, name: str) -> list[str]:
        """Return all values of the header with this lower-case name."""
        return [value.decode("latin-1") for value in values(self.fields, name.encode())]

    @property
    def scheme(self) -> str:
        """``https`` for a connection with TLS, otherwise ``http``."""
        return "http" if self._connection.writer.get_extra_info("sslcontext") is None else "https"

    @property
    def peer(self) -> str | None:
        """The client's address; None at a socket file."""
        found = self._connection.writer.get_extra_info("peername")
        return found[0] if isinstance(found, tuple) else None

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives.

        Raises :class:`~tercet.fleet.admission.ClientLeft`, and :class:`~tercet.protocol.TercetError` for a body that is
        invalid or too slow. Only the time counts in which this waits for more bytes.
        """
        clock = asyncio.get_running_loop().time
        left, came = SECONDS, 0
        while True:
            began = clock()
            try:
                async with asyncio.timeout(left):
                    part = await self._connection.part()
            except TimeoutError:
                if came < LEAST_OF_BODY:
                    raise breach_error(Breach.SLOW_BODY) from None
                left, came = SECONDS, 0
                continue
            except OSError as error:
                raise ClientLeft from error
            except NotReadable as error:
                raise BadRequest(f"the request's body cannot be read: {error}") from error
            if not part:
                self.is_read = True
                return
            left, came = max(0.0, left - (clock() - began)), came + len(part)
            yield part

    @property
    def trailers(self) -> Fields:
        """The request's trailers, after its body was read."""
        return self._connection.trailers

    async def expected(self) -> None:
        """Send 100 Continue to a client that waits for it."""
        if self._connection.http.they_are_waiting_for_100_continue:
            await self._connection.send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue"))

    async def inform(self, status: int, reason: bytes, fields: Fields) -> None:
        """Pass on an informational answer (1xx), to clients that support it."""
        if self.http_version >= b"1.1" and not self.began:
            await self._connection.send(
                h11.InformationalResponse(status_code=status, reason=reason, headers=end_to_end(fields))
            )

    async def begin(self, status: int, reason: bytes, fields: Fields) -> None:
        """Send the answer's head; ``fields`` define its framing."""
        self.began = True
        ends = [(b"Connection", b"close")] if self.has_body and not self.is_read else []
        await self._connection.send(h11.Response(status_code=status, reason=reason, headers=[*fields, *ends]))

    async def write(self, part: bytes) -> None:
        """Send a part of the answer's body."""
        await self._connection.send_part(part)

    async def end(self, trailers: Fields = ()) -> None:
        """End the answer."""
        await self._connection.send_end(trailers)

    def abort(self) -> None:
        """Close the connection, so that the client sees an incomplete answer."""
        self._connection.abort()

    async def answer(self, status: int, body: bytes, content_type: str, more: Fields = ()) -> None:
        """Send a whole answer of the proxy itself, with ``more`` headers."""
        fields = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode()), *more]
        await self.begin(status, b"", fields)
        if self.method != b"HEAD":
            await self.write(body)
        await self.end()


class Listener:
    """A port whose requests ``handler`` answers, each in a task that is cancelled when its client leaves.

    ``failure`` returns the body of an error for a path; the path is empty if it is not known.
    """

    def __init__(self, handler: Handler, failure: Callable[[str, TercetError], bytes]) -> None:
        self.port = 0
        self._handler = handler
        self._failure = failure
        self._server: asyncio.Server | None = None
        self._clients: dict[asyncio.Task[None], Connection] = {}
        self._idle: set[asyncio.Task[None]] = set()
        self._ends = False

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        """Start listening. Raises :class:`OSError` for an address that cannot be used."""
        self._server = await asyncio.start_server(self._client, host, port, ssl=tls, limit=READ_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    async def finish(self) -> None:
        """Accept no new requests, and return when all requests have ended."""
        self._ends = True
        if self._server is not None:
            self._server.close()
        for task in tuple(self._idle):
            task.cancel()
        if self._clients:
            await asyncio.wait(tuple(self._clients))

    async def close(self) -> None:
        """End all requests."""
        self.abort()
        for task in tuple(self._clients):
            task.cancel()
        await self.finish()

    def abort(self) -> None:
        """Close all connections, even if clients have not read all written data."""
        for connection in tuple(self._clients.values()):
            connection.abort()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connection = Connection(h11.SERVER, reader, writer, LONGEST_HEAD)
        self._clients[task] = connection
        try:
            silence = SECONDS
            while await self._next(connection, task, silence) and connection.next_message():
                silence = IDLE_SECONDS
            await _linger(connection)
        except (OSError, asyncio.CancelledError):  # the client has left, or this proxy shuts down
            pass
        finally:
            del self._clients[task]
            connection.close()

    async def _next(self, connection: Connection, task: asyncio.Task[None], silence: float) -> bool:
        """Serve the next request; return whether another one may follow."""
        try:
            head = await self._head(connection, task, silence)
            if head is None:
                return False
            call = ClientCall(connection, head)
            if not call.has_body:
                await connection.part()
        except NotReadable as error:
            await self._refuse(connection, error)
            return False
        serving = asyncio.ensure_future(self._serve(call))
        leaving = asyncio.ensure_future(_left(connection, serving))
        try:
            await asyncio.wait({serving})
        finally:
            serving.cancel()
            leaving.cancel()
            await asyncio.wait({serving, leaving})
        return not self._ends

    async def _head(self, connection: Connection, task: asyncio.Task[None], silence: float) -> h11.Request | None:
        """Read a head; return None if the connection ends or is idle for too long."""
        if self._ends:
            return None
        self._idle.add(task)
        try:
            async with asyncio.timeout(silence):
                await connection.begun()
        except (TimeoutError, BrokeOff):
            return None
        finally:
            self._idle.discard(task)
        try:
            async with asyncio.timeout(SECONDS):
                event = await connection.event()
        except TimeoutError:
            raise NotReadable(Breach.SLOW_HEAD.value, HTTPStatus.REQUEST_TIMEOUT) from None
        return event if isinstance(event, h11.Request) else None

    async def _refuse(self, connection: Connection, error: NotReadable) -> None:
        kind = _ERRORS.get(error.status)
        said = BadRequest(f"the request cannot be parsed: {error}") if kind is None else kind(str(error))
        body = self._failure("", said)
        fields = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        with contextlib.suppress(h11.LocalProtocolError):
            await connection.send(
                h11.Response(status_code=error.status, headers=[*fields, (b"connection", b"close")], reason=b"")
            )
            await connection.send_part(body)
            await connection.send_end()

    async def _serve(self, call: ClientCall) -> None:
        try:
            await self._handler(call)
        except (OSError, ClientLeft):
            call.abort()
        except Exception:
            logger.exception("a request failed")
            if call.began:
                call.abort()
            else:
                await call.answer(500, self._failure(call.path, TercetError("internal error")), "application/json")


async def _left(connection: Connection, serving: asyncio.Task[None]) -> None:
    """Cancel the task of a client that has left; while a body arrives, its reader notices that."""
    await connection.is_whole.wait()
    with contextlib.suppress(OSError):
        await connection.gone()
    serving.cancel()


async def _linger(connection: Connection) -> None:
    """Read data that a client still sends, for a limited time: closing earlier could destroy the answer on its way."""
    if connection.http.their_state not in (h11.SEND_BODY, h11.ERROR) or connection.writer.is_closing():
        return
    with contextlib.suppress(TimeoutError, OSError):
        async with asyncio.timeout(LINGER_SECONDS):
            if connection.writer.can_write_eof():
                connection.writer.write_eof()
            while await connection.reader.read(READ_BYTES):
                pass


# This keeps the path as it is written: URL parsers drop an empty query, and raise for some hosts.
_ABSOLUTE = re.compile(
    rb"https?://([^/?@]*@)?(?P<host>(\[[0-9a-f:.]+\]|[^/?@\[\]:]+)(:[0-9]*)?)(?P<path>([/?].*)?)", re.IGNORECASE
)


def _origin_form(target: bytes, method: bytes) -> tuple[bytes, bytes | None]:
    """Return the path and the host for the engine, from a target in any of HTTP's forms.

    Raises :class:`~tercet.wire.client.passing.NotReadable` for an invalid target, and for tunnels.
    """
    if method == b"CONNECT":
        raise NotReadable("CONNECT: this server is not a proxy to other servers", 405)
    if b"#" in target:
        raise NotReadable("the request's target must not have a fragment")
    if target.startswith(b"/") or target == b"*":
        return target, None
    url = _ABSOLUTE.fullmatch(target)
    if url is None:
        raise NotReadable("the request's target is neither a path nor a URL")
    path = url["path"]
    return path if path.startswith(b"/") else b"/" + path, url["host"]


JSON = "application/json"


class ProxiedAnswer:
    """One answer to a client. ``traces``, if there are any, are added to it."""

    def __init__(self, http: ClientCall) -> None:
        self.traces: Sequence[VerbTrace] = ()
        self._http = http
        self._events: EventSplitter | None = None
        self._last = b""
        self._send: Any = None
        self._reason = b""
        self._trailers: Fields = ()

    async def begin(self, upstream: OriginAnswer) -> None:
        """Send the server's status, reason and headers."""
        self._events = EventSplitter() if is_stream(upstream) else None
        self._reason = upstream.reason
        self._send = TracingSend(self._write_message, self.traces) if self.traces else self._write_message
        has_length = upstream.status != HTTPStatus.NO_CONTENT
        headers = passed_on(upstream.fields) if has_length else end_to_end(upstream.fields)
        await self._send({"type": "http.response.start", "status": upstream.status, "headers": headers})

    async def write(self, chunk: bytes) -> None:
        """Pass on a part of the server's body."""
        passed = chunk if self._events is None else b"".join(self._events.split(chunk))
        if passed:
            self._last = passed
            await self._send({"type": "http.response.body", "body": passed, "more_body": True})

    async def end(self, trailers: Fields) -> None:
        """End a complete answer."""
        rest = b"" if self._events is None else self._events.rest()
        self._trailers = trailers
        await self._send({"type": "http.response.body", "body": rest, "more_body": False})

    async def fail(self, error: TercetError, asks: Fields = ()) -> None:
        """Send an error as the answer, or at the end of a stream; cut off any other answer that has begun."""
        if not self._http.began:
            await self._http.answer(error.status, error_body(self._http.path, error), JSON, asks)
            return
        logger.warning("an answer was cut off: %s: %s", error.code, error.message)
        if self._events is not None:
            await self._http.write(last_events(self._http.path, error, object_of(self._last)))
            await self._http.end()
        else:
            self._http.abort()

    async def _write_message(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            await self._http.begin(message["status"], self._reason, message["headers"])
            return
        if body := message.get("body"):
            await self._http.write(body)
        if not message.get("more_body"):
            await self._http.end(self._trailers)


def is_stream(response: OriginAnswer) -> bool:
    """True if the answer is a stream of readable events without a length, so that a last event can be added."""
    kind = first(response.fields, b"content-type") or ""
    if not kind.lower().startswith(EVENTS) or first(response.fields, b"content-length") is not None:
        return False
    return not is_encoded(response.fields)


class RequestBodies:
    """All buffered bodies of one process, each of at most ``most`` bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = BodiesHeld(LARGEST_AT_ONCE * most)

    @property
    def size(self) -> int:
        """Bytes of all buffered bodies."""
        return self._held.size

    def one(self) -> AbstractContextManager[HeldBody]:
        """Return a context for one body, which is dropped at its exit."""
        return self._held.one()

    def announced(self, http: ClientCall) -> int | None:
        """Return the length in bytes that a request announces; None if it announces none.

        Raises :class:`~tercet.protocol.RequestTooLarge`.
        """
        announced = http.header("content-length") or ""
        length = int(announced) if announced.isdecimal() else None
        if length is not None and length > self._most:
            raise self._too_large()
        return length

    async def read(self, http: ClientCall, body: HeldBody) -> None:
        """Read the whole body; the caller forgets it once it was passed on.

        Raises :class:`~tercet.protocol.RequestTooLarge`, :class:`~tercet.protocol.Saturated` if all bodies together
        exceed their limit, and the errors of :meth:`~tercet_gateway.sidecar.listener.ClientCall.parts`.
        """
        self.announced(http)
        await http.expected()
        async with body.until_let_go():
            async for chunk in http.parts():
                if body.size + len(chunk) > self._most:
                    raise self._too_large()
                body.take(chunk)
        body.end()

    def _too_large(self) -> RequestTooLarge:
        return RequestTooLarge(f"the request's body has more than {self._most} bytes (--max-request-bytes)")
