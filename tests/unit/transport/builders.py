"""A receiver's side of one connection without sockets, and what a sender says to it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from tercet.transport import BlockShape, Grant, GrantTable, KVRegion
from tercet.transport.backends import Backend, Copies, Reader, Sender
from tercet.transport.frames import (
    HEADER_BYTES,
    NONCE_BYTES,
    Greeting,
    Header,
    Kind,
    Reference,
    Welcome,
    decode,
    frame,
    receiver_proof,
    sender_proof,
    unpack,
)
from tercet.transport.inbound import Inbound
from tercet.transport.region import RegionShape
from tercet.transport.rules import Rules
from tercet.transport.vectors import Bytes, Places

LAYERS, BLOCKS, BLOCK_BYTES, SIZE = 2, 8, 64, 16
LEASE, OTHER_LEASE = "12" * 16, "34" * 16
SENTINEL = 0xEE
SECRET, FINGERPRINT = "the fleet's", "same"
NONCE = bytes(range(NONCE_BYTES))


class FakeReader:
    """Reads a sender's region that is in this process; ``before`` and ``after`` each reading something happens."""

    def __init__(self, ours: KVRegion, theirs: KVRegion) -> None:
        self.ours, self.theirs = ours, theirs
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None
        self.reads: list[list[tuple[int, int, int]]] = []
        self.closed = 0

    at_a_time = 1024

    def read(self, copies: Copies) -> None:
        self.before()
        self.reads.append([(size, there, here) for size, there, here in copies.tolist()])
        for size, there, here in self.reads[-1]:
            source = self.theirs.bytes[there : there + size]
            assert (there >= 0, here >= 0, len(source)) == (True, True, size)
            self.ours.bytes[here : here + size] = source
        self.after()

    def word(self, there: int) -> int:
        return int.from_bytes(self.theirs.bytes[there : there + 8], "little")

    def close(self) -> None:
        self.closed += 1


class FakeBackend:
    """Connects to one sender's region, whatever it offers."""

    def __init__(self, reader: Reader | Exception, name: str = "fake") -> None:
        self.reader = reader
        self.name = name
        self.asked: list[tuple[bytes, RegionShape]] = []

    def offer(self) -> bytes:
        return b"ours"

    def connect(self, offer: bytes, sender: Sender) -> Reader:
        self.asked.append((offer, sender.shape))
        if isinstance(self.reader, Exception):
            raise self.reader
        return self.reader

    def close(self) -> None:
        pass


class Receiving:
    """One rank that receives. Its region is full of :data:`SENTINEL`; blocks 5, 2 and 3 are under :data:`LEASE`."""

    def __init__(
        self, backends: Sequence[Backend] = (), block: BlockShape | None = None, *, tcp_allowed: bool = True
    ) -> None:
        block_bytes = BLOCK_BYTES if block is None else block.block_bytes
        self.region = KVRegion.create(LAYERS, BLOCKS, block_bytes)
        self.region.close()  # the mapping stays, and nobody opens the file here
        self.region.bytes[:] = bytes([SENTINEL]) * self.region.shape.size
        self.grants = GrantTable(LAYERS)
        size = SIZE if block is None else block.tokens
        self.grants.grant(Grant(LEASE, (5, 2, 3), 0, 3 * size, size))
        self.finished: list[tuple[str, int]] = []
        self.rules = Rules(
            self.region, self.grants, FINGERPRINT, SECRET,
            lambda lease, end: self.finished.append((lease, end)),
            backends, tcp_allowed, block,
        )  # fmt: skip

    @property
    def counters(self) -> Mapping[str, int]:
        return {name: value for name, value in self.rules.counters.read().items() if value}

    def block(self, layer: int, block: int) -> bytes:
        return bytes(self.region.blocks(layer, block))

    def snapshot(self) -> bytes:
        return bytes(self.region.bytes)

    def touched(self, before: bytes | None = None) -> set[tuple[int, int] | None]:
        """The (layer, block) pairs that have changed; ``None`` stands for bytes that are in no block."""
        now = bytearray(self.region.bytes)
        then = bytearray(before or bytes([SENTINEL]) * len(now))
        size, found = self.region.shape.block_bytes, set[tuple[int, int] | None]()
        for layer in range(LAYERS):
            for block in range(BLOCKS):
                at = slice(self.region.shape.block(layer, block), self.region.shape.block(layer, block) + size)
                if now[at] != then[at]:
                    found.add((layer, block))
                now[at] = then[at] = bytes(size)
        return found | ({None} if now != then else set[None]())


