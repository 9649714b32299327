"""Receivers that lie to a sender."""

from __future__ import annotations

import random
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from itertools import islice

import pytest

from tercet.protocol import TransferFailed
from tercet.transport import KVRegion, TransportSettings
from tercet.transport.peer_messages import (
    FROM_SENDER,
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
from tests.unit.transport.ranks import (
    KIB,
    SECONDS,
    Held,
    Send,
    filled,
    new_lease,
    rank,
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
