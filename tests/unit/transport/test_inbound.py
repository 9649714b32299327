"""The receiver's conversation without sockets: good frames land, anything else writes nothing."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.transport import BufferMemory, Grant, GrantTable
from tercet.transport.direct import LIVE_WORDS, Greeting, LiveTable, Reference
from tercet.transport.frames import HEADER_BYTES, Header, Kind, ProtocolViolation, hello, unpack
from tercet.transport.inbound import Inbound, InboundCounters
from tercet.transport.memory import runs

LAYERS, BLOCKS, BLOCK_BYTES, SIZE = 2, 8, 64, 16
LEASE = "12" * 16
SENTINEL = 0xEE
GREETING = hello(Greeting("same"))


class Conversation:
    def __init__(self, greet: bool = True, greeting: bytes = GREETING, same_process: bool = False) -> None:
        self.buffers = [bytearray([SENTINEL]) * (BLOCKS * BLOCK_BYTES) for _ in range(LAYERS)]
        self.memory = BufferMemory([memoryview(buffer) for buffer in self.buffers], BLOCKS)
        self.grants = GrantTable(LAYERS)
        self.grants.grant(Grant(LEASE, (5, 2, 3), 0, 3 * SIZE, SIZE))
        self.counters, self.finished = InboundCounters(), []
        self.inbound = Inbound(
            self.memory, self.grants, "same", self.counters,
            self.take, lambda _pid: same_process,
        )  # fmt: skip
        if greet:
            assert [answer.kind for answer in self.say(greeting)] == [Kind.WELCOME]

    def take(self, lease: str, end: int) -> None:
        self.finished.append((lease, end))

    def say(self, data: bytes) -> list[Header]:
        answers = []
        while data:
            wanted = self.inbound.wanted
            assert len(data) >= wanted
            answer = self.inbound.feed(memoryview(data[:wanted]))
            if answer:
                answers.append(unpack(answer[:HEADER_BYTES]))
            data = data[wanted:]
        return answers

    @property
    def untouched(self) -> bool:
        return all(set(buffer) == {SENTINEL} for buffer in self.buffers)


def piece(layer: int, begin: int, end: int, fill: int, send: int = 1, lease: str = LEASE) -> bytes:
    body = bytes([fill]) * ((end - begin) * BLOCK_BYTES)
    return Header(Kind.PIECE, send, lease, layer, begin, end, len(body)).pack() + body


def fin(begin: int, end: int, send: int = 1, lease: str = LEASE) -> bytes:
    return Header(Kind.FIN, send, lease, begin=begin, end=end).pack()


def test_pieces_land_in_their_blocks_and_nowhere_else() -> None:
    talk = Conversation()
    assert talk.say(piece(0, 0, 3, 1) + piece(1, 0, 1, 2) + piece(1, 1, 3, 3)) == []
    expected = [{5: 1, 2: 1, 3: 1}, {5: 2, 2: 3, 3: 3}]
    for buffer, filled in zip(talk.buffers, expected, strict=True):
        for block in range(BLOCKS):
            found = set(buffer[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])
            assert found == {filled.get(block, SENTINEL)}
    assert [answer.kind for answer in talk.say(fin(0, 40))] == [Kind.ACK]
    assert talk.finished == [(LEASE, 40)]
    assert (talk.counters.pieces_received, talk.counters.bytes_received) == (3, 6 * BLOCK_BYTES)


def test_duplicates_and_any_order_are_fine() -> None:
    talk = Conversation()
    talk.say(piece(1, 2, 3, 9) + piece(0, 0, 3, 8) + piece(1, 2, 3, 9) + piece(1, 0, 2, 7))
    assert [answer.kind for answer in talk.say(fin(0, 48))] == [Kind.ACK]


def test_a_claim_before_its_pieces_is_refused() -> None:
    talk = Conversation()
    assert [answer.kind for answer in talk.say(piece(0, 0, 3, 1) + fin(0, 48))] == [Kind.REFUSED]
    assert talk.finished == []


def test_an_ended_lease_is_refused_once_and_other_sends_go_on() -> None:
    talk = Conversation()
    talk.grants.revoke(LEASE)
    talk.grants.grant(Grant("34" * 16, (0,), 0, SIZE, SIZE))
    late = piece(0, 0, 1, 1) + piece(1, 0, 1, 1) + fin(0, 16)
    answers = talk.say(late)
    assert [(answer.kind, answer.send) for answer in answers] == [(Kind.REFUSED, 1)]
    assert talk.untouched
    good = piece(0, 0, 1, 4, 2, "34" * 16) + piece(1, 0, 1, 4, 2, "34" * 16) + fin(0, 16, 2, "34" * 16)
    assert [(answer.kind, answer.send) for answer in talk.say(good)] == [(Kind.ACK, 2)]


@pytest.mark.parametrize(
    "frame",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"\r\n" * 20,
        Header(Kind.ACK, 1).pack(),
        Header(Kind.REFUSED, 1).pack(),
        GREETING,
        Header(Kind.PIECE, 1, LEASE, 0, 0, 1, BLOCK_BYTES + 1).pack(),
        Header(Kind.PIECE, 1, LEASE, 0, 0, 1, 0).pack(),
        Header(Kind.PIECE, 1, LEASE, 0, 2, 1, BLOCK_BYTES).pack(),
        Header(Kind.PIECE, 1, LEASE, 0, 0, 1, 2**63).pack(),
        Header(Kind.FIN, 1, LEASE, nbytes=5).pack(),
        b"TRC1\x63" + b"\0" * (HEADER_BYTES - 5),
    ],
    ids=["http", "ack", "refused", "second hello", "size", "empty", "backward", "huge", "fin body", "kind"],
)
def test_violations_close_the_connection(frame: bytes) -> None:
    talk = Conversation()
    with pytest.raises(ProtocolViolation):
        talk.say(frame[:HEADER_BYTES])
    assert talk.untouched


def test_pieces_before_the_greeting_are_a_violation() -> None:
    with pytest.raises(ProtocolViolation, match="HELLO"):
        Conversation(greet=False).say(piece(0, 0, 1, 1))


def test_another_layout_is_a_violation() -> None:
    with pytest.raises(ProtocolViolation, match="layout"):
        Conversation(greet=False).say(hello(Greeting("other")))


@given(st.binary(min_size=HEADER_BYTES, max_size=400))
def test_garbage_writes_nothing(data: bytes) -> None:
    talk = Conversation(greet=False)
    with contextlib.suppress(ProtocolViolation):
        for offset in range(0, len(data) - HEADER_BYTES, HEADER_BYTES):
            talk.inbound.feed(memoryview(data[offset : offset + talk.inbound.wanted]))
    assert talk.untouched


frames = st.one_of(
    st.builds(piece, st.integers(0, 3), st.integers(0, 3), st.integers(3, 5), st.integers(0, 9), st.integers(1, 3)),
    st.builds(fin, st.integers(0, 60), st.integers(0, 60), st.integers(1, 3)),
)


@given(st.lists(frames, max_size=20), st.integers(0, 20))
def test_hostile_frames_stay_inside_the_lease(said: list[bytes], revoke_at: int) -> None:
    talk = Conversation()
    before: list[bytes] = []
    with contextlib.suppress(ProtocolViolation):
        for at, frame in enumerate(said):
            if at == revoke_at:
                talk.grants.revoke(LEASE)
                before = [bytes(buffer) for buffer in talk.buffers]
            talk.say(frame)
            if at >= revoke_at:
                assert [bytes(buffer) for buffer in talk.buffers] == before
    for buffer in talk.buffers:
        for block in set(range(BLOCKS)) - {5, 2, 3}:
            assert set(buffer[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]) == {SENTINEL}


@given(st.lists(st.integers(0, 30), max_size=30), st.integers(1, 5))
def test_runs_are_the_blocks(blocks: list[int], longest: int) -> None:
    found = runs(blocks, longest)
    assert [block for first, count in found for block in range(first, first + count)] == blocks
    assert all(1 <= count <= longest for _, count in found)


@given(
    st.builds(
        Header, st.sampled_from(list(Kind)), st.integers(0, 2**64 - 1),
        st.binary(min_size=16, max_size=16).map(bytes.hex),
        st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1),
    )
)  # fmt: skip
def test_headers_round_trip(header: Header) -> None:
    assert unpack(header.pack()) == header


# ---- pieces by reference -------------------------------------------------------------------------------------


def reference(table: LiveTable, data: bytearray, slots: int, send: int = 1) -> bytes:
    body = msgspec.msgpack.encode(table.reference(send, memoryview(data)))
    return Header(Kind.REFERENCE, send, LEASE, 0, 0, slots, len(body)).pack() + body


def directly(table: LiveTable) -> Conversation:
    return Conversation(greeting=hello(table.greeting("same")), same_process=True)


def test_a_reference_is_copied_out_of_the_senders_memory() -> None:
    table, data = LiveTable(), bytearray(b"\x07" * BLOCK_BYTES)
    talk = directly(table)
    table.begin(1)
    assert talk.say(reference(table, data, 1)) == []
    assert bytes(talk.memory.read(0, 5, 1)) == bytes(data)
    assert (talk.counters.pieces_by_reference, talk.counters.bytes_received) == (1, BLOCK_BYTES)


def test_a_reference_of_a_send_that_ended_is_not_taken() -> None:
    table, data = LiveTable(), bytearray(BLOCK_BYTES)
    talk = directly(table)
    table.begin(1)
    table.end(1)
    assert [answer.kind for answer in talk.say(reference(table, data, 1))] == [Kind.REFUSED]
    assert talk.untouched


def test_an_ended_lease_takes_no_reference() -> None:
    table, data = LiveTable(), bytearray(BLOCK_BYTES)
    talk = directly(table)
    table.begin(1)
    talk.grants.revoke(LEASE)
    assert [answer.kind for answer in talk.say(reference(table, data, 1))] == [Kind.REFUSED]
    assert talk.untouched


@pytest.mark.parametrize("address", [0, 1, 2**47, 2**64 - 8])
def test_a_wild_reference_is_refused(address: int) -> None:
    table = LiveTable()
    talk = directly(table)
    body = msgspec.msgpack.encode(Reference(address, address))
    frame = Header(Kind.REFERENCE, 1, LEASE, 0, 0, 1, len(body)).pack() + body
    assert [answer.kind for answer in talk.say(frame)] == [Kind.REFUSED]
    assert talk.untouched


def test_references_need_proof_of_the_same_machine() -> None:
    table, data = LiveTable(), bytearray(BLOCK_BYTES)
    true = table.greeting("same")
    wrong = [
        Conversation(greeting=hello(true), same_process=False),
        Conversation(greeting=hello(msgspec.structs.replace(true, nonce=bytes(16))), same_process=True),
        Conversation(greeting=hello(msgspec.structs.replace(true, pid=2**22 + 1)), same_process=True),
        Conversation(greeting=hello(msgspec.structs.replace(true, nonce=b"")), same_process=True),
    ]
    for talk in wrong:
        with pytest.raises(ProtocolViolation):
            talk.say(reference(table, data, 1))
        assert talk.untouched


def test_live_words_are_reused_without_confusion() -> None:
    table, data = LiveTable(), bytearray(BLOCK_BYTES)
    talk = directly(table)
    table.begin(1)
    table.begin(1 + LIVE_WORDS)
    table.end(1)
    assert [answer.kind for answer in talk.say(reference(table, data, 1, 1))] == [Kind.REFUSED]
    assert talk.say(reference(table, data, 1, 1 + LIVE_WORDS)) == []


# ---- what must not take a connection with it -----------------------------------------------------------------


def test_an_owner_that_fails_is_no_acknowledgement(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Conversation()

    def fail(lease: str, end: int) -> None:
        raise RuntimeError("the owner is gone")

    monkeypatch.setattr(talk.inbound, "_on_finished", fail)
    said = piece(0, 0, 1, 1) + piece(1, 0, 1, 1) + fin(0, 16)
    assert [answer.kind for answer in talk.say(said)] == [Kind.REFUSED]
    monkeypatch.undo()
    assert [(answer.kind, answer.send) for answer in talk.say(fin(0, 16, 2))] == [(Kind.ACK, 2)]


def test_refusals_are_remembered_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercet.transport.inbound.REMEMBERED_REFUSED", 2)
    talk = Conversation()
    talk.grants.revoke(LEASE)
    answered = [len(talk.say(piece(0, 0, 1, 1, send))) for send in (1, 2, 2, 3, 3, 1)]
    assert answered == [1, 1, 0, 1, 0, 1]
    assert talk.counters.pieces_refused == 6
    assert talk.untouched
