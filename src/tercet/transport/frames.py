"""The wire format: a fixed little-endian header, then ``nbytes`` of body.

| kind | from | fields | body |
| --- | --- | --- | --- |
| CHALLENGE | receiver, first | | random bytes, which the sender's proof must cover |
| HELLO | sender, first | | a :class:`Greeting` |
| WELCOME | receiver | | a :class:`Welcome` |
| PIECE | sender | send, lease, slots ``[begin, end)`` of layers, part of parts | that part of each block, by layers |
| REFERENCE | sender | as PIECE | a :class:`Reference`: where the receiver reads the blocks |
| FIN | sender | send, lease, tokens ``[begin, end)``, frames | |
| ACK | receiver | send | |
| REFUSED | receiver | send (0: the whole connection) | the reason, text |

Several connections may carry one session. Answers come on its first one, stream 0.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from enum import IntEnum
from typing import NamedTuple, TypeVar

import msgspec

from tercet.protocol import TercetError
from tercet.transport.recut import BlockShape
from tercet.transport.region import RegionShape

MAGIC = b"TRC4"
MAX_PIECE_BYTES = 8 * 1024 * 1024
MAX_TEXT_BYTES = 64 * 1024
MAX_GREETING_BYTES = 256 * 1024
NONCE_BYTES = 16
_HEADER = struct.Struct("<4sB3xQ16sIIIIHHQI")
HEADER_BYTES = _HEADER.size
NO_LEASE = "0" * 32
# A block's number in a reference, as NumPy calls it.
REFERRED = "<i8"

S = TypeVar("S", bound=msgspec.Struct)


class ProtocolViolation(TercetError):
    """The peer does not speak this protocol, or breaks it; its connection is closed."""

    code = "protocol_violation"
    status = 502


class Kind(IntEnum):
    """Kinds of frames."""

    HELLO = 1
    PIECE = 2
    FIN = 3
    ACK = 4
    REFUSED = 5
    WELCOME = 6
    REFERENCE = 7
    CHALLENGE = 8


class Header(NamedTuple):
    """One frame's header. ``send`` is a sender's number for the send, never 0 and never used twice.

    It is about ``layers`` layers, the first of which is ``layer``.
    """

    kind: Kind
    send: int = 0
    lease: str = NO_LEASE
    layer: int = 0
    begin: int = 0
    end: int = 0
    frames: int = 0
    part: int = 0
    parts: int = 1
    nbytes: int = 0
    layers: int = 1

    @property
    def layer_range(self) -> range:
        """The layers that it is about."""
        return range(self.layer, self.layer + self.layers)

    def pack(self) -> bytes:
        """Its bytes."""
        return _HEADER.pack(MAGIC, self.kind, self.send, bytes.fromhex(self.lease), *self[3:])


def unpack(data: bytes | memoryview) -> Header:
    """Read a header; raises :class:`ProtocolViolation` if it is none."""
    magic, kind, send, lease, *rest = _HEADER.unpack(data)
    if magic != MAGIC:
        raise ProtocolViolation(f"not a KV transfer: the header begins with {bytes(magic)!r}")
    try:
        return Header(Kind(kind), send, lease.hex(), *rest)
    except ValueError:
        raise ProtocolViolation(f"unknown frame kind {kind}") from None


class Greeting(msgspec.Struct, frozen=True, array_like=True):
    """Who a sender is, and how its memory can be read.

    ``fingerprint`` must equal the receiver's. ``session`` names the connections that belong together, ``stream`` counts
    them. ``offers`` has, for each backend that the sender has, what a receiver needs to read the sender's region, of
    which ``shape`` is the plan; ``word`` is the number of a live word that is set, so that a receiver can try.
    ``proof`` shows that the sender knows the fleet's secret. ``block`` tells how its blocks can be cut between
    tokens, if they can.
    """

    fingerprint: str
    session: str
    stream: int
    nonce: bytes
    proof: bytes
    shape: RegionShape | None = None
    word: int = 0
    offers: dict[str, bytes] = {}
    block: BlockShape | None = None


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    """How KV is to travel, ``tcp`` or the name of a backend; ``proof`` shows that the receiver knows the secret."""

    transport: str
    proof: bytes


class Reference(msgspec.Struct, frozen=True, array_like=True):
    """The sender's blocks, one for each slot, of which ``[offset, offset + size)`` is to be read in every layer.

    ``blocks`` has their numbers, each as :data:`REFERRED`.
    """

    blocks: bytes
    offset: int
    size: int


def frame(header: Header, body: bytes = b"") -> bytes:
    """A header and its body."""
    return header._replace(nbytes=len(body)).pack() + body


def decode(body: memoryview | bytes, kind: type[S]) -> S:
    """Read a body; raises :class:`ProtocolViolation` if it is no ``kind``."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    # Beside its own errors msgspec lets these two through, for text that is not UTF-8 and for what is nested deeply.
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolViolation(f"{kind.__name__}: {error}") from error


def ack(send: int) -> bytes:
    """All of a send is in place."""
    return frame(Header(Kind.ACK, send))


def refused(send: int, reason: str) -> bytes:
    """Nothing more of a send is taken."""
    return frame(Header(Kind.REFUSED, send), reason.encode()[:MAX_TEXT_BYTES])


def sender_proof(secret: str, challenge: bytes, greeting_nonce: bytes, session: str) -> bytes:
    """What a sender answers to a challenge (HMAC-SHA256, RFC 2104)."""
    return _proof(secret, "sender", challenge, greeting_nonce, session)


def receiver_proof(secret: str, challenge: bytes, greeting_nonce: bytes, session: str) -> bytes:
    """What a receiver answers to a greeting."""
    return _proof(secret, "receiver", challenge, greeting_nonce, session)


def _proof(secret: str, role: str, challenge: bytes, nonce: bytes, session: str) -> bytes:
    # MessagePack says how long each field is, so that bytes of one cannot be taken for bytes of the next.
    said = msgspec.msgpack.encode((role, challenge, nonce, session))
    return hmac.digest(secret.encode(), said, hashlib.sha256)
