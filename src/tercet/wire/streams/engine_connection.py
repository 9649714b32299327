"""The router's side of one engine's connection: incoming data, by sequence."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from tercet.protocol import EngineLoad, EngineUnreachable, MoveProposal, OutputStream, RequestTooLarge, TercetError
from tercet.protocol.spans import current_span
from tercet.protocol.wire import StartGenerateCall, large_field_of
from tercet.settings.log_lines import request_id
from tercet.wire.streams.wire_format import LONGEST_FRAME, OutputBatch, StreamCommand, TokenDelta, fits, frame_of

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
        self,
        engine: str,
        numbers: itertools.count[int],
        on_load: Callable[[EngineLoad], None],
        on_proposal: Callable[[MoveProposal], None],
    ) -> None:
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
        """True if tokens can arrive."""
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
        frame = frame_of(self._command_of(call))
        if not fits(frame):
            large = large_field_of(call)
            raise RequestTooLarge(
                f"{large}: the call has {len(frame)} bytes, and at most {LONGEST_FRAME} are allowed", large
            )
        if self._transport is not None and self._transport.get_write_buffer_size() > MOST_UNREAD:
            raise EngineUnreachable(f"{self.engine} does not read its messages")
        self._write(frame)

    @staticmethod
    def _command_of(call: StartGenerateCall) -> StreamCommand:
        place = current_span()
        traces = () if place is None else (tuple(place.headers().values()),)
        return StreamCommand(starts=(call,), names=(request_id(),), traces=traces)

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
        """Record that a connection is closed."""
        if transport is self._transport:
            self.drop(why)
            self.on_lost()

    def drop(self, why: str) -> None:
        """Close the connection; every sequence ends with :class:`~tercet.protocol.EngineUnreachable`."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        self.inbox.lose(EngineUnreachable(f"{self.engine}: its token stream ended: {why}"))

    def heartbeat(self) -> None:
        """Send a heartbeat: the router is listening."""
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
            if sequence is None:
                if not delta.is_last:
                    unwanted.append(delta.number)
            elif delta.position == sequence.position:
                self._deliver(sequence, delta)
            elif delta.is_last or delta.position + len(delta.token_ids) > sequence.position:  # not delivered already
                unwanted.append(delta.number)
                self._fail(
                    delta.number,
                    EngineUnreachable(
                        f"{self._engine} lost tokens: expected output position {sequence.position}, "
                        f"received {delta.position}"
                    ),
                )
        return unwanted

    def lose(self, error: TercetError) -> None:
        """End every open sequence with ``error``: the stream is lost."""
        for number in list(self.sequences):
            self._fail(number, error)

    def _deliver(self, sequence: _Sequence, delta: TokenDelta) -> None:
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