class Conversation:
    """One connection to a :class:`Receiving`: bytes go in as a socket would bring them, answers come out."""

    def __init__(self, receiving: Receiving | None = None, *, greet: bool = True, session: str = "a") -> None:
        self.receiving = receiving or Receiving()
        self.session = session
        self.answers: list[tuple[Header, bytes]] = []
        self.holds: Callable[[int], bool] = lambda _pid: False
        self.inbound = Inbound(self.receiving.rules, self._take_answer, lambda pid: self.holds(pid))
        self._data = bytearray()
        self._body = None
        if greet:
            self.say(self.hello())

    def _take_answer(self, data: bytes) -> None:
        header = unpack(data[:HEADER_BYTES])
        assert len(data) == HEADER_BYTES + header.nbytes
        self.answers.append((header, data[HEADER_BYTES:]))

    def hello(self, secret: str = SECRET, **changes: Any) -> bytes:
        """A greeting that answers this connection's challenge."""
        challenge = self.inbound.challenge()[HEADER_BYTES:]
        proof = sender_proof(secret, challenge, NONCE, self.session)
        greeting = Greeting(FINGERPRINT, self.session, 0, NONCE, proof, offers={"tcp": b""})
        return frame(Header(Kind.HELLO), msgspec.msgpack.encode(msgspec.structs.replace(greeting, **changes)))

    def welcome(self) -> str:
        """How KV is to travel, as the first answer says; its proof is right."""
        header, body = self.answers[0]
        assert header.kind is Kind.WELCOME
        welcome = decode(body, Welcome)
        challenge = self.inbound.challenge()[HEADER_BYTES:]
        assert welcome.proof == receiver_proof(SECRET, challenge, NONCE, self.session)
        return welcome.transport

    def say(self, data: bytes) -> list[tuple[Kind, int]]:
        """Feed bytes; returns what was answered to them: kinds, and numbers of sends."""
        before = len(self.answers)
        self._data += data
        while self._step():
            pass
        self.inbound.settle()
        return [(header.kind, header.send) for header, _ in self.answers[before:]]

    def _step(self) -> bool:
        if self._body is None:
            if len(self._data) < HEADER_BYTES:
                return False
            header = memoryview(bytes(self._data[:HEADER_BYTES]))
            del self._data[:HEADER_BYTES]
            self._body = self.inbound.begin(header)
            return True
        if self._body.left:
            left = self._body.left
            self.inbound.receive(self._body, self._receive)
            return self._body.left < left
        body, self._body = self._body, None
        self.inbound.end(body)
        return True

    def _receive(self, into: Bytes) -> int:
        some = bytes(self._data[: into.left])
        del self._data[: len(some)]
        scatter(some, into)
        return len(some)


def scatter(data: bytes, into: Bytes) -> None:
    """Fill the first places of a vector that is not to be used up."""
    for address, length in into.rest.tolist():
        ctypes.memmove(address, data[:length], min(length, len(data)))
        data = data[length:]


def gather(places: Places) -> bytes:
    """What is there."""
    return b"".join(ctypes.string_at(address, length) for address, length in places.tolist())


def piece(
    layer: int,
    begin: int,
    end: int,
    fill: int | bytes,
    send: int = 1,
    lease: str = LEASE,
    part: int = 0,
    parts: int = 1,
    layers: int = 1,
) -> bytes:  # fmt: skip
    """Slots of some layers, full of one byte, or of ``fill``."""
    size = (end - begin) * layers * BLOCK_BYTES // max(1, parts)
    body = fill if isinstance(fill, bytes) else bytes([fill]) * size
    return frame(Header(Kind.PIECE, send, lease, layer, begin, end, 0, part, parts, layers=layers), body)


def fin(begin: int, end: int, frames: int, send: int = 1, lease: str = LEASE, part: int = 0, parts: int = 1) -> bytes:
    """A claim."""
    return Header(Kind.FIN, send, lease, 0, begin, end, frames, part, parts).pack()


def referred(blocks: Iterable[int]) -> bytes:
    """Block numbers as a reference has them; negative ones and those that are too large are said, too."""
    return b"".join((block % 2**64).to_bytes(8, "little") for block in blocks)


def reference(
    layer: int, begin: int, blocks: Sequence[int], send: int = 1, lease: str = LEASE,
    offset: int = 0, size: int = BLOCK_BYTES, part: int = 0, parts: int = 1, end: int | None = None, layers: int = 1,
) -> bytes:  # fmt: skip
    """Slots of some layers, to be read from the sender's blocks."""
    end = begin + len(blocks) if end is None else end
    body = msgspec.msgpack.encode(Reference(referred(blocks), offset, size))
    return frame(Header(Kind.REFERENCE, send, lease, layer, begin, end, 0, part, parts, layers=layers), body)
