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


async def echoes(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the request's method and body."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    answer = scope["method"].encode() + b" " + body + b";"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(answer))]})
    await send({"type": "http.response.body", "body": answer})


OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"


@pytest.mark.parametrize("piece", [1, 7, 100_000])
async def test_an_offer_of_another_protocol_is_ignored_and_its_body_read(
    piece: int, caplog: pytest.LogCaptureFixture
) -> None:
    # Java's HttpClient offers h2c with every request; the last one here asks for the connection's end.
    many = [
        b"POST /a HTTP/1.1\r\nhost: a\r\n" + OFFER + b"content-length: 5\r\n\r\nhello",
        b"POST /b HTTP/1.1\r\n" + OFFER + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n",
        b"GET /c HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
        b"POST /d HTTP/1.1\r\ncontent-length: 2\r\n\r\nok",
        b"POST /e HTTP/1.1\r\nconnection: upgrade, close\r\nupgrade: x\r\ncontent-length: 3\r\n\r\nend",
    ]
    async with served_asgi(echoes, http=BoundedProtocol, ws="none", log_config=None) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        sent = b"".join(many)
        for at in range(0, len(sent), piece):
            writer.write(sent[at : at + piece])
            await asyncio.sleep(0)
        got = await asyncio.wait_for(reader.read(), 5)
        writer.close()
    bodies = [part.rpartition(b"\r\n\r\n")[2] for part in got.split(b";")[:-1]]
    assert bodies == [b"POST hello", b"POST abcde", b"GET ", b"POST ok", b"POST end"]
    assert not [each for each in caplog.records if each.name.startswith("uvicorn")]


async def test_many_offers_in_one_packet_are_read_one_after_the_other() -> None:
    async with served_asgi(echoes, http=BoundedProtocol, ws="none", log_config=None) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        writer.write((b"GET / HTTP/1.1\r\n" + OFFER + b"\r\n") * 2000 + b"GET / HTTP/1.0\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), 20)).count(b"GET ;") == 2001
        writer.close()
