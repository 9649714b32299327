"""Frames: two that become one, what clients are not shown, and what a timeline loses when it is halved: nothing."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tercet.router.page.records import (
    FleetPoint,
    Frame,
    LaneEnd,
    LaneSpan,
    LaneStart,
    MoveShown,
    Seat,
    encoded,
    for_clients,
)
from tercet_lab.bench.simulated.recording import halved, merged

SEATS = ([Seat("p", "prefill"), Seat("d", "decode")], [Seat("d", "both")])


def picture(frames: list[Frame]) -> dict[str, Any]:
    """What a page has after these frames, by the rules that the records give."""
    found: dict[str, Any] = {
        "engines": None,
        "rows": {},
        "points": [],
        "lanes": [],
        "spans": [],
        "ends": [],
        "moves": {},
    }
    for frame in frames:
        if frame.whole:
            found = picture([])
        if frame.engines is not None:
            found["engines"], found["rows"] = list(frame.engines), {}
        found["rows"] |= {row[0]: list(row) for row in frame.loads}
        for name in ("points", "lanes", "spans", "ends"):
            found[name] += getattr(frame, name)
        found["moves"] |= {move.number: move for move in frame.moves}
        found["t"], found["unseen"] = frame.t, list(frame.unseen)
    return found


def move(number: int, outcome: str) -> MoveShown:
    return MoveShown(number, 1.0, "a", "b", "why", outcome, 5, seq_id="cmpl-ann", error="ann said so")


@st.composite
def frame(draw: st.DrawFn) -> Frame:
    rows = draw(st.dictionaries(st.integers(0, 1), st.integers(0, 1000), max_size=2))
    moves = draw(st.dictionaries(st.integers(1, 3), st.sampled_from(["under_way", "moved"]), max_size=2))
    return Frame(
        t=draw(st.floats(0, 100)),
        whole=draw(st.booleans()),
        engines=draw(st.none() | st.sampled_from(SEATS)),
        loads=[[index, kv, 0, 0, 0, 0, 0, 0] for index, kv in rows.items()],
        points=[FleetPoint(1.0, 0.5, 1, 2, {})] * draw(st.integers(0, 2)),
        moves=[move(number, outcome) for number, outcome in moves.items()],
    )


@given(st.lists(frame(), max_size=9))
def test_half_as_many_frames_end_with_the_same_picture(frames: list[Frame]) -> None:
    fewer = halved(frames)
    assert len(fewer) == (len(frames) + 1) // 2
    if frames:
        assert picture(fewer) == picture(frames)


def test_a_whole_frame_needs_nothing_before_it() -> None:
    later = Frame(t=2.0, whole=True, engines=SEATS[1])
    assert merged(Frame(t=1.0, engines=SEATS[0], loads=[[0, 7, 0, 0, 0, 0, 0, 0]]), later) is later


def test_clients_see_no_names_of_requests_and_no_words_of_errors() -> None:
    span = LaneSpan(1, "retry", "d", 1.0, 1.0, "", 0, 0, 0, 0, "ann's engine died")
    shown = Frame(
        t=1.0, lanes=[LaneStart(1, 0.5, "p", 10, "cmpl-ann")], spans=[span], ends=[LaneEnd(1, 2.0, True, 5, 1.0, 1.0)],
        moves=[move(1, "failed")],
    )  # fmt: skip
    assert b"ann" in encoded([shown])
    assert b"ann" not in encoded([for_clients(shown)])
    assert for_clients(shown).ends == shown.ends


def test_what_has_not_changed_takes_no_room() -> None:
    assert encoded([Frame(t=1.5)]) == b'data: {"t":1.5}\n\n'
    event = encoded([Frame(t=1.0, engines=SEATS[0])])
    assert msgspec.json.decode(event.removeprefix(b"data: "))["engines"] == [["p", "prefill"], ["d", "decode"]]
