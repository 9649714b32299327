"""One rank: its memory, settings and counters, which both directions need, and how it introduces itself to a peer.

Both sides prove that they know the fleet's secret, and the receiver chooses the transport: the first of its backends
that the sender offers and that reads a word of the sender's memory correctly.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from tercet.protocol import TercetError, TransferFailed
from tercet.protocol.access import secrets_of
from tercet.settings import Settings
from tercet.settings.declaration import FixedPort
from tercet.transport.backends import AUTO, tcp
from tercet.transport.backends.reading import Backend, BackendUnavailable, Batch, Reader, SendingPeer
from tercet.transport.peer_messages import NONCE_BYTES, Challenge, Greeting, ProtocolViolation, Welcome, proof_of
from tercet.transport.region import BlockShape, HostPages, KVMemory, KVRegion, RegionShape, rearranged
from tercet.transport.staged import StagedMemory

logger = logging.getLogger(__name__)


class TransportSettings(Settings, frozen=True, rename=lambda name: name):
    """Settings of sending and receiving."""

    transport: str = AUTO  # or a backend's name
    # Addresses to listen on; a sender spreads its connections over them.
    hosts: Annotated[tuple[str, ...], Meta(min_length=1)] = ("127.0.0.1",)
    ports: tuple[FixedPort, ...] = ()  # those to try, any if empty
    streams: Annotated[int, Meta(ge=1, le=tcp.MAX_STREAMS)] = 2  # connections per peer over which ``tcp`` reads
    secret: str = ""  # the fleet's
    timeout: Annotated[float, Meta(gt=0)] = 30.0  # seconds without progress after which a send fails
    receive_limit: Annotated[float, Meta(ge=0)] = 0.0  # most bytes per second that are received, 0 for no limit


class TransportCounters:
    """Counters of a rank since its start: bytes, chunks and sends that it has sent, received or refused.

    Thread-safe.
    """

    NAMES: tuple[str, ...] = (
        "bytes_sent", "chunks_sent", "sends_done", "sends_failed", "sessions_lost",
        "bytes_received", "chunks_received", "chunks_refused", "receives_done", "receives_refused",
        "receives_dropped", "connections_refused",
    )  # fmt: skip

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = dict.fromkeys(self.NAMES, 0)

    def count(self, **increments: int) -> None:
        with self._lock:
            for name, increment in increments.items():
                self._values[name] += increment

    def read(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._values)


@dataclass(frozen=True)
class LocalRank:
    """One rank. A peer must have the same ``fingerprint`` and secret."""

    region: KVRegion
    fingerprint: str
    settings: TransportSettings
    backends: Sequence[Backend]  # the best first
    block: BlockShape | None = None  # how its blocks can be cut between tokens
    staged: StagedMemory | None = None  # holds the KV if the region has only the generation words
    counters: TransportCounters = field(default_factory=TransportCounters)

    @property
    def memory(self) -> KVMemory:
        """The memory that holds the rank's KV."""
        return self.staged or HostPages(self.region)


# ---- the sender's side -----------------------------------------------------------------------------------------------


def greet(
    rank: LocalRank, challenge: Challenge, session: str, stream: int, offers: dict[str, bytes], word: int
) -> Greeting:
    """Return a greeting that proves our identity; in a session's first one, ``offers`` has ways to read our memory.

    ``word`` is the number of a generation word that is set.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    secret = next(iter(secrets_of(rank.settings.secret)), "")
    proof = proof_of("sender", secret, challenge.nonce, nonce, session)
    greeting = Greeting(rank.fingerprint, session, stream, nonce, proof)
    if stream:
        return greeting
    return msgspec.structs.replace(greeting, shape=rank.region.shape, word=word, offers=offers, block=rank.block)


def chosen(rank: LocalRank, challenge: Challenge, greeting: Greeting, welcome: Welcome) -> str:
    """Return the receiver's choice; raise :class:`ProtocolViolation` if the receiver does not belong to the fleet."""
    exchange = challenge.nonce, greeting.nonce, greeting.session
    known = secrets_of(rank.settings.secret) or ("",)
    if not any(secrets.compare_digest(proof_of("receiver", each, *exchange), welcome.proof) for each in known):
        raise ProtocolViolation("secret: the receiver does not know this fleet's secret")
    if welcome.transport not in greeting.offers:
        raise ProtocolViolation(f"the receiver chose {welcome.transport!r:.40}, which was not offered")
    return welcome.transport


# ---- the receiver's side ---------------------------------------------------------------------------------------------


class Agreement(NamedTuple):
    """A receiver's record of a sender: its session, its region, and the reader for it.

    ``block`` is None unless the sender's blocks have another size than ours.
    """

    session: str
    shape: RegionShape
    reader: Reader
    block: BlockShape | None
    welcome: Welcome


