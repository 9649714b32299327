"""A server with limits, asked by sockets that do not behave: long and slow heads, dripped bodies, silence.

It serves an ASGI application by uvicorn, as the router does, and calls of a handler, as the sidecar does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.server import ServerState

from tercet.aio import incoming
from tercet.aio.incoming import LONGEST_HEAD
from tercet.wire.serving.client_connection import StreamingProtocol
from tercet.wire.serving.http_server import error_handlers, unless_disconnected
from tercet_gateway.proxied_calls import ClientCall, HttpServer, application
from tests.longest_wait import LONGEST_WAIT_S, until
from tests.servers import served_asgi

SOON = 0.1
HEAD = b"POST /x HTTP/1.1\r\nhost: h\r\ncontent-length: 10\r\n\r\n"
BEGUN = {"type": "http.response.start", "status": 200, "headers": []}, {
    "type": "http.response.body", "body": b"begun", "more_body": True,
}  # fmt: skip
Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Served:
    """Answers 200 once it has read the body, or at once for ``/at-once``; for ``/stream`` it begins before.

    ``bodies`` has the size of each body, and ``left`` counts clients that left before theirs ended.
    """

    def __init__(self) -> None:
        self.port = 0
        self.left = 0
        self.bodies: list[int] = []

    async def application(self, scope: Any, receive: Any, send: Any) -> None:
        for message in BEGUN if scope["path"] == "/stream" else ():
            await send(message)
        size, more = 0, scope["path"] != "/at-once"
        while more:
            message = await receive()
            if message["type"] != "http.request":
                self.left += 1
                return
            size += len(message["body"])
            more = message["more_body"]
        self.bodies.append(size)
        if scope["path"] != "/stream":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def handle(self, http: ClientCall) -> None:
        try:
            for message in BEGUN if http.path == "/stream" else ():
                await http.send(message)
            if http.path != "/at-once":
                self.bodies.append(sum([len(part) async for part in http.parts()]))
        except BaseException:
            self.left += 1
            raise
        if http.path == "/stream":
            await http.send({"type": "http.response.body", "body": b""})
        else:
            await http.answer(200, b"ok", "text/plain")

    @asynccontextmanager
    async def client(self) -> AsyncGenerator[Client]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()


@asynccontextmanager
async def by_uvicorn(served: Served) -> AsyncGenerator[int]:
    state = ServerState()
    config = uvicorn.Config(
        served.application, http=StreamingProtocol, log_level="critical", lifespan="off", interface="asgi3"
    )
    config.load()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: StreamingProtocol(config, state, {}), "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    for protocol in list(state.connections):
        assert protocol.transport is not None
        protocol.transport.abort()


@asynccontextmanager
async def by_handler(served: Served) -> AsyncGenerator[int]:
    server = HttpServer(application(served.handle))
    await server.start("127.0.0.1", 0)
    yield server.port
    await server.close()


@pytest.fixture(params=[by_uvicorn, by_handler])
async def served(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    monkeypatch.setattr(incoming, "SECONDS", SOON)
    found = Served()
    async with request.param(found) as found.port:
        yield found


async def all_said(reader: asyncio.StreamReader) -> bytes:
    """Up to the end of the connection, however it ends."""
    said = b""
    with suppress(ConnectionResetError):
        async with asyncio.timeout(LONGEST_WAIT_S):
            while part := await reader.read(65536):
                said += part
    return said


async def test_a_connection_that_says_nothing_is_closed(served: Served) -> None:
    async with served.client() as (reader, _):
        assert await all_said(reader) == b""


@pytest.mark.parametrize(
    "said", [b"G", b"GET / HTTP/1.1\r\nhost: h\r\na: ", b"\r\n\r\n", b"GET / HTTP/1.1\r\nhost: h\r\n\r\nGET / HT"]
)
async def test_a_head_that_does_not_end_is_408(said: bytes, served: Served) -> None:
    async with served.client() as (reader, writer):
        writer.write(said)
        answer = await all_said(reader)
    assert b"HTTP/1.1 408 Request Timeout" in answer
    assert b'"code":"request_timeout"' in answer


@pytest.mark.parametrize(
    ("before", "unit"),
    [
        (b"GET /", b"x"),
        (b"GET / HTTP/1.1\r\nhost: h\r\na: ", b"x"),
        (b"GET / HTTP/1.1\r\nhost: h\r\n", b"x"),
        (b"GET / HTTP/1.1\r\nhost: h\r\n", b"a: b\r\n"),
        (b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n"),
        (b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n0\r\na: ", b"x"),
        (b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n1;a=", b"x"),
    ],
)
async def test_a_long_head_is_refused_before_it_ends(before: bytes, unit: bytes, served: Served) -> None:
    """One line, one header, many of them, trailers and chunk extensions: some of them httptools copies again and again.

    A few are no HTTP for other reasons, and refused by uvicorn; none is read on.
    """
    async with served.client() as (reader, writer):
        writer.write(before)
        for _ in range(64):
            writer.write(unit * (8 * 1024 * 1024 // 64 // len(unit)))
            await asyncio.sleep(0)
            if reader.at_eof():
                break
        answer = await all_said(reader)
    assert answer.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 "))
    assert not served.bodies


@pytest.mark.parametrize("fields", [1, 4])
@pytest.mark.parametrize("size", [LONGEST_HEAD - 400, LONGEST_HEAD + 100])
async def test_a_head_in_one_piece_has_the_same_bound(size: int, fields: int, served: Served) -> None:
    lines = b"".join(b"a%d: %s\r\n" % (number, b"x" * (size // fields)) for number in range(fields))
    async with served.client() as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: h\r\nconnection: close\r\n" + lines + b"\r\n")
        answer = await all_said(reader)
    assert answer.startswith(b"HTTP/1.1 200 " if size < LONGEST_HEAD else b"HTTP/1.1 431 ")


@pytest.mark.parametrize("path", [b"/x", b"/stream"])
async def test_a_body_that_is_dripped_ends_its_request(path: bytes, served: Served) -> None:
    async with served.client() as (reader, writer):
        writer.write(HEAD.replace(b"/x", path) + b"12345")
        answer = await all_said(reader)
    assert answer.startswith(b"HTTP/1.1 408 ") or path == b"/stream"
    await until(lambda: served.left)
    assert served.left == 1
    assert not served.bodies


async def test_a_body_that_nobody_reads_ends_its_connection(served: Served) -> None:
    """The answer arrives, and the client may not keep sending."""
    async with served.client() as (reader, writer):
        writer.write(HEAD.replace(b"/x", b"/at-once"))
        answer = await all_said(reader)
    assert answer.startswith(b"HTTP/1.1 200 ")


async def test_long_bodies_after_short_heads_are_served_and_connections_go_on(served: Served) -> None:
    body = b"x" * (4 * LONGEST_HEAD)
    head = b"POST /x HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % len(body)
    chunked = b"POST /x HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n"
    async with served.client() as (reader, writer):
        for _ in range(3):
            for request in (head + body, chunked % (len(body), body)):
                writer.write(request)
                async with asyncio.timeout(LONGEST_WAIT_S):
                    await reader.readuntil(b"\r\n\r\nok")
        await asyncio.sleep(3 * SOON)  # idle between requests is for the keep-alive time to say
        writer.write(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")
        async with asyncio.timeout(LONGEST_WAIT_S):
            await reader.readuntil(b"\r\n\r\nok")
    assert served.bodies == [*[len(body)] * 6, 0]


async def test_a_caller_that_leaves_ends_its_work_and_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    began, given_back = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            began.set()
            await asyncio.sleep(LONGEST_WAIT_S)
        finally:
            await asyncio.sleep(SOON)
            given_back.set()

    async def answer(request: Request) -> Response:
        await unless_disconnected(request, work())
        return Response()

    app = Starlette(routes=[Route("/", answer)], exception_handlers=error_handlers(None))
    async with served_asgi(app, http=StreamingProtocol, log_config=None) as url:
        _, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        writer.write(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")
        await began.wait()
        writer.close()
        await asyncio.wait_for(given_back.wait(), LONGEST_WAIT_S)
    assert not [each for each in caplog.records if each.name.startswith("uvicorn")]
