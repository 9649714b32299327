"""The wire format: a fixed little-endian header, then ``nbytes`` of body.

| kind | from | fields | body |
| --- | --- | --- | --- |
| HELLO | sender, first | | a :class:`~tercet.transport.direct.Greeting` |
| WELCOME | receiver, first | begin = 1: references are taken, 0: they are not | |
| PIECE | sender | send, lease, layer, slots ``[begin, end)`` | a block of KV for each slot |
| REFERENCE | sender | as PIECE | a :class:`~tercet.transport.direct.Reference` to the blocks |
| FIN | sender | send, lease, tokens ``[begin, end)`` | |
| ACK | receiver | send | |
| REFUSED | receiver | send (0: the whole connection) | the reason, text |
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

import msgspec

from tercet.protocol import TercetError
from tercet.transport.direct import Greeting

MAGIC = b"TRC1"
MAX_PIECE_BYTES = 4 * 1024 * 1024
MAX_TEXT_BYTES = 64 * 1024
_HEADER = struct.Struct("<4sB3xQ16sIIIQ")
HEADER_BYTES = _HEADER.size
NO_LEASE = "0" * 32


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


class Header(NamedTuple):
    """One frame's header. ``send`` is a sender's number for the send, never 0 and never used twice."""

    kind: Kind
    send: int = 0
    lease: str = NO_LEASE
    layer: int = 0
    begin: int = 0
    end: int = 0
    nbytes: int = 0

    def pack(self) -> bytes:
        """Its bytes."""
        lease = bytes.fromhex(self.lease)
        return _HEADER.pack(MAGIC, self.kind, self.send, lease, self.layer, self.begin, self.end, self.nbytes)


def unpack(data: bytes | memoryview) -> Header:
    """Read a header; raises :class:`ProtocolViolation` if it is none."""
    magic, kind, send, lease, layer, begin, end, nbytes = _HEADER.unpack(data)
    if magic != MAGIC:
        raise ProtocolViolation(f"not a KV transfer: the header begins with {bytes(magic)!r}")
    try:
        return Header(Kind(kind), send, lease.hex(), layer, begin, end, nbytes)
    except ValueError:
        raise ProtocolViolation(f"unknown frame kind {kind}") from None


def hello(greeting: Greeting) -> bytes:
    """A sender's first frame."""
    body = msgspec.msgpack.encode(greeting)
    return Header(Kind.HELLO, nbytes=len(body)).pack() + body


def welcome(by_reference: bool) -> bytes:
    """A receiver's first frame."""
    return Header(Kind.WELCOME, begin=int(by_reference)).pack()


def ack(send: int) -> bytes:
    """All of a send is in place."""
    return Header(Kind.ACK, send).pack()


def refused(send: int, reason: str) -> bytes:
    """Nothing more of a send is taken."""
    body = reason.encode()[:MAX_TEXT_BYTES]
    return Header(Kind.REFUSED, send, nbytes=len(body)).pack() + body
