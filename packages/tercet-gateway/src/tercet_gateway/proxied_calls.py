"""What sidecar and model router share: one request of a client, its body within limits, and an answer passed on.

Both are ASGI applications on an :class:`HttpServer`.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.server import ServerState

from tercet.aio.files import require_regular
from tercet.fleet.admission import ClientLeft
from tercet.protocol import BadRequest, RequestTooLarge, TercetError
from tercet.protocol.errors import error_body, last_events
from tercet.protocol.headers import path_of
from tercet.protocol.spans import VerbTrace
from tercet.protocol.sse import EVENTS, EventSplitter, object_of
from tercet.protocol.wire import JSON
from tercet.router.request_bodies import LARGEST_AT_ONCE, BodiesHeld, HeldBody
from tercet.wire.client.passing import Fields, OriginAnswer, end_to_end, first, passed_on, values
from tercet.wire.serving.answers import TracingSend
from tercet.wire.serving.client_connection import CONNECTION, TARGET, ClientConnection, StreamingProtocol

if TYPE_CHECKING:
    import grpc  # only pickers need it
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("tercet.gateway")
# Time that a connection may be idle between two requests, in seconds: proxies keep theirs for a minute.
IDLE_SECONDS = 75


class HttpServer:
    """A port whose requests an ASGI application answers, on connections with limits."""

    def __init__(self, app: ASGIApp) -> None:
        self.port = 0
        self._config = uvicorn.Config(
            app, ws="none", lifespan="off", log_config=None, log_level="error", access_log=False, proxy_headers=False,
            timeout_keep_alive=IDLE_SECONDS,
        )  # fmt: skip
        self._state = ServerState()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        """Start listening. Raises :class:`OSError` for an address that cannot be used."""
        self._config.load()
        made = partial(StreamingProtocol, self._config, self._state, {})
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(made, host, port, ssl=tls, backlog=self._config.backlog)
        self.port = self._server.sockets[0].getsockname()[1]

    async def finish(self) -> None:
        """Accept no new requests, and return when all requests have ended."""
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._state.connections):
            connection.shutdown()
        while self._state.tasks:
            await asyncio.wait(tuple(self._state.tasks))

    def abort(self) -> None:
        """Close all connections, even if clients have not read all written data."""
        for connection in tuple(self._state.connections):
            connection.transport.abort()

    async def close(self) -> None:
        """End all requests."""
        self.abort()
        await self.finish()


ERROR_SECONDS = 2.0
"""Seconds to send errors of ended requests to their clients; then connections are closed."""


def application(handler: Callable[[ClientCall], Awaitable[None]]) -> ASGIApp:
    """Return the application whose requests ``handler`` answers; it is cancelled when the client leaves."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        with scope[CONNECTION].until_lost():
            http = ClientCall(scope, receive, send)
            try:
                http.read_head()
                await handler(http)
            except ClientLeft:
                return
            except TercetError as error:  # of the head, after which no other request is trusted
                await http.answer(error.status, error_body(http.path, error), JSON, [(b"connection", b"close")])
            except Exception:
                logger.exception("a request failed")
                if http.began:
                    http.connection.abort()
                else:
                    await http.answer(500, error_body(http.path, TercetError("internal error")), JSON)

    return answer


@asynccontextmanager
async def serving(
    handler: Callable[[ClientCall], Awaitable[None]], host: str, port: int, tls: ssl.SSLContext | None
) -> AsyncGenerator[HttpServer]:
    """Serve requests by ``handler`` in this context; its end ends them.

    Raises :class:`~tercet.protocol.BadRequest` for an address that cannot be used.
    """
    server = HttpServer(application(handler))
    try:
        await server.start(host, port, tls)
    except OSError as error:
        raise BadRequest(f"port: cannot listen on {host}:{port}: {error.strerror}", "port") from error
    try:
        yield server
    finally:
        await server.close()


@asynccontextmanager
async def ended_later(
    server: HttpServer, seconds: float, hurried: asyncio.Event, give_up: Callable[[], None]
) -> AsyncGenerator[None]:
    """Accept no new requests, and enter when all have ended.

    After ``seconds``, or when ``hurried`` is set, ``give_up`` ends those that run with an error, which their clients
    have :data:`ERROR_SECONDS` to read.
    """

    async def end() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await hurried.wait()
        give_up()
        await asyncio.sleep(ERROR_SECONDS)
        server.abort()

    ending = asyncio.create_task(end())
    try:
        await server.finish()
        yield
    finally:
        ending.cancel()


