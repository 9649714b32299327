"""Messages and proofs, as they are on the wire; who may send and how KV travels, which is said before the first chunk;
and that no ZeroMQ socket takes messages of any size.
"""

from __future__ import annotations

import ast
import itertools
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from tercet.protocol import TransferFailed
from tercet.protocol.access import secrets_of
from tercet.transport import KVRegion
from tercet.transport.backends import BackendUnavailable
from tercet.transport.backends.reading import Batch, HostBackend, UnderLease
from tercet.transport.peer_messages import (
    FROM_RECEIVER,
    FROM_SENDER,
    HEADER_BYTES,
    MAGIC,
    MAX_MESSAGE_BYTES,
    NONCE_BYTES,
    REQUESTS,
    Acknowledged,
    Challenge,
    Greeting,
    MessageSplitter,
    ProtocolViolation,
    ReadDescriptors,
    ReadRequest,
    Refused,
    SendBegin,
    SendEnd,
    Welcome,
    framed,
    proof_of,
)
from tercet.transport.region import BlockShape, RegionShape, shape_of
from tercet.transport.sockets import bounded
from tests.sources import modules
from tests.unit.transport.builders import (
    BLOCK_BYTES,
    BLOCKS,
    LAYERS,
    WORD,
    Conversation,
    FakeBackend,
    FakeReader,
    Receiving,
    chunk,
    sending_region,
)
from tests.unit.transport.models import whose

LEASE = "ab" * 16
GREETING = Greeting(
    "same", "a", 0, b"n" * 16, b"p" * 32, shape_of([64], 1, 64), 5, {"host": b"x", "tcp": b""}, BlockShape(16, 1, 2, 2)
)  # fmt: skip
CHUNK = ReadDescriptors(1, LEASE, 2, 3, 4, 5, 6, bytes(8), 7, 8, 0, 2)
TRACED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BEGIN = SendBegin(1, LEASE, whose(16), ((0, 2),), TRACED)
OF_SENDERS = [GREETING, Greeting("same", "a", 1, b"n", b"p"), BEGIN, CHUNK, SendEnd(1, LEASE, 0, 16, 2)]
OF_RECEIVERS = [Challenge(b"n"), Welcome("tcp", b"p"), Acknowledged(7), Refused(0, "nö"), Refused(8, "")]


@pytest.mark.parametrize("message", OF_SENDERS, ids=lambda each: type(each).__name__)
@given(cuts=st.lists(st.integers(0, 400), max_size=5))
def test_what_senders_say_comes_back_as_it_went(message: msgspec.Struct, cuts: list[int]) -> None:
    """However it is cut on its way."""
    data, splitter = 2 * framed(message), MessageSplitter(FROM_SENDER)
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    found = [each for begin, end in itertools.pairwise(bounds) for each in splitter.feed(data[begin:end])]
    assert (found, splitter.held) == ([message] * 2, 0)


@pytest.mark.parametrize("message", OF_RECEIVERS, ids=lambda each: type(each).__name__)
def test_what_receivers_say_comes_back_as_it_went(message: msgspec.Struct) -> None:
    assert list(MessageSplitter(FROM_RECEIVER).feed(framed(message))) == [message]


def test_what_is_asked_for_comes_back_as_it_went() -> None:
    assert list(MessageSplitter(REQUESTS).feed(framed(ReadRequest(1, 0, 4096)))) == [ReadRequest(1, 0, 4096)]


def test_where_the_fields_are() -> None:
    """Another implementation reads this layout: it must not change without another magic."""
    body = msgspec.msgpack.encode([4, 1, LEASE, 2, 3, 4, 5, 6, bytes(8), 7, 8, 0, 2, 0, None])
    assert framed(CHUNK) == struct.pack("<4sI", b"TRC8", len(body)) + body


def test_a_peer_without_traces_and_one_with_more_than_ours_are_understood() -> None:
    """Fields come at the end of a message, so that a version ignores those of a later one."""
    said = msgspec.msgpack.decode(msgspec.msgpack.encode(BEGIN))
    splitter = MessageSplitter(FROM_SENDER)
    assert splitter.feed(framed(msgspec.Raw(msgspec.msgpack.encode(said[:-1])))) == [  # type: ignore[arg-type]
        msgspec.structs.replace(BEGIN, traceparent="")
    ]
    assert splitter.feed(framed(msgspec.Raw(msgspec.msgpack.encode([*said, "later"])))) == [BEGIN]  # type: ignore[arg-type]
    with pytest.raises(ProtocolViolation):
        splitter.feed(framed(msgspec.structs.replace(BEGIN, traceparent="x" * 129)))


