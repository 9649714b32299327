"""The router's side of token streams: the listener, and each engine's connection, whose data is sorted by sequence."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import socket
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self, cast
from urllib.parse import urlsplit

import msgspec

from tercet.aio import TaskSet, repeat
from tercet.logs import request_id
from tercet.protocol import EngineLoad, EngineUnreachable, MoveProposal, OutputStream, RequestTooLarge, TercetError
from tercet.protocol.names import host_and_port
from tercet.protocol.spans import current_span
from tercet.protocol.sse import FrameSplitter, ItemTooLong
from tercet.protocol.wire import UNREADABLE, StartGenerateCall, large_field_of
from tercet.wire.streams.wire_format import (
    HEARTBEAT_SECONDS,
    LONGEST_FRAME,
    LONGEST_HELLO,
    PROTOCOL,
    OutputBatch,
    StreamCommand,
    StreamHello,
    TokenDelta,
    fits,
    frame_of,
)

# Most bytes that an engine may leave unread; beyond that it gets no more calls.
MOST_UNREAD = 16 * 1024 * 1024
_batches = msgspec.msgpack.Decoder(OutputBatch)


class EngineConnection:
    """The sequences that one engine runs for this router, and the TCP connection that carries their tokens.

    The engine connects to ``address`` and shows ``key`` there. ``on_load`` receives every report of its load,
    ``on_proposal`` every move that it passes on. ``numbers`` numbers the sequences and never repeats one in this
    process, so late data matches no sequence. Only the engine's known ``incarnation`` may connect; any incarnation may
    connect before it is known. ``on_lost`` is called when the connection is closed, which may mean that the engine has
    ended.
    """

    def __init__(
        self, engine: str, numbers: itertools.count[int], on_load: Callable[[EngineLoad], None],
        on_proposal: Callable[[MoveProposal], None],
    ) -> None:  # fmt: skip
        self.engine = engine
        self.key = secrets.token_hex(16)
        self.address = ""
        self.incarnation = ""
        self.on_lost: Callable[[], object] = lambda: None
        self.last_heard = -float("inf")
        self.inbox = SequenceInbox(engine)
        self._numbers = numbers
        self._on_load = on_load
        self._on_proposal = on_proposal
        self._transport: asyncio.Transport | None = None

    @property
    def connected(self) -> bool:
        return self._transport is not None

    @contextmanager
    def sequence(self, position: int, stream: OutputStream) -> Generator[int]:
        """Yield a new sequence's number; its outputs are put into ``stream``, from ``position`` on.

        A sequence that has not ended at the exit is cancelled on the engine.
        """
        number = next(self._numbers)
        self.inbox.open(number, position, stream)
        try:
            yield number
        finally:
            if self.inbox.close(number):
                self._send(StreamCommand(cancelled=(number,)))

    def start(self, call: StartGenerateCall) -> None:
        """Send a call to generate; outputs and errors arrive at the sequence that ``call.router`` numbers.

        Raises :class:`~tercet.protocol.RequestTooLarge` for a call that does not fit into a message, and
        :class:`~tercet.protocol.EngineUnreachable` if the engine does not read its messages.
        """
        place = current_span()
        traces = () if place is None else (tuple(place.headers().values()),)
        encoded = msgspec.Raw(msgspec.msgpack.encode(call))
        frame = frame_of(StreamCommand(starts=(encoded,), names=(request_id(),), traces=traces))
        if not fits(frame):
            large = large_field_of(call)
            raise RequestTooLarge(
                f"{large}: the call has {len(frame)} bytes, and at most {LONGEST_FRAME} are allowed", large
            )
        # An engine that is stuck must not collect calls in this process's memory.
        if self._transport is not None and self._transport.get_write_buffer_size() > MOST_UNREAD:
            raise EngineUnreachable(f"{self.engine} does not read its messages")
        self._write(frame)

    def receive(self, frame: bytes) -> None:
        """Handle a frame from the engine. Raises one of ``UNREADABLE`` for an invalid frame."""
        batch = _batches.decode(frame)
        self.last_heard = time.monotonic()
        if batch.load is not None:
            self._on_load(batch.load)
        for proposal in batch.proposals:
            self._on_proposal(proposal)
        unwanted = self.inbox.receive(batch.deltas)
        if unwanted:
            self._send(StreamCommand(cancelled=tuple(unwanted)))

    def attach(self, transport: asyncio.Transport) -> None:
        """Use a new connection of the engine; data on an earlier one is lost."""
        if self._transport is not None:
            self.drop("the engine connected again")
        self._transport = transport
        self.last_heard = time.monotonic()
        self.heartbeat()

    def detach(self, transport: asyncio.Transport, why: str) -> None:
        if transport is self._transport:
            self.drop(why)
            self.on_lost()

    def drop(self, why: str) -> None:
        """Close the connection; every sequence ends with :class:`~tercet.protocol.EngineUnreachable`."""
        # No half-open state: outputs that were on their way are gone, so no sequence may wait for them. The service
        # retries each from the tokens that its client has.
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        self.inbox.lose(EngineUnreachable(f"{self.engine}: its token stream ended: {why}"))

    def heartbeat(self) -> None:
        self._send(StreamCommand())

    def _send(self, command: StreamCommand) -> None:
        self._write(frame_of(command))

    def _write(self, frame: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)


@dataclass(slots=True)
class _Sequence:
    position: int
    stream: OutputStream


class SequenceInbox:
    """The sequences of one engine, without I/O; ``engine`` is its name in messages.

    Every open sequence gets outputs whose positions follow each other, until the last one or an error. Repeated outputs
    are dropped. A gap is an error: no client gets a token that does not follow the one before.
    """

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self.sequences: dict[int, _Sequence] = {}

    def open(self, number: int, position: int, stream: OutputStream) -> None:
        """Put the outputs of a sequence into ``stream``; its first token here is at ``position``."""
        self.sequences[number] = _Sequence(position, stream)

    def close(self, number: int) -> bool:
        """Close a sequence whose outputs are not wanted any more; return whether it was still open."""
        return self.sequences.pop(number, None) is not None

    def receive(self, deltas: Iterable[TokenDelta]) -> list[int]:
        """Deliver a message's deltas; return the numbers of sequences that the engine should stop."""
        unwanted: list[int] = []
        for delta in deltas:
            sequence = self.sequences.get(delta.number)
            # It was closed here, and the engine has not read that yet.
            if sequence is None:
                if not delta.is_last:
                    unwanted.append(delta.number)
            elif delta.position == sequence.position:
                self._deliver(sequence, delta)
            # Positions decide: an output that comes again does no harm, and a token that is skipped is noticed.
            elif delta.is_last or delta.position + len(delta.token_ids) > sequence.position:  # not delivered already
                unwanted.append(delta.number)
                why = f"expected output position {sequence.position}, received {delta.position}"
                self._fail(delta.number, EngineUnreachable(f"{self._engine} lost tokens: {why}"))
        return unwanted

    def lose(self, error: TercetError) -> None:
        """End every open sequence with ``error``: the stream is lost."""
        for number in list(self.sequences):
            self._fail(number, error)

    def _deliver(self, sequence: _Sequence, delta: TokenDelta) -> None:
        # Before the output is read: one that cannot be read counts as delivered, and ends its sequence alone.
        sequence.position += len(delta.token_ids)
        if delta.is_last:
            del self.sequences[delta.number]
        try:
            output = delta.to_output()
        except TercetError as error:
            sequence.stream.fail(error)
        else:
            sequence.stream.put(output)

    def _fail(self, number: int, error: TercetError) -> None:
        self.sequences.pop(number).stream.fail(error)


# ---- The listener ----------------------------------------------------------------------------------------------------


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
