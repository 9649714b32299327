"""One engine's connection, at the front door: what it brings, sorted by sequence."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

import msgspec

from tercet.protocol import EngineLoad, EngineUnreachable, OutputStream, TercetError
from tercet.protocol.wire import StartGenerateCall
from tercet.streams.wire_format import OutputBatch, StreamCommand, TokenDelta, frame_of

_batches = msgspec.msgpack.Decoder(OutputBatch)


class EngineConnection:
    """The sequences that one engine runs for this front door, and the TCP connection that their tokens come by.

    The engine connects to ``address`` and shows ``key`` there. ``on_load`` is told every report of its load. Numbers
    of sequences are ``numbers``'s: never used twice in this process, so that what comes late is nobody's.
    """

    def __init__(self, engine: str, numbers: itertools.count[int], on_load: Callable[[EngineLoad], None]) -> None:
        self.engine = engine
        self.key = secrets.token_hex(16)
        self.address = ""
        self.last_heard = -float("inf")
        self._inbox = SequenceInbox(engine)
        self._numbers = numbers
        self._on_load = on_load
        self._transport: asyncio.Transport | None = None

    @property
    def connected(self) -> bool:
        """Whether tokens can arrive."""
        return self._transport is not None

    @property
    def open_sequences(self) -> int:
        """How many sequences wait for tokens."""
        return len(self._inbox)

    @contextmanager
    def sequence(self, position: int, stream: OutputStream) -> Generator[int]:
        """A new sequence's number; its outputs are put into ``stream``, from the one at ``position`` on.

        What is not over at the exit is cancelled on the engine.
        """
        number = next(self._numbers)
        self._inbox.open(number, position, stream)
        try:
            yield number
        finally:
            if self._inbox.close(number):
                self._send(StreamCommand(cancelled=(number,)))

    def start(self, call: StartGenerateCall) -> None:
        """Have the engine generate; outputs and errors come to the sequence that ``call.door`` numbers."""
        self._send(StreamCommand(starts=(call,)))

    def receive(self, frame: bytes) -> None:
        """The engine sent this; raises ``msgspec.MsgspecError`` for what no engine sends."""
        batch = _batches.decode(frame)
        self.last_heard = time.monotonic()
        if batch.load is not None:
            self._on_load(batch.load)
        unwanted = self._inbox.receive(batch.deltas)
        if unwanted:
            self._send(StreamCommand(cancelled=tuple(unwanted)))

    def attach(self, transport: asyncio.Transport) -> None:
        """The engine has connected, perhaps again: then what the connection before carried is lost."""
        if self._transport is not None:
            self.drop("connected anew")
        self._transport = transport
        self.last_heard = time.monotonic()
        self.heartbeat()

    def detach(self, transport: asyncio.Transport, why: str) -> None:
        """A connection is closed."""
        if transport is self._transport:
            self.drop(why)

    def drop(self, why: str) -> None:
        """Close the connection; every sequence ends with :class:`~tercet.protocol.EngineUnreachable`."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        self._inbox.lose(EngineUnreachable(f"{self.engine}: its token stream ended: {why}"))

    def heartbeat(self) -> None:
        """Tell the engine that somebody is listening."""
        self._send(StreamCommand())

    def _send(self, command: StreamCommand) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame_of(command))


class _Sequence:
    __slots__ = ("position", "stream")

    def __init__(self, position: int, stream: OutputStream) -> None:
        self.position = position
        self.stream = stream


class SequenceInbox:
    """The sequences of one engine. Decides without I/O; ``engine`` is its name in messages.

    Every sequence that was opened gets outputs whose positions follow each other, until one is the last, or one error.
    What was there already is dropped. A gap is an error: nobody gets a token that does not follow the one before.
    """

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._open: dict[int, _Sequence] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, number: int) -> bool:
        return number in self._open

    def open(self, number: int, position: int, stream: OutputStream) -> None:
        """Put the outputs of a sequence into ``stream``; its first token here is at ``position``."""
        self._open[number] = _Sequence(position, stream)

    def close(self, number: int) -> bool:
        """Nobody waits for the sequence any more; whether it was still open."""
        return self._open.pop(number, None) is not None

    def receive(self, deltas: Iterable[TokenDelta]) -> list[int]:
        """Deliver a message's deltas; returns the numbers of sequences that the engine should not work on."""
        unwanted: list[int] = []
        for delta in deltas:
            sequence = self._open.get(delta.number)
            if sequence is None:
                if delta.details is None or not delta.details.is_last:
                    unwanted.append(delta.number)
            elif delta.position == sequence.position:
                self._deliver(sequence, delta)
            elif not _is_repeated(delta, sequence):
                unwanted.append(delta.number)
                self._fail(delta.number, self._gap(delta, sequence))
        return unwanted

    def lose(self, error: TercetError) -> None:
        """The stream is lost: every open sequence ends with ``error``."""
        for number in list(self._open):
            self._fail(number, error)

    def _deliver(self, sequence: _Sequence, delta: TokenDelta) -> None:
        sequence.position += len(delta.token_ids)
        if delta.details is not None and delta.details.is_last:
            del self._open[delta.number]
        try:
            output = delta.to_output()
        except TercetError as error:
            sequence.stream.fail(error)
        else:
            sequence.stream.put(output)

    def _fail(self, number: int, error: TercetError) -> None:
        self._open.pop(number).stream.fail(error)

    def _gap(self, delta: TokenDelta, sequence: _Sequence) -> EngineUnreachable:
        return EngineUnreachable(
            f"{self._engine} lost tokens: output position {sequence.position} was due, {delta.position} came"
        )


def _is_repeated(delta: TokenDelta, sequence: _Sequence) -> bool:
    """Whether all of it was delivered already."""
    is_last = delta.details is not None and delta.details.is_last
    return not is_last and delta.position + len(delta.token_ids) <= sequence.position