@given(st.binary(min_size=HEADER_BYTES, max_size=64))
def test_random_bytes_are_no_header(data: bytes) -> None:
    with pytest.raises(ProtocolViolation, match="not a KV transfer"):
        list(MessageSplitter(FROM_SENDER).feed(data.replace(MAGIC, b"HTTP")))


@pytest.mark.parametrize("nbytes", [MAX_MESSAGE_BYTES + 1, 2**32 - 1])
def test_a_message_has_a_reasonable_length(nbytes: int) -> None:
    with pytest.raises(ProtocolViolation, match=f"a message of {nbytes} bytes"):
        list(MessageSplitter(FROM_SENDER).feed(struct.pack("<4sI", MAGIC, nbytes)))


def with_header(body: bytes) -> bytes:
    return struct.pack("<4sI", MAGIC, len(body)) + body


@given(data=st.binary(max_size=200))
def test_random_bytes_are_no_message(data: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        list(MessageSplitter(FROM_SENDER).feed(with_header(b"\xc1" + data)))
    with suppress(ProtocolViolation):
        assert list(MessageSplitter(FROM_SENDER).feed(with_header(data)))


@given(st.data())
def test_a_message_with_a_byte_changed_or_lost(data: st.DataObject) -> None:
    whole = bytearray(msgspec.msgpack.encode(GREETING))
    at = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ProtocolViolation):
        list(MessageSplitter(FROM_SENDER).feed(with_header(bytes(whole[:at]))))
    whole[at] = data.draw(st.integers(0, 255))
    with suppress(ProtocolViolation):
        [found] = MessageSplitter(FROM_SENDER).feed(with_header(bytes(whole)))
        assert isinstance(found, Greeting | ReadDescriptors | SendEnd)


PREFIX = msgspec.msgpack.encode(GREETING)[1:]
END = [5, 1, LEASE, 0, 16, 2]
OF_NO_SENDER = {
    "kind": [9],
    "an answer": [6, 1],
    "a request": [8, 1, 0, 1],
    "send 0": [5, 0, *END[2:]],
    "no lease": [5, 1, "x", *END[3:]],
    "a long lease": [5, 1, LEASE + "0", *END[3:]],
    "a capital lease": [5, 1, LEASE.upper(), *END[3:]],
    "negative": [*END[:3], -1, 16, 2],
    "far": [*END[:4], 2**32, 2],
    "far send": [5, 2**63, *END[2:]],
    "text": [*END[:4], "16", 2],
    "short": END[:3],
    "no session": [2, "same", "", 0, b"n", b"p"],
    "stream": [2, "same", "a", -1, b"n", b"p"],
    "no number": [],
}


@pytest.mark.parametrize("said", OF_NO_SENDER.values(), ids=OF_NO_SENDER)
def test_what_no_sender_says(said: list[object]) -> None:
    with pytest.raises(ProtocolViolation, match="not a message"):
        list(MessageSplitter(FROM_SENDER).feed(with_header(msgspec.msgpack.encode(said))))


@pytest.mark.parametrize(
    "body",
    [
        b"\x96\x02\xa2\xff\xfe\xa1a\x00\xc4\x00\xc4\x00",
        b"\x9b" + PREFIX + b"\x91" * 100_000 + b"\x00",
        b"\xdd\xff\xff\xff\xff",
        b"\x85\xa1a\x00",
        b"\x91" * 9000,
        b"",
    ],
    ids=["no utf-8", "deeper", "long", "a map", "deep", "nothing"],
)
def test_messages_that_are_hard_to_read(body: bytes) -> None:
    with pytest.raises(ProtocolViolation, match="not a message"):
        list(MessageSplitter(FROM_SENDER).feed(with_header(body)))


# ---- proofs --------------------------------------------------------------------------------------------------

NONCE = bytes(range(NONCE_BYTES))


def test_a_proof_covers_all_that_was_said() -> None:
    proofs = [
        proof_of(role, secret, challenge, nonce, session)
        for role in ("sender", "receiver")
        for secret in ("", "fleet", "other")
        for challenge in (NONCE, NONCE[::-1])
        for nonce in (NONCE, bytes(NONCE_BYTES))
        for session in ("a", "b")
    ]
    assert len(set(proofs)) == len(proofs) == 48
    assert all(len(proof) == 32 for proof in proofs)
    assert proof_of("sender", "fleet", NONCE, NONCE, "a") == proof_of("sender", "fleet", NONCE, NONCE, "a")


