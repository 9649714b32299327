"""Offers of memory that is not the sender's, or not to be read."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager

import msgspec
import pytest

from tercet.protocol import TransferFailed
from tercet.transport import KVRegion, SendReport, Target, TransportSettings
from tercet.transport.backends.host import held_by
from tercet.transport.base import OnDone
from tercet.transport.origin import Origin
from tercet.transport.region import TAIL_BYTES
from tercet.transport.sender import Sender
from tercet.transport.sockets import parse_address
from tests.unit.transport.ranks import (
    FINGERPRINT,
    SECONDS,
    TOKENS,
    Outcome,
    content,
    filled,
    grant,
    rank,
    rank_process,
    settle,
    whole,
)

KIB = 1024
LAYERS, BLOCKS, BYTES = 2, 8, 4 * KIB
ALL = tuple(range(BLOCKS))
TCP = TransportSettings("tcp")


def region(seed: int = 1) -> KVRegion:
    return filled(LAYERS, BLOCKS, BYTES, seed)


def connect(address: str) -> socket.socket:
    return socket.create_connection(parse_address(address), SECONDS)


def until_closed(sock: socket.socket) -> bytes:
    """What comes until the other side closes."""
    found = b""
    try:
        while more := sock.recv(4096):
            found += more
    except ConnectionError:
        return found
    return found


@contextmanager
def offering(source: KVRegion, offer: bytes) -> Generator[Callable[[Target, OnDone], str]]:
    """A sender that offers something of its own choosing as its memory; what it gives opens a send."""
    origin = Origin(source, FINGERPRINT, "", SECONDS, 1, {"host": offer, "tcp": b""})
    sender = Sender(origin)

    def begin(target: Target, on_done: OnDone) -> str:
        sender.open("send", target, on_done)
        sender.push("send", range(LAYERS), 0, ALL)
        sender.finish("send", 0, BLOCKS * TOKENS)
        settle(lambda: sender.transport_to(target.addresses))
        return sender.transport_to(target.addresses) or ""

    try:
        yield begin
    finally:
        sender.close()
        source.close()


def sent_with(offer: bytes, source: KVRegion, theirs: KVRegion) -> str:
    """How KV travels from a sender with such an offer; it must arrive."""
    with rank(theirs, TransportSettings("auto")) as ours, offering(source, offer) as begin:
        lease, outcomes = grant(ours, ALL), list[Outcome]()
        chosen = begin(Target(ours.addresses, lease, whole(source)), outcomes.append)
        settle(lambda: outcomes)
        assert isinstance(outcomes[0], SendReport), outcomes
        assert ours.revoke(lease) == BLOCKS * TOKENS
        assert content(theirs) == content(source)
        return chosen


def offer_of(pid: int, fd: int) -> bytes:
    return msgspec.msgpack.encode((pid, fd))


def unsealed(size: int) -> int:
    fd = os.memfd_create("test")
    os.ftruncate(fd, size)
    return fd


def test_memory_of_the_sender_is_read() -> None:
    source = region()
    assert sent_with(offer_of(os.getpid(), source.fd), source, region(2)) == "host"


@pytest.mark.parametrize(
    "offer",
    [b"", b"\xc1", offer_of(-1, 0), offer_of(0, 0), offer_of(2**22 + 1, 0), offer_of(os.getpid(), 2**20)],
    ids=["nothing", "nonsense", "no process", "process 0", "a process that is not there", "a file that is not there"],
)
def test_an_offer_that_is_none_is_left_for_tcp(offer: bytes) -> None:
    assert sent_with(offer, region(), region(2)) == "tcp"


def test_a_file_that_could_shrink_is_left_for_tcp() -> None:
    source = region()
    fd = unsealed(source.shape.size)
    try:
        assert sent_with(offer_of(os.getpid(), fd), source, region(2)) == "tcp"
    finally:
        os.close(fd)


@pytest.mark.parametrize("blocks", [BLOCKS - 4, BLOCKS + 4])
def test_a_file_of_another_size_is_left_for_tcp(blocks: int) -> None:
    other = filled(LAYERS, blocks, BYTES, 3)
    assert other.shape.size > TAIL_BYTES
    assert sent_with(offer_of(os.getpid(), other.fd), region(), region(2)) == "tcp"
    other.close()


def test_a_sealed_file_that_is_not_the_senders_region_is_left_for_tcp() -> None:
    other = region(3)
    assert sent_with(offer_of(os.getpid(), other.fd), region(), region(2)) == "tcp"
    other.close()


def test_a_pipe_is_left_for_tcp() -> None:
    ends = os.pipe()
    try:
        assert sent_with(offer_of(os.getpid(), ends[0]), region(), region(2)) == "tcp"
    finally:
        for end in ends:
            os.close(end)


def test_memory_of_another_process_is_left_for_tcp() -> None:
    with rank_process(TCP, LAYERS, BLOCKS, BYTES) as victim:
        assert sent_with(offer_of(victim.pid, victim.fd), region(), region(2)) == "tcp"


def test_where_only_host_is_allowed_the_reason_is_told() -> None:
    source, theirs = region(), region(2)
    before = content(theirs)
    with rank_process(TCP, LAYERS, BLOCKS, BYTES) as victim, rank(theirs, TransportSettings("host")) as ours:
        origin = Origin(source, FINGERPRINT, "", SECONDS, 1, {"host": offer_of(victim.pid, victim.fd)})
        sender, outcomes = Sender(origin), list[Outcome]()
        sender.open("send", Target(ours.addresses, grant(ours, ALL), whole(source)), outcomes.append)
        settle(lambda: outcomes)
        assert isinstance(outcomes[0], TransferFailed)
        assert "not a process that this one can see" in outcomes[0].message
        assert content(theirs) == before
        sender.close()
    source.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_only_the_process_at_the_other_end_holds_a_connection(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        socket.create_server((host, 0), family=family) as listener,
        rank_process(TCP, LAYERS, BLOCKS, BYTES) as child,
        socket.create_connection(listener.getsockname()[:2]) as ours,
    ):
        connection, _ = listener.accept()
        with connection:
            assert held_by(os.getpid(), connection)
            assert not any(held_by(pid, connection) for pid in (child.pid, 1, -1))
            ours.close()
            assert not held_by(os.getpid(), connection)
