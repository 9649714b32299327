"""The receiver's conversation without sockets: good frames land byte for byte, anything else writes nothing."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.transport import BlockShape, Grant
from tercet.transport.frames import HEADER_BYTES, MAX_PIECE_BYTES, Header, Kind, ProtocolViolation, frame
from tercet.transport.inbound import MAX_REFERENCE_BYTES
from tercet.transport.session import REMEMBERED_REFUSED
from tests.unit.transport.builders import (
    BLOCK_BYTES,
    BLOCKS,
    LAYERS,
    LEASE,
    OTHER_LEASE,
    SENTINEL,
    SIZE,
    Conversation,
    Receiving,
    fin,
    piece,
)

LEASED = {(layer, block) for layer in range(LAYERS) for block in (5, 2, 3)}


def whole(send: int) -> bytes:
    return piece(0, 0, 3, 1, send) + piece(1, 0, 3, 2, send) + fin(0, 48, 2, send)


WHOLE = whole(1)


def feed_in_cuts(talk: Conversation, data: bytes, cuts: list[int]) -> None:
    bounds = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for begin, end in pairwise(bounds):
        talk.say(data[begin:end])


# ---- what is sent arrives ------------------------------------------------------------------------------------


@st.composite
def whole_sends(draw: st.DrawFn) -> tuple[list[bytes], dict[tuple[int, int], bytes]]:
    """The frames of a send, in any order, and what its slots are to hold. Layers come one by one, or together."""
    contents: dict[tuple[int, int], bytes] = {}
    frames: list[bytes] = []
    together = draw(st.booleans())
    for layers in [range(LAYERS)] if together else [range(layer, layer + 1) for layer in range(LAYERS)]:
        cut = draw(st.integers(0, 3))
        for begin, end in ((0, cut), (cut, 3)):
            size = len(layers) * (end - begin) * BLOCK_BYTES
            body = draw(st.binary(min_size=size, max_size=size))
            for at, place in enumerate((layer, slot) for layer in layers for slot in range(begin, end)):
                contents[place] = body[at * BLOCK_BYTES :][:BLOCK_BYTES]
            if body:
                frames.append(piece(layers.start, begin, end, body, layers=len(layers)))
    return draw(st.permutations([*frames, fin(0, 41, len(frames))])), contents


@given(whole_sends(), st.lists(st.integers(0, 2000), max_size=12))
def test_a_send_arrives_byte_for_byte(send: tuple[list[bytes], dict[tuple[int, int], bytes]], cuts: list[int]) -> None:
    frames, contents = send
    talk = Conversation()
    feed_in_cuts(talk, b"".join(frames), cuts)
    assert [(header.kind, header.send) for header, _ in talk.answers] == [(Kind.WELCOME, 0), (Kind.ACK, 1)]
    for (layer, slot), expected in contents.items():
        assert talk.receiving.block(layer, (5, 2, 3)[slot]) == expected
    assert talk.receiving.touched() <= LEASED
    assert talk.receiving.finished == [(LEASE, 41)]
    assert talk.receiving.counters == {
        "bytes_received": 6 * BLOCK_BYTES, "chunks_received": len(frames) - 1, "claims_accepted": 1,
    }  # fmt: skip


def test_pieces_land_in_their_blocks_and_nowhere_else() -> None:
    talk = Conversation()
    assert talk.say(piece(0, 0, 3, 1) + piece(1, 0, 1, 2) + piece(1, 1, 2, 3)) == []
    expected = {(0, 5): 1, (0, 2): 1, (0, 3): 1, (1, 5): 2, (1, 2): 3}
    for layer in range(LAYERS):
        for block in range(BLOCKS):
            assert set(talk.receiving.block(layer, block)) == {expected.get((layer, block), SENTINEL)}
    assert talk.receiving.touched() == set(expected)


def test_parts_of_blocks_come_from_several_sessions() -> None:
    first = Conversation()
    second = Conversation(first.receiving, session="b")
    for part, talk in enumerate((first, second)):
        said = b"".join(piece(layer, 0, 3, part + 1, 7, part=part, parts=2) for layer in range(LAYERS))
        assert talk.say(said + fin(0, 48, 2, 7, part=part, parts=2)) == [(Kind.ACK, 7)]
    half = BLOCK_BYTES // 2
    assert {first.receiving.block(*each) for each in LEASED} == {b"\1" * half + b"\2" * half}
    assert first.receiving.touched() == LEASED
    assert first.receiving.finished == [(LEASE, 0), (LEASE, 48)]


def test_streams_of_a_session_share_its_sends_and_answers_come_on_the_first() -> None:
    first = Conversation()
    second = Conversation(first.receiving, greet=False)
    assert second.say(second.hello(stream=1) + piece(0, 0, 3, 1)) == []
    assert first.say(fin(0, 48, 2)) == []
    assert second.say(piece(1, 0, 3, 2)) == []
    assert [header.kind for header, _ in first.answers] == [Kind.WELCOME, Kind.ACK]
    first.inbound.close()
    assert len(first.receiving.rules.sessions) == 1
    second.inbound.close()
    assert len(first.receiving.rules.sessions) == 0


# ---- what is refused -----------------------------------------------------------------------------------------


def test_an_ended_lease_is_refused_once_and_other_sends_go_on() -> None:
    talk = Conversation()
    talk.receiving.grants.revoke(LEASE)
    talk.receiving.grants.grant(Grant(OTHER_LEASE, (0,), 0, SIZE, SIZE))
    assert talk.say(WHOLE) == [(Kind.REFUSED, 1)]
    assert talk.receiving.touched() == set()
    good = piece(0, 0, 1, 4, 2, OTHER_LEASE) + piece(1, 0, 1, 4, 2, OTHER_LEASE) + fin(0, 16, 2, 2, OTHER_LEASE)
    assert talk.say(good) == [(Kind.ACK, 2)]
    assert talk.receiving.counters == {
        "chunks_refused": 2, "bytes_received": 2 * BLOCK_BYTES, "chunks_received": 2, "claims_accepted": 1,
    }  # fmt: skip
    assert "has ended" in talk.answers[1][1].decode()


@pytest.mark.parametrize("at", [HEADER_BYTES, HEADER_BYTES + 1, HEADER_BYTES + BLOCK_BYTES + 3, len(WHOLE) // 2 - 31])
def test_what_comes_after_the_revocation_goes_nowhere(at: int) -> None:
    talk = Conversation()
    talk.say(WHOLE[:at])
    talk.receiving.grants.revoke(LEASE)
    before = talk.receiving.snapshot()
    assert talk.say(WHOLE[at:]) == [(Kind.REFUSED, 1)]
    assert talk.receiving.snapshot() == before
    assert talk.receiving.finished == []
    assert talk.receiving.grants.receives == 0


@pytest.mark.parametrize(
    "said",
    [
        piece(LAYERS, 0, 1, 1),
        piece(2**32 - 1, 0, 1, 1),
        piece(0, 3, 4, 1),
        piece(0, 0, 1, b"x", layers=0),
        piece(0, 0, 1, 1, layers=LAYERS + 1),
        piece(1, 0, 1, 1, layers=LAYERS),
        piece(0, 0, 1, b"x", layers=2**32 - 1),
        piece(0, 2, 4, 1),
        piece(0, 2**32 - 2, 2**32 - 1, 1),
        piece(0, 1, 1, b"x"),
        piece(0, 2, 1, b"x" * BLOCK_BYTES),
        piece(0, 0, 1, 1, part=1, parts=1),
        piece(0, 0, 1, 1, part=0, parts=0),
        piece(0, 0, 1, b"x" * 21, part=0, parts=3),
        piece(0, 0, 1, b"x", part=0, parts=2**16 - 1),
        piece(0, 0, 1, 1, lease=OTHER_LEASE),
        fin(0, 48, 0),
        fin(0, 49, 0),
        fin(48, 48, 0),
        fin(2**32 - 2, 2**32 - 1, 0),
        fin(0, 48, 0, part=1, parts=1),
        fin(0, 48, 0, lease=OTHER_LEASE),
    ],
    ids=[
        "layer", "layer far", "slot",
        "no layers", "layers", "layers from 1", "many layers", "slots", "slot far", "no slots", "backward",
        "part", "no parts", "uneven parts",
        "many parts", "lease", "nothing arrived", "tokens", "no tokens", "tokens far", "claimed part", "claimed lease",
    ],
)  # fmt: skip
def test_what_does_not_fit_the_lease_is_refused(said: bytes) -> None:
    talk = Conversation()
    assert talk.say(said) == [(Kind.REFUSED, 1)]
    assert talk.receiving.touched() == set()
    refused = "claims_refused" if said[4] == Kind.FIN else "chunks_refused"
    assert talk.receiving.counters == {refused: 1}
    assert talk.say(WHOLE) == []
    assert talk.say(whole(2)) == [(Kind.ACK, 2)]


def test_a_claim_that_misses_a_piece_is_refused() -> None:
    talk = Conversation()
    assert talk.say(piece(0, 0, 3, 1) + piece(0, 0, 3, 1) + fin(0, 48, 2)) == [(Kind.REFUSED, 1)]
    assert talk.receiving.finished == []
    assert talk.receiving.counters["claims_refused"] == 1


def test_of_a_refused_send_nothing_is_kept() -> None:
    talk = Conversation()
    talk.say(piece(0, 0, 3, 1))
    assert talk.receiving.grants.receives == 1
    assert talk.say(piece(1, 3, 4, 1)) == [(Kind.REFUSED, 1)]
    assert talk.receiving.grants.receives == 0


def test_an_owner_that_fails_is_no_acknowledgement() -> None:
    talk = Conversation()
    taken = talk.receiving.rules.on_finished

    def fail(_lease: str, _end: int) -> None:
        raise RuntimeError("the owner is gone")

    talk.receiving.rules.on_finished = fail
    assert talk.say(WHOLE) == [(Kind.REFUSED, 1)]
    talk.receiving.rules.on_finished = taken
    assert talk.say(whole(2)) == [(Kind.ACK, 2)]


def test_refusals_are_remembered_up_to_a_limit() -> None:
    talk = Conversation()
    talk.receiving.grants.revoke(LEASE)
    count = REMEMBERED_REFUSED + 1
    for send in range(1, count + 1):
        assert talk.say(piece(0, 0, 1, 1, send)) == [(Kind.REFUSED, send)]
    assert talk.say(piece(0, 0, 1, 1, count)) == []
    assert talk.say(piece(0, 0, 1, 1, 1)) == [(Kind.REFUSED, 1)]
    assert talk.receiving.counters == {"chunks_refused": count + 2}
    assert talk.receiving.touched() == set()


# ---- what ends a connection ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"\r\n" * 20,
        Header(Kind.ACK, 1).pack(),
        Header(Kind.REFUSED, 1).pack(),
        Header(Kind.WELCOME, 1).pack(),
        Header(Kind.CHALLENGE, 1).pack(),
        Header(Kind.HELLO, nbytes=50).pack(),
        Header(Kind.PIECE, 1, LEASE, 0, 0, 1, nbytes=BLOCK_BYTES + 1).pack(),
        Header(Kind.PIECE, 1, LEASE, 0, 0, 1, nbytes=BLOCK_BYTES - 1).pack(),
        Header(Kind.PIECE, 1, LEASE, 0, 0, 1).pack(),
        Header(Kind.PIECE, 1, LEASE, 0, 0, 1, nbytes=MAX_PIECE_BYTES + 1).pack(),
        Header(Kind.PIECE, 1, LEASE, 0, 0, 1, nbytes=2**64 - 1).pack(),
        Header(Kind.PIECE, 0, LEASE, 0, 0, 1, nbytes=BLOCK_BYTES).pack(),
        Header(Kind.REFERENCE, 1, LEASE, 0, 0, 1, nbytes=8).pack(),
        Header(Kind.REFERENCE, 1, LEASE, 0, 0, 1, nbytes=MAX_REFERENCE_BYTES + 1).pack(),
        Header(Kind.FIN, 1, LEASE, nbytes=5).pack(),
        Header(Kind.FIN, 0, LEASE, 0, 0, 48).pack(),
        b"TRC2\x63" + bytes(HEADER_BYTES - 5),
        b"TRC1" + Header(Kind.FIN, 1).pack()[4:],
    ],
    ids=[
        "http", "ack", "refused", "welcome", "challenge", "second hello", "longer", "shorter", "empty", "large", "huge",
        "send 0", "no reader", "long reference", "fin body", "claim 0", "kind", "magic",
    ],
)  # fmt: skip
def test_violations_end_the_connection(said: bytes) -> None:
    talk = Conversation()
    with pytest.raises(ProtocolViolation):
        talk.say(said[:HEADER_BYTES])
    assert talk.receiving.touched() == set()
    talk.inbound.close()
    assert len(talk.receiving.rules.sessions) == 0


def test_pieces_need_tcp_to_be_allowed() -> None:
    talk = Conversation(Receiving(tcp_allowed=False), greet=False)
    with pytest.raises(ProtocolViolation, match="tcp: not allowed"):
        talk.say(talk.hello())


@given(st.binary(min_size=HEADER_BYTES, max_size=600), st.booleans())
def test_garbage_writes_nothing(data: bytes, greet: bool) -> None:
    talk = Conversation(greet=greet)
    with pytest.raises(ProtocolViolation):
        talk.say(data)
    assert talk.receiving.touched() == set()


@given(st.data())
def test_a_greeting_with_a_byte_changed_is_no_way_in(data: st.DataObject) -> None:
    talk = Conversation(greet=False)
    said = bytearray(talk.hello())
    at = data.draw(st.integers(0, len(said) - 1))
    said[at] ^= data.draw(st.integers(1, 255))
    with suppress(ProtocolViolation):
        talk.say(bytes(said) + WHOLE)
    # Fields that no proof covers may have changed: the session is the sender's own, still.
    assert talk.receiving.touched() <= LEASED
    talk.inbound.close()
    assert len(talk.receiving.rules.sessions) == 0


# ---- whatever is said ----------------------------------------------------------------------------------------

NUMBERS = st.one_of(st.integers(0, 4), st.integers(0, 2**32 - 1))
SENDS = st.integers(1, 3)
FRAMES = st.one_of(
    st.builds(piece, st.integers(0, 2), st.integers(0, 3), st.integers(0, 4), st.integers(0, 9), SENDS),
    st.builds(piece, st.integers(0, 1), st.just(0), st.just(3), st.integers(0, 9), SENDS),
    st.builds(
        piece, st.integers(0, 1), st.just(0), st.just(2), st.integers(0, 9), SENDS, st.just(LEASE),
        st.integers(0, 2), st.integers(0, 4), st.integers(0, 3),
    ),
    st.builds(fin, st.integers(0, 60), st.integers(0, 60), st.integers(0, 3), SENDS),
    st.just(WHOLE),
    st.builds(
        lambda header, body: header._replace(nbytes=len(body)).pack() + body,
        st.builds(
            Header, st.sampled_from(Kind), SENDS, st.sampled_from([LEASE, OTHER_LEASE]), NUMBERS, NUMBERS, NUMBERS,
            NUMBERS, st.integers(0, 4), st.integers(0, 4), st.just(0), NUMBERS,
        ),
        st.binary(max_size=3 * BLOCK_BYTES),
    ),
)  # fmt: skip


def say_until_it_ends(talk: Conversation, said: list[bytes], revoke_at: int, cut: int) -> None:
    """Feed frames until a violation, and revoke the lease in the middle of one: nothing changes from then on."""
    before: bytes | None = None
    with suppress(ProtocolViolation):
        for at, each in enumerate(said):
            first = each[: cut % (len(each) + 1)]
            talk.say(first)
            if at == revoke_at:
                talk.receiving.grants.revoke(LEASE)
                before = talk.receiving.snapshot()
            talk.say(each[len(first) :])
    if before is not None:
        assert talk.receiving.snapshot() == before
    assert talk.receiving.touched() <= LEASED
    talk.inbound.close()
    assert len(talk.receiving.rules.sessions) == talk.receiving.grants.receives == 0


@given(st.lists(FRAMES, max_size=20), st.integers(0, 20), st.integers(0, 400))
def test_hostile_frames_stay_inside_the_lease(said: list[bytes], revoke_at: int, cut: int) -> None:
    say_until_it_ends(Conversation(), said, revoke_at, cut)


@given(st.lists(FRAMES, max_size=20), st.integers(0, 20), st.integers(0, 400), st.integers(1, 70))
def test_hostile_frames_of_other_blocks_stay_inside_the_lease(
    said: list[bytes], revoke_at: int, cut: int, tokens: int
) -> None:
    receiving = Receiving(block=BlockShape(16, 2, 1, 1))
    talk = Conversation(receiving, greet=False)
    talk.say(talk.hello(block=BlockShape(tokens, 2, 1, 1)))
    say_until_it_ends(talk, said, revoke_at, cut)


# ---- blocks of another size ----------------------------------------------------------------------------------

OURS = BlockShape(16, 2, 1, 1)


def other_block(tokens: int, slot: int) -> bytes:
    """A sender's block of two heads: each byte tells its token, its head and whether it is a value."""
    return bytes(
        (slot * tokens + token) | head << 6 | value << 7
        for head in range(2)
        for value in range(2)
        for token in range(tokens)
    )


