"""Receivers that lie to a sender."""

from __future__ import annotations

import errno
import random
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice

import pytest

from tercet.protocol import TransferFailed
from tercet.transport import KVRegion, TransportSettings, receiver
from tercet.transport.peer_messages import (
    FROM_SENDER,
    HEADER_BYTES,
    MAGIC,
    NONCE_BYTES,
    Acknowledged,
    Challenge,
    Greeting,
    MessageSplitter,
    ReadDescriptors,
    ReadRequest,
    Refused,
    SendBegin,
    SendEnd,
    Welcome,
    framed,
    proof_of,
)
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
    new_lease,
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


def welcome(greeting: Greeting, challenge: bytes, transport: str = "tcp", secret: str = "") -> bytes:
    proof = proof_of("receiver", secret, challenge, greeting.nonce, greeting.session)
    return framed(Welcome(transport, proof))


def with_header(body: bytes, nbytes: int | None = None) -> bytes:
    return struct.pack("<4sI", MAGIC, len(body) if nbytes is None else nbytes) + body


def introduce(connection: socket.socket) -> tuple[Greeting, bytes]:
    """Challenge a sender; returns its greeting, and the challenge."""
    challenge = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(framed(Challenge(challenge)))
    greeting = next(heard(connection))
    assert isinstance(greeting, Greeting)
    return greeting, challenge


def heard(connection: socket.socket) -> Iterator[object]:
    """What a sender says."""
    splitter = MessageSplitter(FROM_SENDER)
    while data := connection.recv(4096):
        yield from splitter.feed(data)


def first_chunk(connection: socket.socket) -> ReadDescriptors:
    """The first chunk of a sender's only send."""
    begin, chunk = islice(heard(connection), 2)
    assert isinstance(begin, SendBegin)
    assert isinstance(chunk, ReadDescriptors)
    return chunk


Lie = Callable[[Greeting, bytes], bytes]
LIES: dict[str, tuple[Lie, str]] = {
    "nothing more": (lambda _g, _c: b"", "closed the connection"),
    "random bytes": (lambda _g, _c: random.Random(1).randbytes(4096), "not a KV transfer"),
    "half a header": (lambda _g, _c: MAGIC, "closed the connection"),
    "another kind": (lambda _g, _c: framed(Acknowledged(1)), "must send Welcome here, not Acknowledged"),
    "nonsense": (lambda _g, _c: with_header(b"\xc1"), "not a message"),
    "a welcome without an end": (lambda _g, _c: with_header(b"", 2**31), "a message of"),
    "a refusal": (lambda _g, _c: framed(Refused(0, "not you")), "not you"),
    "another secret": (lambda g, c: welcome(g, c, secret="x"), "does not know this fleet's secret"),
    "a transport that was not offered": (lambda g, c: welcome(g, c, "pigeon"), "which was not offered"),
    "a sender's frame": (lambda g, c: welcome(g, c) + framed(SendEnd(1, "0" * 32, 0, 1, 1)), "not a message"),
    "a challenge again": (lambda g, c: welcome(g, c) + framed(Challenge(c)), "must not send Challenge here"),
    "the end": (lambda g, c: welcome(g, c) + framed(Refused(0, "enough")), "enough"),
}


