"""Wrong input, broken peers and a starved system: each costs the send that it concerns, and no other."""

from __future__ import annotations

import errno
import itertools
import os
import queue
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import pytest

from tercet.protocol import BadRequest, Conflict, TercetError, TransferFailed
from tercet.transport import Grant, SendReport, TcpTransport
from tercet.transport.direct import Greeting, held_by
from tercet.transport.frames import HEADER_BYTES, Header, Kind, ack, hello, unpack, welcome
from tercet.transport.peer import CANCEL_SECONDS
from tercet.transport.sockets import fill
from tests.unit.transport.test_tcp import BLOCK_BYTES, LAYERS, SIZE, WAIT, Rank, lease, push_all, ranks, start

BIG = 1 << 18


@pytest.fixture
def pair() -> Iterator[tuple[Rank, Rank]]:
    with ranks() as both:
        yield both


def assert_works(source: Rank, target: Rank, number: int) -> None:
    target.transport.grant(Grant(lease(number), (number,), 0, SIZE, SIZE))
    done = start(source, target.transport.address, number)
    push_all(source, [5], number)
    source.transport.finish(f"send-{number}", 0, SIZE)
    assert done.get(timeout=WAIT) == SendReport(LAYERS * BLOCK_BYTES, LAYERS)


# ---- wrong input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["zz" * 16, "ab", "", "AB" * 16, "ab" * 17])
def test_a_lease_that_is_none_fails_its_send_alone(pair: tuple[Rank, Rank], bad: str) -> None:
    source, target = pair
    outcomes: queue.SimpleQueue[SendReport | TercetError] = queue.SimpleQueue()
    source.transport.open("bad", target.transport.address, bad, outcomes.put)
    source.transport.push("bad", 0, 0, [1])
    source.transport.finish("bad", 0, SIZE)
    assert isinstance(outcomes.get(timeout=WAIT), BadRequest)
    assert_works(source, target, 2)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:abc", "tcp://127.0.0.1:99999", "nothing", "tcp://a..b:1"])
def test_an_address_that_is_none_fails_its_send(pair: tuple[Rank, Rank], address: str) -> None:
    source, target = pair
    for number in (3, 4):
        assert isinstance(start(source, address, number).get(timeout=WAIT), TransferFailed)
    assert_works(source, target, 2)


@pytest.mark.parametrize(("layer", "slot", "block"), [(-1, 0, 1), (99, 0, 1), (0, -1, 1), (0, 2**32, 1), (0, 0, 64),
                                                      (0, 0, -1)])  # fmt: skip
def test_a_push_from_outside_the_memory_fails_its_send_alone(
    pair: tuple[Rank, Rank], layer: int, slot: int, block: int
) -> None:
    source, target = pair
    target.transport.grant(Grant(lease(1), (1,), 0, SIZE, SIZE))
    done = start(source, target.transport.address)
    source.transport.push("send-1", layer, slot, [block])
    assert isinstance(done.get(timeout=WAIT), BadRequest)
    assert_works(source, target, 2)
    assert target.block(0, 1) == bytes(BLOCK_BYTES)


@pytest.mark.parametrize(("begin", "end"), [(-1, 5), (0, 2**40), (9, 3)])
def test_a_claim_of_no_range_fails_its_send_alone(pair: tuple[Rank, Rank], begin: int, end: int) -> None:
    source, target = pair
    done = start(source, target.transport.address)
    source.transport.finish("send-1", begin, end)
    assert isinstance(done.get(timeout=WAIT), BadRequest)
    assert_works(source, target, 2)


def test_a_send_id_names_one_send(pair: tuple[Rank, Rank]) -> None:
    source, target = pair
    target.transport.grant(Grant(lease(1), (1,), 0, SIZE, SIZE))
    first, second = start(source, target.transport.address), start(source, target.transport.address)
    assert isinstance(second.get(timeout=WAIT), Conflict)
    push_all(source, [5])
    source.transport.finish("send-1", 0, SIZE)
    assert isinstance(first.get(timeout=WAIT), SendReport)


