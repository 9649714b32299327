"""A way to a server that speaks TLS for clients that do not: for gRPC, which cannot be told to trust anybody."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

PIECE = 64 * 1024


@asynccontextmanager
async def plain_router(host: str, port: int) -> AsyncGenerator[str]:
    """An address on this machine that leads there while entered; whatever certificate is shown there is taken.

    Gateways trust an endpoint picker the same way: its certificate is commonly self-signed.
    """
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    passing = set[asyncio.Task[None]]()

    async def come_in(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        passing.add(task)
        try:
            with suppress(OSError):
                await _join(reader, writer, host, port, context)
        finally:
            passing.discard(task)
            writer.close()

    server = await asyncio.start_server(come_in, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in passing:
            task.cancel()
        await asyncio.gather(*passing, return_exceptions=True)


async def _join(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int, context: ssl.SSLContext
) -> None:
    far_reader, far_writer = await asyncio.open_connection(host, port, ssl=context)
    try:
        ways = [asyncio.create_task(_pass(reader, far_writer)), asyncio.create_task(_pass(far_reader, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in ways:
                each.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
    finally:
        far_writer.close()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(PIECE):
        writer.write(piece)
        await writer.drain()