@given(st.text("ab|", max_size=8), st.data())
def test_nothing_said_can_be_taken_for_something_else(said: str, data: st.DataObject) -> None:
    """Wherever the border between two fields is drawn, the proof is another one."""
    first, second = (data.draw(st.tuples(*[st.integers(0, len(said))] * 2).map(sorted)) for _ in range(2))

    def fields(low: int, high: int) -> tuple[bytes, bytes, str]:
        return said[:low].encode(), said[low:high].encode(), said[high:]

    one, other = fields(*first), fields(*second)
    assert (proof_of("sender", "fleet", *one) == proof_of("sender", "fleet", *other)) == (one == other)


def refused(talk: Conversation, why: str, **said: Any) -> None:
    """A violation, which leaves no session behind."""
    with pytest.raises(ProtocolViolation, match=why):
        talk.greet(**said)
    assert (talk.agreed, talk.answers) == (None, [])


# ---- who -------------------------------------------------------------------------------------------------------------


def test_a_sender_that_knows_the_secret_is_welcome() -> None:
    assert Conversation(greet=False).greet() == "fake"


@pytest.mark.parametrize("secret", ["", "another", "the-fleet", "the-fleets-"])
def test_another_secret(secret: str) -> None:
    refused(Conversation(greet=False), "secret", secret=secret)


@pytest.mark.parametrize(
    ("receiver", "sender"), [("a b", "a"), ("a b", "b"), ("b a", "a b"), ("a", "a b"), ("b", "b a")]
)
def test_two_secrets_are_valid_while_they_are_changed(receiver: str, sender: str) -> None:
    talk = Conversation(greet=False)
    rank = talk.receiving.rank
    talk.receiving.rank = replace(rank, settings=msgspec.structs.replace(rank.settings, secret=receiver))
    assert talk.greet(secret=secrets_of(sender)[0]) == "fake"


@pytest.mark.parametrize("changes", [{"proof": b""}, {"proof": bytes(32)}, {"nonce": b"x"}, {"session": "b"}], ids=str)
def test_a_proof_of_something_else(changes: dict[str, Any]) -> None:
    refused(Conversation(greet=False), "secret", **changes)


def test_a_greeting_that_was_heard_elsewhere() -> None:
    """Each connection has a challenge of its own."""
    first, second = Conversation(), Conversation(greet=False)
    second.challenge = Challenge(b"another")
    refused(second, "secret", proof=first.hello().proof)


def test_the_secret_comes_before_the_layout() -> None:
    refused(Conversation(greet=False), "secret", secret="another", fingerprint="other")
    refused(Conversation(greet=False), "layout", fingerprint="other")


# ---- blocks ----------------------------------------------------------------------------------------------------------

OURS = BlockShape(16, 2, 1, 1)


@pytest.mark.parametrize(
    "block", [BlockShape(0, 2, 1, 1), BlockShape(-3, 2, 1, 1), BlockShape(8, 2, 2, 1), BlockShape(8, 2, 1, 2)], ids=str
)
def test_blocks_that_cannot_be_put_together(block: BlockShape) -> None:
    refused(Conversation(Receiving(block=OURS), greet=False), "layout", block=block)


# ---- backends --------------------------------------------------------------------------------------------------------


def offering(theirs: KVRegion, *backends: FakeBackend, **changes: Any) -> Conversation:
    return Conversation(Receiving(backends), theirs, **changes)


def chosen(talk: Conversation) -> str:
    assert talk.agreed is not None
    return talk.agreed.welcome.transport


def test_the_first_backend_that_works_is_taken() -> None:
    theirs = sending_region()
    readers = [FakeReader(theirs), FakeReader(theirs)]
    good, better = (FakeBackend(reader, name) for reader, name in zip(readers, ("good", "better"), strict=True))
    broken = FakeBackend(BackendUnavailable("broken: it is"), "broken")
    talk = offering(theirs, broken, better, good)
    assert chosen(talk) == "better"
    assert (broken.asked, better.asked, good.asked) == ([(b"broken", theirs.shape)], [(b"better", theirs.shape)], [])
    talk.close()
    assert [reader.closed for reader in readers] == [0, 1]


@pytest.mark.parametrize(
    "error", [BackendUnavailable("not here"), TransferFailed("it broke"), OSError("the device is gone")], ids=repr
)
def test_the_next_one_is_taken_when_a_backend_does_not_work(error: Exception) -> None:
    theirs = sending_region()
    last = FakeBackend(FakeReader(theirs), "last")
    assert chosen(offering(theirs, FakeBackend(error), last)) == "last"


