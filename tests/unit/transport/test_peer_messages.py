"""Messages and proofs, as they are on the wire."""

from __future__ import annotations

import itertools
import struct
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from tercet.transport.region import BlockShape, shape_of
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
