"""KV that the receiver reads from its sender's memory: only what was offered, into what was leased, while it lasts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.protocol import TransferFailed
from tercet.transport import KVRegion
from tercet.transport import references as module
from tercet.transport.frames import Header, Kind, ProtocolViolation, Reference, frame
from tercet.transport.references import batches
from tercet.transport.region import shape_of
from tests.unit.transport.builders import (
    BLOCK_BYTES,
    BLOCKS,
    LAYERS,
    LEASE,
    SENTINEL,
    SIZE,
    Conversation,
    FakeBackend,
    FakeReader,
    Receiving,
    fin,
    reference,
    referred,
)

WORD = 77
LEASED = {(layer, block) for layer in range(LAYERS) for block in (5, 2, 3)}


class Reading:
    """A conversation with a sender whose region is read; its block b of layer l is full of ``16 * l + b``."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self.theirs = KVRegion.create(LAYERS, BLOCKS, block_bytes)
        for layer in range(LAYERS):
            for block in range(BLOCKS):
                self.theirs.blocks(layer, block)[:] = bytes([16 * layer + block]) * block_bytes
        self.theirs.begin(WORD)
        self.theirs.begin(1)
        self.receiving = Receiving()
        self.reader = FakeReader(self.receiving.region, self.theirs)
        self.receiving.rules.backends = [FakeBackend(self.reader)]
        self.talk = Conversation(self.receiving, greet=False)
        self.talk.say(self.talk.hello(shape=self.theirs.shape, word=WORD, offers={"fake": b"", "tcp": b""}))
        assert self.talk.welcome() == "fake"

    def say(self, data: bytes) -> list[tuple[Kind, int]]:
        return self.talk.say(data)


@pytest.fixture
def reading() -> Iterator[Reading]:
    reading = Reading()
    yield reading
    reading.theirs.close()


def test_blocks_are_read_into_their_slots(reading: Reading) -> None:
    said = reference(0, 0, [1, 2, 4]) + reference(1, 0, [7]) + reference(1, 1, [0, 3])
    assert reading.say(said + fin(0, 48, 3)) == [(Kind.ACK, 1)]
    found = [set(reading.receiving.block(layer, block)) for layer in range(LAYERS) for block in (5, 2, 3)]
    assert found == [{1}, {2}, {4}, {16 + 7}, {16 + 0}, {16 + 3}]
    assert reading.receiving.touched() == LEASED
    assert reading.receiving.counters == {
        "bytes_received": 6 * BLOCK_BYTES, "chunks_received": 3, "chunks_by_reference": 3, "claims_accepted": 1,
    }  # fmt: skip


def test_a_reference_may_be_to_several_layers(reading: Reading) -> None:
    assert reading.say(reference(0, 0, [1, 2, 4], layers=LAYERS) + fin(0, 48, 1)) == [(Kind.ACK, 1)]
    found = [set(reading.receiving.block(layer, block)) for layer in range(LAYERS) for block in (5, 2, 3)]
    assert found == [{1}, {2}, {4}, {16 + 1}, {16 + 2}, {16 + 4}]
    assert reading.receiving.touched() == LEASED
    assert reading.receiving.counters["bytes_received"] == 6 * BLOCK_BYTES


def test_neighbours_on_both_sides_go_in_one_copy(reading: Reading) -> None:
    """Slots 1 and 2 are blocks 2 and 3."""
    reading.say(reference(0, 0, [4, 5, 6]))
    assert [copy[0] for copies in reading.reader.reads for copy in copies] == [BLOCK_BYTES, 2 * BLOCK_BYTES]


def test_a_part_comes_from_anywhere_in_the_senders_blocks() -> None:
    reading = Reading(block_bytes=2 * BLOCK_BYTES)
    reading.theirs.blocks(0, 1)[:] = bytes(range(2 * BLOCK_BYTES))
    half = BLOCK_BYTES // 2
    assert reading.say(reference(0, 2, [1], offset=half, size=half, part=1, parts=2)) == []
    assert reading.receiving.block(0, 3) == bytes([SENTINEL]) * half + bytes(range(half, 2 * half))
    assert reading.say(reference(0, 0, [1], offset=BLOCK_BYTES, send=1 + 4096)) == [(Kind.REFUSED, 1 + 4096)]
    reading.theirs.begin(3)
    assert reading.say(reference(0, 0, [1], offset=BLOCK_BYTES, send=3)) == []
    assert reading.receiving.block(0, 5) == bytes(range(BLOCK_BYTES, 2 * BLOCK_BYTES))
    reading.theirs.close()


