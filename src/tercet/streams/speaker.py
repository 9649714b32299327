"""An engine's side of token streams: its connections to front doors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tercet.protocol import BadRequest, EngineLoad, FrontDoorUnreachable
from tercet.streams.connection import Connection, Start
from tercet.streams.messages import REPORT_SECONDS, Hello

CONNECT_SECONDS = 5.0
MOST_CONNECTIONS = 256


class Speaker:
    """One engine's connections, one for each front door that it has been told of.

    ``load`` says how busy the engine is; it is asked for each message, so it must be cheap. ``start`` has the engine
    generate what front doors ask for over their connections. Without connections nothing runs.
    """

    def __init__(self, engine: str, load: Callable[[], EngineLoad | None], start: Start) -> None:
        self._engine = engine
        self._load = load
        self._start = start
        self._connecting: dict[tuple[str, str], asyncio.Task[Connection]] = {}
        self._connections: dict[tuple[str, str], Connection] = {}
        self._tick: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._connections)

    async def connect(self, address: str, key: str) -> Connection:
        """The connection to the front door at ``address`` (``host:port``) that gave out ``key``, made if need be.

        Raises :class:`~tercet.protocol.FrontDoorUnreachable`, and :class:`~tercet.protocol.BadRequest` for what is no
        address.
        """
        where = address, key
        found = self._connections.get(where)
        if found is not None:
            return found
        making = self._connecting.get(where)
        if making is None:
            making = self._connecting[where] = asyncio.get_running_loop().create_task(self._connect(address, key))
            making.add_done_callback(lambda made: self._connected(where, made))
        # Shielded: others may wait for the same connection.
        return await asyncio.shield(making)

    def close(self) -> None:
        """End every connection, and with it what runs for its front door."""
        for task in list(self._connecting.values()):
            task.cancel()
        for connection in list(self._connections.values()):
            connection.abort()

    async def _connect(self, address: str, key: str) -> Connection:
        host, port = _parsed(address)
        if len(self._connections) >= MOST_CONNECTIONS:
            raise FrontDoorUnreachable(f"door: {len(self._connections)} front doors are connected already", "door")
        loop = asyncio.get_running_loop()
        where = address, key

        def lost() -> None:
            self._connections.pop(where, None)

        connection = Connection(self._load, self._start, lost)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await loop.create_connection(lambda: connection, host, port)
                await connection.greet(Hello(connection.protocol, key, self._engine))
        except BaseException as error:
            connection.abort()
            if not isinstance(error, OSError):  # a timeout is one
                raise
            reason = str(error) or f"no answer within {CONNECT_SECONDS:.0f} s"
            raise FrontDoorUnreachable(f"door: no front door answers at {address}: {reason}", "door") from error
        self._connections[where] = connection
        self._tick = self._tick or loop.call_later(REPORT_SECONDS, self._report)
        return connection

    def _connected(self, where: tuple[str, str], made: asyncio.Task[Connection]) -> None:
        self._connecting.pop(where, None)
        if not made.cancelled():
            made.exception()  # those who still wait for it get it; if nobody does, there is nobody to tell

    def _report(self) -> None:
        self._tick = None
        for connection in list(self._connections.values()):
            connection.tick()
        if self._connections:
            self._tick = asyncio.get_running_loop().call_later(REPORT_SECONDS, self._report)


def _parsed(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise BadRequest(f"door: {address!r} is not an address such as 127.0.0.1:7001", "door")
    return host.strip("[]"), int(port)
