"""The receiver's session without sockets: only what was offered is read, into what was leased, while it lasts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.protocol import TransferFailed, content_of, packed
from tercet.transport import BlockShape, inbound
from tercet.transport.inbound import REMEMBERED_REFUSED, Inbound
from tercet.transport.peer_messages import (
    HEADER_BYTES,
    Acknowledged,
    Challenge,
    ProtocolViolation,
    ReadDescriptors,
    ReadRequest,
    Refused,
    SendBegin,
    SendEnd,
    Welcome,
    framed,
)
from tests.unit.transport.builders import (
    BLOCK_BYTES,
    BLOCKS,
    LAYERS,
    LEASE,
    OTHER_LEASE,
    SENTINEL,
    SIZE,
    Conversation,
    FakeBackend,
    Receiving,
    chunk,
    fin,
    numbers,
    sending_region,
)
from tests.unit.transport.models import a_grant, whose

LEASED = {(layer, block) for layer in range(LAYERS) for block in (5, 2, 3)}
DONE, NOT_DONE = [("Acknowledged", 1)], [("Refused", 1)]


def whole(send: int) -> tuple[ReadDescriptors, ReadDescriptors, SendEnd]:
    return chunk(0, 0, [1, 2, 4], send), chunk(1, 0, [1, 2, 4], send), fin(0, 48, 2, send)


WHOLE = whole(1)


# ---- what is sent arrives --------------------------------------------------------------------------------------------


@st.composite
def whole_sends(draw: st.DrawFn) -> tuple[list[msgspec.Struct], dict[tuple[int, int], int]]:
    """The messages of a send, in any order, and the blocks of its slots. Layers come one by one, or together."""
    blocks: dict[tuple[int, int], int] = {}
    said: list[msgspec.Struct] = []
    together = draw(st.booleans())
    for layers in [range(LAYERS)] if together else [range(layer, layer + 1) for layer in range(LAYERS)]:
        cut = draw(st.integers(0, 3))
        for begin, end in ((0, cut), (cut, 3)):
            some = draw(st.lists(st.integers(0, BLOCKS - 1), min_size=end - begin, max_size=end - begin))
            blocks |= {(layer, begin + at): block for layer in layers for at, block in enumerate(some)}
            if some:
                said.append(chunk(layers.start, begin, some, layers=len(layers)))
    return draw(st.permutations([*said, fin(0, 41, len(said))])), blocks


@pytest.fixture
def talk() -> Conversation:
    return Conversation()


@given(whole_sends(), st.lists(st.integers(0, 2000), max_size=12))
def test_a_send_arrives_byte_for_byte(
    send: tuple[list[msgspec.Struct], dict[tuple[int, int], int]], cuts: list[int]
) -> None:
    messages, blocks = send
    talk, data = Conversation(), b"".join(map(framed, [SendBegin(1, LEASE, whose(41)), *messages]))
    for begin, end in pairwise([0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]):
        talk.feed(data[begin:end])
    assert talk.answers == [Acknowledged(1)]
    for (layer, slot), block in blocks.items():
        assert talk.receiving.block(layer, (5, 2, 3)[slot]) == bytes(talk.theirs.blocks(layer, block))
    assert talk.receiving.touched() <= LEASED
    assert talk.receiving.finished == [(LEASE, 41)]
    assert talk.receiving.counters == {
        "bytes_received": 6 * BLOCK_BYTES, "chunks_received": len(messages) - 1, "receives_done": 1,
    }  # fmt: skip


def test_blocks_are_read_into_their_slots_and_nowhere_else(talk: Conversation) -> None:
    assert talk.say(chunk(0, 0, [1, 2, 4]), chunk(1, 0, [7]), chunk(1, 1, [0])) == []
    expected = {(0, 5): 1, (0, 2): 2, (0, 3): 4, (1, 5): 16 + 7, (1, 2): 16}
    for layer in range(LAYERS):
        for block in range(BLOCKS):
            assert set(talk.receiving.block(layer, block)) == {expected.get((layer, block), SENTINEL)}
    assert talk.receiving.touched() == set(expected)


def test_a_chunk_may_have_several_layers(talk: Conversation) -> None:
    assert talk.say(chunk(0, 0, [1, 2, 4], layers=LAYERS), fin(0, 48, 1)) == DONE
    found = [set(talk.receiving.block(layer, block)) for layer in range(LAYERS) for block in (5, 2, 3)]
    assert found == [{1}, {2}, {4}, {16 + 1}, {16 + 2}, {16 + 4}]
    assert talk.receiving.touched() == LEASED


def test_neighbours_on_both_sides_go_in_one_copy(talk: Conversation) -> None:
    """Slots 1 and 2 are blocks 2 and 3."""
    talk.say(chunk(0, 0, [4, 5, 6]))
    assert [copy[0] for copies in talk.reader.reads for copy in copies] == [BLOCK_BYTES, 2 * BLOCK_BYTES]


def test_parts_of_blocks_come_from_several_sessions() -> None:
    receiving, half = Receiving(), BLOCK_BYTES // 2
    for part, name in enumerate("ab"):
        theirs = sending_region()
        receiving.backends[:] = []
        talk = Conversation(receiving, theirs, session=name)
        theirs.set_word(7)
        said = [
            chunk(layer, 0, [part + 1] * 3, 7, size=half, offset=half * part, part=part, parts=2)
            for layer in range(LAYERS)
        ]
        assert talk.say(*said, fin(0, 48, 2, 7, part=part, parts=2)) == [("Acknowledged", 7)]
    for layer in range(LAYERS):
        expected = bytes([16 * layer + 1]) * half + bytes([16 * layer + 2]) * half
        assert {receiving.block(layer, block) for block in (5, 2, 3)} == {expected}
    assert receiving.touched() == LEASED
    assert receiving.finished == [(LEASE, 0), (LEASE, 48)]


def test_a_part_comes_from_anywhere_in_the_senders_blocks() -> None:
    talk, half = Conversation(theirs=sending_region(2 * BLOCK_BYTES)), BLOCK_BYTES // 2
    talk.theirs.blocks(0, 1)[:] = bytes(range(2 * BLOCK_BYTES))
    assert talk.say(chunk(0, 2, [1], offset=half, size=half, part=1, parts=2)) == []
    assert talk.receiving.block(0, 3) == bytes([SENTINEL]) * half + bytes(range(half, 2 * half))
    assert talk.say(chunk(0, 0, [1], offset=BLOCK_BYTES, send=1 + 4096)) == [("Refused", 1 + 4096)]
    talk.theirs.set_word(3)
    assert talk.say(chunk(0, 0, [1], offset=BLOCK_BYTES, send=3)) == []
    assert talk.receiving.block(0, 5) == bytes(range(BLOCK_BYTES, 2 * BLOCK_BYTES))


def test_chunks_that_come_together_are_read_together(talk: Conversation) -> None:
    assert talk.say(chunk(0, 0, [1, 3]), chunk(1, 0, [1, 3]), fin(0, 2 * SIZE, 2)) == DONE
    assert len(talk.reader.reads) == 1
    assert len(talk.receiving.touched()) == 4


def test_chunks_of_two_sends_are_read_apart(talk: Conversation) -> None:
    talk.theirs.set_word(2)
    assert talk.say(chunk(0, 0, [1]), chunk(0, 1, [2], send=2)) == []
    assert [len(copies) for copies in talk.reader.reads] == [1, 1]


# ---- what is not taken -----------------------------------------------------------------------------------------------


def test_blocks_that_were_given_up_while_they_were_read(talk: Conversation) -> None:
    talk.reader.after = lambda: talk.theirs.clear_word(1)
    assert talk.say(chunk(0, 0, [1])) == NOT_DONE
    assert talk.receiving.grants.receives == 0
    assert talk.receiving.touched() <= {(0, 5)}
    assert talk.receiving.counters == {"chunks_refused": 1}
    assert talk.say(chunk(1, 0, [1]), fin(0, 16, 2)) == []
    assert talk.receiving.finished == []


def test_kv_that_another_send_writes_over_and_does_not_complete_is_valid_no_more(talk: Conversation) -> None:
    assert talk.say(*WHOLE[:2], fin(0, 2 * SIZE + 1, 2)) == DONE
    talk.theirs.set_word(2)
    before = talk.receiving.snapshot()
    talk.reader.after = lambda: talk.theirs.clear_word(2)
    assert talk.say(chunk(0, 0, [7, 7, 7], send=2)) == [("Refused", 2)]
    assert talk.receiving.grants.revoke(LEASE) == 2 * SIZE, "what may be prefix cache was not touched"
    assert talk.receiving.touched(before) == {(0, 3)}


def test_the_word_of_another_send_does_not_do(talk: Conversation) -> None:
    talk.theirs.set_word(1 + 4096)
    assert talk.say(chunk(0, 0, [1])) == NOT_DONE
    assert talk.say(chunk(0, 0, [1], send=1 + 4096)) == []


@pytest.mark.parametrize("error", [OSError("the process is gone"), TransferFailed("it broke")], ids=repr)
def test_a_reader_that_fails_refuses_its_send_only(error: Exception) -> None:
    def fail() -> None:
        raise error

    talk = Conversation()
    talk.reader.before = fail
    assert talk.say(chunk(0, 0, [1])) == NOT_DONE
    assert str(error) in talk.reason()
    talk.reader.before = lambda: None
    talk.theirs.set_word(2)
    assert talk.say(chunk(0, 0, [1], send=2)) == []


def test_an_ended_lease_is_refused_once_and_other_sends_go_on(talk: Conversation) -> None:
    talk.receiving.grants.revoke(LEASE)
    talk.receiving.grants.grant(a_grant(OTHER_LEASE, (0,), 0, SIZE, SIZE))
    assert talk.say(*WHOLE) == NOT_DONE
    assert "has ended" in talk.reason()
    assert (talk.reader.reads, talk.receiving.touched()) == ([], set())
    talk.theirs.set_word(2)
    good = [chunk(layer, 0, [4], 2, OTHER_LEASE) for layer in range(LAYERS)]
    assert talk.say(*good, fin(0, 16, 2, 2, OTHER_LEASE)) == [("Acknowledged", 2)]
    assert talk.receiving.counters == {
        "receives_refused": 1, "chunks_refused": 2,
        "bytes_received": 2 * BLOCK_BYTES, "chunks_received": 2, "receives_done": 1,
    }  # fmt: skip


@pytest.mark.parametrize("at", range(4))
def test_what_comes_after_the_revocation_goes_nowhere(talk: Conversation, at: int) -> None:
    talk.say(*WHOLE[:at])
    talk.receiving.grants.revoke(LEASE)
    before = talk.receiving.snapshot()
    assert talk.say(*WHOLE[at:]) == (NOT_DONE if at < 3 else [])
    assert talk.receiving.snapshot() == before
    assert talk.receiving.grants.receives == 0


def test_a_lease_that_ends_between_two_steps(talk: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A revocation waits for one step at most; it comes from another thread, as soon as the lease is let go."""
    talk.reader.at_a_time = BLOCK_BYTES
    grants = talk.receiving.grants
    ended, write = list[int | None](), grants.write

    def write_and_revoke(lease: str, step: Callable[[], int]) -> int:
        moved = write(lease, step)
        ended.append(grants.revoke(LEASE))
        return moved

    monkeypatch.setattr(grants, "write", write_and_revoke)
    assert talk.say(chunk(0, 0, [1, 2, 4])) == NOT_DONE
    assert (ended, len(talk.reader.reads)) == ([0], 1)
    assert talk.receiving.touched() == {(0, 5)}