# ---- what is not taken ---------------------------------------------------------------------------------------


def test_blocks_that_were_given_up_while_they_were_read(reading: Reading) -> None:
    reading.reader.after = lambda: reading.theirs.end(1)
    assert reading.say(reference(0, 0, [1])) == [(Kind.REFUSED, 1)]
    assert reading.receiving.grants.receives == 0
    assert reading.receiving.touched() <= {(0, 5)}
    assert reading.receiving.counters == {"chunks_refused": 1}
    assert reading.say(reference(1, 0, [1]) + fin(0, 16, 2)) == []
    assert reading.receiving.finished == []


def test_the_word_of_another_send_does_not_do(reading: Reading) -> None:
    reading.theirs.begin(1 + 4096)
    assert reading.say(reference(0, 0, [1])) == [(Kind.REFUSED, 1)]
    assert reading.say(reference(0, 0, [1], send=1 + 4096)) == []


@pytest.mark.parametrize("error", [OSError("the process is gone"), TransferFailed("it broke")], ids=repr)
def test_a_reader_that_fails_refuses_its_send_only(reading: Reading, error: Exception) -> None:
    def fail() -> None:
        raise error

    reading.reader.before = fail
    assert reading.say(reference(0, 0, [1])) == [(Kind.REFUSED, 1)]
    assert str(error) in reading.talk.answers[-1][1].decode()
    reading.reader.before = lambda: None
    reading.theirs.begin(2)
    assert reading.say(reference(0, 0, [1], send=2)) == []


def test_references_that_come_together_are_read_together(reading: Reading) -> None:
    said = reference(0, 0, [1, 3]) + reference(1, 0, [1, 3]) + fin(0, 2 * SIZE, 2)
    assert reading.say(said) == [(Kind.ACK, 1)]
    assert len(reading.reader.reads) == 1
    assert len(reading.receiving.touched()) == 4


def test_references_of_two_sends_are_read_apart(reading: Reading) -> None:
    reading.theirs.begin(2)
    assert reading.say(reference(0, 0, [1]) + reference(0, 1, [2], send=2)) == []
    assert [len(copies) for copies in reading.reader.reads] == [1, 1]


def test_an_ended_lease_is_not_read_for(reading: Reading) -> None:
    reading.receiving.grants.revoke(LEASE)
    assert reading.say(reference(0, 0, [1, 2, 3])) == [(Kind.REFUSED, 1)]
    assert reading.reader.reads == []
    assert reading.receiving.touched() == set()


