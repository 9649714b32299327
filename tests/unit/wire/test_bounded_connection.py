"""What follows a head: fields after a body, and a body that nobody reads any more."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from uvicorn.server import ServerState

from tercet.wire.serving import client_connection
from tercet.wire.serving.client_connection import BoundedProtocol
from tests.servers import served_asgi


class Client(asyncio.Transport):
    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass


async def test_a_trailer_is_not_a_header() -> None:
    heard: list[Any] = []
    answered = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        heard.extend(name for name, _ in scope["headers"])
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})
        answered.set()

    config = uvicorn.Config(app, http=BoundedProtocol, lifespan="off", log_config=None)
    config.load()
    protocol: Any = BoundedProtocol(config=config, server_state=ServerState(), app_state={})
    protocol.connection_made(Client())
    protocol.data_received(
        b"POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1\r\n0\r\n0\r\n"
        b"content-type: application/json\r\n\r\n"
    )
    await answered.wait()
    protocol.connection_lost(None)
    assert heard == [b"host", b"transfer-encoding"]


async def refused(scope: Any, receive: Any, send: Any) -> None:
    """Answer by the head alone, as every server does with a label or a key that it refuses."""
    await send({"type": "http.response.start", "status": 415, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"no"})


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("size", [10, 8_000_000])
async def test_an_answer_arrives_before_the_body_was_sent(version: str, size: int) -> None:
    async with served_asgi(refused, http=BoundedProtocol) as url:
        for _ in range(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
            head = f"POST / HTTP/{version}\r\nhost: a\r\nconnection: close\r\ncontent-length: {size}\r\n\r\n"
            writer.write(head.encode())
            assert (await reader.readline()).split()[1] == b"415"
            writer.write(bytes(size))
            await writer.drain()
            assert (await reader.read()).endswith(b"\r\n\r\nno")
            writer.close()


async def test_a_client_that_sends_on_and_on_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_connection, "LINGER_SECONDS", 0.2)
    async with served_asgi(refused, http=BoundedProtocol) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        writer.write(b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n")
        assert (await reader.read()).endswith(b"no")

        async def send_on() -> None:
            while True:
                writer.write(b"4\r\nmore\r\n")
                await writer.drain()
                await asyncio.sleep(0.001)

        with pytest.raises(ConnectionError):
            await send_on()


@pytest.mark.parametrize("field", [b"content-type: application/json\x0b", b"x y: z", b"content-length: 1x"])
async def test_what_cannot_be_parsed_is_answered_also_if_more_follows(field: bytes) -> None:
    async with served_asgi(refused, http=BoundedProtocol) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        writer.write(b"POST / HTTP/1.1\r\nhost: a\r\n" + field + b"\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"400"
        writer.write(bytes(8_000_000))
        await writer.drain()
        assert b"is not valid HTTP/1.1" in await reader.read()
        writer.close()


async def test_garbage_within_a_body_does_not_enter_the_answer_that_is_being_sent() -> None:
    went = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
        await send({"type": "http.response.body", "body": b"so far", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        went.set()

    async with served_asgi(app, http=BoundedProtocol) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
        await reader.readuntil(b"so far")
        writer.write(b"no length\r\n")
        with suppress(ConnectionError):
            assert await reader.read() == b""
        await went.wait()
        writer.close()