@pytest.mark.parametrize("together", [False, True], ids=["layer by layer", "layers together"])
@pytest.mark.parametrize("tokens", [8, 12, 24, 32, 48])
def test_blocks_of_another_size_are_put_together(tokens: int, together: bool) -> None:
    talk = Conversation(Receiving(block=OURS), greet=False)
    talk.say(talk.hello(block=BlockShape(tokens, 2, 1, 1)))
    assert talk.welcome() == "tcp"
    count = -(-48 // tokens)
    body = b"".join(other_block(tokens, slot) for slot in range(count))
    said = [piece(layer, 0, count, body) for layer in range(LAYERS)]
    if together:
        said = [piece(0, 0, count, LAYERS * body, layers=LAYERS)]
    assert talk.say(b"".join(said) + fin(0, 48, len(said))) == [(Kind.ACK, 1)]
    for layer in range(LAYERS):
        for slot, block in enumerate((5, 2, 3)):
            assert talk.receiving.block(layer, block) == other_block(16, slot)
    assert talk.receiving.touched() == LEASED


def test_heads_of_another_size_come_from_two_ranks() -> None:
    receiving = Receiving(block=OURS)
    for part, session in enumerate("ab"):
        talk = Conversation(receiving, greet=False, session=session)
        talk.say(talk.hello(block=BlockShape(48, 1, 1, 1)))
        body = other_block(48, 0)[part * 96 :][:96]
        said = [piece(layer, 0, 1, body, part=part, parts=2) for layer in range(LAYERS)]
        assert talk.say(b"".join(said) + fin(0, 48, 2, part=part, parts=2)) == [(Kind.ACK, 1)]
    assert [receiving.block(1, block) for block in (5, 2, 3)] == [other_block(16, slot) for slot in range(3)]


def test_a_late_block_of_another_size_is_refused_and_counted_once() -> None:
    talk = Conversation(Receiving(block=OURS), greet=False)
    talk.say(talk.hello(block=BlockShape(48, 2, 1, 1)))
    said = piece(0, 0, 1, other_block(48, 0))
    talk.say(said[:-1])
    talk.receiving.grants.revoke(LEASE)
    assert talk.say(said[-1:]) == [(Kind.REFUSED, 1)]
    assert talk.receiving.counters == {"chunks_refused": 1}
    assert talk.say(said) == []
    assert talk.receiving.counters == {"chunks_refused": 2}
    assert talk.receiving.touched() == set()


def test_a_block_of_another_size_must_be_whole() -> None:
    talk = Conversation(Receiving(block=OURS), greet=False)
    talk.say(talk.hello(block=BlockShape(48, 2, 1, 1)))
    with pytest.raises(ProtocolViolation, match="for slots of 192"):
        talk.say(piece(0, 0, 1, b"x" * 191))


# ---- the end -------------------------------------------------------------------------------------------------


@given(st.integers(0, len(WHOLE) - 1))
def test_a_connection_that_ends_half_way_leaves_nothing(at: int) -> None:
    talk = Conversation()
    talk.say(WHOLE[:at])
    half_done = talk.receiving.grants.receives
    talk.inbound.close()
    assert talk.receiving.grants.receives == len(talk.receiving.rules.sessions) == 0
    assert talk.receiving.rules.counters.receives_dropped == half_done == (at >= len(piece(0, 0, 3, 1)))
    assert talk.receiving.grants.revoke(LEASE) == 0


def test_a_connection_that_never_greeted_closes() -> None:
    talk = Conversation(greet=False)
    talk.say(frame(Header(Kind.HELLO), b"x" * 100)[:80])
    talk.inbound.close()
    assert talk.receiving.counters == {}
