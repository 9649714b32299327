"""The engine's side of token streams: its connections to routers, and their sequences."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tercet.aio import TaskSet
from tercet.protocol import BadRequest, EngineError, EngineLoad, OutputStream, RouterUnreachable
from tercet.protocol.wire import StreamDestination
from tercet.wire.streams.router_connection import RouterConnection, SequenceSender, Start
from tercet.wire.streams.wire_format import LONGEST_FRAME, REPORT_SECONDS

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
MOST_CONNECTIONS = 256


class RouterConnections:
    """One engine's connections, one for each router to which it was asked to connect.

    ``incarnation`` identifies this start of the engine. ``load`` returns its load; it is called often, so it must be
    cheap. ``start`` generates for routers that request it over their connections. Without connections nothing runs. A
    call to ``start`` has at most ``longest_call`` bytes.
    """

    def __init__(
        self, engine: str, incarnation: str, load: Callable[[], EngineLoad | None], start: Start,
        longest_call: int = LONGEST_FRAME,
    ) -> None:  # fmt: skip
        self._engine = engine
        self._incarnation = incarnation
        self._load = load
        self._start = start
        self._longest_call = longest_call
        self._connecting: dict[tuple[str, str], asyncio.Task[RouterConnection]] = {}
        self._connections: dict[tuple[str, str], RouterConnection] = {}
        self._tick: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._connections)

    async def connect(self, address: str, key: str) -> RouterConnection:
        """Return the connection to the router at ``address`` (``host:port``) with this ``key``; connect if needed.

        Raises :class:`~tercet.protocol.RouterUnreachable`, and :class:`~tercet.protocol.BadRequest` for an invalid
        address.
        """
        where = address, key
        found = self._connections.get(where)
        if found is not None:
            return found
        making = self._connecting.get(where)
        if making is None:
            making = self._connecting[where] = asyncio.get_running_loop().create_task(self._connect(where))
            making.add_done_callback(lambda made: self._connected(where, made))
        # The task is shielded: other callers may wait for the same connection.
        return await asyncio.shield(making)

    def tell_now(self) -> int:
        """Send every router a report at once; return their number."""
        for connection in list(self._connections.values()):
            connection.report()
        return len(self._connections)

    def close(self) -> None:
        """Close every connection, which ends the routers' sequences."""
        for task in list(self._connecting.values()):
            task.cancel()
        for connection in list(self._connections.values()):
            connection.abort()

    async def _connect(self, where: tuple[str, str]) -> RouterConnection:
        address, key = where
        host, port = _parsed(address)
        if len(self._connections) >= MOST_CONNECTIONS:
            raise RouterUnreachable(f"router: {len(self._connections)} routers are connected already", "router")
        loop = asyncio.get_running_loop()
        connection = RouterConnection(
            address, self._load, self._start, lambda: self._connections.pop(where, None), self._longest_call
        )  # fmt: skip
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await loop.create_connection(lambda: connection, host, port)
                await connection.greet(key, self._engine, self._incarnation)
        except BaseException as error:
            connection.abort()
            # a timeout is an OSError; an invalid host name a ValueError
            if not isinstance(error, OSError | ValueError):
                raise
            said = str(error) or f"no answer within {CONNECT_SECONDS:.0f} s"
            logger.warning("no router answers at %s, the address that a call named: %s", address, said)
            raise RouterUnreachable("router: no router answers at the address in the call", "router") from error
        self._connections[where] = connection
        self._tick = self._tick or loop.call_later(REPORT_SECONDS, self._report)
        return connection

    def _connected(self, where: tuple[str, str], made: asyncio.Task[RouterConnection]) -> None:
        self._connecting.pop(where, None)
        if not made.cancelled():
            made.exception()  # mark it as retrieved; callers that still wait get it

    def _report(self) -> None:
        self._tick = None
        for connection in list(self._connections.values()):
            connection.tick()
        if self._connections:
            self._tick = asyncio.get_running_loop().call_later(REPORT_SECONDS, self._report)


def _parsed(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise BadRequest(f"router: {address!r} is not an address such as 127.0.0.1:7001", "router")
    return host.strip("[]"), int(port)


class StreamRelay:
    """A generator for routers: each sequence runs in a task that ends when its router disconnects.

    ``senders`` has the sender of each sequence's outputs, by its id.
    """

    def __init__(self, router_connections: RouterConnections) -> None:
        self.router_connections = router_connections
        self.senders: dict[str, SequenceSender] = {}
        self._tasks = TaskSet()

    async def start(self, seq_id: str, router: StreamDestination, position: int, outputs: OutputStream) -> None:
        """Generate; ``position`` is the position of the first token in the sequence's output. Errors are also sent.

        Returns once the router is connected. Raises :class:`~tercet.protocol.RouterUnreachable` if the router cannot be
        reached, and :class:`~tercet.protocol.Conflict` if the sequence was cancelled before it began.
        """
        connection = await self.router_connections.connect(router.address, router.key)
        running: list[asyncio.Task[None]] = []
        sender = connection.sender(router.number, position, lambda: [task.cancel() for task in running])
        self.senders.setdefault(seq_id, sender)  # the engine refuses a second sequence with the same id
        running.append(self._tasks.spawn(self._relay(seq_id, sender, outputs)))

    async def _relay(self, seq_id: str, sender: SequenceSender, outputs: OutputStream) -> None:
        try:
            await outputs.run(sender.send)
            if sender.open:
                sender.fail(EngineError("the engine ended the sequence without a finish reason"))
        except Exception as error:  # an error fails only its sequence
            sender.fail(error)
        finally:
            sender.close()
            if self.senders.get(seq_id) is sender:
                del self.senders[seq_id]

    async def close(self) -> None:
        """End all sequences, and close every connection."""
        self.router_connections.close()
        await self._tasks.close()
