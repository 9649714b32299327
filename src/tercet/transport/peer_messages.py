"""Messages between two ranks, each a short header and a MessagePack body.

The receiver begins with a :class:`Challenge`, the sender answers with its :class:`Greeting` (on a Unix socket with the
descriptor of its memory), and the receiver with a :class:`Welcome`. From then on the sender begins sends
(:class:`SendBegin`), describes their chunks (:class:`ReadDescriptors`) and ends them (:class:`SendEnd`), which is
:class:`Acknowledged` or :class:`Refused`.

A session has one connection for these messages. With ``tcp`` it has further ones, which carry only :class:`ReadRequest`
and its answers: the send's number in :data:`WORD`, the chunk's bytes, and the number again if the blocks were still
pinned; or only 0 for a send that has ended.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Annotated, Generic, Literal, TypeVar

import msgspec

from tercet.protocol import Content, TercetError
from tercet.protocol.splitting import BrokenFrame, FrameSplitter, ItemTooLong
from tercet.protocol.wire import UNREADABLE
from tercet.transport.layouts import BlockShape
from tercet.transport.region import RegionShape

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
    """A sender's identity, and the ways to read its memory.

    ``fingerprint`` must equal the receiver's. ``session`` names the connections that belong together, ``stream``
    numbers them; the first one carries the messages. ``offers`` has, for each transport of the sender, the data that a
    receiver needs to read the sender's region, whose layout is ``shape``; ``word`` is the number of a generation word
    that is set, so that a receiver can test reading. ``proof`` shows that the sender knows the fleet's secret.
    ``block`` describes how its blocks can be cut between tokens, or is None.
    """

    fingerprint: str
    session: Session
    stream: Count
    nonce: bytes
    proof: bytes
    shape: RegionShape | None = None
    word: int = 0
    offers: dict[str, bytes] = {}
    block: BlockShape | None = None


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The transport that the receiver chose; ``proof`` shows that it knows the secret."""

    transport: str
    proof: bytes


class SendBegin(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """The first message of a send: the content of its KV. The send ends at ``content.end`` or before.

    ``planes`` are the receiver's planes that it fills, as ranges ``[begin, end)``; all of them if empty.
    ``traceparent`` is the sender's place in a sampled trace (W3C Trace Context), empty without one; a receiver that
    does not know the field ignores it.
    """

    send: SendNumber
    lease: Lease
    content: Content
    planes: tuple[tuple[Count, Count], ...] = ()
    traceparent: Traceparent = ""


class ReadDescriptors(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The source of one chunk: the KV for slots ``[begin, end)`` of ``layers`` layers, from ``layer`` on.

    ``blocks`` has the sender's block for each slot, the same in every layer, each as :data:`BLOCK_NUMBER`. Of each
    block, ``[offset, offset + size)`` is read, into part ``part`` of ``parts`` equal ones of the receiver's block.
    ``chunk`` numbers the send's chunks. ``unit`` is the number of tokens in the sender's slots, 0 if equal to the
    receiver's. ``source`` is the sender's number for the first layer, if it differs from the receiver's.
    """

    send: SendNumber
    lease: Lease
    chunk: Count
    layer: Count
    layers: Count
    begin: Count
    end: Count
    blocks: bytes = b""
    offset: Count = 0
    size: Count = 0
    part: Count = 0
    parts: Count = 1
    unit: Count = 0
    source: Count | None = None

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
    said = msgspec.msgpack.encode((role, challenge, nonce, session))
    return hmac.digest(secret.encode(), said, hashlib.sha256)