FAR = 2**32 - 1
UNFIT: dict[str, ReadDescriptors | SendEnd] = {
    "layer": chunk(LAYERS, 0, [1]),
    "layer far": chunk(FAR, 0, [1]),
    "no layers": chunk(0, 0, [1], layers=0),
    "layers": chunk(0, 0, [1], layers=LAYERS + 1),
    "layers from 1": chunk(1, 0, [1], layers=LAYERS),
    "many layers": chunk(0, 0, [1], layers=FAR),
    "slot": chunk(0, 3, [1]),
    "slots": chunk(0, 2, [1, 2]),
    "slot far": chunk(0, FAR - 1, [1]),
    "no slots": chunk(0, 1, []),
    "backward": chunk(0, 2, [1], end=1),
    "part": chunk(0, 0, [1], part=1),
    "no parts": chunk(0, 0, [1], parts=0),
    "uneven parts": chunk(0, 0, [1], size=21, parts=3),
    "many parts": chunk(0, 0, [1], size=1, parts=2**16 - 1),
    "lease": chunk(0, 0, [1], lease=OTHER_LEASE),
    "block": chunk(0, 0, [BLOCKS]),
    "block before the first": chunk(0, 0, [-1]),
    "block far": chunk(0, 0, [2**63]),
    "more blocks": chunk(0, 0, [1, 2], end=1),
    "fewer blocks": chunk(0, 0, [1], end=2),
    "no blocks": chunk(0, 0, [], end=1),
    "offset": chunk(0, 0, [1], offset=1),
    "offset far": chunk(0, 0, [1], offset=FAR),
    "smaller": chunk(0, 0, [1], size=BLOCK_BYTES - 1),
    "larger": chunk(0, 0, [1], size=BLOCK_BYTES + 1),
    "whole as a part": chunk(0, 0, [1], part=1, parts=2),
    "part over the end": chunk(0, 0, [1], size=32, offset=48, part=1, parts=2),
    "nothing arrived": fin(0, 48, 0),
    "tokens": fin(0, 49, 0),
    "no tokens": fin(48, 48, 0),
    "tokens far": fin(FAR - 1, FAR, 0),
    "ended part": fin(0, 48, 0, part=1, parts=1),
    "ended lease": fin(0, 48, 0, lease=OTHER_LEASE),
}


