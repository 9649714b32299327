"""Chunks that are asked for over connections: in their places whoever brings them, and not a byte after the lease."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest

from tercet.protocol import LeaseEnded, TransferFailed
from tercet.transport.backends import tcp
from tercet.transport.backends.reading import Batch, UnderLease
from tercet.transport.backends.tcp import TcpReader
from tercet.transport.peer_messages import (
    REQUESTS,
    WORD,
    MessageSplitter,
    ProtocolViolation,
    ReadDescriptors,
    ReadRequest,
    framed,
)
from tercet.transport.sockets import Vector, address_of, wait_in_calls
from tests.unit.transport.builders import sending_region
from tests.unit.transport.ranks import SECONDS, settle

pytestmark = pytest.mark.verifies("KV blocks", transport="tcp", vllm=False)

SIZE = 64 * 1024
SEND, LEASE = 7, "ab" * 16
Serve = Callable[[socket.socket, ReadRequest], None]


def straight(step: Callable[[], int]) -> int:
    return step()


def content(number: int) -> bytes:
    return bytes([number]) * SIZE


def answer(sock: socket.socket, request: ReadRequest) -> None:
    sock.sendall(WORD.pack(request.send) + content(request.chunk) + WORD.pack(request.send))


def batch_of(count: int, target: bytearray) -> Batch:
    """Chunks that go to the target backward."""
    found = Batch(SEND, LEASE, memoryview(target))
    for number in range(count):
        found.chunks.append(ReadDescriptors(SEND, LEASE, number, 0, 1, number, number + 1, size=SIZE))
        found.copies.append(np.array([(SIZE, 0, (count - 1 - number) * SIZE)]))
    return found


@contextmanager
def reader_of(*servers: Serve, timeout: float = SECONDS) -> Generator[TcpReader]:
    """A reader with a connection to each of some servers."""
    reader, threads, ends = TcpReader(), list[threading.Thread](), list[socket.socket]()

    def serve(sock: socket.socket, server: Serve) -> None:
        splitter = MessageSplitter(REQUESTS)
        try:
            while data := sock.recv(4096):
                for request in splitter.feed(data):
                    server(sock, request)
        except OSError:
            return

    for server in servers:
        near, far = socket.socketpair()
        ends += near, far
        wait_in_calls(near, SECONDS, 0.005)
        threads += [
            threading.Thread(target=reader.serve, args=(near, timeout)),
            threading.Thread(target=serve, args=(far, server)),
        ]
        for thread in threads[-2:]:
            thread.start()
    settle(lambda: len(reader._connections) == len(servers))  # pyright: ignore[reportPrivateUsage]
    try:
        yield reader
    finally:
        reader.close()
        for end in ends:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        for thread in threads:
            thread.join(SECONDS)
            assert not thread.is_alive()
        for end in ends:
            end.close()


@pytest.mark.parametrize("servers", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_chunks_are_in_their_places(servers: int, count: int) -> None:
    target = bytearray(count * SIZE)
    with reader_of(*[answer] * servers) as reader:
        assert reader.read(batch_of(count, target), straight)
        assert reader.read(Batch(SEND, LEASE, memoryview(target)), straight)
    assert target == b"".join(content(number) for number in reversed(range(count)))


def test_one_chunk_whose_blocks_were_given_up_spoils_the_batch() -> None:
    def give_up(sock: socket.socket, request: ReadRequest) -> None:
        word = 0 if request.chunk == 2 else request.send
        sock.sendall(WORD.pack(request.send) + content(request.chunk) + WORD.pack(word))

    with reader_of(give_up, give_up) as reader:
        assert not reader.read(batch_of(4, bytearray(4 * SIZE)), straight)
        assert reader.read(batch_of(2, bytearray(2 * SIZE)), straight)


def test_of_a_send_that_is_over_nothing_is_written_and_no_more_asked_for() -> None:
    asked: list[int] = []

    def over(sock: socket.socket, request: ReadRequest) -> None:
        asked.append(request.chunk)
        sock.sendall(WORD.pack(0))

    target = bytearray(9 * SIZE)
    with reader_of(over) as reader:
        assert not reader.read(batch_of(9, target), straight)
    assert not any(target)
    assert asked == [0, 1]  # as many as are asked for ahead


@pytest.mark.parametrize("offered", [True, False])
def test_of_a_send_that_is_over_a_sender_says_so_and_sends_nothing(offered: bool) -> None:
    region = sending_region()
    region.clear_word(1)
    near, far = socket.socketpair()
    place = Vector(np.array([(address_of(region.bytes), SIZE)], dtype=np.uint64), region, SIZE)
    with near, far:
        far.sendall(framed(ReadRequest(1, 0, SIZE)))
        far.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionResetError):
            tcp.serve(near, region, lambda _request: nullcontext(place if offered else None))
        assert far.recv(2 * SIZE) == WORD.pack(0)


def test_two_chunks_come_over_two_connections() -> None:
    one, other = list[tuple[int, int]](), list[tuple[int, int]]()
    with reader_of(asking(one), asking(other)) as reader:
        assert reader.read(batch_of(2, bytearray(2 * SIZE)), straight)
    assert sorted([one, other]) == [[(SEND, 0)], [(SEND, 1)]]


def asking(asked: list[tuple[int, int]]) -> Serve:
    """A sender that notes what it is asked for; the send after :data:`SEND` is over."""

    def serve(sock: socket.socket, request: ReadRequest) -> None:
        asked.append((request.send, request.chunk))
        if request.send == SEND:
            answer(sock, request)
        else:
            sock.sendall(WORD.pack(0))

    return serve


@pytest.mark.parametrize("servers", [1, 2])
def test_chunks_that_were_asked_for_early_are_read_once(servers: int) -> None:
    asked: list[tuple[int, int]] = []
    target = bytearray(4 * SIZE)
    with reader_of(*[asking(asked)] * servers) as reader:
        batch = batch_of(4, target)
        reader.ask_early(batch.chunks)
        settle(lambda: len(asked) == servers)
        assert reader.read(batch, straight)
    assert sorted(asked) == [(SEND, number) for number in range(4)]
    assert target == b"".join(content(number) for number in reversed(range(4)))


@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("settled", [False, True])
def test_a_chunk_that_was_asked_for_early_in_vain_is_not_written(over: bool, settled: bool) -> None:
    asked: list[tuple[int, int]] = []
    vain = ReadDescriptors(SEND + over, LEASE, 5, 0, 1, 5, 6, size=SIZE)
    target = bytearray(2 * SIZE)
    with reader_of(asking(asked)) as reader:
        reader.ask_early([vain])
        if settled:
            reader.discard()
        assert reader.read(batch_of(2, target), straight)
    assert target == content(1) + content(0)
    assert asked == [(vain.send, 5), (SEND, 0), (SEND, 1)]


def test_a_chunk_of_any_size_is_not_asked_for_early() -> None:
    asked: list[tuple[int, int]] = []
    with reader_of(asking(asked)) as reader:
        reader.ask_early([ReadDescriptors(SEND, LEASE, 0, 0, 1, 0, 1, size=tcp.LONGEST_CHUNK_BYTES + 1)])
        assert reader.read(batch_of(1, bytearray(SIZE)), straight)
    assert asked == [(SEND, 0)]


def ending_after(steps: int) -> UnderLease:
    """A lease that ends after some steps."""
    left = iter(range(steps))

    def under_lease(step: Callable[[], int]) -> int:
        if next(left, None) is None:
            raise LeaseEnded("the lease has ended")
        return step()

    return under_lease


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_after_the_lease_not_a_byte_is_written_and_the_connections_go_on(servers: int, steps: int) -> None:
    def in_drops(sock: socket.socket, request: ReadRequest) -> None:
        sock.sendall(WORD.pack(request.send))
        for start in range(0, SIZE, SIZE // 4):
            sock.sendall(content(request.chunk)[start : start + SIZE // 4])
        sock.sendall(WORD.pack(request.send))

    target, other = bytearray(9 * SIZE), bytearray(2 * SIZE)
    with reader_of(*[in_drops] * servers) as reader:
        with pytest.raises(LeaseEnded):
            reader.read(batch_of(9, target), ending_after(steps))
        then = bytes(target)
        if not steps:
            assert not any(then)
        assert reader.read(batch_of(2, other), straight)
        assert (target, other) == (then, content(1) + content(0))


@pytest.mark.parametrize("which", [0, 1])
def test_a_connection_that_breaks_fails_the_batch(which: int) -> None:
    def leave(sock: socket.socket, request: ReadRequest) -> None:
        sock.sendall(WORD.pack(request.send) + content(request.chunk)[: SIZE // 2])
        sock.shutdown(socket.SHUT_RDWR)

    servers: Sequence[Serve] = [answer, leave] if which else [leave, answer]

    def read(reader: TcpReader) -> None:
        for _ in range(50):  # until it has taken part
            reader.read(batch_of(9, bytearray(9 * SIZE)), straight)

    with reader_of(*servers) as reader, pytest.raises(OSError, match=r"closed|pipe|reset"):
        read(reader)


@pytest.mark.parametrize("ended", [False, True])
def test_a_sender_that_does_not_go_on_is_given_up(ended: bool) -> None:
    def stall(sock: socket.socket, request: ReadRequest) -> None:
        sock.sendall(WORD.pack(request.send) + content(request.chunk)[: SIZE // 2])

    with reader_of(stall, timeout=0.05) as reader, pytest.raises(TimeoutError):
        reader.read(batch_of(1, bytearray(SIZE)), ending_after(0) if ended else straight)


def test_a_failure_of_ours_is_told_by_whichever_thread_meets_it() -> None:
    def fail(_step: Callable[[], int]) -> int:
        raise RuntimeError("ours")

    with reader_of(answer) as reader, pytest.raises(RuntimeError, match="ours"):
        reader.read(batch_of(1, bytearray(SIZE)), fail)


def test_a_sender_that_opens_no_connection_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "CONNECT_SECONDS", 0.05)
    with pytest.raises(TransferFailed, match="did not open a connection"):
        TcpReader().read(batch_of(1, bytearray(SIZE)), straight)


def test_connections_of_a_session_are_limited_and_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "MAX_STREAMS", 1)
    near, far = socket.socketpair()
    with near, far, reader_of(answer) as reader:
        with pytest.raises(ProtocolViolation, match="too many connections"):
            reader.serve(near, SECONDS)
        reader.close()
        with pytest.raises(ProtocolViolation, match="no such session"):
            reader.serve(near, SECONDS)