def test_a_caller_that_fails_to_take_its_answer_harms_nobody(pair: tuple[Rank, Rank]) -> None:
    source, target = pair
    told = threading.Event()

    def fail(_: SendReport | TercetError) -> None:
        told.set()
        raise RuntimeError("no")

    source.transport.open("bad", target.transport.address, lease(1), fail)
    source.transport.finish("bad", 0, SIZE)
    assert told.wait(WAIT)
    assert_works(source, target, 2)


def test_nothing_starts_after_close(pair: tuple[Rank, Rank]) -> None:
    source, target = pair
    source.transport.close()
    before = threading.active_count()
    assert isinstance(start(source, target.transport.address).get(timeout=WAIT), TransferFailed)
    assert threading.active_count() == before


def test_close_leaves_no_thread_of_broken_connections() -> None:
    source, target = Rank(), Rank()
    before = threading.active_count() - 2  # each listens
    for number in (1, 2, 3):
        target.transport.grant(Grant(lease(number), (number,), 0, SIZE, SIZE))
        start(source, target.transport.address, number)
    target.transport.close()
    source.transport.close()
    assert threading.active_count() == before


# ---- a starved system ----------------------------------------------------------------------------------------


def test_accepting_survives_running_out_of_descriptors(
    pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = pair
    accept, starved = socket.socket.accept, threading.Event()

    def once(self: socket.socket) -> tuple[socket.socket, object]:
        connection, peer = accept(self)
        if starved.is_set():
            return connection, peer
        starved.set()
        connection.close()
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(socket.socket, "accept", once)
    host, port = target.transport.address.removeprefix("tcp://").split(":")
    # The accept under way is still the original one; the second connection meets the failure.
    for _ in range(2):
        socket.create_connection((host, int(port))).close()
    assert starved.wait(WAIT)
    assert_works(source, target, 2)


def test_cpus_that_are_not_to_be_had_are_no_obstacle(pair: tuple[Rank, Rank]) -> None:
    _, target = pair
    pinned = Rank()
    pinned.transport.close()
    pinned.transport = TcpTransport(pinned.memory, fingerprint="same", cpus={9999})
    try:
        assert_works(pinned, target, 2)
    finally:
        pinned.transport.close()


# ---- receivers that misbehave --------------------------------------------------------------------------------


@contextmanager
def receiver(answer: bytes = b"") -> Generator[tuple[str, queue.SimpleQueue[socket.socket]]]:
    """A hand-made receiver: welcomes one sender, says ``answer``, and hands over the connection."""
    accepted: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        greeting = unpack(connection.recv(HEADER_BYTES, socket.MSG_WAITALL))
        connection.recv(greeting.nbytes, socket.MSG_WAITALL)
        connection.sendall(welcome(by_reference=False) + answer)
        accepted.put(connection)

    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}", accepted
        thread.join(WAIT)


def wait_until_writing(rank: Rank, address: str) -> None:
    """Until the sender is inside a piece that the receiver does not take."""
    peer = rank.transport._sender._peers[address]
    deadline = time.monotonic() + WAIT
    before = -1
    while time.monotonic() < deadline:
        sent = rank.transport.counters()["bytes_sent"]
        if peer._state.writing is not None and sent == before:
            return
        before = sent
        time.sleep(0.1)
    pytest.fail("the sender never stalled")


