"""A receiver's side of one session without sockets, and what a sender says to it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from tercet.transport import BlockShape, KVRegion, TransportSettings
from tercet.transport.backends import Backend
from tercet.transport.backends.reading import Batch, Copies, Reader, SendingPeer, UnderLease, in_steps
from tercet.transport.grants import GrantTable
from tercet.transport.inbound import Pace, SenderSession
from tercet.transport.local_rank import Agreement, LocalRank, agree, require_ours
from tercet.transport.peer_messages import (
    FROM_SENDER,
    NONCE_BYTES,
    Acknowledged,
    Challenge,
    FromSender,
    Greeting,
    MessageSplitter,
    ReadDescriptors,
    Refused,
    SendBegin,
    SendEnd,
    framed,
    proof_of,
)
from tercet.transport.region import RegionShape
from tercet.transport.sockets import Places
from tests.unit.transport.models import a_grant, whose

LAYERS, BLOCKS, BLOCK_BYTES, SIZE = 2, 8, 64, 16
LEASE, OTHER_LEASE = "12" * 16, "34" * 16
SENTINEL = 0xEE
SECRET, FINGERPRINT = "the-fleets", "same"
NONCE = bytes(range(NONCE_BYTES))
WORD = 77


class FakeReader:
    """Reads a sender's region that is in this process; ``before`` and ``after`` each reading something happens."""

    def __init__(self, theirs: KVRegion) -> None:
        self.theirs = theirs
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None
        self.reads: list[list[tuple[int, int, int]]] = []
        self.closed = 0
        self.at_a_time = 1024

    def read(self, batch: Batch, under_lease: UnderLease) -> bool:
        self.before()
        for some, nbytes in in_steps(batch.rows, self.at_a_time):
            under_lease(lambda some=some, nbytes=nbytes: self._copy(some, batch.target) or nbytes)
        self.after()
        return self.theirs.has_word(batch.send)

    def _copy(self, copies: Copies, target: memoryview) -> None:
        self.reads.append([(size, there, here) for size, there, here in copies.tolist()])
        for size, there, here in self.reads[-1]:
            source = self.theirs.bytes[there : there + size]
            assert (there >= 0, here >= 0, len(source)) == (True, True, size)
            target[here : here + size] = source

    def close(self) -> None:
        self.closed += 1


class FakeBackend:
    """Connects to one sender's region, whatever it offers."""

    def __init__(self, reader: Reader | Exception, name: str = "fake", *, stages: bool = True) -> None:
        self.reader = reader
        self.name = name
        self.stages = stages
        self.asked: list[tuple[bytes, RegionShape]] = []

    def offer(self) -> bytes:
        return b"ours"

    def connect(self, offer: bytes, sender: SendingPeer) -> Reader:
        self.asked.append((offer, sender.shape))
        if isinstance(self.reader, Exception):
            raise self.reader
        return self.reader

    def close(self) -> None:
        pass


def sending_region(block_bytes: int = BLOCK_BYTES) -> KVRegion:
    """A sender's memory: its block b of layer l is full of ``16 * l + b``; send 1 is under way."""
    region = KVRegion.create(LAYERS, BLOCKS, block_bytes)
    region.close()  # the mapping stays, and nobody opens the file here
    for layer in range(LAYERS):
        for block in range(BLOCKS):
            region.blocks(layer, block)[:] = bytes([16 * layer + block]) * block_bytes
    region.set_word(WORD)
    region.set_word(1)
    return region


