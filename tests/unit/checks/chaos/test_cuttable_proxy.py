"""A proxy that passes everything on, or nothing, and closes nothing by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

from tercet_checks.chaos.real_fleet import CuttableProxy
from tests.longest_wait import LONGEST_WAIT_S

HOST = "127.0.0.1"
TOLD = (b"127.0.0.1:11111", b"127.0.0.1:22222")


@asynccontextmanager
async def echoing() -> AsyncGenerator[CuttableProxy]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            writer.write(b"<" + data + b">")
        writer.close()

    server = await asyncio.start_server(echo, HOST, 0)
    async with server, CuttableProxy(HOST, server.sockets[0].getsockname()[1], TOLD) as proxy:
        yield proxy


async def test_bytes_pass_and_addresses_are_replaced() -> None:
    async with echoing() as proxy, asyncio.timeout(LONGEST_WAIT_S):
        reader, writer = await asyncio.open_connection(HOST, proxy.port)
        writer.write(b'{"address": "127.0.0.1:11111"}')
        assert await reader.readuntil(b">") == b'<{"address": "127.0.0.1:22222"}>'
        writer.close()


async def test_what_is_cut_waits_and_new_connections_do_too() -> None:
    async with echoing() as proxy, asyncio.timeout(LONGEST_WAIT_S):
        reader, writer = await asyncio.open_connection(HOST, proxy.port)
        writer.write(b"one")
        assert await reader.readuntil(b">") == b"<one>"
        proxy.cut()
        late_reader, late_writer = await asyncio.open_connection(HOST, proxy.port)
        for each in (writer, late_writer):
            each.write(b"two")
        waiting = [asyncio.ensure_future(each.readuntil(b">")) for each in (reader, late_reader)]
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in waiting)
        proxy.heal()
        assert await asyncio.gather(*waiting) == [b"<two>", b"<two>"]
        for each in (writer, late_writer):
            each.close()


async def test_the_end_of_one_side_is_the_end_of_the_other() -> None:
    async with echoing() as proxy, asyncio.timeout(LONGEST_WAIT_S):
        reader, writer = await asyncio.open_connection(HOST, proxy.port)
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()


async def test_nobody_behind_it_is_a_lost_connection() -> None:
    async with CuttableProxy(HOST, 1, TOLD) as proxy, asyncio.timeout(LONGEST_WAIT_S):
        reader, writer = await asyncio.open_connection(HOST, proxy.port)
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
