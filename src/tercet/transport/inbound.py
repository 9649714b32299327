"""What a connection's sender may say, and what is answered: the receiver's state machine, without I/O."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from tercet.protocol import TercetError, TransferFailed
from tercet.transport.direct import Greeting, Reference, can_read, read_reference
from tercet.transport.frames import (
    HEADER_BYTES,
    MAX_PIECE_BYTES,
    MAX_TEXT_BYTES,
    Header,
    Kind,
    ProtocolViolation,
    ack,
    refused,
    unpack,
    welcome,
)
from tercet.transport.grants import GrantTable
from tercet.transport.memory import KVMemory

logger = logging.getLogger(__name__)
MAX_REFERENCE_BYTES = 64
# A forgotten one is refused once more, which does no harm.
REMEMBERED_REFUSED = 4096
B = TypeVar("B", Greeting, Reference)


@dataclass
class InboundCounters:
    """What arrived, over all connections of a receiver."""

    bytes_received: int = 0
    pieces_received: int = 0
    pieces_by_reference: int = 0
    pieces_refused: int = 0


class Inbound:
    """One accepted connection.

    Feed it exactly :attr:`wanted` bytes at a time; it says what to answer. A lease that has ended is answered once
    per send, and the rest of that send is skipped, so that other sends of the connection go on.

    ``on_finished(lease, valid_end)`` is called before a claim is acknowledged; if it raises, the claim is refused.
    ``held_by`` tells whether the process with a given id is the one at the connection's other end.
    """

    def __init__(
        self,
        memory: KVMemory,
        grants: GrantTable,
        fingerprint: str,
        counters: InboundCounters,
        on_finished: Callable[[str, int], None],
        held_by: Callable[[int], bool] = lambda _pid: False,
    ) -> None:
        self._memory = memory
        self._grants = grants
        self._fingerprint = fingerprint
        self._counters = counters
        self._on_finished = on_finished
        self._held_by = held_by
        self._greeting: Greeting | None = None
        self._by_reference = False
        self._scratch = memoryview(b"")
        self._header: Header | None = None
        self._refused: dict[int, None] = {}  # the latest sends that were refused, oldest first

    @property
    def greeted(self) -> bool:
        """Whether the sender has said who it is."""
        return self._greeting is not None

    @property
    def wanted(self) -> int:
        """How many bytes to feed next."""
        return HEADER_BYTES if self._header is None else self._header.nbytes

    def feed(self, data: memoryview) -> bytes:
        """Take the next :attr:`wanted` bytes; returns what to send back, often nothing.

        Raises :class:`~tercet.transport.frames.ProtocolViolation` when the connection must be closed.
        """
        if self._header is None:
            header = unpack(data)
            self._check(header)
            if header.nbytes:
                self._header = header
                return b""
            return self._take(header, memoryview(b""))
        header, self._header = self._header, None
        return self._take(header, data)

    def _check(self, header: Header) -> None:
        if (header.kind is Kind.HELLO) == (self._greeting is not None):
            raise ProtocolViolation("the first frame, and no other, must be HELLO")
        match header.kind:
            case Kind.HELLO:
                fits = 0 < header.nbytes <= MAX_TEXT_BYTES
            case Kind.PIECE:
                fits = 0 < header.nbytes <= max(MAX_PIECE_BYTES, self._memory.block_bytes)
                fits = fits and header.nbytes == self._size(header)
            case Kind.REFERENCE:
                fits = self._by_reference and 0 < header.nbytes <= MAX_REFERENCE_BYTES
                fits = fits and 0 < self._size(header) <= max(MAX_PIECE_BYTES, self._memory.block_bytes)
            case Kind.FIN:
                fits = header.nbytes == 0
            case _:
                raise ProtocolViolation(f"a sender does not say {header.kind.name}")
        if not fits:
            raise ProtocolViolation(f"{header.kind.name} of {header.nbytes} bytes")

    def _take(self, header: Header, body: memoryview) -> bytes:
        match header.kind:
            case Kind.HELLO:
                return self._greet(body)
            case Kind.PIECE:
                return self._unless_refused(header, lambda: self._write(header, body))
            case Kind.REFERENCE:
                return self._unless_refused(header, lambda: self._write(header, self._fetch(header, body)))
            case _:
                return self._unless_refused(header, lambda: self._finish(header))

    def _greet(self, body: memoryview) -> bytes:
        greeting = _decode(body, Greeting)
        if greeting.fingerprint != self._fingerprint:
            raise ProtocolViolation("layout: the sender's KV layout is another one")
        self._greeting = greeting
        self._by_reference = self._held_by(greeting.pid) and can_read(greeting)
        return welcome(self._by_reference)

    def _size(self, header: Header) -> int:
        return (header.end - header.begin) * self._memory.block_bytes

    def _fetch(self, header: Header, body: memoryview) -> memoryview:
        """A referenced piece's bytes, in scratch memory."""
        size, reference = self._size(header), _decode(body, Reference)
        if self._scratch.nbytes < size:
            self._scratch = memoryview(bytearray(size))
        data = self._scratch[:size]
        try:
            live = self._greeting is not None and read_reference(self._greeting.pid, reference, header.send, data)
        except (OSError, OverflowError, ctypes.ArgumentError) as error:
            raise TransferFailed(f"the sender's memory cannot be read: {error}") from error
        if not live:
            raise TransferFailed("the sender gave this piece up")
        self._counters.pieces_by_reference += 1
        return data

    def _unless_refused(self, header: Header, act: Callable[[], bytes]) -> bytes:
        if header.send in self._refused:
            self._counters.pieces_refused += header.kind is not Kind.FIN
            return b""
        try:
            return act()
        except TercetError as error:
            self._refused[header.send] = None
            if len(self._refused) > REMEMBERED_REFUSED:
                del self._refused[next(iter(self._refused))]
            self._counters.pieces_refused += header.kind is not Kind.FIN
            return refused(header.send, error.message)

    def _write(self, header: Header, body: memoryview) -> bytes:
        def copy(runs: Sequence[tuple[int, int]]) -> None:
            offset = 0
            for first_block, count in runs:
                size = count * self._memory.block_bytes
                self._memory.write(header.layer, first_block, body[offset : offset + size])
                offset += size

        self._grants.write(header.lease, header.layer, header.begin, header.end, copy)
        self._counters.bytes_received += body.nbytes
        self._counters.pieces_received += 1
        return b""

    def _finish(self, header: Header) -> bytes:
        valid_end = self._grants.finish(header.lease, header.begin, header.end)
        try:
            self._on_finished(header.lease, valid_end)
        except Exception as error:
            logger.exception("on_finished of lease %s failed", header.lease)
            raise TransferFailed("the receiver could not take the claim") from error
        return ack(header.send)


def _decode(body: memoryview, kind: type[B]) -> B:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise ProtocolViolation(f"{kind.__name__}: {error}") from error
