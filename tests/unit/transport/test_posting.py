"""Frames that callers write, and what the connection did not take at once."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tercet.transport.sockets import LOCAL_CONGESTION, Post, shut, tune

TIMEOUT = 60.0


class Wire:
    """A post with small buffers behind it, and a thread that delivers."""

    def __init__(self, timeout: float = TIMEOUT) -> None:
        self.sock, self.theirs = socket.socketpair()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.post = Post(self.sock)
        self.moves = False  # whether something else moves, at each moment
        self.ended: list[BaseException | None] = []
        self.thread = threading.Thread(target=self._deliver, args=(timeout,))
        self.thread.start()

    def _deliver(self, timeout: float) -> None:
        try:
            self.post.deliver(timeout, lambda: time.monotonic() if self.moves else 0.0)
        except OSError as error:
            self.ended.append(error)
        else:
            self.ended.append(None)

    def read(self, size: int) -> bytes:
        self.theirs.settimeout(TIMEOUT)
        data = b""
        while len(data) < size:
            data += self.theirs.recv(size - len(data))
        return data

    def close(self) -> None:
        self.post.close()
        self.thread.join(TIMEOUT)
        assert not self.thread.is_alive()
        self.sock.close()
        self.theirs.close()


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire()
    yield wire
    wire.close()


def test_a_frame_is_there_before_send_returns(wire: Wire) -> None:
    wire.post.send(b"frame")
    assert wire.theirs.recv(100, socket.MSG_DONTWAIT) == b"frame"


def test_what_the_connection_does_not_take_follows_in_order(wire: Wire) -> None:
    frames = [bytes([number]) * 1000 for number in range(200)]
    for frame in frames:
        wire.post.send(frame)  # nobody reads: it must not wait
    assert wire.read(200_000) == b"".join(frames)
    wire.post.send(b"later")
    assert wire.read(5) == b"later"


def test_frames_of_many_threads_stay_whole(wire: Wire) -> None:
    def post(number: int) -> None:
        for _ in range(50):
            wire.post.send(bytes([number]) * 997)

    threads = [threading.Thread(target=post, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    data = wire.read(4 * 50 * 997)
    for thread in threads:
        thread.join()
    found = [data[at : at + 997] for at in range(0, len(data), 997)]
    assert all(len(set(frame)) == 1 for frame in found)
    assert sorted(frame[0] for frame in found) == sorted([0, 1, 2, 3] * 50)


def test_a_connection_that_takes_nothing_times_out() -> None:
    wire = Wire(timeout=0.05)
    wire.post.send(bytes(1_000_000))
    wire.thread.join(TIMEOUT)
    assert isinstance(wire.ended[0], TimeoutError)
    wire.close()


@pytest.mark.slow
def test_a_connection_that_takes_nothing_is_waited_for_while_something_else_moves() -> None:
    wire = Wire(timeout=0.2)
    wire.moves = True
    wire.post.send(bytes(1_000_000))
    wire.thread.join(0.6)
    assert not wire.ended
    wire.moves = False
    wire.thread.join(TIMEOUT)
    assert isinstance(wire.ended[0], TimeoutError)
    wire.close()


def test_a_connection_that_ended_is_told_of(wire: Wire) -> None:
    wire.post.send(bytes(1_000_000))
    shut(wire.theirs)
    wire.thread.join(TIMEOUT)
    assert isinstance(wire.ended[0], OSError)
    wire.post.send(b"behind what is left over")


def test_sending_on_a_connection_that_ended_raises(wire: Wire) -> None:
    shut(wire.sock)
    with pytest.raises(OSError, match="pipe"):
        wire.post.send(b"frame")


def test_closing_leaves_the_rest(wire: Wire) -> None:
    wire.post.send(bytes(1_000_000))
    shut(wire.sock)  # as a peer does, so that nothing waits for room
    wire.post.close()
    wire.thread.join(TIMEOUT)
    assert not wire.thread.is_alive()


def test_between_processes_of_one_machine_no_packet_waits_for_a_timer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sock:
        tune(sock)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == LOCAL_CONGESTION
