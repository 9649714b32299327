"""Whatever arrives, a sequence gets its tokens in order, once each, or an error; and frames are cut where they end."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tercet.protocol import EngineError, EngineUnreachable, Output, OutputStream, TercetError
from tercet.wire.client.http_engine import SequenceInbox
from tercet.wire.streams import TokenDelta
from tercet.wire.streams.wire_format import DeltaDetails, OutputBatch, delta_of, failed_delta

LENGTH = 12


def said(number: int, sizes: list[int], length: int = LENGTH, begin: int = 0) -> list[TokenDelta]:
    """What an engine says of a sequence whose tokens are their own positions, cut into pieces of these sizes."""
    deltas, at = list[TokenDelta](), begin
    while at < length:
        size = min(sizes[len(deltas) % len(sizes)], length - at)
        last = at + size == length
        deltas.append(delta_of(number, at, Output(tuple(range(at, at + size)), "length" if last else None)))
        at += size
    return deltas


class Taken(OutputStream):
    """What one sequence got."""

    def __init__(self) -> None:
        super().__init__(OutputStream.until_over)
        self.tokens: list[int] = []
        self.error: TercetError | None = None
        self.finished = False

    def put(self, output: Output) -> None:
        self._require_open()
        self.tokens += output.token_ids
        self.finished = output.finished

    def fail(self, error: TercetError) -> None:
        self._require_open()
        self.error = error

    def _require_open(self) -> None:
        assert not self.finished, "something came after the end"
        assert self.error is None, "something came after an error"


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(SIZES, st.data())
def test_lost_repeated_and_reordered_items_never_make_a_wrong_token(sizes: list[int], data: st.DataObject) -> None:
    deltas = said(7, sizes)
    places = data.draw(st.lists(st.integers(0, len(deltas) - 1), max_size=3 * len(deltas)))
    taken, inbox = Taken(), SequenceInbox("e")
    inbox.open(7, 0, taken)
    for place in places:
        inbox.receive([deltas[place]])
    assert taken.tokens == list(range(len(taken.tokens)))
    assert taken.finished == (taken.error is None and len(taken.tokens) == LENGTH)
    assert (7 in inbox.sequences) == (taken.error is None and not taken.finished)


@given(SIZES, st.data())
def test_repeats_alone_lose_nothing(sizes: list[int], data: st.DataObject) -> None:
    deltas = said(7, sizes)
    taken, inbox = Taken(), SequenceInbox("e")
    inbox.open(7, 0, taken)
    for place in range(len(deltas)):
        for again in data.draw(st.lists(st.integers(0, place), max_size=3)):
            if again < place:
                assert inbox.receive([deltas[again]]) == []
        assert inbox.receive([deltas[place]]) == []
    assert taken.finished
    assert taken.tokens == list(range(LENGTH))


@given(
    st.lists(
        st.builds(
            TokenDelta,
            st.integers(0, 3),
            st.integers(-2, 6),
            st.lists(st.integers(0, 5), max_size=4).map(tuple),
            st.none()
            | st.builds(DeltaDetails, st.sampled_from(["stop", None]), error=st.none() | st.just({"error": 1})),
        ),
        max_size=30,
    )
)
def test_hostile_items_end_sequences_and_nothing_else(deltas: list[TokenDelta]) -> None:
    inbox, taken = SequenceInbox("e"), {number: Taken() for number in range(3)}
    for number, each in taken.items():
        inbox.open(number, 0, each)
    unwanted = inbox.receive(deltas)
    for number, each in taken.items():
        assert (number in inbox.sequences) == (each.error is None and not each.finished)
        if isinstance(each.error, EngineUnreachable):
            assert number in unwanted
    assert all(delta.number in range(4) for delta in deltas)


@given(st.integers(1, 6), SIZES)
def test_positions_go_on_where_the_output_of_another_engine_ended(begin: int, sizes: list[int]) -> None:
    taken, inbox = Taken(), SequenceInbox("e")
    inbox.open(1, begin, taken)
    inbox.receive(said(1, sizes, begin=begin))
    assert taken.tokens == list(range(begin, LENGTH))


def test_a_gap_is_an_error_and_the_engine_is_told_to_stop() -> None:
    taken, inbox = Taken(), SequenceInbox("e")
    inbox.open(1, 0, taken)
    deltas = said(1, [2])
    assert inbox.receive([deltas[0], deltas[2]]) == [1]
    assert isinstance(taken.error, EngineUnreachable)
    assert "expected output position 2, received 4" in str(taken.error)
    assert inbox.receive([deltas[1]]) == [1], "what still comes is not wanted either"


def test_what_is_unknown_is_unwanted_unless_it_is_over() -> None:
    assert SequenceInbox("e").receive([TokenDelta(1, 0, (5,)), delta_of(2, 0, Output((5,), "stop"))]) == [1]


def test_losing_the_stream_ends_every_sequence_once() -> None:
    inbox, taken = SequenceInbox("e"), [Taken(), Taken()]
    for number, each in enumerate(taken):
        inbox.open(number, 0, each)
    inbox.lose(EngineUnreachable("gone"))
    inbox.lose(EngineUnreachable("gone again"))
    assert [str(each.error) for each in taken] == ["gone", "gone"]
    assert not inbox.sequences
    assert not inbox.close(0)


def test_an_error_is_what_the_engine_raised() -> None:
    inbox, taken = SequenceInbox("e"), Taken()
    inbox.open(0, 3, taken)
    inbox.receive([failed_delta(0, 3, EngineError("no more memory"))])
    assert isinstance(taken.error, EngineError)
    assert "no more memory" in str(taken.error)


def test_a_step_is_compact() -> None:
    step = OutputBatch(tuple(delta_of(number, 100, Output((40_000,))) for number in range(64)))
    assert len(msgspec.msgpack.encode(step)) <= 64 * 8 + 6
