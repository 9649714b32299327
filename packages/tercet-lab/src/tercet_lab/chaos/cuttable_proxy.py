"""A TCP proxy between one engine and its router that can stop passing data."""

from __future__ import annotations

import asyncio
from typing import Self

from tercet.aio import TaskSet

CHUNK = 64 * 1024


class CuttableProxy:
    """A proxy from :attr:`port` (0: any free port) to ``host:target_port``. Use as an async context manager.

    In all data, the first text of ``told`` is replaced by the second one, which has the same length: an engine thereby
    gets another proxy's address to connect back to. The text must be within one write.
    """

    def __init__(self, host: str, target_port: int, told: tuple[bytes, bytes], port: int = 0) -> None:
        self.port = port
        self._host = host
        self._target_port = target_port
        self._told = told
        self._passing = asyncio.Event()
        self._passing.set()
        self._connections = TaskSet()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accepted, self._host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        await self._connections.close()

    def cut(self) -> None:
        """Stop passing data in both directions. Connections stay open, and new ones get no answer."""
        self._passing.clear()

    def heal(self) -> None:
        """Pass data again, the delayed data first."""
        self._passing.set()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.spawn(self._connect(reader, writer))

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._passing.wait()
            far_reader, far_writer = await asyncio.open_connection(self._host, self._target_port)
        except OSError:
            writer.transport.abort()  # a proxy cannot refuse a connection that it has accepted: reset it
            return
        except asyncio.CancelledError:
            writer.transport.abort()
            raise
        passing = [
            asyncio.ensure_future(self._pass_on(reader, far_writer)),
            asyncio.ensure_future(self._pass_on(far_reader, writer)),
        ]
        try:
            await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
            await self._passing.wait()
        finally:
            for task in passing:
                task.cancel()
            await asyncio.wait(passing)
            for each in (writer, far_writer):
                each.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(CHUNK):
                await self._passing.wait()
                writer.write(data.replace(*self._told))
                await writer.drain()
        except OSError:
            writer.transport.abort()
