"""The listener for engines' connections at a router."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import socket
from collections.abc import Callable
from typing import Self, cast
from urllib.parse import urlsplit

import msgspec

from tercet.aio import TaskSet, repeat
from tercet.protocol import EngineLoad, EngineUnreachable, MoveProposal
from tercet.protocol.hosts import host_and_port
from tercet.protocol.splitting import FrameSplitter, ItemTooLong
from tercet.protocol.wire import UNREADABLE
from tercet.wire.streams.engine_connection import EngineConnection
from tercet.wire.streams.wire_format import (
    HEARTBEAT_SECONDS,
    LONGEST_FRAME,
    LONGEST_HELLO,
    PROTOCOL,
    StreamHello,
)

logger = logging.getLogger(__name__)
HELLO_SECONDS = 10.0
# Most connections that have not identified themselves, in addition to one per expected engine: beyond this number the
# oldest one is closed for a new one.
MOST_STRANGERS = 256


class StreamListener:
    """Engines' connections of one router process, and the ports at which they arrive. An async context manager.

    It listens only on the addresses of this machine that face its engines: at ``port``, or at any free port if that is
    0.
    """

    def __init__(self, port: int = 0) -> None:
        self._port = port
        self._numbers = itertools.count(1)
        self._connections: dict[str, EngineConnection] = {}
        self._servers: dict[str, asyncio.Server] = {}
        self._opening = asyncio.Lock()
        self._arrivals: dict[_Arrival, None] = {}
        self._tasks = TaskSet()

    async def __aenter__(self) -> Self:
        self._tasks.spawn(repeat(self._send_heartbeats, HEARTBEAT_SECONDS, "heartbeats"), "heartbeats")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._tasks.cancel()
        for connection in list(self._connections.values()):
            self.forget(connection)
        for arrival in list(self._arrivals):
            arrival.abort()
        for server in self._servers.values():
            server.close()

    def connection_of(
        self,
        engine: str,
        on_load: Callable[[EngineLoad], None],
        on_proposal: Callable[[MoveProposal], None] = lambda _: None,
    ) -> EngineConnection:
        """Return the connection of one more engine, which may connect until :meth:`forget`."""
        connection = EngineConnection(engine, self._numbers, on_load, on_proposal)
        self._connections[connection.key] = connection
        return connection

    def forget(self, connection: EngineConnection) -> None:
        """Refuse the engine from now on; its running sequences for this router are lost."""
        self._connections.pop(connection.key, None)
        connection.drop("the router has removed it")

    async def address_for(self, url: str) -> str:
        """Return the address, ``host:port``, that the engine at ``url`` connects to.

        Raises :class:`~tercet.protocol.EngineUnreachable` if its host name cannot be resolved.
        """
        host = await _local_host(url)
        async with self._opening:
            server = self._servers.get(host)
            if server is None:
                loop = asyncio.get_running_loop()
                server = await loop.create_server(self._arrival, host, self._port)
                self._servers[host] = server
        port = cast(int, server.sockets[0].getsockname()[1])
        return host_and_port(host, port)

    def _arrival(self) -> _Arrival:
        # All engines of a large fleet may connect at once.
        strangers = [arrival for arrival in self._arrivals if arrival.connection is None]
        expected = sum(not connection.connected for connection in self._connections.values())
        if len(strangers) >= MOST_STRANGERS + expected:
            strangers[0].abort()
        return _Arrival(self._find, self._arrivals)

    def _find(self, key: str) -> EngineConnection | None:
        # Every key is compared, each in constant time, so that the time of an answer reveals nothing about any key.
        given = key.encode()
        found = [each for known, each in self._connections.items() if secrets.compare_digest(known.encode(), given)]
        return found[0] if found else None

    async def _send_heartbeats(self) -> None:
        for connection in list(self._connections.values()):
            connection.heartbeat()


class _Arrival(asyncio.Protocol):
    """One connection. Nothing in it is trusted before a hello with a key that this router issued."""

    def __init__(self, find: Callable[[str], EngineConnection | None], arrivals: dict[_Arrival, None]) -> None:
        self._find = find
        self._arrivals = arrivals  # in the order of their arrival
        self._splitter = FrameSplitter(LONGEST_HELLO)
        self.connection: EngineConnection | None = None  # None before the engine has shown a key
        self._why = "the connection was closed"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._arrivals[self] = None
        self._patience = asyncio.get_running_loop().call_later(HELLO_SECONDS, self.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._patience.cancel()
        self._arrivals.pop(self, None)
        if self.connection is not None:
            self.connection.detach(self._transport, str(exc) if exc is not None else self._why)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._splitter.split(data):
                if self.connection is not None:
                    self.connection.receive(frame)
                elif not self._transport.is_closing():
                    self._greet(msgspec.msgpack.decode(frame, type=StreamHello))
        except (ItemTooLong, *UNREADABLE) as error:
            self._why = f"the engine violated the protocol: {error}"
            if self.connection is not None:
                logger.error("%s violated the protocol of token streams: %s", self.connection.engine, error)
                self.connection.detach(self._transport, self._why)
            self.abort()

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def _greet(self, hello: StreamHello) -> None:
        connection = self._find(hello.key)
        if connection is None or hello.protocol != PROTOCOL:
            self.abort()
            return
        if connection.incarnation not in ("", hello.incarnation):
            logger.warning(
                "%s: restarted since last contact; verifying its identity before accepting its stream", hello.engine
            )
            self.abort()
            return
        self._patience.cancel()
        self._splitter.longest = LONGEST_FRAME
        self.connection = connection
        connection.attach(self._transport)


async def _local_host(url: str) -> str:
    """Return the address of this machine from which ``url`` is reached."""
    loop = asyncio.get_running_loop()
    try:
        parts = urlsplit(url)
        found = await loop.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing: it only chooses the route
            return cast(str, probe.getsockname()[0])
    except (OSError, UnicodeError, ValueError) as error:
        raise EngineUnreachable("cannot resolve the host name in its URL") from error
