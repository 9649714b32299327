"""Fields after a body: they do not become fields of the head, which was checked before."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from tercet.wire.serving.bounded_connection import BoundedProtocol


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