class ClientCall:
    """One request and the answer to it.

    ``fields`` are the request's headers; ``target`` is its path and query as they were written; ``path`` is the target
    as an engine's server reads it: decoded and without its query.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.fields: list[tuple[bytes, bytes]] = list(scope["headers"])
        self.http_version: str = scope["http_version"]
        self.scheme: str = scope["scheme"]
        self.peer: str | None = (scope["client"] or (None,))[0]  # None at a socket file
        self.target: bytes = scope[TARGET]
        self.path = ""
        self.began = False
        self.connection: ClientConnection = scope[CONNECTION]
        has_chunks = bool(values(self.fields, b"transfer-encoding"))
        self.has_body = has_chunks or (self.header("content-length") or "0").strip("0") != ""
        self._receive = receive
        self._send = send

    def read_head(self) -> None:
        """Raise :class:`~tercet.protocol.BadRequest` for a head that HTTP forbids, and that uvicorn accepts."""
        self.target, host = _origin_form(self.target)
        self.path = path_of(self.target.decode("ascii"))
        if self.http_version != "1.0" and len(values(self.fields, b"host")) != 1:
            raise BadRequest("the request must have one Host header")
        if self.http_version == "1.0" and values(self.fields, b"transfer-encoding"):
            raise BadRequest("a request of HTTP/1.0 has a Transfer-Encoding")
        if host is not None:
            self.fields = [(b"host", host), *((name, value) for name, value in self.fields if name != b"host")]

    def header(self, name: str) -> str | None:
        """Return the first value of the header with this lower-case name; None without one."""
        return first(self.fields, name.encode())

    def headers(self, name: str) -> list[str]:
        """Return all values of the header with this lower-case name."""
        return [value.decode("latin-1") for value in values(self.fields, name.encode())]

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives; a client that waits for 100 Continue gets it first.

        Raises :class:`~tercet.fleet.admission.ClientLeft`, also for a body that is refused as too slow.
        """
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            if part := message.get("body"):
                yield part
            if not message.get("more_body"):
                return

    async def send(self, message: Message) -> None:
        """Send a message of the answer, as ASGI's ``send``."""
        if message["type"] == "http.response.start":
            self.began = True
            if self.http_version == "1.0" and first(message["headers"], b"content-length") is None:
                self._send = self.connection.without_chunks(self._send)
        await self._send(message)

    async def answer(self, status: int, body: bytes, content_type: str, more: Fields = ()) -> None:
        """Send a whole answer of the proxy itself, with ``more`` headers."""
        fields = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode()), *more]
        await self.send({"type": "http.response.start", "status": status, "headers": fields})
        await self.send({"type": "http.response.body", "body": body})


# This keeps the path as it is written: URL parsers drop an empty query, and raise for some hosts.
_ABSOLUTE = re.compile(
    rb"https?://([^/?@]*@)?(?P<host>(\[[0-9a-f:.]+\]|[^/?@\[\]:]+)(:[0-9]*)?)(?P<path>([/?].*)?)", re.IGNORECASE
)


def _origin_form(target: bytes) -> tuple[bytes, bytes | None]:
    """Return the path and the host for the engine, from a target in any of HTTP's forms.

    Raises :class:`~tercet.protocol.BadRequest` for an invalid target.
    """
    if b"#" in target:
        raise BadRequest("the request's target must not have a fragment")
    if target.startswith(b"/"):
        return target, None
    url = _ABSOLUTE.fullmatch(target)
    if url is None:
        raise BadRequest("the request's target is neither a path nor a URL")
    path = url["path"]
    return path if path.startswith(b"/") else b"/" + path, url["host"]


class ProxiedAnswer:
    """One answer to a client. ``traces``, if there are any, are added to it."""

    def __init__(self, http: ClientCall) -> None:
        self.traces: Sequence[VerbTrace] = ()
        self._http = http
        self._events: EventSplitter | None = None
        self._last = b""
        self._send = http.send

    async def begin(self, upstream: OriginAnswer) -> None:
        """Send the server's status and headers."""
        self._events = EventSplitter() if is_stream(upstream) else None
        if self.traces:
            self._send = TracingSend(self._http.send, self.traces)
        has_length = upstream.status not in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)
        headers = passed_on(upstream.fields) if has_length else end_to_end(upstream.fields)
        await self._send({"type": "http.response.start", "status": upstream.status, "headers": headers})

    async def write(self, chunk: bytes) -> None:
        """Pass on a part of the server's body."""
        passed = chunk if self._events is None else b"".join(self._events.split(chunk))
        if passed:
            self._last = passed
            await self._send({"type": "http.response.body", "body": passed, "more_body": True})

    async def end(self) -> None:
        rest = b"" if self._events is None else self._events.rest()
        await self._send({"type": "http.response.body", "body": rest})

    async def fail(self, error: TercetError, asks: Fields = ()) -> None:
        """Send an error as the answer, or at the end of a stream; cut off any other answer that has begun."""
        if not self._http.began:
            await self._http.answer(error.status, error_body(self._http.path, error), JSON, asks)
            return
        logger.warning("an answer was cut off: %s: %s", error.code, error.message)
        if self._events is not None:
            body = last_events(self._http.path, error, object_of(self._last))
            await self._http.send({"type": "http.response.body", "body": body})
        else:
            self._http.connection.abort()


