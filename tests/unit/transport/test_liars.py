"""Receivers that lie to a sender."""

from __future__ import annotations

import random
import secrets
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

import msgspec
import pytest

from tercet.protocol import TransferFailed
from tercet.transport import KVRegion, TransportSettings
from tercet.transport.frames import (
    HEADER_BYTES,
    MAGIC,
    NONCE_BYTES,
    Greeting,
    Header,
    Kind,
    Welcome,
    ack,
    frame,
    receiver_proof,
    refused,
    unpack,
)
from tercet.transport.sockets import parse_address
from tests.unit.transport.ranks import (
    SECONDS,
    Held,
    Send,
    filled,
    new_lease,
    rank,
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


def welcome(greeting: Greeting, challenge: bytes, transport: str = "tcp", secret: str = "") -> bytes:
    proof = receiver_proof(secret, challenge, greeting.nonce, greeting.session)
    return frame(Header(Kind.WELCOME), msgspec.msgpack.encode(Welcome(transport, proof)))


Lie = Callable[[Greeting, bytes], bytes]
LIES: dict[str, tuple[Lie, str]] = {
    "nothing more": (lambda _g, _c: b"", "closed the connection"),
    "random bytes": (lambda _g, _c: random.Random(1).randbytes(4096), "not a KV transfer"),
    "half a header": (lambda _g, _c: MAGIC, "closed the connection"),
    "another kind": (lambda _g, _c: ack(1), "says WELCOME here, not ACK"),
    "no welcome inside": (lambda _g, _c: frame(Header(Kind.WELCOME), b"\xc1"), "Welcome:"),
    "a welcome without an end": (lambda _g, _c: Header(Kind.WELCOME, nbytes=2**40).pack(), "WELCOME of"),
    "a refusal": (lambda _g, _c: refused(0, "not you"), "not you"),
    "another secret": (lambda g, c: welcome(g, c, secret="x"), "does not know this fleet's secret"),
    "a transport that was not offered": (lambda g, c: welcome(g, c, "pigeon"), "which was not offered"),
    "a sender's frame": (lambda g, c: welcome(g, c) + Header(Kind.FIN, 1).pack(), "does not say FIN here"),
    "the end": (lambda g, c: welcome(g, c) + refused(0, "enough"), "enough"),
}


@contextmanager
def lying(lie: Lie) -> Generator[str]:
    """A receiver that takes a greeting, answers with a lie, and says nothing more. Gives its address."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            challenge = secrets.token_bytes(NONCE_BYTES)
            connection.sendall(frame(Header(Kind.CHALLENGE), challenge))
            header = unpack(connection.recv(HEADER_BYTES, socket.MSG_WAITALL))
            body = connection.recv(header.nbytes, socket.MSG_WAITALL)
            connection.sendall(lie(msgspec.msgpack.decode(body, type=Greeting), challenge))
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


def test_an_acknowledgement_without_a_claim_is_none_and_one_of_no_send_is_skipped() -> None:
    source = region()
    with (
        rank(source, TransportSettings("tcp", streams=1)) as sender,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        send = Send(sender, [f"tcp://127.0.0.1:{listener.getsockname()[1]}"], new_lease(), whole(source))
        connection, _ = listener.accept()
        with connection:
            challenge = secrets.token_bytes(NONCE_BYTES)
            connection.sendall(frame(Header(Kind.CHALLENGE), challenge))
            header = unpack(connection.recv(HEADER_BYTES, socket.MSG_WAITALL))
            body = connection.recv(header.nbytes, socket.MSG_WAITALL)
            connection.sendall(welcome(msgspec.msgpack.decode(body, type=Greeting), challenge))
            send.push([0], ALL)
            piece = unpack(connection.recv(HEADER_BYTES, socket.MSG_WAITALL))
            connection.sendall(ack(piece.send - 1) + ack(piece.send))
            outcome = send.wait()
            assert isinstance(outcome, TransferFailed)
            assert "something that was not claimed" in outcome.message


@pytest.mark.parametrize("words", [b"", MAGIC], ids=["nothing", "half a header"])
def test_a_receiver_that_says_nothing_fails_its_send_in_time(words: bytes) -> None:
    source = region()
    with (
        rank(source, TransportSettings("tcp", streams=1, timeout=0.3)) as sender,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        send = Send(sender, [f"tcp://127.0.0.1:{listener.getsockname()[1]}"], new_lease(), whole(source))
        connection, _ = listener.accept()
        with connection:
            connection.sendall(words)
            outcome = send.wait()
            assert isinstance(outcome, TransferFailed)
            assert "no answer to the greeting" in outcome.message