@contextmanager
def lying(lie: Lie) -> Generator[str]:
    """A receiver that takes a greeting, answers with a lie, and says nothing more. Gives its address."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(lie(*introduce(connection)))
            with suppress(OSError):  # the other end may be gone already
                connection.shutdown(socket.SHUT_WR)
            until_closed(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(SECONDS)
        assert not thread.is_alive()


@pytest.mark.parametrize("name", LIES)
def test_a_receiver_that_lies_fails_its_send_with_the_reason(name: str) -> None:
    lie, reason = LIES[name]
    source = region()
    with rank(source, TransportSettings("tcp", streams=1)) as sender:
        before = Held()
        with lying(lie) as address:
            send = Send(sender, [address], new_lease(), whole(source))
            send.push(range(LAYERS), ALL)
            outcome = send.wait()
            assert isinstance(outcome, TransferFailed)
            assert reason in outcome.message
        before.require_back()
        assert len(send.outcomes) == 1


@contextmanager
def connected(timeout: float = 30.0) -> Generator[tuple[KVRegion, Send, socket.socket, socket.socket]]:
    """A send of a region to a listener, and the connection that its sender has opened."""
    source = region()
    with (
        rank(source, TransportSettings("tcp", streams=1, timeout=timeout)) as sender,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        send = Send(sender, [f"tcp://127.0.0.1:{listener.getsockname()[1]}"], new_lease(), whole(source))
        connection, _ = listener.accept()
        with connection:
            yield source, send, listener, connection


@contextmanager
def pushing() -> Generator[tuple[KVRegion, Send, socket.socket, ReadDescriptors]]:
    """The first rank's part of a send that has been offered, and the connection on which its bytes are read."""
    with connected() as (source, send, listener, connection):
        connection.sendall(welcome(*introduce(connection)))
        data, _ = listener.accept()
        with data:
            introduce(data)
            send.push([0], ALL)
            yield source, send, data, first_chunk(connection)


def test_an_acknowledgement_before_the_end_is_none_and_one_of_no_send_is_skipped() -> None:
    with connected() as (_, send, _, connection):
        connection.sendall(welcome(*introduce(connection)))
        send.push([0], ALL)
        chunk = first_chunk(connection)
        connection.sendall(framed(Acknowledged(chunk.send - 1)) + framed(Acknowledged(chunk.send)))
        outcome = send.wait()
        assert isinstance(outcome, TransferFailed)
        assert "an incomplete send" in outcome.message


@pytest.mark.slow
@pytest.mark.parametrize("words", [b"", MAGIC], ids=["nothing", "half a header"])
def test_a_receiver_that_says_nothing_fails_its_send_in_time(words: bytes) -> None:
    with connected(timeout=0.3) as (_, send, _, connection):
        connection.sendall(words)
        outcome = send.wait()
        assert isinstance(outcome, TransferFailed)
        assert "did not answer the greeting" in outcome.message


@pytest.mark.parametrize(
    "asked",
    [
        lambda chunk: ReadRequest(chunk.send, 0, chunk.nbytes - 1),
        lambda chunk: ReadRequest(chunk.send, 0, chunk.nbytes + 1),
        lambda chunk: ReadRequest(chunk.send, 1, chunk.nbytes),
        lambda chunk: ReadRequest(chunk.send, 2**32 - 1, chunk.nbytes),
        lambda chunk: ReadRequest(chunk.send + 1, 0, 2**39),
    ],
    ids=["fewer bytes", "more bytes", "next chunk", "far chunk", "no end of bytes"],
)
def test_a_receiver_that_asks_for_what_was_not_offered_gets_nothing(
    asked: Callable[[ReadDescriptors], ReadRequest],
) -> None:
    with pushing() as (_, send, data, chunk):
        data.sendall(framed(asked(chunk)))
        assert until_closed(data) == b""
        assert isinstance(send.wait(), TransferFailed)


def test_of_a_send_that_is_over_nothing_but_that_is_sent() -> None:
    with pushing() as (source, send, data, chunk):
        data.sendall(framed(ReadRequest(chunk.send, 0, chunk.nbytes)))
        word = chunk.send.to_bytes(8, "little")
        sent = word + bytes(source.blocks(0, 0, BLOCKS)) + word
        assert data.recv(len(sent), socket.MSG_WAITALL) == sent
        send.cancel()
        data.sendall(framed(ReadRequest(chunk.send, 0, chunk.nbytes)))
        assert data.recv(len(word), socket.MSG_WAITALL) == bytes(len(word))
        with pytest.raises(BlockingIOError):
            data.recv(1, socket.MSG_DONTWAIT)


# Connections that are no sender's, and those of a sender that break.

# ---- strangers at a receiver ---------------------------------------------------------------------------------


CHALLENGE = len(framed(Challenge(bytes(NONCE_BYTES))))
HALF = framed(SendEnd(1, "0" * 32, 0, TOKENS, 1))[:-1]


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
