"""What one connection of a sender may say, and what follows: a state machine without I/O.

The shell around it reads a header, then what :meth:`Inbound.begin` says comes next, into the buffers given, and calls
:meth:`Inbound.end`; before it waits for a header, :meth:`Inbound.settle`. Pieces go from the socket straight into KV;
that, too, only by :meth:`Inbound.receive`, which holds the lease while bytes are taken that have arrived already.
References that come together are read together, which libraries are faster at.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable

from tercet.protocol import TercetError, TransferFailed
from tercet.transport.body import Body, Receive, dropped
from tercet.transport.frames import (
    MAX_GREETING_BYTES,
    MAX_PIECE_BYTES,
    NONCE_BYTES,
    Greeting,
    Header,
    Kind,
    ProtocolViolation,
    Reference,
    ack,
    decode,
    frame,
    refused,
    unpack,
)
from tercet.transport.grants import Claim, Piece
from tercet.transport.greeting import Holds, greet
from tercet.transport.recut import BlockShape, place
from tercet.transport.references import Referred, batches, copies
from tercet.transport.rules import Rules
from tercet.transport.session import Answer, Session
from tercet.transport.threads import Turn
from tercet.transport.vectors import Run, Vector

logger = logging.getLogger(__name__)
MAX_REFERENCE_BYTES = 1024 * 1024


class Inbound:
    """One connection. ``holds(pid)``: whether that process has the other end; ``answer`` writes to this connection."""

    def __init__(self, rules: Rules, answer: Answer, holds: Holds) -> None:
        self._rules = rules
        self._answer = answer
        self._holds = holds
        self._challenge = secrets.token_bytes(NONCE_BYTES)
        self._scratch = memoryview(bytearray(64 * 1024))
        self._staging = memoryview(b"")
        self._turn = Turn()
        self._referred = Referred()
        self.session: Session | None = None

    def challenge(self) -> bytes:
        """What the receiver says first."""
        return frame(Header(Kind.CHALLENGE), self._challenge)

    def begin(self, data: memoryview) -> Body | None:
        """Take a header; returns where its body goes, or ``None`` if there is none.

        Raises :class:`~tercet.transport.frames.ProtocolViolation` when the connection must be closed.
        """
        header = unpack(data)
        self._check(header)
        if header.kind is Kind.PIECE:
            return self._piece(header)
        if header.nbytes:
            if header.nbytes > self._scratch.nbytes:
                self._scratch = memoryview(bytearray(header.nbytes))
            return Body(header, Run(self._scratch[: header.nbytes]))
        self.settle()
        self._unless_refused(header, self._claim)
        return None

    def receive(self, body: Body, receive: Receive) -> int:
        """Fill some of a body by ``receive``, which must not wait long; both return the number of bytes."""
        if body.lease is None:
            return self._fill(body, receive)
        try:
            with self._rules.grants.writing(body.lease):
                count = self._fill(body, receive)
        except TercetError as error:
            self._refuse(body.header, error)
            body.divert(self._scratch)
            return self._fill(body, receive)
        self._rules.pace.took(count)
        return count

    def _fill(self, body: Body, receive: Receive) -> int:
        count = receive(body.into)
        body.into.advance(count)
        return count

    def end(self, body: Body) -> None:
        """A body is complete."""
        header = body.header
        match header.kind:
            case Kind.PIECE:
                if not body.dropped:
                    self._unless_refused(header, self._arrived if self._joined.block is None else self._place)
            case Kind.REFERENCE:
                self._unless_refused(header, self._refer)
            case _:
                self._greet(decode(self._scratch[: header.nbytes], Greeting))

    def close(self) -> None:
        """The connection is over, and with it its session, for what it brought may be lost."""
        if self.session is None:
            return
        if self._rules.sessions.leave(self.session):
            self._rules.counters.count(receives_dropped=self._rules.grants.forget_sender(self.session.name))
        else:
            self.session.answer(refused(0, "another connection of the session ended"))

    def _check(self, header: Header) -> None:
        if (header.kind is Kind.HELLO) == (self.session is not None):
            raise ProtocolViolation("the first frame, and no other, must be HELLO")
        if header.send == 0 and header.kind is not Kind.HELLO:
            raise ProtocolViolation(f"{header.kind.name} of send 0, which is none")
        match header.kind:
            case Kind.HELLO:
                fits = 0 < header.nbytes <= MAX_GREETING_BYTES
            case Kind.PIECE:
                fits = self._rules.tcp_allowed and 0 < header.nbytes <= self._largest()
            case Kind.REFERENCE:
                readable = self.session is not None and self.session.reader is not None
                fits = readable and 0 < header.nbytes <= MAX_REFERENCE_BYTES
            case Kind.FIN:
                fits = header.nbytes == 0
            case _:
                raise ProtocolViolation(f"a sender does not say {header.kind.name}")
        if not fits:
            raise ProtocolViolation(f"{header.kind.name} of {header.nbytes} bytes")

    def _greet(self, greeting: Greeting) -> None:
        self.session, welcome = greet(self._rules, greeting, self._challenge, self._answer, self._holds)
        if welcome:
            self._answer(welcome)

    def _largest(self) -> int:
        return max(MAX_PIECE_BYTES, self._rules.region.shape.block_bytes)

    # ---- sends -----------------------------------------------------------------------------------------------

    def _unless_refused(self, header: Header, act: Callable[[Header], None]) -> None:
        session = self._joined
        if header.send in session.refused:
            self._rules.counters.count(chunks_refused=header.kind is not Kind.FIN)
            return
        try:
            act(header)
        except ProtocolViolation:
            raise
        except TercetError as error:
            self._refuse(header, error)

    def _refuse(self, header: Header, error: TercetError) -> None:
        claim = header.kind is Kind.FIN
        self._rules.counters.count(chunks_refused=not claim, claims_refused=claim)
        self._rules.grants.forget(header.lease, self._key(header))
        if self._joined.refuse(header.send):
            self._joined.answer(refused(header.send, error.message))

    def _piece(self, header: Header) -> Body:
        if header.send in self._joined.refused:
            self._rules.counters.count(chunks_refused=1)
            return dropped(header, self._scratch)
        try:
            if self._joined.block is not None:
                return self._staged(header, self._joined.block)
            blocks = self._rules.grants.locate(header.lease, self._piece_of(header))
            size = self._part_bytes(header)
            if header.nbytes != size * len(blocks) * header.layers:
                count = f"{len(blocks)} blocks' parts of {size} in {header.layers} layers"
                raise ProtocolViolation(f"PIECE of {header.nbytes} bytes for {count}")
            places = self._rules.region.places(header.layer_range, blocks, header.part * size, size)
            return Body(header, Vector(places, self._rules.region, header.nbytes), header.lease)
        except ProtocolViolation:
            raise
        except TercetError as error:
            self._refuse(header, error)
            return dropped(header, self._scratch)

    def _staged(self, header: Header, block: BlockShape) -> Body:
        """Let a piece of blocks of another size wait until it is complete."""
        self._rules.grants.locate_tokens(header.lease, self._piece_of(header))
        size = self._heads_of(header) * block.block_bytes // block.heads
        if header.nbytes != size * (header.end - header.begin) * header.layers:
            raise ProtocolViolation(f"PIECE of {header.nbytes} bytes for slots of {size}")
        if self._staging.nbytes < header.nbytes:
            self._staging = memoryview(bytearray(header.nbytes))
        return Body(header, Run(self._staging[: header.nbytes]))

    def _place(self, header: Header) -> None:
        """Put a staged piece's tokens in place."""
        ours, theirs, region = self._rules.block, self._joined.block, self._rules.region
        assert ours is not None
        assert theirs is not None
        heads, part = self._heads_of(header), self._part_bytes(header)
        slots = header.end - header.begin
        size = header.nbytes // (slots * header.layers)
        moves = self._rules.grants.locate_tokens(header.lease, self._piece_of(header))
        for number, layer in enumerate(header.layer_range):
            for move in moves:
                source = self._staging[(number * slots + move.slot - header.begin) * size :][:size]
                with self._rules.grants.writing(header.lease):
                    target = region.blocks(layer, move.block)[header.part * part :][:part]
                    place(source, theirs, target, ours, heads, move)
        self._rules.pace.took(header.nbytes)
        self._arrived(header)

    def _heads_of(self, header: Header) -> int:
        """Heads that a piece has of each block."""
        heads, rest = divmod(self._rules.block.heads if self._rules.block else 0, header.parts)
        if rest or not heads:
            raise TransferFailed(f"blocks do not fall into {header.parts} equal parts")
        return heads

    def _part_bytes(self, header: Header) -> int:
        size, rest = divmod(self._rules.region.shape.block_bytes, header.parts)
        if rest:
            raise TransferFailed(f"blocks do not fall into {header.parts} equal parts")
        return size

    def _arrived(self, header: Header, by_reference: bool = False) -> None:
        parts = (header.end - header.begin) * header.layers
        moved = parts * self._part_bytes(header) if by_reference else header.nbytes
        end = self._rules.grants.arrived(header.lease, self._key(header), self._piece_of(header))
        self._rules.counters.count(
            bytes_received=moved,
            chunks_received=1,
            chunks_by_reference=by_reference,
        )
        self._finish(header, end)

    def _claim(self, header: Header) -> None:
        claim = Claim(header.begin, header.end, header.frames, header.part, header.parts, self._unit)
        self._finish(header, self._rules.grants.claim(header.lease, self._key(header), claim))

    def _finish(self, header: Header, valid_end: int | None) -> None:
        if valid_end is None:
            return
        try:
            self._rules.on_finished(header.lease, valid_end)
        except Exception as error:
            logger.exception("on_finished of lease %s failed", header.lease)
            raise TransferFailed("the receiver could not take the claim") from error
        self._rules.counters.count(claims_accepted=1)
        self._joined.answer(ack(header.send))

    def _refer(self, header: Header) -> None:
        reference = decode(self._scratch[: header.nbytes], Reference)
        session, rules = self._joined, self._rules
        if session.reader is None or session.shape is None:
            raise ProtocolViolation("REFERENCE, though this session has no reader")
        blocks = rules.grants.locate(header.lease, self._piece_of(header))
        wanted = copies(header, self._part_bytes(header), reference, session.shape, rules.region.shape, blocks)
        if self._referred and not self._referred.takes(header):
            self.settle()
        self._referred.add(header, wanted)

    def settle(self) -> None:
        """Copy what was referred to: nothing more has come for now."""
        if self._referred:
            referred, self._referred = self._referred, Referred()
            self._unless_refused(referred.headers[0], lambda _: self._fetch(referred))

    def _fetch(self, referred: Referred) -> None:
        session, rules = self._joined, self._rules
        assert session.reader is not None
        assert session.shape is not None
        lease, send = referred.headers[0].lease, referred.headers[0].send
        try:
            for some, nbytes in batches(referred.copies, session.reader.at_a_time):
                with rules.grants.writing(lease):
                    session.reader.read(some)
                self._turn.took(nbytes)
                rules.pace.took(nbytes)
            live = session.reader.word(session.shape.word(send)) == send
        except OSError as error:
            raise TransferFailed(f"the sender's memory cannot be read: {error}") from error
        if not live:
            raise TransferFailed("the sender gave this piece up")
        for header in referred.headers:
            self._arrived(header, by_reference=True)

    @property
    def _joined(self) -> Session:
        if self.session is None:
            raise ProtocolViolation("the first frame must be HELLO")
        return self.session

    @property
    def _unit(self) -> int:
        """Tokens of the sender's slots, 0 if as many as ours have."""
        block = self._joined.block
        return 0 if block is None else block.tokens

    def _piece_of(self, header: Header) -> Piece:
        return Piece(
            header.layer, header.begin, header.end, header.part, header.parts, self._unit, header.layers
        )  # fmt: skip

    def _key(self, header: Header) -> tuple[str, int]:
        return self._joined.name, header.send
