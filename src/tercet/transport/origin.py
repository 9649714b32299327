"""What all of a rank's sessions with receivers have in common, and how each of their connections begins."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from tercet.protocol import TransferFailed
from tercet.transport.backends import TCP
from tercet.transport.frames import (
    MAX_TEXT_BYTES,
    NONCE_BYTES,
    Greeting,
    Header,
    Kind,
    ProtocolViolation,
    Welcome,
    decode,
    frame,
    receiver_proof,
    sender_proof,
)
from tercet.transport.outgoing import OutboundCounters
from tercet.transport.recut import BlockShape
from tercet.transport.region import KVRegion
from tercet.transport.sockets import read_frame


@dataclass(frozen=True)
class Origin:
    """A rank that sends. ``offers`` are the ways by which its ``region`` can be read, with what a receiver needs."""

    region: KVRegion
    fingerprint: str
    secret: str
    timeout: float
    streams: int
    offers: Mapping[str, bytes]
    block: BlockShape | None = None
    counters: OutboundCounters = field(default_factory=OutboundCounters)

    def join(self, sock: socket.socket, session: str, stream: int, word: int = 0) -> Welcome:
        """Prove who we are; on stream 0 also say how our memory can be read, and wait for the receiver's choice.

        ``word`` is the number of a live word that is set. Raises ``OSError``, or the
        :class:`~tercet.protocol.TercetError` that says why the receiver is not one of ours, or refuses.
        """
        challenge = _expect(sock, Kind.CHALLENGE)
        nonce = secrets.token_bytes(NONCE_BYTES)
        proof = sender_proof(self.secret, challenge, nonce, session)
        greeting = Greeting(self.fingerprint, session, stream, nonce, proof)
        if stream == 0:
            greeting = msgspec.structs.replace(
                greeting, shape=self.region.shape, word=word, offers=dict(self.offers), block=self.block
            )
        sock.sendall(frame(Header(Kind.HELLO), msgspec.msgpack.encode(greeting)))
        if stream:
            return Welcome(TCP, b"")
        welcome = decode(_expect(sock, Kind.WELCOME), Welcome)
        if not secrets.compare_digest(receiver_proof(self.secret, challenge, nonce, session), welcome.proof):
            raise ProtocolViolation("secret: the receiver does not know this fleet's secret")
        if welcome.transport not in self.offers:
            raise ProtocolViolation(f"the receiver chose {welcome.transport!r:.40}, which was not offered")
        return welcome


def _expect(sock: socket.socket, kind: Kind) -> bytes:
    def too_long() -> None:
        raise TransferFailed("no answer to the greeting")

    header, body = read_frame(sock, MAX_TEXT_BYTES, too_long)
    if header.kind is Kind.REFUSED:
        raise ProtocolViolation(body.decode(errors="replace"))
    if header.kind is not kind:
        raise ProtocolViolation(f"a receiver says {kind.name} here, not {header.kind.name}")
    return body