def test_cancel_in_the_middle_of_a_stuck_piece_is_bounded_and_a_fence() -> None:
    with ranks(block_bytes=BIG) as (source, target), receiver() as (address, accepted):
        done = start(source, address)
        for _ in range(3):
            push_all(source, list(range(64)))
        connection = accepted.get(timeout=WAIT)
        wait_until_writing(source, address)
        began = time.monotonic()
        source.transport.cancel("send-1")
        assert time.monotonic() - began < CANCEL_SECONDS + 4
        for buffer in source.buffers:
            buffer[:] = b"\xff" * len(buffer)
        # Taking data again is what would let a writer go on that had not been stopped; so it comes first.
        connection.settimeout(WAIT)
        while data := connection.recv(1 << 16):
            assert b"\xff" * 64 not in data, "read after the fence"
        connection.close()
        assert isinstance(done.get(timeout=WAIT), TransferFailed)
        target.transport.grant(Grant(lease(2), (1,), 0, SIZE, SIZE))
        done = start(source, target.transport.address, 2)
        push_all(source, [5], 2)
        source.transport.finish("send-2", 0, SIZE)
        assert isinstance(done.get(timeout=WAIT), SendReport)


def test_a_receiver_that_stops_taking_data_fails_every_send_of_its_connection() -> None:
    with ranks(block_bytes=BIG, timeout=1.0) as (source, _), receiver() as (address, accepted):
        both = [start(source, address, number) for number in (1, 2)]
        began = time.monotonic()
        for number in (1, 2):
            push_all(source, list(range(64)), number)
        assert time.monotonic() - began < 0.5, "push only queues"
        outcomes = [done.get(timeout=WAIT) for done in both]
        assert all(isinstance(outcome, TransferFailed) and address in outcome.message for outcome in outcomes)
        accepted.get(timeout=WAIT).close()


def test_a_receiver_that_dies_in_the_middle_fails_the_send_at_once() -> None:
    with ranks(block_bytes=BIG) as (source, _), receiver() as (address, accepted):
        done = start(source, address)
        push_all(source, list(range(64)))
        connection = accepted.get(timeout=WAIT)
        connection.recv(1000)
        began = time.monotonic()
        connection.close()
        assert isinstance(done.get(timeout=WAIT), TransferFailed)
        assert time.monotonic() - began < WAIT / 3, "not by timeout"


def test_a_refused_send_is_over_only_when_its_blocks_are_not_read() -> None:
    """The owner unpins on ``on_done``: it must wait for the piece that is being written."""
    with ranks(block_bytes=BIG) as (source, _), receiver() as (address, accepted):
        writing: list[object] = []
        told = threading.Event()

        def done(_: SendReport | TercetError) -> None:
            writing.append(peer._state.writing)
            told.set()

        source.transport.open("send-1", address, lease(1), done)
        peer = source.transport._sender._peers[address]
        (number,) = peer._state.outgoing
        push_all(source, list(range(64)))
        connection = accepted.get(timeout=WAIT)
        wait_until_writing(source, address)
        connection.sendall(Header(Kind.REFUSED, number).pack())
        deadline = time.monotonic() + WAIT
        while number in peer._state.outgoing and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not told.is_set(), "a piece is still being read"
        connection.settimeout(WAIT)
        while not told.is_set():
            assert connection.recv(1 << 20)
        assert writing == [None]
        connection.close()


@pytest.mark.parametrize(
    "answer",
    [hello(Greeting("same")), b"\0" * HEADER_BYTES, Header(Kind.ACK, 1, nbytes=2**24).pack(),
     Header(Kind.REFUSED, 1, nbytes=2**24).pack(), welcome(by_reference=False)],
    ids=["hello", "garbage", "ack with a body", "endless refusal", "second welcome"],
)  # fmt: skip
def test_a_receiver_that_talks_nonsense_is_left(answer: bytes) -> None:
    """At once: it keeps its connection open, and the send does not wait for what it announces."""
    with ranks() as (source, target), receiver(answer) as (address, accepted):
        done = start(source, address)
        with accepted.get(timeout=WAIT):
            assert isinstance(done.get(timeout=WAIT / 2), TransferFailed)
        assert_works(source, target, 2)


