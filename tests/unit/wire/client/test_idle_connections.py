"""A server closes connections that nobody uses, perhaps just when a call is on its way: no call may take such a one."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from tercet.protocol import EngineStatus
from tercet.wire.client import HttpEngine, http_engine
from tests.abort import abort

IDLE_SECONDS = 0.2
STATUS = EngineStatus(
    engine="e", model="m", version="0", vllm_version="0", block_size=1, max_model_len=1, total_blocks=1, free_blocks=1,
    running=0, waiting=0, kv_cache_usage=0.0, leases=0, sends=0,
)  # fmt: skip


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer requests; close the connection on one that comes after too long a pause."""
    answered = time.monotonic()
    try:
        while head := (await reader.readuntil(b"\r\n\r\n")).lower():
            if time.monotonic() - answered >= IDLE_SECONDS:
                return
            length = next((int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")), 0)
            await reader.readexactly(length)
            body = msgspec.json.encode(STATUS) if head.startswith(b"get") else b"{}"
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
            answered = time.monotonic()
    except asyncio.IncompleteReadError:
        return
    finally:
        writer.close()


@pytest.mark.slow
async def test_a_connection_that_was_idle_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_engine, "KEEPALIVE_SECONDS", IDLE_SECONDS / 4)
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, HttpEngine("e", f"http://127.0.0.1:{port}") as engine:
        for _ in range(3):
            await abort(engine, "nobody")
            await asyncio.sleep(2 * IDLE_SECONDS)
