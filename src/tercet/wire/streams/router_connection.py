"""The engine's side of token streams: its connections to routers, one for each, and their sequences."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import chain, repeat
from typing import cast

import msgspec

from tercet.aio.tasks import TaskSet
from tercet.logs import lines_of_request
from tercet.protocol import (
    BadRequest,
    Conflict,
    EngineError,
    EngineLoad,
    MoveProposal,
    Output,
    RequestTooLarge,
    RouterUnreachable,
    TercetError,
)
from tercet.protocol.spans import read_traceparent, working_in
from tercet.protocol.sse import FrameSplitter, ItemTooLong
from tercet.protocol.wire import UNREADABLE, StartGenerateCall, large_field_of
from tercet.wire.streams.wire_format import (
    LONGEST_FRAME,
    PROTOCOL,
    REPORT_SECONDS,
    SILENCE_SECONDS,
    OutputBatch,
    StreamCommand,
    StreamHello,
    TokenDelta,
    UnreadCall,
    delta_of,
    failed_delta,
    fits,
    frame_of,
)

logger = logging.getLogger(__name__)
Start = Callable[[StartGenerateCall, "RouterConnection", int], Awaitable[None]]
"""A function that starts a sequence, with its number at the connection's router; it returns once the engine has it."""
# Most bytes that a router may leave unread; beyond that it counts as dead. The longest message must not cause that, so
# a large message that does not fit below this mark ends its sequence.
MOST_UNSENT = 2 * LONGEST_FRAME
LARGE = 1024 * 1024
# Number of cancellations that are kept for sequences that are not here: they have ended, or not yet arrived by HTTP.
CANCELLED_KEPT = 4096
_commands = msgspec.msgpack.Decoder(StreamCommand)
_calls = msgspec.msgpack.Decoder(StartGenerateCall)
_unread_calls = msgspec.msgpack.Decoder(UnreadCall)


@dataclass(slots=True, eq=False)
class SequenceSender:
    """The sender of one sequence's outputs to its router. :meth:`RouterConnection.sender` returns it."""

    connection: RouterConnection
    number: int
    position: int
    stop: Callable[[], object]

    def send(self, output: Output) -> None:
        """Send new tokens, together with the other outputs of this engine step."""
        delta = delta_of(self.number, self.position, output)
        self.position += len(output.token_ids)
        self.connection.send(delta)
        if output.finish_reason is not None:
            self.close()

    def fail(self, error: Exception) -> None:
        self.connection.send(failed_delta(self.number, self.position, failure_of(error)))
        self.close()

    def propose(self, proposal: MoveProposal) -> None:
        """Send a proposal to move the sequence; the router decides."""
        self.connection.propose(proposal)

    @property
    def open(self) -> bool:
        return self.connection.senders.get(self.number) is self

    def close(self) -> None:
        self.connection.senders.pop(self.number, None)