def test_a_lease_that_ends_between_two_batches(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    """A revocation waits for one batch at most; it comes from another thread, as soon as the lease is let go."""
    reading.reader.at_a_time = BLOCK_BYTES
    grants = reading.receiving.grants
    ended, end_writing = list[int](), grants.end_writing

    def end_and_revoke(opened: object) -> None:
        end_writing(opened)  # pyright: ignore[reportArgumentType]
        ended.append(grants.revoke(LEASE))

    monkeypatch.setattr(grants, "end_writing", end_and_revoke)
    assert reading.say(reference(0, 0, [1, 2, 4])) == [(Kind.REFUSED, 1)]
    assert (ended, len(reading.reader.reads)) == ([0], 1)
    assert reading.receiving.touched() == {(0, 5)}


@pytest.mark.parametrize(
    "said",
    [
        reference(0, 0, [BLOCKS]),
        reference(0, 0, [-1]),
        reference(0, 0, [2**63]),
        reference(0, 0, [1, 2], end=1),
        reference(0, 0, [1], end=2),
        reference(0, 0, [], end=1),
        reference(0, 0, [1], offset=1),
        reference(0, 0, [1], offset=-1),
        reference(0, 0, [1], offset=2**63),
        reference(0, 0, [1], size=BLOCK_BYTES - 1),
        reference(0, 0, [1], size=BLOCK_BYTES + 1),
        reference(0, 0, [1], size=-BLOCK_BYTES),
        reference(0, 0, [1], part=1, parts=2),
        reference(0, 0, [1], size=32, offset=48, part=1, parts=2),
        reference(0, 0, [1], size=21, parts=3),
        reference(0, 0, [1], part=1),
        reference(LAYERS, 0, [1]),
        reference(0, 0, [1], layers=0),
        reference(0, 0, [1], layers=LAYERS + 1),
        reference(1, 0, [1], layers=LAYERS),
        reference(0, 0, [1], layers=2**32 - 1),
        reference(0, 3, [1]),
        reference(0, 2, [1, 2]),
        reference(0, 0, [1], lease="34" * 16),
    ],
)
def test_references_that_do_not_fit(reading: Reading, said: bytes) -> None:
    assert reading.say(said) == [(Kind.REFUSED, 1)]
    assert reading.reader.reads == []
    assert reading.receiving.touched() == set()


@pytest.mark.parametrize("nbytes", [1, 7, 9])
def test_half_a_block_is_none(reading: Reading, nbytes: int) -> None:
    body = msgspec.msgpack.encode(Reference(bytes(nbytes), 0, BLOCK_BYTES))
    assert reading.say(frame(Header(Kind.REFERENCE, 1, LEASE, 0, 0, 1), body)) == [(Kind.REFUSED, 1)]
    assert reading.reader.reads == []


@pytest.mark.parametrize(
    "body", [b"\xc1", b"\x93\xc4\x01\x00", b"\x93\x91\x01\x00\x40", b"\x93\xc4\x09a\x00\x40", b"\x80", b"\x91" * 9000]
)
def test_a_reference_that_cannot_be_read_is_a_violation(reading: Reading, body: bytes) -> None:
    with pytest.raises(ProtocolViolation, match="Reference"):
        reading.say(frame(Header(Kind.REFERENCE, 1, LEASE, 0, 0, 1), body))


SMALL = st.integers(-1, 9)
REFERENCES = st.builds(
    lambda layer, begin, blocks, send, offset, size, part, parts, more, layers: reference(
        layer, begin, blocks, send, LEASE, offset, size, part, parts, begin + len(blocks) + more, layers
    ),
    st.integers(0, 2), st.integers(0, 3), st.lists(SMALL, max_size=3), st.integers(1, 3), st.sampled_from([0, 0, 32]),
    st.sampled_from([64, 64, 32, 16]), st.integers(0, 2), st.sampled_from([1, 1, 2, 4]), st.sampled_from([0, 0, 0, 1]),
    st.integers(0, 3),
)  # fmt: skip


@given(st.lists(st.one_of(REFERENCES, st.just(fin(0, 48, 2))), max_size=15), st.integers(0, 15), st.integers(0, 15))
def test_hostile_references_stay_inside_the_lease(said: list[bytes], end_at: int, revoke_at: int) -> None:
    reading = Reading()
    reading.theirs.begin(2)
    before: bytes | None = None
    with suppress(ProtocolViolation):
        for at, each in enumerate(said):
            if at == end_at:
                reading.reader.after = lambda: reading.theirs.end(1)
            if at == revoke_at:
                reading.receiving.grants.revoke(LEASE)
                before = reading.receiving.snapshot()
            reading.say(each)
    if before is not None:
        assert reading.receiving.snapshot() == before
    assert reading.receiving.touched() <= LEASED
    reading.talk.inbound.close()
    assert (reading.reader.closed, reading.receiving.grants.receives) == (1, 0)
    reading.theirs.close()


LIMIT = 1024


@given(st.lists(st.integers(1, 3 * LIMIT), min_size=1, max_size=20))
def test_batches_are_the_copies_and_no_larger_than_needed(sizes: list[int]) -> None:
    copies = np.array([(size, number, number) for number, size in enumerate(sizes)])
    found = list(batches(copies, LIMIT))
    assert np.array_equal(np.concatenate([batch for batch, _ in found]), copies)
    assert all(nbytes == batch[:, 0].sum() for batch, nbytes in found)
    assert all(len(batch) == 1 or 0 < nbytes <= LIMIT for batch, nbytes in found)


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=40),
    st.lists(st.integers(0, 30), min_size=40, max_size=40, unique=False),
    st.integers(1, 5),
)
def test_copies_are_the_blocks_in_order_and_neighbours_joined(
    sources: list[int], targets: list[int], limit: int
) -> None:
    targets, size = targets[: len(sources)], 64
    numbers = np.array(targets)
    shape = shape_of([40 * size], 40, size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_COPY_BYTES", limit * size)
        header = Header(Kind.REFERENCE, 1, LEASE, 0, 0, len(sources))
        found = module.copies(header, size, Reference(referred(sources), 0, size), shape, shape, numbers).tolist()
    pieces = [(there + at, here + at) for length, there, here in found for at in range(0, length, size)]
    assert pieces == [(source * size, target * size) for source, target in zip(sources, targets, strict=True)]
    assert all(length <= limit * size for length, _, _ in found)
    assert all(
        there + length != after or here + length != behind or length == limit * size
        for (length, there, here), (_, after, behind) in itertools.pairwise(found)
    )