@pytest.mark.parametrize("said", UNFIT.values(), ids=UNFIT)
def test_what_does_not_fit_the_lease_is_refused(talk: Conversation, said: ReadDescriptors | SendEnd) -> None:
    assert talk.say(said) == NOT_DONE
    assert (talk.reader.reads, talk.receiving.touched()) == ([], set())
    counted = dict(talk.receiving.counters)
    if said.lease == LEASE:
        assert counted == {"receives_refused" if isinstance(said, SendEnd) else "chunks_refused": 1}
    else:
        assert counted.pop("receives_refused") == 1, "at its beginning"
    assert talk.say(*WHOLE) == []
    talk.theirs.set_word(2)
    assert talk.say(*whole(2)) == [("Acknowledged", 2)]


@pytest.mark.parametrize("nbytes", [1, 7, 9])
def test_half_a_block_is_none(talk: Conversation, nbytes: int) -> None:
    assert talk.say(msgspec.structs.replace(chunk(0, 0, [1]), blocks=bytes(nbytes))) == NOT_DONE
    assert talk.reader.reads == []


def test_a_send_that_misses_a_chunk_is_refused(talk: Conversation) -> None:
    assert talk.say(chunk(0, 0, [1, 2, 3]), chunk(0, 0, [1, 2, 3]), fin(0, 48, 2)) == NOT_DONE
    assert talk.receiving.finished == []


