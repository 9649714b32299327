"""Connections that are no sender's, and those of a sender that break."""

from __future__ import annotations

import errno
import random
import socket
import struct
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager

import pytest

from tercet.protocol import TransferFailed
from tercet.transport import KVRegion, TransportSettings, receiver
from tercet.transport.peer_messages import HEADER_BYTES, MAGIC, NONCE_BYTES, Acknowledged, Challenge, SendEnd, framed
from tercet.transport.sockets import parse_address
from tests.unit.transport.ranks import (
    KIB,
    SECONDS,
    TOKENS,
    Held,
    Send,
    connect,
    content,
    filled,
    grant,
    rank,
    settle,
    transfer,
    transport_to,
    until_closed,
    whole,
)

LAYERS, BLOCKS, BYTES = 2, 8, 4 * KIB
ALL = tuple(range(BLOCKS))
TCP = TransportSettings("tcp")


def region(seed: int = 1) -> KVRegion:
    return filled(LAYERS, BLOCKS, BYTES, seed)


# ---- strangers at a receiver ---------------------------------------------------------------------------------


CHALLENGE = len(framed(Challenge(bytes(NONCE_BYTES))))
HALF = framed(SendEnd(1, "0" * 32, 0, TOKENS, 1))[:-1]


def with_header(body: bytes, nbytes: int | None = None) -> bytes:
    return struct.pack("<4sI", MAGIC, len(body) if nbytes is None else nbytes) + body


BAD_FIRST_WORDS = {
    "random bytes": random.Random(1).randbytes(4096),
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: somebody\r\n\r\n" + bytes(HEADER_BYTES),
    "an end first": framed(SendEnd(1, "0" * 32, 0, TOKENS, 1)),
    "an answer": framed(Acknowledged(1)),
    "a greeting of nonsense": with_header(b"\xc1" * 100),
    "a greeting without an end": with_header(b"", 2**32 - 1),
    "an empty greeting": with_header(b""),
}


@pytest.mark.parametrize("words", BAD_FIRST_WORDS.values(), ids=BAD_FIRST_WORDS)
def test_who_says_nonsense_is_told_so_and_left(words: bytes) -> None:
    theirs = region(2)
    with rank(theirs, TCP) as ours:
        before = Held()
        with connect(ours.addresses[0]) as stranger:
            stranger.sendall(words)
            answer = until_closed(stranger)
            assert len(answer) >= CHALLENGE
        settle(lambda: ours.counters()["connections"] == 0)
        assert ours.counters()["connections_refused"] == 1
        before.require_back()
        source = region()
        with rank(source, TCP) as sender:
            transfer(sender, source, ours, ALL, ALL)


@pytest.mark.parametrize("words", [b"", MAGIC, HALF], ids=len)
def test_who_leaves_in_the_middle_is_forgotten(words: bytes) -> None:
    with rank(region(), TCP) as ours:
        before = Held()
        with connect(ours.addresses[0]) as stranger:
            stranger.sendall(words)
        settle(lambda: ours.counters()["connections"] == 0)
        before.require_back()


@pytest.mark.slow
@pytest.mark.parametrize("words", [b"", MAGIC, HALF], ids=len)
def test_who_says_too_little_is_closed_in_time(words: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "GREETING_SECONDS", 0.3)
    with rank(region(), TCP) as ours, connect(ours.addresses[0]) as stranger:
        stranger.sendall(words)
        assert len(until_closed(stranger)) == CHALLENGE
        settle(lambda: ours.counters()["connections"] == 0)


def test_saying_it_byte_by_byte_gains_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "GREETING_SECONDS", 0.3)
    with rank(region(), TCP) as ours, connect(ours.addresses[0]) as stranger:
        assert len(stranger.recv(CHALLENGE, socket.MSG_WAITALL)) == CHALLENGE
        stranger.settimeout(0.02)  # the pace
        stranger.sendall(with_header(b"", 100_000))
        ended = False
        for _ in range(3000):
            try:
                stranger.sendall(b"\x90")
                ended = stranger.recv(1) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                ended = True
            break
        assert ended