class RouterConnection(asyncio.Protocol):
    """A connection that sends output batches and receives commands.

    ``lost`` is called at its end, which stops all sequences. ``address`` is the router's. ``start`` runs commands; its
    errors end the sequence. A call has at most ``longest_call`` bytes.
    """

    def __init__(
        self, address: str, load: Callable[[], EngineLoad | None], start: Start, lost: Callable[[], object],
        longest_call: int = LONGEST_FRAME,
    ) -> None:  # fmt: skip
        self.address = address
        self._longest_call = longest_call
        self._load = load
        self._start = start
        self._lost = lost
        self._starting = TaskSet()
        self._splitter = FrameSplitter(LONGEST_FRAME)
        self._transport: asyncio.Transport | None = None
        self._accepted = asyncio.Event()
        self._failure: Exception | None = None
        self.senders: dict[int, SequenceSender] = {}
        self._cancelled: OrderedDict[int, None] = OrderedDict()
        self._deltas: list[TokenDelta] = []
        self._proposals: list[MoveProposal] = []
        self._last_sent = self._last_heard = time.monotonic()

    @property
    def open(self) -> bool:
        """True if the router has accepted the connection, and has not disconnected since."""
        transport = self._transport
        return self._accepted.is_set() and transport is not None and not transport.is_closing()

    async def greet(self, key: str, engine: str, incarnation: str) -> None:
        """Introduce the engine; return once the router has accepted it. Raises ``OSError`` if the router refuses it."""
        if self._transport is not None:
            self._transport.write(frame_of(StreamHello(PROTOCOL, key, engine, incarnation)))
        await self._accepted.wait()
        if self._failure is not None:
            raise self._failure

    def sender(self, number: int, position: int, stop: Callable[[], object]) -> SequenceSender:
        """Return the sender of a sequence; ``stop`` is called if the sequence has to end early."""
        # The cancellation went ahead of its call, which came by HTTP.
        if number in self._cancelled:
            del self._cancelled[number]
            raise Conflict(f"router: sequence {number} was cancelled before it began", "router")
        if number in self.senders:
            raise Conflict(f"router: sequence {number} is running already", "router")
        if not self.open:
            raise RouterUnreachable("router: the router has disconnected", "router")
        sender = self.senders[number] = SequenceSender(self, number, position, stop)
        return sender

    def send(self, delta: TokenDelta) -> None:
        """Send a delta, together with all other deltas of this pass of the event loop."""
        self._flush_soon()
        self._deltas.append(delta)

    def propose(self, proposal: MoveProposal) -> None:
        """Send a proposal, together with the deltas of this pass of the event loop."""
        self._flush_soon()
        self._proposals.append(proposal)

    def _flush_soon(self) -> None:
        # An engine step yields the tokens of all its sequences in one pass of the loop: they leave as one message.
        if not self._deltas and not self._proposals:
            asyncio.get_running_loop().call_soon(self.report)

    def tick(self) -> None:
        """Send a report if nothing was sent lately; close the connection if the router is silent or does not read."""
        # A machine that has vanished closes nothing, and a router that is stopped reads nothing: without these bounds
        # their sequences would run to their end without a reader.
        now = time.monotonic()
        if self._unread() > MOST_UNSENT or now - self._last_heard > SILENCE_SECONDS:
            self.abort()
        elif now - self._last_sent >= REPORT_SECONDS / 2:
            self.report()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def report(self) -> None:
        """Send all pending data now, or at least the engine's load."""
        deltas, self._deltas = self._deltas, []
        proposals, self._proposals = tuple(self._proposals), []
        self._last_sent = time.monotonic()
        if not self.open or self._transport is None:
            return
        load = self._load()
        try:
            frame = frame_of(OutputBatch(tuple(deltas), load, proposals))
        except Exception:  # one of the deltas cannot be encoded
            frame = None
        if frame is not None and self._has_room(frame):
            self._transport.write(frame)
            return
        # One delta cannot be sent, or all together have no room: each is sent alone, and ends only its own sequence.
        failed: set[int] = set()
        for delta in deltas:
            if delta.number in failed:  # a later delta after a gap would be taken for the missing one
                continue
            error: TercetError
            try:
                frame = frame_of(OutputBatch((delta,)))
            except Exception as unsaid:
                error = failure_of(unsaid)
            else:
                if self._has_room(frame):
                    self._transport.write(frame)
                    continue
                if fits(frame):
                    error = RouterUnreachable(f"router: the router has {self._unread()} unread bytes", "router")
                else:
                    why = f"the output of one step has {len(frame)} bytes, and at most {LONGEST_FRAME} are allowed"
                    error = BadRequest(f"sampling_params: {why}: request fewer log probabilities", "sampling_params")
            failed.add(delta.number)
            self._transport.write(frame_of(OutputBatch((failed_delta(delta.number, delta.position, error),))))
            if (sender := self.senders.pop(delta.number, None)) is not None:
                sender.stop()
        self._transport.write(frame_of(OutputBatch((), load, proposals)))

    def _has_room(self, frame: bytes) -> bool:
        return fits(frame) and (len(frame) <= LARGE or self._unread() + len(frame) <= MOST_UNSENT)

    def _unread(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    # ---- asyncio's protocol ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._accepted.is_set():
            self._failure = exc or ConnectionError("the router did not accept the key")
            self._accepted.set()
        self._lost()
        # Without a reader they would decode to their end; the router has ended them all and retries elsewhere.
        senders, self.senders = self.senders, {}
        for sender in senders.values():
            sender.stop()

    def data_received(self, data: bytes) -> None:
        self._last_heard = time.monotonic()
        try:
            for frame in self._splitter.split(data):
                self._follow(_commands.decode(frame))
        except (ItemTooLong, *UNREADABLE) as error:
            logger.error("a router violated the protocol of token streams: %s", error)
            self.abort()

    def _follow(self, command: StreamCommand) -> None:
        self._accepted.set()  # a router answers a greeting that it accepts with its first command
        for number in command.cancelled:
            sender = self.senders.pop(number, None)
            if sender is not None:
                sender.stop()
            else:
                # Its call is still on the way, by HTTP or as a task here, and is refused when it arrives.
                self._cancelled[number] = None
                if len(self._cancelled) > CANCELLED_KEPT:
                    self._cancelled.popitem(last=False)
        names, traces = chain(command.names, repeat("")), chain(command.traces, repeat(()))
        for received, named, trace in zip(command.starts, names, traces, strict=False):
            try:
                call, number = self._read(received)
            except TercetError as refusal:
                # The sequence ends with the refusal; a call that names none violates the protocol.
                unread = _unread_calls.decode(received)
                self.send(failed_delta(unread.router.number, len(unread.output), refusal))
            else:
                place = read_traceparent(*trace[:2]) if trace else None
                with lines_of_request(named), working_in(place):
                    self._starting.spawn(self._begin(call, number))

    def _read(self, received: msgspec.Raw) -> tuple[StartGenerateCall, int]:
        try:
            call = _calls.decode(received)
        except UNREADABLE as error:
            raise BadRequest(f"start_generate: {error}") from error
        if call.router is None:
            raise BadRequest("start_generate: it has no router")
        size, large = len(memoryview(received)), large_field_of(call)
        if size > self._longest_call:
            raise RequestTooLarge(
                f"{large}: the call has {size} bytes, and this engine accepts at most {self._longest_call} "
                "(max_request_bytes in kv_connector_extra_config)",
                large,
            )
        return call, call.router.number

    async def _begin(self, call: StartGenerateCall, number: int) -> None:
        try:
            await self._start(call, self, number)
        except Exception as error:  # an error fails only its sequence
            self.send(failed_delta(number, len(call.output), failure_of(error)))


def failure_of(error: Exception) -> TercetError:
    """Return the error that a router gets for a failed sequence; log unexpected errors."""
    if isinstance(error, TercetError):
        return error
    logger.error("a sequence failed", exc_info=error)
    return EngineError(f"the engine failed: {type(error).__name__}: {error}")


# ---- All connections of an engine ------------------------------------------------------------------------------------


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
        # Calls that name one router at the same time share one connection.
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
        for task in list(self._connecting.values()):
            task.cancel()
        for connection in list(self._connections.values()):
            connection.abort()

    async def _connect(self, where: tuple[str, str]) -> RouterConnection:
        address, key = where
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise BadRequest(f"router: {address!r} is not an address such as 127.0.0.1:7001", "router")
        if len(self._connections) >= MOST_CONNECTIONS:
            raise RouterUnreachable(f"router: {len(self._connections)} routers are connected already", "router")
        loop = asyncio.get_running_loop()
        connection = RouterConnection(
            address, self._load, self._start, lambda: self._connections.pop(where, None), self._longest_call
        )  # fmt: skip
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await loop.create_connection(lambda: connection, host.strip("[]"), int(port))
                await connection.greet(key, self._engine, self._incarnation)
        except BaseException as error:
            connection.abort()
            # a timeout is an OSError; an invalid host name a ValueError
            if not isinstance(error, OSError | ValueError):
                raise
            reason = str(error) or f"no answer within {CONNECT_SECONDS:.0f} s"
            logger.warning("no router answers at %s, the address that a call named: %s", address, reason)
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
