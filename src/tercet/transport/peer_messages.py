"""Messages between two ranks, each a short header and a MessagePack body.

The sender connects, and then speaks first except for the receiver's challenge. One send, over the session's connection
for messages and, with ``tcp``, one of its others::

    receiver                                              sender
    Challenge  nonce                                 ──▶
                                                     ◀──  Greeting  identity, offers (on a Unix socket: + descriptor)
    Welcome    the chosen transport, longest chunk   ──▶
                                                     ◀──  SendBegin        content of the KV, planes
                                                     ◀──  ReadDescriptors  a chunk: layers, slots, the sender's blocks
    ReadRequest  on another connection, only tcp     ──▶
                                                     ◀──  WORD  bytes of the chunk  WORD
                                                     ◀──  SendEnd          the range, the number of chunks
    Acknowledged, or Refused                         ──▶

The words around the bytes are the send's number if the blocks are pinned, before and after they are read; only 0
follows a request for a send that has ended.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Annotated, Generic, Literal, TypeVar

import msgspec

from tercet.protocol import Content, TercetError
from tercet.protocol.sse import BrokenFrame, FrameSplitter, ItemTooLong
from tercet.protocol.wire import UNREADABLE
from tercet.transport.region import BlockShape, RegionShape

MAGIC = b"TRC8"
MAX_MESSAGE_BYTES = 1024 * 1024
NONCE_BYTES = 16
WORD = struct.Struct("<Q")
# NumPy's type of a block's number in read descriptors.
BLOCK_NUMBER = "<i8"
_HEADER = struct.Struct("<4sI")  # followed by that number of bytes
HEADER_BYTES = _HEADER.size

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
# A sender's number for a send, never used twice by its process.
SendNumber = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Lease = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
Session = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
# A place in a distributed trace; the limit leaves space for additions by later versions of the header.
Traceparent = Annotated[str, msgspec.Meta(max_length=128)]
M = TypeVar("M")


class ProtocolViolation(TercetError, status=502):
    """The peer does not use this protocol, or violates it; its connection is closed."""


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Random bytes, new for each connection."""

    nonce: bytes


class Greeting(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A sender's identity, and the ways to read its memory."""

    fingerprint: str  # must equal the receiver's
    session: Session  # names the connections that belong together
    stream: Count  # numbers them; the first one carries the messages
    nonce: bytes
    proof: bytes  # shows that the sender knows the fleet's secret
    shape: RegionShape | None = None  # the layout of the sender's region
    word: int = 0  # number of a generation word that is set, so that a receiver can test reading
    offers: dict[str, bytes] = {}  # for each transport of the sender, what a receiver needs to read the region
    block: BlockShape | None = None  # how its blocks can be cut between tokens


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The transport that the receiver chose; ``proof`` shows that it knows the secret."""

    transport: str
    proof: bytes
    longest: Count = 8 * 1024 * 1024  # bytes of a chunk that the receiver takes over ``tcp``


class SendBegin(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """The first message of a send: the content of its KV. The send ends at ``content.end`` or before."""

    send: SendNumber
    lease: Lease
    content: Content
    planes: tuple[tuple[Count, Count], ...] = ()  # the receiver's planes that it fills, as ranges; all if empty
    traceparent: Traceparent = ""  # the sender's place in a sampled trace (W3C Trace Context), empty without one


class ReadDescriptors(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The source of one chunk: the KV for slots ``[begin, end)`` of ``layers`` layers, from ``layer`` on."""

    send: SendNumber
    lease: Lease
    chunk: Count  # numbers the send's chunks
    layer: Count
    layers: Count
    begin: Count
    end: Count
    blocks: bytes = b""  # the sender's block for each slot, the same in every layer, each as :data:`BLOCK_NUMBER`
    offset: Count = 0  # of each block, [offset, offset + size) is read
    size: Count = 0
    part: Count = 0  # into this part of ``parts`` equal ones of the receiver's block
    parts: Count = 1
    unit: Count = 0  # tokens in the sender's slots, 0 if as many as in the receiver's
    source: Count | None = None  # the sender's number for the first layer, if it differs from the receiver's

    @property
    def sources(self) -> range:
        """The sender's numbers for the layers."""
        first = self.layer if self.source is None else self.source
        return range(first, first + self.layers)

    @property
    def nbytes(self) -> int:
        """Number of bytes of KV."""
        return self.layers * (self.end - self.begin) * self.size


class SendEnd(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The end of a send: ``chunks`` chunks hold part ``part`` of ``parts`` of all blocks of ``[begin, end)``."""

    send: SendNumber
    lease: Lease
    begin: Count
    end: Count
    chunks: Count
    part: Count = 0
    parts: Count = 1
    unit: Count = 0


class Acknowledged(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Answer to a send: all of it is in place."""

    send: SendNumber


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Answer to a send: no more of it is accepted. With send 0, the connection is closed."""

    send: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    reason: str


class ReadRequest(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Request for the ``nbytes`` bytes of a send's chunk."""

    send: SendNumber
    chunk: Count
    nbytes: Annotated[int, msgspec.Meta(ge=1, lt=2**40)]


FromSender = Greeting | SendBegin | ReadDescriptors | SendEnd
FromReceiver = Challenge | Welcome | Acknowledged | Refused
FROM_SENDER: msgspec.msgpack.Decoder[FromSender] = msgspec.msgpack.Decoder(FromSender)
FROM_RECEIVER: msgspec.msgpack.Decoder[FromReceiver] = msgspec.msgpack.Decoder(FromReceiver)
REQUESTS: msgspec.msgpack.Decoder[ReadRequest] = msgspec.msgpack.Decoder(ReadRequest)


def framed(message: msgspec.Struct) -> bytes:
    """Encode a message with its header."""
    body = msgspec.msgpack.encode(message)
    return _HEADER.pack(MAGIC, len(body)) + body


class MessageSplitter(Generic[M]):
    """Splitter of received bytes into messages of the types that ``decoder`` knows."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self._decoder = decoder
        self._frames = FrameSplitter(MAX_MESSAGE_BYTES, _HEADER, MAGIC)

    @property
    def held(self) -> int:
        """Number of bytes of the incomplete message."""
        return self._frames.held

    def feed(self, data: bytes) -> list[M]:
        """Return the messages that ``data`` completes; raise :class:`ProtocolViolation` for an invalid one."""
        try:
            return [self._decoder.decode(body) for body in self._frames.split(data)]
        except BrokenFrame as error:
            raise ProtocolViolation(f"not a KV transfer: {error}") from error
        except ItemTooLong as error:
            raise ProtocolViolation(str(error)) from error
        except UNREADABLE as error:
            raise ProtocolViolation(f"this is not a message of the KV protocol: {error}") from error


def proof_of(role: Literal["sender", "receiver"], secret: str, challenge: bytes, nonce: bytes, session: str) -> bytes:
    """Return an end's proof that it knows the secret; ``nonce`` is the greeting's (HMAC-SHA256, RFC 2104)."""
    # MessagePack encodes the length of each field, so bytes of one cannot be taken for bytes of the next.
    message = msgspec.msgpack.encode((role, challenge, nonce, session))
    return hmac.digest(secret.encode(), message, hashlib.sha256)