def test_of_a_refused_send_nothing_is_kept(talk: Conversation) -> None:
    talk.say(chunk(0, 0, [1, 2, 3]))
    assert talk.receiving.grants.receives == 1
    assert talk.say(chunk(1, 3, [1])) == NOT_DONE
    assert talk.receiving.grants.receives == 0


def test_an_owner_that_fails_is_no_acknowledgement(talk: Conversation) -> None:
    taken = talk.on_filled

    def fail(_lease: str, _end: int) -> None:
        raise RuntimeError("the owner is gone")

    talk.on_filled = fail
    assert talk.say(*WHOLE) == NOT_DONE
    assert talk.receiving.counters["receives_refused"] == 1
    talk.on_filled = taken
    talk.theirs.set_word(2)
    assert talk.say(*whole(2)) == [("Acknowledged", 2)]


def test_refusals_are_remembered_up_to_a_limit_the_latest_ones(talk: Conversation) -> None:
    talk.receiving.grants.revoke(LEASE)
    count = REMEMBERED_REFUSED + 1
    for send in range(1, count + 1):
        assert talk.say(chunk(0, 0, [1], send)) == [("Refused", send)]
    assert talk.say(chunk(0, 0, [1], count)) == []
    assert talk.say(chunk(0, 0, [1], 1)) == NOT_DONE
    assert talk.receiving.counters == {"receives_refused": count, "chunks_refused": count + 2}
    assert talk.receiving.touched() == set()


# ---- what ends a connection ------------------------------------------------------------------------------------------

