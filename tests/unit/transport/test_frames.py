"""Headers, bodies and proofs, as they are on the wire."""

from __future__ import annotations

import struct
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.transport.frames import (
    HEADER_BYTES,
    MAGIC,
    MAX_TEXT_BYTES,
    NO_LEASE,
    NONCE_BYTES,
    Greeting,
    Header,
    Kind,
    ProtocolViolation,
    Reference,
    Welcome,
    ack,
    decode,
    frame,
    receiver_proof,
    refused,
    sender_proof,
    unpack,
)
from tercet.transport.recut import BlockShape
from tercet.transport.region import shape_of

WORD, HALF, SHORT = (st.integers(0, 2**bits - 1) for bits in (64, 32, 16))
LEASES = st.binary(min_size=16, max_size=16).map(bytes.hex)


@given(st.builds(Header, st.sampled_from(Kind), WORD, LEASES, HALF, HALF, HALF, HALF, SHORT, SHORT, WORD, HALF))
def test_headers_come_back_as_they_went(header: Header) -> None:
    packed = header.pack()
    assert len(packed) == HEADER_BYTES
    assert unpack(memoryview(packed)) == header


def test_where_the_fields_are() -> None:
    """Another implementation reads this layout: it must not change without another magic."""
    header = Header(Kind.PIECE, 1, "ab" * 16, 2, 3, 4, 5, 6, 7, 8, 9)
    expected = struct.pack("<4sBBBBQ16sIIIIHHQI", MAGIC, 2, 0, 0, 0, 1, b"\xab" * 16, 2, 3, 4, 5, 6, 7, 8, 9)
    assert (header.pack(), HEADER_BYTES) == (expected, 64)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_random_bytes_are_no_header(data: bytes) -> None:
    with pytest.raises(ProtocolViolation, match="not a KV transfer"):
        unpack(data.replace(MAGIC, b"HTTP"))


@pytest.mark.parametrize("kind", sorted(set(range(256)) - set(Kind)))
def test_kinds_that_there_are_not(kind: int) -> None:
    packed = bytearray(Header(Kind.FIN).pack())
    packed[4] = kind
    with pytest.raises(ProtocolViolation, match=f"unknown frame kind {kind}"):
        unpack(bytes(packed))


def test_a_frame_says_how_long_its_body_is() -> None:
    said = frame(Header(Kind.HELLO, nbytes=99), b"four")
    assert unpack(said[:HEADER_BYTES]) == Header(Kind.HELLO, nbytes=4)
    assert said[HEADER_BYTES:] == b"four"


def test_answers() -> None:
    assert unpack(ack(7)) == Header(Kind.ACK, 7)
    said = refused(8, "nö")
    assert unpack(said[:HEADER_BYTES]) == Header(Kind.REFUSED, 8, NO_LEASE, nbytes=3)
    assert said[HEADER_BYTES:] == "nö".encode()
    assert len(refused(8, "é" * MAX_TEXT_BYTES)) == HEADER_BYTES + MAX_TEXT_BYTES


# ---- bodies --------------------------------------------------------------------------------------------------

GREETING = Greeting(
    "same", "a", 0, b"n" * 16, b"p" * 32, shape_of([64], 1, 64), 5, {"host": b"x", "tcp": b""}, BlockShape(16, 1, 2, 2)
)  # fmt: skip
BODIES = [GREETING, Greeting("same", "a", 1, b"n", b"p"), Welcome("tcp", b"p"), Reference(bytes(16), 0, 64)]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_bodies_come_back_as_they_went(body: msgspec.Struct) -> None:
    assert decode(msgspec.msgpack.encode(body), type(body)) == body


@pytest.mark.parametrize("kind", [Greeting, Welcome, Reference])
@given(data=st.binary(max_size=200))
def test_random_bytes_are_no_body(kind: type[msgspec.Struct], data: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        decode(b"\xc1" + data, kind)
    with suppress(ProtocolViolation):
        assert isinstance(decode(data, kind), kind)


@given(st.data())
def test_a_body_with_a_byte_changed_or_lost(data: st.DataObject) -> None:
    whole = bytearray(msgspec.msgpack.encode(GREETING))
    at = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ProtocolViolation):
        decode(bytes(whole[:at]), Greeting)
    whole[at] = data.draw(st.integers(0, 255))
    with suppress(ProtocolViolation):
        assert isinstance(decode(bytes(whole), Greeting), Greeting)


PREFIX = msgspec.msgpack.encode(GREETING)[1:]


@pytest.mark.parametrize(
    "body",
    [
        b"\x95\xa2\xff\xfe\xa1a\x00\xc4\x00\xc4\x00",
        b"\x9a" + PREFIX + b"\x91" * 100_000 + b"\x00",
        b"\xdd\xff\xff\xff\xff",
        b"\x85\xa1a\x00",
        b"",
    ],
    ids=["no utf-8", "deep", "long", "a map", "nothing"],
)
def test_bodies_that_are_hard_to_read(body: bytes) -> None:
    with pytest.raises(ProtocolViolation, match="Greeting"):
        decode(body, Greeting)


# ---- proofs --------------------------------------------------------------------------------------------------

NONCE = bytes(range(NONCE_BYTES))


def test_a_proof_covers_all_that_was_said() -> None:
    proofs = [
        proof(secret, challenge, nonce, session)
        for proof in (sender_proof, receiver_proof)
        for secret in ("", "fleet", "other")
        for challenge in (NONCE, NONCE[::-1])
        for nonce in (NONCE, bytes(NONCE_BYTES))
        for session in ("a", "b")
    ]
    assert len(set(proofs)) == len(proofs) == 48
    assert all(len(proof) == 32 for proof in proofs)
    assert sender_proof("fleet", NONCE, NONCE, "a") == sender_proof("fleet", NONCE, NONCE, "a")


@given(st.text("ab|", max_size=8), st.data())
def test_nothing_said_can_be_taken_for_something_else(said: str, data: st.DataObject) -> None:
    """Wherever the border between two fields is drawn, the proof is another one."""
    first, second = (data.draw(st.tuples(*[st.integers(0, len(said))] * 2).map(sorted)) for _ in range(2))

    def fields(low: int, high: int) -> tuple[bytes, bytes, str]:
        return said[:low].encode(), said[low:high].encode(), said[high:]

    one, other = fields(*first), fields(*second)
    assert (sender_proof("fleet", *one) == sender_proof("fleet", *other)) == (one == other)