@pytest.mark.slow
def test_of_many_strangers_those_that_waited_longest_go_and_senders_go_on() -> None:
    source, theirs = region(), region(2)
    with rank(source, TCP) as sender, rank(theirs, TCP) as ours, ExitStack() as stack:
        before = Held()
        transfer(sender, source, ours, ALL, ALL)  # in a session from before
        for number in range(300):
            stack.enter_context(connect(ours.addresses[0]))
            if number % 60 == 59:
                transfer(sender, source, ours, ALL, ALL)
        settle(lambda: ours.counters()["connections_refused"] == 300 - receiver.MAX_STRANGERS)
        settle(lambda: ours.counters()["connections"] == receiver.MAX_STRANGERS + TCP.streams + 1)
        other = region(3)
        with rank(other, TCP) as late:
            transfer(late, other, ours, ALL, ALL)
            assert content(theirs) == content(other)
        stack.close()
        sender.close()
        settle(lambda: ours.counters()["connections"] == 0)
        before.require_back()


def test_there_is_an_end_to_connections_also_of_senders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "MAX_CONNECTIONS", 5)
    source, theirs = region(), region(2)
    with rank(source, TCP) as sender, rank(theirs, TCP) as ours:
        transfer(sender, source, ours, ALL, ALL)
        settle(lambda: ours.counters()["connections"] == 3)
        other = region(3)
        with rank(other, TCP) as late:  # has room for one of its two streams, beside its messages
            send = Send(late, ours.addresses, grant(ours, ALL), whole(other))
            assert isinstance(send.wait(), TransferFailed)
        assert ours.counters()["connections_refused"] >= 1
        transfer(sender, source, ours, ALL, ALL)


def test_accepting_survives_running_out_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, failures = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files") for _ in range(2)]

    def failing(listener: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", failing)
    with rank(region(), TCP) as ours, socket.socket() as stranger:
        stranger.settimeout(SECONDS)
        stranger.connect(parse_address(ours.addresses[0]))
        assert stranger.recv(len(MAGIC), socket.MSG_WAITALL) == MAGIC
        assert not failures


# ---- a connection of several that breaks ---------------------------------------------------------------------


@contextmanager
def forwarding(address: str) -> Generator[tuple[str, Callable[[], None]]]:
    """A listener that passes one connection on to ``address``; gives its own address, and what breaks it."""
    ends: list[socket.socket] = []

    def pump(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            return

    def serve() -> None:
        try:
            here, _ = listener.accept()
        except OSError:
            return
        there = connect(address)
        ends.extend((here, there))
        for way in ((here, there), (there, here)):
            threading.Thread(target=pump, args=way, daemon=True).start()

    def cut() -> None:
        settle(lambda: len(ends) == 2)
        for end in ends:
            end.shutdown(socket.SHUT_RDWR)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}", cut
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(SECONDS)
    for end in ends:
        end.close()


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_session_that_loses_one_connection_fails_its_sends_at_once(which: int) -> None:
    source = region()
    with rank(source, TransportSettings("tcp", timeout=10 * SECONDS)) as sender, rank(region(2), TCP) as ours:
        with forwarding(ours.addresses[0]) as (by_proxy, cut):
            addresses = [ours.addresses[0]] * 3
            addresses[which] = by_proxy
            send = Send(sender, addresses, grant(ours, ALL), whole(source))
            settle(lambda: transport_to(sender, addresses) == "tcp" and ours.counters()["connections"] == 3)
            send.push([0], ALL)
            settle(lambda: ours.counters()["chunks_received"] == 1)
            cut()
            assert isinstance(send.wait(), TransferFailed)
        settle(lambda: ours.counters()["connections"] == ours.counters()["receives_active"] == 0)
        transfer(sender, source, ours, ALL, ALL)