def test_answers_to_unknown_sends_are_skipped() -> None:
    with ranks() as (source, _), receiver(ack(1) + Header(Kind.REFUSED, 2).pack()) as (address, accepted):
        done = start(source, address)
        (number,) = source.transport._sender._peers[address]._state.outgoing
        with accepted.get(timeout=WAIT) as connection:
            connection.sendall(Header(Kind.REFUSED, number).pack())
            outcome = done.get(timeout=WAIT)
        assert isinstance(outcome, TransferFailed)
        assert "refused" in outcome.message


def test_an_acknowledgement_without_a_claim_is_none() -> None:
    with ranks() as (source, _), receiver() as (address, accepted):
        done = start(source, address)
        (number,) = source.transport._sender._peers[address]._state.outgoing
        with accepted.get(timeout=WAIT) as connection:
            connection.sendall(ack(number))
            outcome = done.get(timeout=WAIT)
        assert isinstance(outcome, TransferFailed)
        assert "not claimed" in outcome.message


# ---- senders that misbehave ----------------------------------------------------------------------------------


def test_a_sender_that_never_greets_is_dropped(pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    _, target = pair
    monkeypatch.setattr("tercet.transport.receiver.GREETING_SECONDS", 0.2)
    host, port = target.transport.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.settimeout(WAIT)
        connection.sendall(hello(Greeting("same"))[:-1])
        assert connection.recv(1) == b""


@pytest.mark.parametrize("seed", range(5))
def test_frames_may_arrive_in_any_cuts(pair: tuple[Rank, Rank], seed: int) -> None:
    _, target = pair
    target.transport.grant(Grant(lease(1), (7, 3), 0, 2 * SIZE, SIZE))
    said = hello(Greeting("same"))
    for layer in range(LAYERS):
        body = bytes([layer + 1]) * (2 * BLOCK_BYTES)
        said += Header(Kind.PIECE, 1, lease(1), layer, 0, 2, len(body)).pack() + body
    said += Header(Kind.FIN, 1, lease(1), begin=0, end=2 * SIZE).pack()
    cuts, chance = [0, len(said)], random.Random(seed)
    cuts[1:1] = sorted(chance.sample(range(1, len(said)), 200))
    host, port = target.transport.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(WAIT)
        for begin, end in itertools.pairwise(cuts):
            connection.sendall(said[begin:end])
        answers = memoryview(bytearray(2 * HEADER_BYTES))
        assert fill(connection, answers)
    assert [unpack(answers[at : at + HEADER_BYTES]).kind for at in (0, HEADER_BYTES)] == [Kind.WELCOME, Kind.ACK]
    for layer in range(LAYERS):
        filled = {block for block in range(64) if any(target.block(layer, block))}
        assert filled == {7, 3}
        assert target.block(layer, 7) == target.block(layer, 3) == bytes([layer + 1]) * BLOCK_BYTES


# ---- whose memory a reference may name -----------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_only_the_process_at_the_other_end_holds_a_connection(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"no {host} here")
    code = f"import socket; s = socket.create_connection(({host!r}, {listener.getsockname()[1]})); input()"
    with listener, subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        try:
            listener.settimeout(WAIT)
            connection, _ = listener.accept()
            with connection:
                assert held_by(child.pid, connection)
                for other in (os.getpid(), os.getppid(), 1, 0, -1, 2**40):
                    assert not held_by(other, connection)
        finally:
            child.communicate(b"\n", timeout=WAIT)


def test_numbers_are_not_used_again_by_a_later_connection(pair: tuple[Rank, Rank]) -> None:
    """Else a late reference of a broken connection could find its number alive in the next one's table."""
    source, _ = pair
    seen: list[int] = []
    for number in (1, 2, 3):
        with receiver() as (address, accepted):
            done = start(source, address, number)
            seen += source.transport._sender._peers[address]._state.outgoing
            accepted.get(timeout=WAIT).close()
            done.get(timeout=WAIT)
    assert len(set(seen)) == 3
    assert 0 not in seen
