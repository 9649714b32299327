"""Frames that callers write, what the connection did not take at once, and receivers that answer in drips or close
while somebody writes to them.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.protocol import TercetError, TransferFailed
from tercet.transport import TransportSettings, inbound, peer
from tercet.transport import peer as peer_module
from tercet.transport.backends import backends_for
from tercet.transport.inbound import BURST_SECONDS, Pace
from tercet.transport.local_rank import LocalRank
from tercet.transport.peer import RankSend, TransferPeer
from tercet.transport.peer_messages import NONCE_BYTES, Challenge, Refused, framed
from tercet.transport.region import HeadSlice
from tercet.transport.sockets import LOCAL_CONGESTION, Post, shut, tune
from tests.unit.transport.builders import sending_region
from tests.unit.transport.models import whose
from tests.unit.transport.ranks import Send, filled, new_lease, rank, settle, transfer, whole

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


# How fast a limited receiver takes KV in.


LIMIT = 1000.0


class Clock:
    """Time that passes while somebody sleeps, a little longer than asked for, or idles."""

    def __init__(self, oversleep: float) -> None:
        self.now, self.slept, self._oversleep = 100.0, 0.0, oversleep

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        assert seconds > 0
        self.slept += seconds
        self.now += seconds + self._oversleep


@given(
    st.lists(st.tuples(st.integers(0, 500), st.sampled_from([0.0, 0.001, 1.0])), min_size=1), st.sampled_from([0, 1e-4])
)
def test_no_more_than_the_limit_and_no_wait_for_nothing(steps: list[tuple[int, float]], oversleep: float) -> None:
    clock, pace = Clock(oversleep), Pace(LIMIT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inbound, "time", clock)
        patch.setattr(pace, "_over", clock)
        taken, idle = 0, 0.0
        for nbytes, pause in steps:
            pace.took(nbytes)
            taken, idle = taken + nbytes, idle + pause
            # What it took in since the start has had its time, but for one burst.
            assert taken <= LIMIT * (clock.now - 100.0 + BURST_SECONDS) + 1e-6
            clock.now += pause
        assert clock.slept <= taken / LIMIT


def test_without_a_limit_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbound, "time", None)
    Pace().took(10**15)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["host", "tcp"])
def test_a_limited_receiver_takes_its_time(backend: str) -> None:
    limit, layers, size = 4e6, 5, 16 * 1024
    limited = TransportSettings(backend, receive_limit=limit)
    ours, theirs = filled(layers, 40, size, 1), filled(layers, 40, size, 2)
    with rank(ours, TransportSettings(backend)) as sender, rank(theirs, limited) as receiver:
        began = time.monotonic()
        report = transfer(sender, ours, receiver, range(20), range(20, 40))
        assert time.monotonic() - began >= report.bytes / limit - BURST_SECONDS


def test_closing_ends_the_wait_of_whoever_took_too_much() -> None:
    pace = Pace(1.0)
    taking = threading.Thread(target=pace.took, args=(10**6,))
    taking.start()
    pace.close()
    taking.join(60)
    assert not taking.is_alive()


# What counts as progress of a session, and what is had under ``auto``.


def test_an_owed_answer_is_waited_for_while_the_session_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(peer_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    rank = LocalRank(sending_region(), "", TransportSettings(timeout=5.0), ())
    peer = TransferPeer(["tcp://127.0.0.1:1"], rank, lambda _peer: None)
    send = RankSend("ab" * 16, whose(16), HeadSlice(0, 64), lambda _outcome: None)
    assert peer.open(send)
    send.finished_at = now[0] - 20
    peer._answered(Refused(send.number + 1, "another send"))  # pyright: ignore[reportPrivateUsage]
    peer._require_progress()  # pyright: ignore[reportPrivateUsage]
    now[0] += 6
    with pytest.raises(TransferFailed, match="did not acknowledge"):
        peer._require_progress()  # pyright: ignore[reportPrivateUsage]
    peer.close()


def test_auto_goes_on_where_memory_cannot_be_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError("no /proc")

    monkeypatch.setattr(os, "open", fail)
    region = sending_region()
    assert "host" not in [backend.name for backend in backends_for("auto", region)]
    with pytest.raises(OSError, match="no /proc"):
        backends_for("host", region)
