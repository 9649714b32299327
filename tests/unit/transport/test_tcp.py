"""The TCP transport over loopback, with peers that vanish, stall and lie."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from tercet.protocol import TercetError, TransferFailed
from tercet.transport import BufferMemory, Grant, SendReport, TcpTransport

LAYERS, BLOCKS, BLOCK_BYTES, SIZE = 3, 64, 4096, 16
WAIT = 30.0


@dataclass
class Rank:
    """One transport over memory of its own; block b of layer l is filled with a byte that tells them."""

    block_bytes: int = BLOCK_BYTES
    timeout: float = WAIT
    fingerprint: str = "same"
    finished: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.buffers = [bytearray(BLOCKS * self.block_bytes) for _ in range(LAYERS)]
        self.memory = BufferMemory([memoryview(buffer) for buffer in self.buffers], BLOCKS)
        self.transport = TcpTransport(
            self.memory, fingerprint=self.fingerprint, timeout=self.timeout,
            on_finished=lambda lease, end: self.finished.append((lease, end)),
        )  # fmt: skip

    def fill(self) -> None:
        for layer in range(LAYERS):
            for block in range(BLOCKS):
                self.memory.write(layer, block, memoryview(bytes([layer * 64 + block]) * self.block_bytes))

    def block(self, layer: int, block: int) -> bytes:
        return bytes(self.memory.read(layer, block, 1))


@contextmanager
def ranks(block_bytes: int = BLOCK_BYTES, timeout: float = WAIT) -> Generator[tuple[Rank, Rank]]:
    before = threading.active_count()
    source, target = Rank(block_bytes, timeout), Rank(block_bytes)
    source.fill()
    try:
        yield source, target
    finally:
        source.transport.close()
        target.transport.close()
        deadline = time.monotonic() + WAIT
        while threading.active_count() > before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert threading.active_count() <= before


@pytest.fixture(params=["by reference", "inline"])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Rank, Rank]]:
    if request.param == "inline":
        monkeypatch.setattr("tercet.transport.inbound.can_read", lambda greeting: False)
    with ranks() as both:
        yield both


def lease(number: int) -> str:
    return f"{number:032x}"


def start(source: Rank, address: str, number: int = 1) -> queue.SimpleQueue:
    done: queue.SimpleQueue[SendReport | TercetError] = queue.SimpleQueue()
    source.transport.open(f"send-{number}", address, lease(number), done.put)
    return done


def push_all(source: Rank, blocks: list[int], number: int = 1) -> None:
    for layer in range(LAYERS):
        source.transport.push(f"send-{number}", layer, 0, blocks)


def test_bytes_land_where_they_should_and_nowhere_else(pair: tuple[Rank, Rank]) -> None:
    source, target = pair
    theirs, ours = [4, 5, 9, 8, 10], [30, 31, 7, 50, 51]
    target.transport.grant(Grant(lease(1), tuple(ours), 0, 75, SIZE))
    done = start(source, target.transport.address)
    push_all(source, theirs)
    source.transport.finish("send-1", 0, 75)
    assert done.get(timeout=WAIT) == SendReport(5 * LAYERS * BLOCK_BYTES, 4 * LAYERS)
    assert target.finished == [(lease(1), 75)]
    assert target.transport.revoke(lease(1)) == 75
    for layer in range(LAYERS):
        for block in range(BLOCKS):
            expected = source.block(layer, theirs[ours.index(block)]) if block in ours else bytes(BLOCK_BYTES)
            assert target.block(layer, block) == expected


def test_sends_share_a_connection(pair: tuple[Rank, Rank]) -> None:
    source, target = pair
    for number in range(1, 9):
        target.transport.grant(Grant(lease(number), (number,), 0, SIZE, SIZE))
    waiting = [start(source, target.transport.address, number) for number in range(1, 9)]
    for number in range(1, 9):
        push_all(source, [63 - number], number)
        source.transport.finish(f"send-{number}", 0, SIZE)
    assert {done.get(timeout=WAIT) for done in waiting} == {SendReport(LAYERS * BLOCK_BYTES, LAYERS)}
    assert target.transport.counters()["connections"] == 1
    assert [target.block(0, number) for number in range(1, 9)] == [source.block(0, 63 - n) for n in range(1, 9)]


def test_claim_without_its_pieces_fails(pair: tuple[Rank, Rank]) -> None:
    source, target = pair
    target.transport.grant(Grant(lease(1), (1, 2), 0, 32, SIZE))
    done = start(source, target.transport.address)
    push_all(source, [1])
    source.transport.finish("send-1", 0, 32)
    outcome = done.get(timeout=WAIT)
    assert isinstance(outcome, TransferFailed)
    assert "slot 1" in outcome.message


def test_late_push_is_refused_and_the_memory_untouched(pair: tuple[Rank, Rank]) -> None:
    source, target = pair
    target.transport.grant(Grant(lease(1), (1,), 0, SIZE, SIZE))
    target.transport.grant(Grant(lease(2), (2,), 0, SIZE, SIZE))
    late, fine = (start(source, target.transport.address, number) for number in (1, 2))
    target.transport.revoke(lease(1))
    for number in (1, 2):
        push_all(source, [40], number)
        source.transport.finish(f"send-{number}", 0, SIZE)
    outcome = late.get(timeout=WAIT)
    assert isinstance(outcome, TransferFailed)
    assert "ended" in outcome.message
    assert isinstance(fine.get(timeout=WAIT), SendReport)
    assert target.block(0, 1) == bytes(BLOCK_BYTES)


def test_after_cancel_the_memory_is_not_read(pair: tuple[Rank, Rank]) -> None:
    source, target = pair
    target.transport.grant(Grant(lease(1), tuple(range(BLOCKS)), 0, BLOCKS * SIZE, SIZE))
    done = start(source, target.transport.address)
    for _ in range(50):
        push_all(source, list(range(BLOCKS)))
    source.transport.cancel("send-1")
    for buffer in source.buffers:
        buffer[:] = b"\xff" * len(buffer)
    assert isinstance(done.get(timeout=WAIT), TransferFailed)
    # A later send on the same connection is behind anything that was still on its way.
    target.transport.grant(Grant(lease(2), (), 0, 0, SIZE))
    other = start(source, target.transport.address, 2)
    source.transport.finish("send-2", 0, 0)
    other.get(timeout=WAIT)
    assert all(b"\xff" not in bytes(buffer) for buffer in target.buffers)


def test_nobody_listening_fails_at_once(pair: tuple[Rank, Rank]) -> None:
    source, _ = pair
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = f"tcp://127.0.0.1:{gone.getsockname()[1]}"
    outcome = start(source, address).get(timeout=WAIT)
    assert isinstance(outcome, TransferFailed)
    assert address in outcome.message
    assert source.transport.counters()["sends_active"] == 0


def test_another_layout_is_refused() -> None:
    with ranks() as (_, target):
        other = Rank(fingerprint="other")
        try:
            done = start(other, target.transport.address)
            push_all(other, [1])
            outcome = done.get(timeout=WAIT)
            assert isinstance(outcome, TransferFailed)
        finally:
            other.transport.close()


def test_a_receiver_that_closes_fails_the_send_and_the_next_one_reconnects(pair: tuple[Rank, Rank]) -> None:
    source, _ = pair
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        done = start(source, address)
        connection, _ = listener.accept()
        connection.recv(100)
        connection.close()
        assert isinstance(done.get(timeout=WAIT), TransferFailed)
        start(source, address, 2)
        listener.settimeout(WAIT)
        listener.accept()[0].close()


def test_a_stuck_receiver_stalls_only_its_own_send() -> None:
    with ranks(block_bytes=1 << 18, timeout=1.0) as (source, target), socket.create_server(("127.0.0.1", 0)) as stuck:
        done = start(source, f"tcp://127.0.0.1:{stuck.getsockname()[1]}", 1)
        began = time.monotonic()
        push_all(source, list(range(BLOCKS)), 1)
        source.transport.finish("send-1", 0, SIZE)
        assert time.monotonic() - began < 0.5, "push only queues"

        target.transport.grant(Grant(lease(2), (3,), 0, SIZE, SIZE))
        fine = start(source, target.transport.address, 2)
        push_all(source, [5], 2)
        source.transport.finish("send-2", 0, SIZE)
        assert isinstance(fine.get(timeout=WAIT), SendReport)
        assert isinstance(done.get(timeout=WAIT), TransferFailed)


def test_a_receiver_that_never_acknowledges_fails_the_send() -> None:
    with ranks(timeout=0.5) as (source, _), socket.create_server(("127.0.0.1", 0)) as silent:
        done = start(source, f"tcp://127.0.0.1:{silent.getsockname()[1]}")
        push_all(source, [1])
        source.transport.finish("send-1", 0, SIZE)
        outcome = done.get(timeout=WAIT)
        assert isinstance(outcome, TransferFailed)
        assert "no acknowledgement" in outcome.message


def test_cancel_of_a_send_that_is_stuck_is_bounded() -> None:
    with ranks(block_bytes=1 << 18) as (source, _), socket.create_server(("127.0.0.1", 0)) as stuck:
        done = start(source, f"tcp://127.0.0.1:{stuck.getsockname()[1]}")
        push_all(source, list(range(BLOCKS)))
        source.transport.cancel("send-1")
        assert isinstance(done.get(timeout=WAIT), TransferFailed)


@pytest.mark.parametrize("data", [b"", b"\0", b"TRC1", b"\xff" * 5000, b"GET / HTTP/1.1\r\n\r\n" * 10])
def test_garbage_connections_do_no_harm(pair: tuple[Rank, Rank], data: bytes) -> None:
    source, target = pair
    host, port = target.transport.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.settimeout(WAIT)
        with contextlib.suppress(OSError):  # the receiver may have hung up already
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
    assert all(not any(buffer) for buffer in target.buffers)
    target.transport.grant(Grant(lease(1), (1,), 0, SIZE, SIZE))
    done = start(source, target.transport.address)
    push_all(source, [2])
    source.transport.finish("send-1", 0, SIZE)
    assert isinstance(done.get(timeout=WAIT), SendReport)


def test_unknown_sends_are_fine(pair: tuple[Rank, Rank]) -> None:
    source, _ = pair
    source.transport.push("never", 0, 0, [1])
    source.transport.finish("never", 0, 1)
    source.transport.cancel("never")