class Receiving:
    """One rank that receives. Its region is full of :data:`SENTINEL`; blocks 5, 2 and 3 are under :data:`LEASE`."""

    def __init__(self, backends: Sequence[Backend] = (), block: BlockShape | None = None) -> None:
        block_bytes = BLOCK_BYTES if block is None else block.block_bytes
        self.region = KVRegion.create(LAYERS, BLOCKS, block_bytes)
        self.region.close()
        self.region.bytes[:] = bytes([SENTINEL]) * self.region.shape.size
        self.grants = GrantTable(LAYERS)
        size = SIZE if block is None else block.tokens
        self.grants.grant(a_grant(LEASE, (5, 2, 3), 0, 3 * size, size))
        self.finished: list[tuple[str, int]] = []
        self.backends = list(backends)
        self.rank = LocalRank(self.region, FINGERPRINT, TransportSettings(secret=SECRET), self.backends, block)

    @property
    def counters(self) -> Mapping[str, int]:
        return {name: value for name, value in self.rank.counters.read().items() if value}

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
    """One sender's session with a :class:`Receiving`: bytes go in as a socket would bring them, answers come out."""

    def __init__(
        self,
        receiving: Receiving | None = None,
        theirs: KVRegion | None = None,
        *,
        session: str = "a",
        greet: bool = True,
        **changes: Any,
    ) -> None:
        self.receiving = receiving or Receiving()
        self.theirs = theirs or sending_region()
        self.name = session
        self.answers: list[msgspec.Struct] = []
        self.reader = FakeReader(self.theirs)
        self.challenge = Challenge(bytes(reversed(NONCE)))
        self.on_filled: Callable[[str, int], None] = lambda lease, end: self.receiving.finished.append((lease, end))
        self.agreed: Agreement | None = None
        self._splitter = MessageSplitter(FROM_SENDER)
        self._begins: set[tuple[int, str]] = set()
        if not self.receiving.backends:
            self.receiving.backends.append(FakeBackend(self.reader))
        if greet:
            self.greet(**changes)

    def hello(self, secret: str = SECRET, **changes: Any) -> Greeting:
        """A greeting that answers this connection's challenge."""
        proof = proof_of("sender", secret, self.challenge.nonce, NONCE, self.name)
        offers = {backend.name: backend.name.encode() for backend in self.receiving.rank.backends}
        said = Greeting(FINGERPRINT, self.name, 0, NONCE, proof, self.theirs.shape, WORD, offers)
        return msgspec.structs.replace(said, **changes)

    def greet(self, secret: str = SECRET, memory: int | None = None, **changes: Any) -> str:
        """Introduce the sender; returns the transport that was chosen."""
        said = self.hello(secret, **changes)
        require_ours(self.receiving.rank, self.challenge, said)
        agreed = self.agreed = agree(self.receiving.rank, self.challenge, said, memory)
        assert agreed.welcome.proof == proof_of("receiver", secret, self.challenge.nonce, NONCE, self.name)
        self.session = SenderSession(
            self.receiving.rank, self.receiving.grants, agreed, Pace(), self._finished, self.answers.append
        )
        return agreed.welcome.transport

    def _finished(self, lease: str, end: int) -> None:
        self.on_filled(lease, end)

    def feed(self, data: bytes) -> list[msgspec.Struct]:
        """Bytes that come together; returns what was answered to them."""
        before = len(self.answers)
        messages: Iterable[FromSender] = self._splitter.feed(data)
        self.session.take(messages)
        self.session.settle()
        return self.answers[before:]

    def say(self, *messages: msgspec.Struct) -> list[tuple[str, int]]:
        """Messages that come together; returns kinds of answers, and numbers of sends."""
        answers = self.feed(b"".join(framed(each) for message in messages for each in self._begun(message)))
        assert all(isinstance(each, Acknowledged | Refused) for each in answers)
        return [(type(each).__name__, each.send) for each in answers if isinstance(each, Acknowledged | Refused)]

    def _begun(self, message: msgspec.Struct) -> Iterable[msgspec.Struct]:
        """A message, behind the beginning of its send if that has not been said."""
        if isinstance(message, ReadDescriptors | SendEnd) and (message.send, message.lease) not in self._begins:
            self._begins.add((message.send, message.lease))
            opened = self.receiving.grants._open.get(message.lease)
            yield SendBegin(message.send, message.lease, whose(opened.grant.end if opened else SIZE))
        yield message

    def reason(self) -> str:
        """Why something was refused last."""
        last = self.answers[-1]
        assert isinstance(last, Refused)
        return last.reason

    def close(self) -> None:
        self.session.close()


def gather(places: Places) -> bytes:
    """What is there."""
    return b"".join(ctypes.string_at(address, length) for address, length in places.tolist())


def numbers(blocks: Iterable[int]) -> bytes:
    """Block numbers as read descriptors have them; negative ones and those that are too large are said, too."""
    return b"".join((block % 2**64).to_bytes(8, "little") for block in blocks)


def chunk(
    layer: int, begin: int, blocks: Sequence[int], send: int = 1, lease: str = LEASE,
    offset: int = 0, size: int = BLOCK_BYTES, part: int = 0, parts: int = 1, end: int | None = None, layers: int = 1,
) -> ReadDescriptors:  # fmt: skip
    """Slots of some layers, to be read from the sender's blocks."""
    end = begin + len(blocks) if end is None else end
    return ReadDescriptors(
        send, lease, 0, layer, layers, begin, end, numbers(blocks), offset, size, part, parts
    )  # fmt: skip


def fin(begin: int, end: int, chunks: int, send: int = 1, lease: str = LEASE, part: int = 0, parts: int = 1) -> SendEnd:
    """The end of a send."""
    return SendEnd(send, lease, begin, end, chunks, part, parts)
