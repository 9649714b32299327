"""Whoever asks an engine learns whether it can have begun with what it was asked for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import msgspec
import pytest

from tercet.protocol import EngineNotReached, EngineStatus, EngineUnreachable, Request
from tercet.wire.client import HttpEngine
from tercet.wire.streams import StreamListener
from tests.unit.router.conftest import Engine

REQUEST = Request(seq_id="s", prompt=(1, 2, 3))


@asynccontextmanager
async def serving_status() -> AsyncGenerator[int]:
    """A server that says how it is, and hangs up on whatever else it is asked; gives its port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET"):
            body = msgspec.json.encode(await Engine("e").status())
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (len(body), body))
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_of_an_engine_that_nobody_runs_one_knows_that_it_did_nothing() -> None:
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    async with StreamListener() as listener, HttpEngine("e", f"http://127.0.0.1:{port}", listener) as engine:
        with pytest.raises(EngineNotReached):
            async with engine.prep_recv(REQUEST):
                pass
        with pytest.raises(EngineNotReached):
            await anext(engine.start_generate(REQUEST))


async def test_an_engine_that_is_refused_was_not_asked_either() -> None:
    def refuse(_status: EngineStatus) -> None:
        raise EngineUnreachable("another model")

    async with serving_status() as port, HttpEngine("e", f"http://127.0.0.1:{port}", admit=refuse) as engine:
        with pytest.raises(EngineNotReached, match="another model"):
            async with engine.prep_recv(REQUEST):
                pass


async def test_of_one_that_is_gone_after_it_got_the_call_one_does_not() -> None:
    async with serving_status() as port, HttpEngine("e", f"http://127.0.0.1:{port}") as engine:
        with pytest.raises(EngineUnreachable) as failed:
            async with engine.prep_recv(REQUEST):
                pass
        assert not isinstance(failed.value, EngineNotReached)