@pytest.mark.parametrize("changes", [{"word": 0}, {"word": WORD + 1}, {"word": 2**62}, {"offers": {"x": b""}}], ids=str)
def test_memory_that_cannot_be_tried_is_not_read(changes: dict[str, Any]) -> None:
    theirs = sending_region()
    backend = FakeBackend(reader := FakeReader(theirs))
    with pytest.raises(ProtocolViolation, match="no transport that both sides allow works: fake"):
        offering(theirs, backend, **changes)
    assert reader.closed == len(backend.asked)


@pytest.mark.parametrize(
    "shape", [None, RegionShape((0,), 1, 64, 0, 64), RegionShape((-64,), 1, 64, 0, 2**40)], ids=str
)
def test_a_region_that_does_not_hold_its_blocks_is_not_read(shape: RegionShape | None) -> None:
    backend = FakeBackend(FakeReader(sending_region()))
    with pytest.raises(ProtocolViolation, match="region"):
        offering(sending_region(), backend, shape=shape)
    assert backend.asked == []


def test_a_reader_that_fails_its_check_is_closed() -> None:
    class Broken(FakeReader):
        def read(self, batch: Batch, under_lease: UnderLease) -> bool:
            raise OSError("the sender is gone")

    theirs = sending_region()
    reader = Broken(theirs)
    assert chosen(offering(theirs, FakeBackend(reader), FakeBackend(FakeReader(theirs), "last"))) == "last"
    assert reader.closed == 1


def test_no_way_at_all_says_why() -> None:
    theirs = sending_region()
    backends = FakeBackend(BackendUnavailable("fake: no device")), FakeBackend(FakeReader(theirs), "other")
    with pytest.raises(ProtocolViolation, match="fake: no device; other: the sender does not offer it"):
        offering(theirs, *backends, offers={"fake": b""})


# ---- the host backend ------------------------------------------------------------------------------------------------


def hosted(theirs: KVRegion, memory: int | None, **changes: Any) -> Conversation:
    receiving = Receiving()
    receiving.backends.append(HostBackend(theirs))
    return Conversation(receiving, theirs, memory=memory, **changes)


def test_memory_that_came_with_the_greeting_is_mapped() -> None:
    theirs = KVRegion.create(LAYERS, BLOCKS, BLOCK_BYTES)
    theirs.set_word(WORD)
    theirs.set_word(1)
    theirs.blocks(0, 6)[:] = bytes(range(BLOCK_BYTES))
    talk = hosted(theirs, theirs.fd)
    assert chosen(talk) == "host"
    assert talk.say(chunk(0, 1, [6])) == []
    assert talk.receiving.block(0, 2) == bytes(range(BLOCK_BYTES))
    assert talk.receiving.touched() == {(0, 2)}
    shape = theirs.shape
    larger = RegionShape(shape.planes, shape.num_blocks, shape.block_bytes, shape.words, shape.size + 8)
    for memory, changes in ((None, {}), (theirs.fd, {"shape": larger}), (os.open(os.devnull, os.O_RDONLY), {})):
        with pytest.raises(ProtocolViolation, match="host: the sender's memory"):
            hosted(theirs, memory, **changes)
    theirs.close()


def unbounded(text: str) -> Iterator[int]:
    """Lines on which a socket of ZeroMQ is made and not bounded."""
    tree = ast.parse(text)
    inside = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "bounded"
        for inner in node.args
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "socket":
            of_zmq = any(isinstance(each, ast.Attribute) and ast.unparse(each).startswith("zmq.") for each in node.args)
            if of_zmq and id(node) not in inside:
                yield node.lineno


def test_every_socket_is_bounded() -> None:
    files = [path for _, path in modules() if "zmq" in (text := path.read_text()) and ".socket(zmq" in text]
    assert len(files) >= 4
    assert [(path.name, line) for path in files for line in unbounded(path.read_text())] == []
    assert list(unbounded("a = context.socket(zmq.PULL)")) == [1]


@pytest.mark.parametrize(("size", "arrives"), [(1000, True), (1001, False)])
def test_a_message_that_is_too_long_does_not_arrive(size: int, arrives: bool) -> None:
    context = zmq.Context()
    with bounded(context.socket(zmq.PULL), 1000) as takes, context.socket(zmq.PUSH) as sends:
        takes.linger = sends.linger = 0
        sends.connect(f"tcp://127.0.0.1:{takes.bind_to_random_port('tcp://127.0.0.1')}")
        sends.send(b"x" * size)
        sends.send(b"short")
        assert takes.poll(2000 if arrives else 100) == (zmq.POLLIN if arrives else 0) or not arrives
        if takes.poll(0):
            assert (len(takes.recv()) == size) is arrives
    context.term()
