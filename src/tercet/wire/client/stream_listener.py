"""The router's ends of token streams: where engines connect, and the upkeep of each connection."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Self, cast
from urllib.parse import urlsplit

import msgspec

from tercet.aio.tasks import TaskSet, keep_running, repeat
from tercet.logs import STREAM_BACK, STREAM_FALLBACK
from tercet.protocol import EngineLoad, EngineUnreachable, MoveProposal, TercetError
from tercet.protocol.names import host_and_port
from tercet.protocol.sse import FrameSplitter, ItemTooLong
from tercet.protocol.wire import UNREADABLE, RouterAddress
from tercet.wire.client.http_engine import EngineConnection
from tercet.wire.streams.wire_format import HEARTBEAT_SECONDS, LONGEST_FRAME, LONGEST_HELLO, PROTOCOL, StreamHello

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

    def keeper_of(
        self, connection: EngineConnection, url: str, connect: Callable[[RouterAddress], Awaitable[object]],
        alive: Callable[[], Awaitable[object]],
    ) -> StreamKeeper:  # fmt: skip
        """Return the upkeep of one of the connections: that of the engine at ``url``."""
        return StreamKeeper(self, connection, url, connect, alive)

    def forget(self, connection: EngineConnection) -> None:
        """Refuse the engine from now on; its running sequences for this router are lost."""
        # First: its key opens nothing from here on.
        self._connections.pop(connection.key, None)
        connection.drop("the router has removed it")

    async def address_for(self, url: str) -> str:
        """Return the address, ``host:port``, that the engine at ``url`` connects to.

        Raises :class:`~tercet.protocol.EngineUnreachable` if its host name cannot be resolved.
        """
        loop = asyncio.get_running_loop()
        try:
            parts = urlsplit(url)
            found = await loop.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
            family, kind, protocol, _, address = found[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # sends nothing: it only chooses the route, and so this machine's address on it
                host = cast(str, probe.getsockname()[0])
        except (OSError, UnicodeError, ValueError) as error:
            raise EngineUnreachable("cannot resolve the host name in its URL") from error
        async with self._opening:
            server = self._servers.get(host)
            if server is None:
                server = self._servers[host] = await loop.create_server(self._arrival, host, self._port)
        port = cast(int, server.sockets[0].getsockname()[1])
        return host_and_port(host, port)

    def _arrival(self) -> _Arrival:
        # All engines of a large fleet may connect at once.
        strangers = [arrival for arrival in self._arrivals if arrival.connection is None]
        expected = sum(not connection.connected for connection in self._connections.values())
        if len(strangers) >= MOST_STRANGERS + expected:
            # The oldest: an engine sends its hello at once.
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
                    hello = msgspec.msgpack.decode(frame, type=StreamHello)
                    connection = self._find(hello.key)
                    if connection is None or hello.protocol != PROTOCOL:
                        self.abort()
                        continue
                    # A restarted engine: its identity is checked by HTTP first, and then it connects again.
                    if connection.incarnation not in ("", hello.incarnation):
                        logger.warning(
                            "%s: restarted since last contact; verifying its identity before accepting its stream",
                            hello.engine,
                        )
                        self.abort()
                        continue
                    # From here on it is an engine, and may send as much as one.
                    self._patience.cancel()
                    self._splitter.longest = LONGEST_FRAME
                    self.connection = connection
                    connection.attach(self._transport)
        except (ItemTooLong, *UNREADABLE) as error:
            self._why = f"the engine violated the protocol: {error}"
            if self.connection is not None:
                logger.error("%s violated the protocol of token streams: %s", self.connection.engine, error)
                self.connection.detach(self._transport, self._why)
            self.abort()

    def abort(self) -> None:
        self._transport.abort()


# ---- The upkeep of a connection --------------------------------------------------------------------------------------


CHECK_SECONDS = 0.5
STALE_AFTER = 1.0
"""Seconds without a report after which the engine is polled."""
STALLED_AFTER = 15.0
ANSWER_SECONDS = 10.0
RETRY_DELAY_S = 30.0
ATTEMPTS = 5
ATTEMPT_SECONDS = 0.05


class StreamKeeper:
    """Upkeep of ``connection``: it makes an engine connect to ``listener``, and again when the connection is lost.

    ``connect`` makes the engine connect to a router, ``alive`` polls it; both raise
    :class:`~tercet.protocol.EngineUnreachable` if it does not answer. An engine that cannot connect is served by
    server-sent events, which is logged; connecting is retried every half minute.
    """

    def __init__(
        self, listener: StreamListener, connection: EngineConnection, url: str,
        connect: Callable[[RouterAddress], Awaitable[object]], alive: Callable[[], Awaitable[object]],
    ) -> None:  # fmt: skip
        self._listener = listener
        self._name = connection.engine
        self._url = url
        self._connect = connect
        self._alive = alive
        self.connection = connection
        self._falls_back_until: float | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._keeping: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._keeping = asyncio.get_running_loop().create_task(keep_running(self._keep, f"stream of {self._name}"))

    async def close(self) -> None:
        """Disconnect; sequences that the engine still runs for this router end."""
        for task in (self._keeping, self._connecting):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
        self._listener.forget(self.connection)

    async def ready(self) -> EngineConnection | None:
        """Return the connection once the engine is connected; None if server-sent events have to be used.

        Raises :class:`~tercet.protocol.EngineUnreachable` if the engine does not answer.
        """
        if self.connection.connected:
            return self.connection
        if self._falls_back_until is not None and time.monotonic() < self._falls_back_until:
            return None
        if self._connecting is None:

            def tried(task: asyncio.Task[None]) -> None:
                self._connecting = None
                if not task.cancelled():
                    task.exception()  # mark it as retrieved; the callers that wait get it

            # As a task: a request that gives up must not end the attempt that others wait for.
            self._connecting = asyncio.get_running_loop().create_task(self._try())
            self._connecting.add_done_callback(tried)
        await asyncio.shield(self._connecting)  # other callers wait for the same attempt
        return self.connection if self.connection.connected else None

    async def _try(self) -> None:
        try:
            self.connection.address = await self._listener.address_for(self._url)
            for _ in range(ATTEMPTS):
                await self._connect(RouterAddress(address=self.connection.address, key=self.connection.key))
                if self.connection.connected:
                    break
                # The engine has not noticed yet that its last connection is lost.
                await asyncio.sleep(ATTEMPT_SECONDS)
        except EngineUnreachable:
            raise
        except (TercetError, OSError) as error:
            if self._falls_back_until is None:
                why = error.message if isinstance(error, TercetError) else str(error)
                STREAM_FALLBACK.tell(engine=self._name, reason=why)
            # Not at each request: an attempt costs the engine a connection, and the request a wait.
            self._falls_back_until = time.monotonic() + RETRY_DELAY_S
            return
        if not self.connection.connected:
            raise EngineUnreachable(f"{self._name} connected its token stream and disconnected at once")
        if self._falls_back_until is not None:
            STREAM_BACK.tell(engine=self._name, reason="the engine has connected")
        self._falls_back_until = None

    async def _keep(self) -> None:
        while True:
            try:
                await self.ready()
            except EngineUnreachable as error:
                logger.debug("%s", error)  # the engine may still be loading, or have ended; membership logs that
            await asyncio.sleep(CHECK_SECONDS)
            # An engine reports ten times a second: a second of silence means that the process, or the network, stands.
            if self.connection.connected and self._silence() > STALE_AFTER:
                await self._check()

    async def _check(self) -> None:
        """Disconnect if the engine is dead, or if it answers but sends nothing on the stream."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._alive()
        except (EngineUnreachable, TimeoutError):
            if self._silence() > STALE_AFTER:
                self.connection.drop(f"no data for {self._silence():.0f} s, and the engine does not answer")
        except TercetError as error:
            logger.debug("%s answers: %s", self._name, error)
        # It answers calls, and sends nothing on the stream: its stream is stuck, and its sequences are better
        # elsewhere.
        if self.connection.connected and self._silence() > STALLED_AFTER:
            self.connection.drop(f"no data for {self._silence():.0f} s")

    def _silence(self) -> float:
        return time.monotonic() - self.connection.last_heard