ANSWERS = [Acknowledged(1), Refused(1, ""), Welcome("tcp", b""), Challenge(b""), ReadRequest(1, 0, 1)]


@pytest.mark.parametrize("said", ANSWERS, ids=lambda each: type(each).__name__)
def test_what_receivers_say_ends_the_connection(talk: Conversation, said: msgspec.Struct) -> None:
    with pytest.raises(ProtocolViolation):
        talk.say(said)
    assert talk.receiving.touched() == set()


def test_a_greeting_comes_once(talk: Conversation) -> None:
    with pytest.raises(ProtocolViolation, match="must begin only once"):
        talk.say(talk.hello())


@given(st.binary(min_size=HEADER_BYTES, max_size=600))
def test_garbage_writes_nothing(data: bytes) -> None:
    talk = Conversation()
    with pytest.raises(ProtocolViolation):
        talk.feed(data)
    assert talk.receiving.touched() == set()


# ---- whatever is said ------------------------------------------------------------------------------------------------

SENDS = st.integers(1, 3)
CHUNKS = st.builds(
    lambda layer, begin, blocks, send, offset, size, part, parts, more, layers: chunk(
        layer, begin, blocks, send, LEASE, offset, size, part, parts, max(0, begin + len(blocks) + more), layers
    ),
    st.integers(0, 2), st.integers(0, 3), st.lists(st.integers(-1, 9), max_size=3), SENDS,
    st.sampled_from([0, 0, 32]), st.sampled_from([64, 64, 32, 16, 0, FAR]), st.integers(0, 2),
    st.sampled_from([1, 1, 2, 4]), st.sampled_from([0, 0, 0, 1, -1, FAR // 2]), st.integers(0, 3),
)  # fmt: skip
ENDS = st.builds(fin, st.integers(0, 60), st.integers(0, 60), st.integers(0, 3), SENDS)
SAID = st.lists(st.one_of(CHUNKS, CHUNKS, ENDS, st.sampled_from(WHOLE), st.just(fin(0, 48, 2))), max_size=20)


def say_until_it_ends(talk: Conversation, said: list[msgspec.Struct], end_at: int, revoke_at: int) -> None:
    """Say it, give send 1 up and revoke the lease between: nothing changes from then on."""
    for send in (2, 3):
        talk.theirs.set_word(send)
    before: bytes | None = None
    with suppress(ProtocolViolation):
        for at, each in enumerate(said):
            if at == end_at:
                talk.reader.after = lambda: talk.theirs.clear_word(1)
            if at == revoke_at:
                talk.receiving.grants.revoke(LEASE)
                before = talk.receiving.snapshot()
            talk.say(each)
    if before is not None:
        assert talk.receiving.snapshot() == before
    assert talk.receiving.touched() <= LEASED
    talk.close()
    assert (talk.reader.closed, talk.receiving.grants.receives) == (1, 0)


@given(SAID, st.integers(0, 20), st.integers(0, 20))
def test_hostile_descriptors_stay_inside_the_lease(said: list[msgspec.Struct], end_at: int, revoke_at: int) -> None:
    say_until_it_ends(Conversation(), said, end_at, revoke_at)


@given(SAID, st.integers(0, 20), st.integers(0, 20), st.integers(1, 70))
def test_hostile_descriptors_of_other_blocks_stay_inside_the_lease(
    said: list[msgspec.Struct], end_at: int, revoke_at: int, tokens: int
) -> None:
    say_until_it_ends(other_blocks(BlockShape(tokens, 2, 1, 1)), said, end_at, revoke_at)


# ---- blocks of another size ------------------------------------------------------------------------------------------

OURS = BlockShape(16, 2, 1, 1)


def other_block(tokens: int, slot: int) -> bytes:
    """A sender's block of two heads: each byte tells its token, its head and whether it is a value."""
    return bytes(
        (slot * tokens + token) % 64 | head << 6 | value << 7
        for head in range(2)
        for value in range(2)
        for token in range(tokens)
    )


def other_blocks(block: BlockShape, receiving: Receiving | None = None, session: str = "a") -> Conversation:
    """A session with a sender whose blocks have another size; each holds the tokens that its number says."""
    receiving = receiving or Receiving(block=OURS)
    receiving.backends[:] = []
    theirs = sending_region(block.block_bytes)
    for layer in range(LAYERS):
        for number in range(BLOCKS):
            theirs.blocks(layer, number)[:] = other_block(block.tokens, number)[: block.block_bytes]
    return Conversation(receiving, theirs, session=session, block=block)


@pytest.mark.parametrize("together", [False, True], ids=["layer by layer", "layers together"])
@pytest.mark.parametrize("tokens", [8, 12, 24, 32, 48])
def test_blocks_of_another_size_are_put_together(tokens: int, together: bool) -> None:
    block = BlockShape(tokens, 2, 1, 1)
    talk = other_blocks(block)
    count = range(-(-48 // tokens))
    said = [chunk(layer, 0, count, size=block.block_bytes) for layer in range(LAYERS)]
    if together:
        said = [chunk(0, 0, count, size=block.block_bytes, layers=LAYERS)]
    assert talk.say(*said, fin(0, 48, len(said))) == DONE
    for layer in range(LAYERS):
        for slot, ours in enumerate((5, 2, 3)):
            assert talk.receiving.block(layer, ours) == other_block(16, slot)
    assert talk.receiving.touched() == LEASED


def test_a_chunk_that_needs_too_much_staging_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = BlockShape(16, 1, 1, 2), BlockShape(32, 1, 1, 2)
    talk = Conversation(Receiving(block=ours), sending_region(theirs.block_bytes), block=theirs)
    monkeypatch.setattr(inbound, "MAX_STAGED_CHUNK_BYTES", theirs.block_bytes)
    assert talk.say(chunk(0, 0, [1, 2], size=theirs.block_bytes)) == NOT_DONE
    assert "too large" in talk.reason()


def test_a_sender_whose_blocks_are_not_what_it_says_is_refused() -> None:
    ours, theirs = BlockShape(16, 1, 1, 2), BlockShape(32, 1, 1, 2)
    with pytest.raises(ProtocolViolation, match="another size than its greeting says"):
        Conversation(Receiving(block=ours), sending_region(theirs.block_bytes // 2), block=theirs)


def test_heads_of_another_size_come_from_two_ranks() -> None:
    receiving = Receiving(block=OURS)
    for part, session in enumerate("ab"):
        talk = other_blocks(BlockShape(48, 1, 1, 1), receiving, session)
        for layer in range(LAYERS):
            talk.theirs.blocks(layer, 0)[:] = other_block(48, 0)[part * 96 :][:96]
        said = [chunk(layer, 0, [0], size=96, part=part, parts=2) for layer in range(LAYERS)]
        assert talk.say(*said, fin(0, 48, 2, part=part, parts=2)) == DONE
    assert [receiving.block(1, block) for block in (5, 2, 3)] == [other_block(16, slot) for slot in range(3)]


def test_a_late_block_of_another_size_is_refused_and_counted_once() -> None:
    talk = other_blocks(BlockShape(48, 2, 1, 1))

    def revoke() -> None:
        talk.receiving.grants.revoke(LEASE)

    talk.reader.before = revoke
    said = chunk(0, 0, [0], size=192)
    assert talk.say(said) == NOT_DONE
    assert talk.receiving.counters == {"chunks_refused": 1}
    assert talk.say(said) == []
    assert talk.receiving.counters == {"chunks_refused": 2}
    assert talk.receiving.touched() == set()


@pytest.mark.parametrize("size", [191, 193, 96])
def test_a_block_of_another_size_must_be_whole(size: int) -> None:
    talk = other_blocks(BlockShape(48, 2, 1, 1))
    assert talk.say(chunk(0, 0, [0], size=size)) == NOT_DONE
    assert talk.receiving.touched() == set()


def test_blocks_of_another_size_need_a_reader_that_can_put_them_aside() -> None:
    theirs = sending_region(192)
    receiving = Receiving(block=OURS)
    talk = Conversation(receiving, theirs, greet=False)
    receiving.backends[:] = [FakeBackend(talk.reader, "straight", stages=False), FakeBackend(talk.reader, "aside")]
    assert talk.greet(block=BlockShape(48, 2, 1, 1)) == "aside"


def test_read_descriptors_do_not_say_what_the_senders_blocks_are(talk: Conversation) -> None:
    said = [msgspec.structs.replace(each, unit=8) for each in WHOLE]
    assert talk.say(*said) == DONE
    assert talk.receiving.block(0, 5) == bytes(talk.theirs.blocks(0, 1))


def test_numbers_are_what_read_descriptors_have() -> None:
    assert numbers([1, -1]) == (1).to_bytes(8, "little") + b"\xff" * 8


# ---- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(3))
def test_of_a_session_that_ends_half_way_whole_blocks_are_left(talk: Conversation, at: int) -> None:
    talk.say(*WHOLE[:at])
    half_done = talk.receiving.grants.receives
    talk.close()
    assert talk.receiving.grants.receives == 0
    assert talk.receiving.counters.get("receives_dropped", 0) == half_done == (at > 0)
    assert talk.reader.closed == 1
    valid_end = 3 * SIZE if at == 2 else 0
    assert talk.receiving.finished == [(LEASE, valid_end)] * (at > 0)
    assert talk.receiving.grants.revoke(LEASE) == valid_end


# ---- whose KV it is --------------------------------------------------------------------------------------------------


def test_kv_of_other_tokens_is_refused_before_a_byte_is_written(talk: Conversation) -> None:
    others = content_of(packed([0, 1, 3, *range(3, 3 * SIZE)]), None)
    assert talk.say(SendBegin(1, LEASE, others)) == NOT_DONE
    assert "of other tokens" in talk.reason()
    assert talk.feed(b"".join(map(framed, WHOLE))) == []
    assert (talk.reader.reads, talk.receiving.touched()) == ([], set())
    assert talk.receiving.counters == {"receives_refused": 1, "chunks_refused": len(WHOLE) - 1}
    talk.theirs.set_word(2)
    assert talk.say(*whole(2)) == [("Acknowledged", 2)]


def test_what_does_not_say_whose_it_is_is_refused(talk: Conversation) -> None:
    assert [type(each) for each in talk.feed(b"".join(map(framed, WHOLE)))] == [Refused]
    assert (talk.reader.reads, talk.receiving.touched()) == ([], set())
    assert [type(each) for each in talk.feed(framed(fin(0, SIZE, 0, 2)))] == [Refused]
    assert "the content of its KV" in talk.reason()


def test_a_send_that_begins_twice_is_refused(talk: Conversation) -> None:
    begin = SendBegin(1, LEASE, whose(SIZE))
    assert talk.say(begin, begin) == NOT_DONE
    assert talk.say(begin) == []


def test_what_is_in_place_already_is_left_out_and_the_send_completed(talk: Conversation) -> None:
    """A sender that died has left two blocks; the next one, which does not know, sends all three."""
    talk.say(*(chunk(layer, 0, [1, 2]) for layer in range(LAYERS)))
    talk.session.close()
    again = Conversation(talk.receiving, session="b", theirs=talk.theirs)
    talk.receiving.backends[:] = [FakeBackend(again.reader)]
    again.greet()
    before = talk.receiving.snapshot()
    assert again.say(*(chunk(layer, 0, [6, 7, 4]) for layer in range(LAYERS)), fin(0, 3 * SIZE, 2)) == DONE
    assert talk.receiving.touched(before) == {(layer, 3) for layer in range(LAYERS)}
    assert talk.receiving.grants.revoke(LEASE) == 3 * SIZE


def test_only_the_first_chunks_of_one_send_are_requested_early(talk: Conversation) -> None:
    first, second, other = chunk(0, 0, [1], 1), chunk(1, 0, [1], 1), chunk(0, 0, [1], 2)
    begun = SendBegin(1, LEASE, whose(SIZE)), SendBegin(2, LEASE, whose(SIZE))
    assert talk.agreed is not None
    found = Inbound(talk.receiving.rank, talk.receiving.grants, talk.agreed)
    assert not found.read_next([begun[0], fin(0, 16, 0)])
    assert found.read_next([*begun, first, other, second]) == [first]
    for message in (*begun, first):
        found.take(message)
    assert found.read_next([other, second]) == []  # the waiting chunk of another send is read before
    assert found.read_next([second, other]) == [second]
    assert [type(each) for each in found.take(chunk(99, 0, [1], 1))] == [Refused]
    found.settle()
    assert found.read_next([second, other]) == ()
    assert found.read_next([other, second]) == [other]
