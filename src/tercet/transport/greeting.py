"""The first words of a connection: who the sender is, and how KV is to travel from it."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable

import msgspec

from tercet.protocol import TercetError, TransferFailed
from tercet.transport.backends import TCP, Backend, BackendUnavailable, Reader, Sender
from tercet.transport.frames import (
    Greeting,
    Header,
    Kind,
    ProtocolViolation,
    Welcome,
    frame,
    receiver_proof,
    sender_proof,
)
from tercet.transport.recut import BlockShape
from tercet.transport.rules import Rules
from tercet.transport.session import Answer, Session

logger = logging.getLogger(__name__)
Holds = Callable[[int], bool]


def greet(rules: Rules, greeting: Greeting, challenge: bytes, answer: Answer, holds: Holds) -> tuple[Session, bytes]:
    """Let a connection begin a session, or join one; returns it, and what to answer, if anything.

    Raises :class:`~tercet.transport.frames.ProtocolViolation`; no session has a connection more then.
    """
    _require_ours(rules, greeting, challenge)
    if greeting.stream:
        return rules.sessions.join(greeting.session), b""
    block = _other_block(rules.block, greeting.block)
    transport, reader = _choose(rules, greeting, block, holds)
    session = Session(greeting.session, answer, reader, greeting.shape, block)
    try:
        # Last, since further connections may join from now on, and find all of it.
        rules.sessions.begin(session)
    except BaseException:
        if reader is not None:
            reader.close()
        raise
    proof = receiver_proof(rules.secret, challenge, greeting.nonce, greeting.session)
    return session, frame(Header(Kind.WELCOME), msgspec.msgpack.encode(Welcome(transport, proof)))


def _require_ours(rules: Rules, greeting: Greeting, challenge: bytes) -> None:
    expected = sender_proof(rules.secret, challenge, greeting.nonce, greeting.session)
    if not secrets.compare_digest(expected, greeting.proof):
        raise ProtocolViolation("secret: the sender does not know this fleet's secret")
    if greeting.fingerprint != rules.fingerprint:
        raise ProtocolViolation("layout: the sender's KV layout is another one")


def _other_block(ours: BlockShape | None, theirs: BlockShape | None) -> BlockShape | None:
    """The sender's block, if it has another size than ours; by the fingerprint the rest is equal."""
    if ours is None or theirs is None or ours.tokens == theirs.tokens:
        return None
    try:
        theirs.require_sane()
    except TercetError as error:
        raise ProtocolViolation(f"layout: {error.message}") from error
    if (ours.head_size, ours.item_bytes) != (theirs.head_size, theirs.item_bytes):
        raise ProtocolViolation("layout: heads of the sender's blocks have another size")
    return theirs


def _choose(rules: Rules, greeting: Greeting, block: BlockShape | None, holds: Holds) -> tuple[str, Reader | None]:
    """The first backend that both have and that passes its check, or ``tcp``."""
    reasons: list[str] = []
    backends = rules.backends
    if block is not None:
        backends, reasons = (), ["blocks of another size are put together from what comes over tcp"]
    for backend in backends:
        offer = greeting.offers.get(backend.name)
        if offer is None or greeting.shape is None:
            reasons.append(f"{backend.name}: the sender does not offer it")
            continue
        try:
            return backend.name, _connect(backend, offer, Sender(greeting.shape, holds), greeting.word)
        except TransferFailed as error:
            reasons.append(error.message)
        except OSError as error:
            reasons.append(f"{backend.name}: the sender's memory cannot be read: {error}")
    if not (rules.tcp_allowed and TCP in greeting.offers):
        raise ProtocolViolation(
            "no transport that both sides allow works: " + "; ".join([*reasons, "tcp: not allowed"])
        )
    if reasons:
        logger.info("KV of this sender comes over tcp: %s", "; ".join(reasons))
    return TCP, None


def _connect(backend: Backend, offer: bytes, sender: Sender, word: int) -> Reader:
    sender.shape.require_sane()
    reader = backend.connect(offer, sender)
    try:
        if word == 0 or reader.word(sender.shape.word(word)) != word:
            raise BackendUnavailable(f"{backend.name}: it does not read what the sender has in its memory")
    except BaseException:
        reader.close()
        raise
    return reader
