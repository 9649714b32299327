"""Receivers that answer in drips, or close while somebody writes to them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import pytest

from tercet.protocol import TercetError
from tercet.transport import TransportSettings, peer
from tercet.transport.peer_messages import NONCE_BYTES, Challenge, framed
from tercet.transport.sockets import Post
from tests.unit.transport.ranks import Send, filled, new_lease, rank, settle, whole

SECONDS = 60.0


@contextmanager
def listener(serve: Callable[[socket.socket], None]) -> Generator[str]:
    """A receiver that does with each connection what it likes; its address."""
    server = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            try:
                sock, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(sock,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("before", [b"", framed(Challenge(bytes(NONCE_BYTES)))], ids=["challenge", "welcome"])
def test_a_receiver_that_answers_byte_by_byte_gains_no_time(before: bytes) -> None:
    over = threading.Event()

    def drip(sock: socket.socket) -> None:
        with sock:
            try:
                sock.sendall(before)
                for byte in framed(Challenge(bytes(10_000))):
                    if over.wait(0.05):
                        return
                    sock.sendall(bytes([byte]))
            except OSError:
                pass

    region = filled(1, 2, 64, 1)
    with listener(drip) as address, rank(region, TransportSettings("tcp", timeout=0.5)) as sender:
        try:
            began = time.monotonic()
            send = Send(sender, [address], new_lease(), whole(region))
            outcome = send.wait()
            assert isinstance(outcome, TercetError)
            assert "did not answer the greeting" in outcome.message
            assert time.monotonic() - began < 400  # a drip of 10,000 bytes takes 500 s
        finally:
            over.set()


# ---- writing to a connection and closing it ------------------------------------------------------------------------


def fill(sock: socket.socket) -> None:
    """Write until it takes no more."""
    try:
        while True:
            sock.send(bytes(64 * 1024), socket.MSG_DONTWAIT)
    except BlockingIOError:
        return


def test_a_post_does_not_wait_though_its_socket_has_a_timeout() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fill(ours)
        ours.settimeout(SECONDS)
        post = Post(ours)
        writer = threading.Thread(target=post.send, args=(b"frame",), daemon=True)
        writer.start()
        writer.join(SECONDS / 4)
        assert not writer.is_alive(), "it waits for a peer that reads nothing"


def test_a_closed_post_writes_nothing() -> None:
    """Else a frame could go to whoever has got the descriptor by then."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        post = Post(ours)
        post.close()
        with pytest.raises(ConnectionAbortedError):
            post.send(b"late")
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(100)


def test_a_socket_is_not_closed_while_another_thread_shuts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the call could reach whoever has got the descriptor by then."""
    hang_up = threading.Event()
    closed_meanwhile: list[bool] = []

    def serve(sock: socket.socket) -> None:
        with sock:
            hang_up.wait(SECONDS)

    def slow_shut(sock: socket.socket) -> None:
        if sock.fileno() < 0:
            return
        hang_up.set()  # the thread that owns the socket hears of it, and wants to close it
        deadline = time.monotonic() + 0.5
        while sock.fileno() >= 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        closed_meanwhile.append(sock.fileno() < 0)

    monkeypatch.setattr(peer, "shut", slow_shut)
    region = filled(1, 2, 64, 1)
    with listener(serve) as address:
        with rank(region, TransportSettings("tcp", timeout=SECONDS)) as sender:
            send = Send(sender, [address], new_lease(), whole(region))
            settle(lambda: sender.counters()["sessions_out"] == 1)
            settle(lambda: any(found._sockets for found in sender.sends._peers.values()))
        assert isinstance(send.wait(), TercetError)
    assert closed_meanwhile == [False]
