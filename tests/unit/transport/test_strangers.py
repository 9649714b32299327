"""Connections that are no sender's, receivers that lie, and offers of memory that is not to be read."""

from __future__ import annotations

import os
import random
import resource
import secrets
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager

import msgspec
import pytest

from tercet.protocol import TransferFailed
from tercet.transport import KVRegion, SendReport, Target, TransportSettings, receiver
from tercet.transport.backends.host import held_by
from tercet.transport.base import OnDone
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
from tercet.transport.peer import Origin
from tercet.transport.region import TAIL_BYTES
from tercet.transport.sender import Sender
from tercet.transport.sockets import parse_address
from tests.unit.transport.ranks import (
    FINGERPRINT,
    SECONDS,
    TOKENS,
    Held,
    Outcome,
    Send,
    content,
    filled,
    grant,
    new_lease,
    rank,
    rank_process,
    settle,
    transfer,
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


# ---- strangers at a receiver ---------------------------------------------------------------------------------

CHALLENGE = HEADER_BYTES + NONCE_BYTES
BAD_FIRST_WORDS = {
    "random bytes": random.Random(1).randbytes(4096),
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: somebody\r\n\r\n" + bytes(HEADER_BYTES),
    "a claim first": Header(Kind.FIN, 1, end=TOKENS).pack(),
    "an answer": ack(1),
    "a greeting of nonsense": frame(Header(Kind.HELLO), b"\xc1" * 100),
    "a greeting without an end": Header(Kind.HELLO, nbytes=2**63).pack(),
    "an empty greeting": Header(Kind.HELLO).pack(),
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


@pytest.mark.parametrize("words", [b"", MAGIC, Header(Kind.HELLO, nbytes=1000).pack() + b"\x90"], ids=len)
def test_who_leaves_in_the_middle_is_forgotten(words: bytes) -> None:
    with rank(region(), TCP) as ours:
        before = Held()
        with connect(ours.addresses[0]) as stranger:
            stranger.sendall(words)
        settle(lambda: ours.counters()["connections"] == 0)
        before.require_back()


@pytest.mark.parametrize("words", [b"", MAGIC, Header(Kind.HELLO, nbytes=1000).pack() + b"\x90"], ids=len)
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
        stranger.sendall(Header(Kind.HELLO, nbytes=100_000).pack())
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


def test_of_many_strangers_those_that_waited_longest_go_and_senders_go_on() -> None:
    source, theirs = region(), region(2)
    with rank(source, TCP) as sender, rank(theirs, TCP) as ours, ExitStack() as stack:
        before = Held()
        transfer(sender, source, ours, ALL, ALL)  # in a session from before
        for number in range(300):
            stack.enter_context(connect(ours.addresses[0]))
            if number % 60 == 59:
                transfer(sender, source, ours, ALL, ALL)
        settle(lambda: ours.counters()["connections"] <= receiver.MAX_STRANGERS + TCP.streams)
        assert ours.counters()["connections_refused"] == 300 - receiver.MAX_STRANGERS
        other = region(3)
        with rank(other, TCP) as late:
            transfer(late, other, ours, ALL, ALL)
            assert content(theirs) == content(other)
        stack.close()
        sender.close()
        settle(lambda: ours.counters()["connections"] == 0)
        before.require_back()


def test_there_is_an_end_to_connections_also_of_senders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "MAX_CONNECTIONS", 3)
    source, theirs = region(), region(2)
    with rank(source, TCP) as sender, rank(theirs, TCP) as ours:
        transfer(sender, source, ours, ALL, ALL)
        settle(lambda: ours.counters()["connections"] == 2)
        other = region(3)
        with rank(other, TCP) as late:  # has room for one of its two streams
            send = Send(late, ours.addresses, grant(ours, ALL), whole(other))
            assert isinstance(send.wait(), TransferFailed)
        assert ours.counters()["connections_refused"] == 1
        transfer(sender, source, ours, ALL, ALL)


def take_all(descriptors: ExitStack) -> None:
    while True:
        descriptors.enter_context(socket.socket())


def test_accepting_survives_running_out_of_descriptors(caplog: pytest.LogCaptureFixture) -> None:
    with rank(region(), TCP) as ours, socket.socket() as stranger:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        stranger.settimeout(SECONDS)
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        with ExitStack() as fillers:
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
                with pytest.raises(OSError, match="Too many open files"):
                    take_all(fillers)
                stranger.connect(parse_address(ours.addresses[0]))
                settle(lambda: "a sender cannot be accepted" in caplog.text)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert stranger.recv(len(MAGIC), socket.MSG_WAITALL) == MAGIC


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


@pytest.mark.parametrize("which", [0, 1])
def test_a_session_that_loses_one_connection_fails_its_sends_at_once(which: int) -> None:
    source = region()
    with rank(source, TransportSettings("tcp", timeout=10 * SECONDS)) as sender, rank(region(2), TCP) as ours:
        with forwarding(ours.addresses[0]) as (by_proxy, cut):
            addresses = [ours.addresses[0]] * 2
            addresses[which] = by_proxy
            send = Send(sender, addresses, grant(ours, ALL), whole(source))
            settle(lambda: sender.transport_to(addresses) == "tcp" and ours.counters()["connections"] == 2)
            send.push([0], ALL)
            settle(lambda: ours.counters()["pieces_received"] == 1)
            cut()
            assert isinstance(send.wait(), TransferFailed)
        settle(lambda: ours.counters()["connections"] == ours.counters()["receives_active"] == 0)
        transfer(sender, source, ours, ALL, ALL)


# ---- receivers that lie --------------------------------------------------------------------------------------


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


# ---- memory that is offered ----------------------------------------------------------------------------------


@contextmanager
def offering(source: KVRegion, offer: bytes) -> Generator[Callable[[Target, OnDone], str]]:
    """A sender that offers something of its own choosing as its memory; what it gives opens a send."""
    origin = Origin(source, FINGERPRINT, "", SECONDS, 1, {"host": offer, "tcp": b""})
    sender = Sender(origin)

    def begin(target: Target, on_done: OnDone) -> str:
        sender.open("send", target, on_done)
        for layer in range(LAYERS):
            sender.push("send", layer, 0, ALL)
        sender.finish("send", 0, BLOCKS * TOKENS)
        settle(lambda: sender.transport_to(target.addresses))
        return sender.transport_to(target.addresses) or ""

    try:
        yield begin
    finally:
        sender.close()
        source.close()


def sent_with(offer: bytes, source: KVRegion, theirs: KVRegion) -> str:
    """How KV travels from a sender with such an offer; it must arrive."""
    with rank(theirs, TransportSettings("auto")) as ours, offering(source, offer) as begin:
        lease, outcomes = grant(ours, ALL), list[Outcome]()
        chosen = begin(Target(ours.addresses, lease, whole(source)), outcomes.append)
        settle(lambda: outcomes)
        assert isinstance(outcomes[0], SendReport), outcomes
        assert ours.revoke(lease) == BLOCKS * TOKENS
        assert content(theirs) == content(source)
        return chosen


def offer_of(pid: int, fd: int) -> bytes:
    return msgspec.msgpack.encode((pid, fd))


def unsealed(size: int) -> int:
    fd = os.memfd_create("test")
    os.ftruncate(fd, size)
    return fd


def test_memory_of_the_sender_is_read() -> None:
    source = region()
    assert sent_with(offer_of(os.getpid(), source.fd), source, region(2)) == "host"


@pytest.mark.parametrize(
    "offer",
    [b"", b"\xc1", offer_of(-1, 0), offer_of(0, 0), offer_of(2**22 + 1, 0), offer_of(os.getpid(), 2**20)],
    ids=["nothing", "nonsense", "no process", "process 0", "a process that is not there", "a file that is not there"],
)
def test_an_offer_that_is_none_is_left_for_tcp(offer: bytes) -> None:
    assert sent_with(offer, region(), region(2)) == "tcp"


def test_a_file_that_could_shrink_is_left_for_tcp() -> None:
    source = region()
    fd = unsealed(source.shape.size)
    try:
        assert sent_with(offer_of(os.getpid(), fd), source, region(2)) == "tcp"
    finally:
        os.close(fd)


@pytest.mark.parametrize("blocks", [BLOCKS - 4, BLOCKS + 4])
def test_a_file_of_another_size_is_left_for_tcp(blocks: int) -> None:
    other = filled(LAYERS, blocks, BYTES, 3)
    assert other.shape.size > TAIL_BYTES
    assert sent_with(offer_of(os.getpid(), other.fd), region(), region(2)) == "tcp"
    other.close()


def test_a_sealed_file_that_is_not_the_senders_region_is_left_for_tcp() -> None:
    other = region(3)
    assert sent_with(offer_of(os.getpid(), other.fd), region(), region(2)) == "tcp"
    other.close()


def test_a_pipe_is_left_for_tcp() -> None:
    ends = os.pipe()
    try:
        assert sent_with(offer_of(os.getpid(), ends[0]), region(), region(2)) == "tcp"
    finally:
        for end in ends:
            os.close(end)


def test_memory_of_another_process_is_left_for_tcp() -> None:
    with rank_process(TCP, LAYERS, BLOCKS, BYTES) as victim:
        assert sent_with(offer_of(victim.pid, victim.fd), region(), region(2)) == "tcp"


def test_where_only_host_is_allowed_the_reason_is_told() -> None:
    source, theirs = region(), region(2)
    before = content(theirs)
    with rank_process(TCP, LAYERS, BLOCKS, BYTES) as victim, rank(theirs, TransportSettings("host")) as ours:
        origin = Origin(source, FINGERPRINT, "", SECONDS, 1, {"host": offer_of(victim.pid, victim.fd)})
        sender, outcomes = Sender(origin), list[Outcome]()
        sender.open("send", Target(ours.addresses, grant(ours, ALL), whole(source)), outcomes.append)
        settle(lambda: outcomes)
        assert isinstance(outcomes[0], TransferFailed)
        assert "not a process that this one can see" in outcomes[0].message
        assert content(theirs) == before
        sender.close()
    source.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_only_the_process_at_the_other_end_holds_a_connection(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        socket.create_server((host, 0), family=family) as listener,
        rank_process(TCP, LAYERS, BLOCKS, BYTES) as child,
        socket.create_connection(listener.getsockname()[:2]) as ours,
    ):
        connection, _ = listener.accept()
        with connection:
            assert held_by(os.getpid(), connection)
            assert not any(held_by(pid, connection) for pid in (child.pid, 1, -1))
            ours.close()
            assert not held_by(os.getpid(), connection)