def require_ours(rank: LocalRank, challenge: Challenge, greeting: Greeting) -> None:
    """Raise :class:`ProtocolViolation` unless a sender knows the secret and has KV of our layout."""
    if _shared_secret(rank, challenge, greeting) is None:
        raise ProtocolViolation("secret: the sender does not know this fleet's secret")
    if greeting.fingerprint != rank.fingerprint:
        raise ProtocolViolation("layout: the sender's KV layout differs from the receiver's")


def _shared_secret(rank: LocalRank, challenge: Challenge, greeting: Greeting) -> str | None:
    """Return the secret that a sender has proved; empty without secrets, None if the proof is wrong."""
    # During a rotation there are two secrets, and the answer must be proved by the one that the sender knows.
    exchange = challenge.nonce, greeting.nonce, greeting.session
    known = secrets_of(rank.settings.secret) or ("",)
    fits = [each for each in known if secrets.compare_digest(proof_of("sender", each, *exchange), greeting.proof)]
    return fits[0] if fits else None


def agree(rank: LocalRank, challenge: Challenge, greeting: Greeting, memory: int | None) -> Agreement:
    """Choose how to read KV of a sender, which passed a descriptor of its ``memory``, or None.

    Raises :class:`ProtocolViolation` if no common transport works.
    """
    if greeting.shape is None:
        raise ProtocolViolation("the sender's greeting does not describe its region")
    # The sender's block if its size differs from ours, else None; the fingerprint covers the rest.
    ours, block = rank.block, greeting.block
    if ours is None or block is None or ours.tokens == block.tokens:
        block = None
    else:
        try:
            block.require_sane()
        except TercetError as error:
            raise ProtocolViolation(f"layout: {error.message}") from error
        if (ours.head_size, ours.item_bytes) != (block.head_size, block.item_bytes):
            raise ProtocolViolation("layout: heads of the sender's blocks have another size")
    try:
        greeting.shape.require_sane()
        order = rearranged(greeting.shape.order, rank.region.shape.order)
        if order is not None and rank.staged is None:
            raise TransferFailed("layout: the items of the sender's blocks have another order")
    except TransferFailed as error:
        raise ProtocolViolation(error.message) from error
    if block is not None and block.block_bytes != greeting.shape.block_bytes:
        raise ProtocolViolation("layout: the sender's blocks have another size than its greeting says")
    backend, reader = _choose(rank, greeting, SendingPeer(greeting.shape, memory), block)
    # That of the sender: during a rotation it may know the old one only.
    secret = _shared_secret(rank, challenge, greeting) or ""
    proof = proof_of("receiver", secret, challenge.nonce, greeting.nonce, greeting.session)
    # Blocks of another size, and those of a device, pass through buffers.
    longest = tcp.LOCAL_CHUNK_BYTES if block is None and rank.staged is None else tcp.MAX_CHUNK_BYTES
    return Agreement(greeting.session, greeting.shape, reader, block, Welcome(backend.name, proof, longest))


def _choose(
    rank: LocalRank, greeting: Greeting, sender: SendingPeer, block: BlockShape | None
) -> tuple[Backend, Reader]:
    """Return the first common backend that passes its check, with its reader."""
    reasons: list[str] = []
    for backend in rank.backends:
        try:
            reader = _connect(rank, backend, greeting, sender, block)
        except TransferFailed as error:
            reasons.append(error.message)
        except OSError as error:
            reasons.append(f"{backend.name}: the sender's memory cannot be read: {error}")
        else:
            if reasons:
                logger.info("KV of this sender is read over %s: %s", backend.name, "; ".join(reasons))
            return backend, reader
    raise ProtocolViolation("no transport that both sides allow works: " + "; ".join(reasons))


def _connect(
    rank: LocalRank, backend: Backend, greeting: Greeting, sender: SendingPeer, block: BlockShape | None
) -> Reader:
    offer = greeting.offers.get(backend.name)
    if offer is None:
        raise BackendUnavailable(f"{backend.name}: the sender does not offer it")
    if block is not None and not backend.stages:
        raise BackendUnavailable(f"{backend.name}: does not convert blocks of another size")
    reader = backend.connect(offer, sender)
    try:  # it must read the word that the sender has set
        empty = Batch(greeting.word, "", rank.region.bytes)
        # A backend that connects may still read other memory, such as that of a process with the same number.
        if greeting.word == 0 or not reader.read(empty, lambda step: step()):
            raise BackendUnavailable(f"{backend.name}: does not read the sender's memory correctly")
    except BaseException:
        reader.close()
        raise
    return reader