def is_stream(response: OriginAnswer) -> bool:
    """True if the answer is a stream of readable events without a length, so that a last event can be added."""
    kind = first(response.fields, b"content-type") or ""
    if not kind.lower().startswith(EVENTS) or first(response.fields, b"content-length") is not None:
        return False
    return all(each.strip().lower() in (b"", b"identity") for each in values(response.fields, b"content-encoding"))


class RequestBodies:
    """All buffered bodies of one process, each of at most ``most`` bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = BodiesHeld(LARGEST_AT_ONCE * most)

    @property
    def size(self) -> int:
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
        exceed their limit, and the errors of :meth:`~tercet_gateway.proxied_calls.ClientCall.parts`.
        """
        self.announced(http)
        async with body.until_let_go():
            async for chunk in http.parts():
                if body.size + len(chunk) > self._most:
                    raise self._too_large()
                body.take(chunk)
        body.end()

    def _too_large(self) -> RequestTooLarge:
        return RequestTooLarge(f"the request's body has more than {self._most} bytes (--max-request-bytes)")


class ServedCertificate:
    """A certificate and its key, in files that their issuer replaces before they expire.

    The files are checked at each handshake. A pair that cannot be used, such as a new certificate with the old key, is
    ignored until it changes: connections get the last valid pair. Use one object for each server. Raises
    :class:`~tercet.protocol.BadRequest` if the first pair cannot be used.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = certificate, key
        try:
            self._seen = self._stamp()
            self._context = self._read()
        except (OSError, ssl.SSLError) as error:
            raise BadRequest(f"tls-cert: {certificate} and {key} cannot be used: {error}", "tls-cert") from error

    def credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of a gRPC server's port.

        gRPC calls back in its threads, where None means no change.
        """
        import grpc

        return grpc.dynamic_ssl_server_credentials(self._pair(), self._renewed_pair, False)  # pyright: ignore[reportArgumentType]

    def context(self) -> ssl.SSLContext:
        """Return the TLS context of any other server."""
        door = self._read()
        door.sni_callback = self._shown  # called at every handshake, with or without a server name
        return door

    def _renewed_pair(self) -> grpc.ServerCertificateConfiguration | None:
        return self._pair() if self._renewed() else None

    def _shown(self, connection: ssl.SSLObject, _name: str | None, _door: ssl.SSLContext) -> None:
        self._renewed()
        connection.context = self._context

    def _renewed(self) -> bool:
        """True if another pair must be used from now on."""
        try:
            stamp = self._stamp()
            if stamp == self._seen:
                return False
            self._seen = stamp
            self._context = self._read()
        except (OSError, ssl.SSLError) as error:
            logger.warning(
                "the new certificate in %s cannot be used, the previous one stays in use: %s", self._files[0], error
            )
            return False
        logger.info("the certificate in %s has changed, and is in use from now on", self._files[0])
        return True

    def _stamp(self) -> object:
        for each in self._files:
            require_regular(each)
        return [(stat.st_mtime_ns, stat.st_ino, stat.st_size) for stat in (each.stat() for each in self._files)]

    def _pair(self) -> grpc.ServerCertificateConfiguration:
        import grpc

        certificate, key = self._files
        return grpc.ssl_server_certificate_configuration([(key.read_bytes(), certificate.read_bytes())])

    def _read(self) -> ssl.SSLContext:
        """Load the pair; this also checks it for gRPC, which accepts any files and fails at handshakes."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self._files, password="")
        return context


def certificate_of(certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    """Return the TLS context for clients; None without TLS."""
    if certificate is None or key is None:
        return None
    return ServedCertificate(Path(certificate), Path(key)).context()
