"""What one connection of a sender may say, and what follows: a state machine without I/O.

The shell around it reads a header, then what :meth:`Inbound.begin` says comes next, into the buffers given, and calls
:meth:`Inbound.end`. Pieces go from the socket straight into KV; that, too, only by :meth:`Inbound.receive`, which holds
the lease while bytes are taken that have arrived already.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice

import msgspec

from tercet.protocol import TercetError, TransferFailed
from tercet.transport.backends import TCP, Backend, BackendUnavailable, Copy, Reader, Sender
from tercet.transport.base import OnFinished
from tercet.transport.frames import (
    MAX_GREETING_BYTES,
    MAX_PIECE_BYTES,
    NONCE_BYTES,
    Greeting,
    Header,
    Kind,
    ProtocolViolation,
    Reference,
    Welcome,
    ack,
    decode,
    frame,
    receiver_proof,
    refused,
    sender_proof,
    unpack,
)
from tercet.transport.grants import Claim, GrantTable, Piece
from tercet.transport.recut import BlockShape, place
from tercet.transport.region import KVRegion, RegionShape
from tercet.transport.session import Answer, Session, Sessions

logger = logging.getLogger(__name__)
MAX_BUFFERS = 512  # in one system call; Linux takes 1024
MAX_REFERENCE_BYTES = 1024 * 1024
# Copied while a lease is held at a time, so that its revocation need not wait longer than for this.
MAX_COPY_BYTES = 1024 * 1024
Receive = Callable[[Sequence[memoryview]], int]


@dataclass
class InboundCounters:
    """What was taken and refused, over all connections. Thread-safe through :meth:`count`."""

    bytes_received: int = 0
    pieces_received: int = 0
    pieces_refused: int = 0
    pieces_by_reference: int = 0
    claims_accepted: int = 0
    claims_refused: int = 0
    receives_dropped: int = 0
    connections_refused: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def count(self, **increments: int) -> None:
        """Add to the named counters."""
        with self._lock:
            for name, increment in increments.items():
                setattr(self, name, getattr(self, name) + increment)

    def read(self) -> Mapping[str, int]:
        """All of them."""
        with self._lock:
            return asdict(self)


@dataclass
class Rules:
    """What all connections of a receiver share."""

    region: KVRegion
    grants: GrantTable
    fingerprint: str
    secret: str
    on_finished: OnFinished
    backends: Sequence[Backend] = ()
    tcp_allowed: bool = True
    block: BlockShape | None = None
    counters: InboundCounters = field(default_factory=InboundCounters)
    sessions: Sessions = field(default_factory=Sessions)


class Body:
    """Bytes that come next, and where they go. ``lease`` is set while they go into KV."""

    def __init__(self, header: Header, buffers: Sequence[memoryview], lease: str | None = None) -> None:
        self.header = header
        self.lease = lease
        self.left = sum(buffer.nbytes for buffer in buffers)
        self._buffers = deque(buffers)

    def buffers(self) -> list[memoryview]:
        """What is still to be filled, in order; not more than one system call takes."""
        return list(islice(self._buffers, MAX_BUFFERS))

    def advance(self, count: int) -> None:
        """``count`` bytes have been filled."""
        self.left -= count
        while count:
            first = self._buffers.popleft()
            if first.nbytes > count:
                self._buffers.appendleft(first[count:])
                return
            count -= first.nbytes

    def divert(self, scratch: memoryview) -> None:
        """Let the rest go nowhere."""
        self.lease = None
        self._buffers.clear()
        left = self.left
        while left:
            self._buffers.append(scratch[:left])
            left -= min(left, scratch.nbytes)


class Inbound:
    """One connection. ``holds(pid)``: whether that process has the other end; ``answer`` writes to this connection."""

    def __init__(self, rules: Rules, answer: Answer, holds: Callable[[int], bool]) -> None:
        self._rules = rules
        self._answer = answer
        self._holds = holds
        self._challenge = secrets.token_bytes(NONCE_BYTES)
        self._scratch = memoryview(bytearray(64 * 1024))
        self._staging = memoryview(b"")
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
            return Body(header, [self._scratch[: header.nbytes]])
        self._unless_refused(header, self._claim)
        return None

    def receive(self, body: Body, receive: Receive) -> None:
        """Fill some of a body by ``receive``, which must not wait and returns the number of bytes."""
        if body.lease is not None:
            try:
                with self._rules.grants.writing(body.lease):
                    body.advance(receive(body.buffers()))
                return
            except TercetError as error:
                self._refuse(body.header, error)
                body.divert(self._scratch)
        body.advance(receive(body.buffers()))

    def end(self, body: Body) -> None:
        """A body is complete."""
        header = body.header
        match header.kind:
            case Kind.PIECE:
                if self._joined.block is not None:
                    self._unless_refused(header, self._place)
                elif body.lease is not None:
                    self._unless_refused(header, self._arrived)
            case Kind.REFERENCE:
                self._unless_refused(header, self._fetch)
            case _:
                self._greet(decode(self._scratch[: header.nbytes], Greeting))

    def close(self) -> None:
        """The connection is over."""
        if self.session is not None and self._rules.sessions.leave(self.session):
            self._rules.counters.count(receives_dropped=self._rules.grants.forget_sender(self.session.name))

    # ---- greeting --------------------------------------------------------------------------------------------

    def _check(self, header: Header) -> None:
        if (header.kind is Kind.HELLO) == (self.session is not None):
            raise ProtocolViolation("the first frame, and no other, must be HELLO")
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

    def _largest(self) -> int:
        return max(MAX_PIECE_BYTES, self._rules.region.shape.block_bytes)

    def _greet(self, greeting: Greeting) -> None:
        rules = self._rules
        expected = sender_proof(rules.secret, self._challenge, greeting.nonce, greeting.session)
        if not secrets.compare_digest(expected, greeting.proof):
            raise ProtocolViolation("secret: the sender does not know this fleet's secret")
        if greeting.fingerprint != rules.fingerprint:
            raise ProtocolViolation("layout: the sender's KV layout is another one")
        if greeting.stream:
            self.session = rules.sessions.join(greeting.session)
        else:
            session = Session(greeting.session, self._answer, shape=greeting.shape)
            rules.sessions.begin(session)
            self.session = session
            session.block = self._other_block(greeting)
            transport, session.reader = self._choose(greeting)
            proof = receiver_proof(rules.secret, self._challenge, greeting.nonce, greeting.session)
            self._answer(frame(Header(Kind.WELCOME), msgspec.msgpack.encode(Welcome(transport, proof))))

    def _other_block(self, greeting: Greeting) -> BlockShape | None:
        """The sender's block, if it has another size than ours; by the fingerprint the rest is equal."""
        ours, theirs = self._rules.block, greeting.block
        if ours is None or theirs is None or ours.tokens == theirs.tokens:
            return None
        try:
            theirs.require_sane()
        except TercetError as error:
            raise ProtocolViolation(f"layout: {error.message}") from error
        if (ours.head_size, ours.item_bytes) != (theirs.head_size, theirs.item_bytes):
            raise ProtocolViolation("layout: heads of the sender's blocks have another size")
        return theirs

    def _choose(self, greeting: Greeting) -> tuple[str, Reader | None]:
        """The first backend that both have and that passes its check, or ``tcp``."""
        reasons: list[str] = []
        backends = self._rules.backends
        if self._joined.block is not None:
            backends, reasons = (), ["blocks of another size are put together from what comes over tcp"]
        for backend in backends:
            offer = greeting.offers.get(backend.name)
            if offer is None or greeting.shape is None:
                reasons.append(f"{backend.name}: the sender does not offer it")
                continue
            try:
                return backend.name, self._connect(backend, offer, greeting.shape, greeting.word)
            except TransferFailed as error:
                reasons.append(error.message)
        if not (self._rules.tcp_allowed and TCP in greeting.offers):
            raise ProtocolViolation(
                "no transport that both sides allow works: " + "; ".join([*reasons, "tcp: not allowed"])
            )
        if reasons:
            logger.info("KV of this sender comes over tcp: %s", "; ".join(reasons))
        return TCP, None

    def _connect(self, backend: Backend, offer: bytes, shape: RegionShape, word: int) -> Reader:
        shape.require_sane()
        reader = backend.connect(offer, Sender(shape, self._holds))
        try:
            if word == 0 or reader.word(shape.word(word)) != word:
                raise BackendUnavailable(f"{backend.name}: it does not read what the sender has in its memory")
        except BaseException:
            reader.close()
            raise
        return reader

    # ---- sends -----------------------------------------------------------------------------------------------

    def _unless_refused(self, header: Header, act: Callable[[Header], None]) -> None:
        session = self._joined
        if header.send in session.refused:
            self._rules.counters.count(pieces_refused=header.kind is not Kind.FIN)
            return
        try:
            act(header)
        except TercetError as error:
            self._refuse(header, error)

    def _refuse(self, header: Header, error: TercetError) -> None:
        claim = header.kind is Kind.FIN
        self._rules.counters.count(pieces_refused=not claim, claims_refused=claim)
        self._rules.grants.forget(header.lease, self._key(header))
        if self._joined.refuse(header.send):
            self._joined.answer(refused(header.send, error.message))

    def _piece(self, header: Header) -> Body:
        body = Body(header, [])
        body.left = header.nbytes
        if header.send in self._joined.refused:
            self._rules.counters.count(pieces_refused=1)
            body.divert(self._scratch)
            return body
        try:
            if self._joined.block is not None:
                return self._staged(header, self._joined.block)
            blocks = self._rules.grants.locate(header.lease, self._piece_of(header))
            size = self._part_bytes(header)
            if header.nbytes != size * len(blocks):
                raise ProtocolViolation(f"PIECE of {header.nbytes} bytes for {len(blocks)} blocks' parts of {size}")
            views = self._rules.region.places(header.layer, blocks, header.part * size, size)
            return Body(header, views, header.lease)
        except ProtocolViolation:
            raise
        except TercetError as error:
            self._refuse(header, error)
            body.divert(self._scratch)
            return body

    def _staged(self, header: Header, block: BlockShape) -> Body:
        """Let a piece of blocks of another size wait until it is complete."""
        self._rules.grants.locate_tokens(header.lease, self._piece_of(header))
        size = self._heads_of(header) * block.block_bytes // block.heads
        if header.nbytes != size * (header.end - header.begin):
            raise ProtocolViolation(f"PIECE of {header.nbytes} bytes for slots of {size}")
        if self._staging.nbytes < header.nbytes:
            self._staging = memoryview(bytearray(header.nbytes))
        return Body(header, [self._staging[: header.nbytes]])

    def _place(self, header: Header) -> None:
        """Put a staged piece's tokens in place."""
        ours, theirs, region = self._rules.block, self._joined.block, self._rules.region
        assert ours is not None
        assert theirs is not None
        heads, part = self._heads_of(header), self._part_bytes(header)
        size = header.nbytes // (header.end - header.begin)
        for move in self._rules.grants.locate_tokens(header.lease, self._piece_of(header)):
            source = self._staging[(move.slot - header.begin) * size :][:size]
            with self._rules.grants.writing(header.lease):
                target = region.blocks(header.layer, move.block)[header.part * part :][:part]
                place(source, theirs, target, ours, heads, move)
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
        moved = (header.end - header.begin) * self._part_bytes(header) if by_reference else header.nbytes
        end = self._rules.grants.arrived(header.lease, self._key(header), self._piece_of(header))
        self._rules.counters.count(
            bytes_received=moved,
            pieces_received=1,
            pieces_by_reference=by_reference,
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

    def _fetch(self, header: Header) -> None:
        reference = decode(self._scratch[: header.nbytes], Reference)
        session, rules = self._joined, self._rules
        if session.reader is None or session.shape is None:
            raise ProtocolViolation("REFERENCE, though this session has no reader")
        blocks = rules.grants.locate(header.lease, self._piece_of(header))
        copies = self._copies(header, reference, session.shape, blocks)
        try:
            for some in _batches(copies):
                with rules.grants.writing(header.lease):
                    session.reader.read(some)
                # vLLM's processes wait for one another by yielding their core: whoever shares one must yield, too.
                os.sched_yield()
            live = session.reader.word(session.shape.word(header.send)) == header.send
        except OSError as error:
            raise TransferFailed(f"the sender's memory cannot be read: {error}") from error
        if not live:
            raise TransferFailed("the sender gave this piece up")
        self._arrived(header, by_reference=True)

    def _copies(
        self, header: Header, reference: Reference, theirs: RegionShape, blocks: Sequence[int]
    ) -> Iterator[Copy]:
        ours, size = self._rules.region.shape, self._part_bytes(header)
        whole = header.parts == 1 and reference.offset == 0 and size == theirs.block_bytes
        inside = all(0 <= block < theirs.num_blocks for block in reference.blocks)
        fits = 0 <= reference.offset <= theirs.block_bytes - size and header.layer < len(theirs.planes)
        if reference.size != size or len(reference.blocks) != len(blocks) or not (inside and fits):
            raise TransferFailed("the reference does not fit the slots that it is for")
        here, there = ours.block(header.layer, 0) + header.part * size, theirs.block(header.layer, 0) + reference.offset
        if whole:
            return _joined_copies(size, there, here, reference.blocks, blocks)
        return (
            (size, there + source * theirs.block_bytes, here + target * ours.block_bytes)
            for source, target in zip(reference.blocks, blocks, strict=True)
        )

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
        return Piece(header.layer, header.begin, header.end, header.part, header.parts, self._unit)

    def _key(self, header: Header) -> tuple[str, int]:
        return self._joined.name, header.send


def _joined_copies(size: int, there: int, here: int, sources: Sequence[int], targets: Sequence[int]) -> Iterator[Copy]:
    """Whole blocks; neighbours on both sides go in one copy."""
    first, limit = 0, max(1, MAX_COPY_BYTES // size)
    for index in range(1, len(sources) + 1):
        together = (
            index < len(sources)
            and sources[index] == sources[index - 1] + 1
            and targets[index] == targets[index - 1] + 1
            and index - first < limit
        )
        if not together:
            yield (index - first) * size, there + sources[first] * size, here + targets[first] * size
            first = index


def _batches(copies: Iterator[Copy]) -> Iterator[list[Copy]]:
    batch: list[Copy] = []
    total = 0
    for copy in copies:
        batch.append(copy)
        total += copy[0]
        if total >= MAX_COPY_BYTES:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch
