"""Frames: two that become one, those of several workers, what clients are not shown, what a timeline loses when it is
halved, and viewers, of whom slow ones skip.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tercet.protocol import NoSpace, ShuttingDown
from tercet.router.observe.request_traces import RequestTraces, SharedTraces
from tercet.router.page import watch as module
from tercet.router.page.records import (
    About,
    EngineTTFT,
    FleetPoint,
    Frame,
    LaneEnd,
    LaneSpan,
    LaneStart,
    MoveShown,
    ProgramPoint,
    Seat,
    encoded,
    for_clients,
    reported_loads,
)
from tercet.router.page.watch import (
    APART,
    FOR_ADMINS,
    MOST_PENDING,
    MOST_VIEWERS,
    FleetWatch,
    OtherWorkers,
    Viewers,
    about_service,
    added,
    numbered,
)
from tercet_lab.bench.simulated.recording import halved, merged
from tests.longest_wait import LONGEST_WAIT_S, until
from tests.unit.router.conftest import LiveRouter


def frames_in(part: bytes) -> list[Frame]:
    return [msgspec.json.decode(event.removeprefix(b"data: "), type=Frame) for event in part.split(b"\n\n") if event]


class Gallery:
    """Viewers of a router; ``made`` counts the watches, ``over`` is set when the router shuts down."""

    def __init__(self, router: LiveRouter) -> None:
        self.router, self.made, self.over = router, 0, False
        self.viewers = Viewers(self._watch, lambda: 2, lambda: self.over)

    def _watch(self) -> FleetWatch:
        self.made += 1
        service = self.router.service
        return FleetWatch(service, reported_loads(self.router.fleet), lambda: about_service(service, "m"))

    @property
    def is_quiet(self) -> bool:
        return not self.router.service.observers


@pytest.fixture
async def gallery(router: LiveRouter, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gallery]:
    monkeypatch.setattr(module, "INTERVAL_S", 0.01)
    gallery = Gallery(router)
    yield gallery
    await gallery.viewers.close()


async def until_quiet(gallery: Gallery) -> None:
    await until(lambda: gallery.is_quiet)


async def test_a_viewer_gets_a_whole_frame_and_then_changes(gallery: Gallery) -> None:
    viewer = gallery.viewers.enter("admin")
    async with aclosing(gallery.viewers.stream(viewer)) as stream:
        first = frames_in(await anext(stream))
        assert [frame.whole for frame in first] == [True]
        assert [seat.name for seat in first[0].engines or ()] == ["p", "d"]
        await gallery.router.ask()
        later = list[Frame]()
        while not any(frame.ends for frame in later):
            later += frames_in(await anext(stream))
        assert not any(frame.whole for frame in later)
        assert [lane.seq_id for frame in later for lane in frame.lanes] == ["s1"]


async def test_clients_see_less_of_the_same_frame(gallery: Gallery) -> None:
    viewer = gallery.viewers.enter("client")
    async with aclosing(gallery.viewers.stream(viewer)) as stream:
        await anext(stream)
        await gallery.router.ask()
        lanes = list[str]()
        while not lanes:
            lanes = [lane.seq_id for frame in frames_in(await anext(stream)) for lane in frame.lanes]
        assert lanes == [""]


async def test_nothing_is_observed_without_a_viewer(gallery: Gallery) -> None:
    assert gallery.is_quiet
    one, two = (gallery.viewers.enter("admin") for _ in range(2))
    first, second = gallery.viewers.stream(one), gallery.viewers.stream(two)
    assert await anext(first) is await anext(second)  # made once
    assert gallery.made == 1
    await first.aclose()
    assert not gallery.is_quiet
    await second.aclose()
    await until_quiet(gallery)
    assert len(gallery.viewers) == 0


async def test_the_next_viewer_finds_one_producer(gallery: Gallery) -> None:
    for _ in range(3):  # before the producer has noticed that the last one left
        stream = gallery.viewers.stream(gallery.viewers.enter("admin"))
        await anext(stream)
        await stream.aclose()
    assert gallery.made == 1
    await until_quiet(gallery)
    stream = gallery.viewers.stream(gallery.viewers.enter("admin"))
    await anext(stream)
    assert gallery.made == 2
    await stream.aclose()


async def test_a_slow_viewer_is_never_behind_by_more_than_a_few_frames(gallery: Gallery) -> None:
    viewer = gallery.viewers.enter("admin")
    async with aclosing(gallery.viewers.stream(viewer)) as stream:
        await anext(stream)
        async with asyncio.timeout(LONGEST_WAIT_S):
            while not viewer.is_behind:
                assert len(viewer._pending) <= MOST_PENDING
                await asyncio.sleep(0.005)
        assert len(viewer._pending) == 0
        assert [frame.whole for frame in frames_in(await anext(stream))] == [True]


async def test_there_is_a_most_of_viewers(gallery: Gallery) -> None:
    gallery.viewers.enter("worker")
    entered = [gallery.viewers.enter("client") for _ in range(MOST_VIEWERS - FOR_ADMINS)]
    with pytest.raises(NoSpace, match="for administrators; close one"):
        gallery.viewers.enter("client")
    entered += [gallery.viewers.enter("admin") for _ in range(FOR_ADMINS)]
    with pytest.raises(NoSpace, match="close one"):
        gallery.viewers.enter("admin")
    stream = gallery.viewers.stream(entered[0])
    await anext(stream)
    await stream.aclose()
    gallery.viewers.enter("admin")


async def test_every_stream_ends_when_the_router_shuts_down(gallery: Gallery) -> None:
    stream = gallery.viewers.stream(gallery.viewers.enter("admin"))
    await anext(stream)
    gallery.over = True
    async with asyncio.timeout(LONGEST_WAIT_S):
        _ = [part async for part in stream]
    await until_quiet(gallery)
    with pytest.raises(ShuttingDown):
        gallery.viewers.enter("admin")


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


NAMES = itertools.count()


def point(**programs: ProgramPoint) -> FleetPoint:
    return FleetPoint(1.0, 0.5, 3, 0, programs)


def did(done: int, tokens: int, ttft: float | None) -> ProgramPoint:
    return ProgramPoint(done, 1, tokens, ttft, ttft, None, None)


OF_OTHER = Frame(
    t=2.0, points=[point(a=did(3, 30, 40.0), b=did(1, 5, None))], lanes=[LaneStart(7, 1.0, "a", 100, "s")],
    spans=[LaneSpan(7, "prep_recv", "d", 1.0, 1.1, "", 100, 0, 0, 0, "")], ends=[LaneEnd(7, 2.0, True, 9, 1.0, 1.0)],
    moves=[MoveShown(1, 1.5, "d", "e", "drain", "moved", 9)], loads=[[0, 1]], ttfts=[EngineTTFT("d", 2, 3.0)],
)  # fmt: skip


async def nobody() -> Sequence[str]:
    return ()


async def silence(name: str) -> AsyncGenerator[bytes]:
    return
    yield


def test_what_programs_did_is_added_and_times_are_weighted_by_requests() -> None:
    found = added(point(a=did(1, 10, 20.0)), [*OF_OTHER.points])
    assert found == {"a": ProgramPoint(4, 2, 40, 35.0, 35.0, None, None), "b": did(1, 5, None)}


def test_frames_are_joined_and_kept_for_those_who_come_later() -> None:
    others = OtherWorkers(nobody, silence)
    own = Frame(t=2.5, points=[point(a=did(1, 10, 20.0))], lanes=[LaneStart(7, 2.0, "a", 5, "own")], loads=[[0, 5]])
    others.take(numbered(OF_OTHER, APART))
    joined = others.join(own)
    assert [lane.lane for lane in joined.lanes] == [7, 7 + APART]
    assert (joined.spans[0].lane, joined.ends[0].lane, joined.moves[0].number) == (7 + APART, 7 + APART, 1 + APART)
    assert joined.loads == [[0, 5]], "each worker has the engines' reports"
    assert (others.ttfts(), others.ttfts()) == ([EngineTTFT("d", 2, 3.0)], [])
    assert not joined.ttfts, "they are in the loads"
    assert joined.points[0].programs["a"].done == 4
    assert others.join(own).lanes == own.lanes, "once"
    whole = others.join_whole(replace(own, whole=True))
    assert [lane.seq_id for lane in whole.lanes] == ["own", "s"]
    assert [each.programs["a"].done for each in whole.points] == [4, 1]
    assert whole.moves == [*joined.moves]
    others.end()
    assert others.join_whole(own).lanes == own.lanes


def test_a_whole_frame_of_another_worker_brings_no_past_of_the_charts() -> None:
    others = OtherWorkers(nobody, silence)
    others.take(numbered(replace(OF_OTHER, whole=True), APART))
    joined = others.join(Frame(t=2.5, points=[point(a=did(1, 10, 20.0))]))
    assert joined.points[0].programs == {"a": did(1, 10, 20.0)}
    assert len(joined.lanes) == 1


class Process:
    """A router process in this one: its viewers, and its socket among the others'."""

    def __init__(self, router: LiveRouter, names: list[str]) -> None:
        self.name = f"test-{id(names)}-{next(NAMES)}"

        async def others() -> Sequence[str]:
            return [name for name in names if name != self.name]

        def about() -> About:
            return replace(about_service(router.service, "m"), workers=1 + len(self.others))

        self.traces = SharedTraces(RequestTraces(), self.name, others)
        self.others = OtherWorkers(self.traces.others, self.traces.frames_of)
        watch = lambda: FleetWatch(router.service, reported_loads(router.fleet), about, 1000.0)  # noqa: E731
        self.viewers = Viewers(watch, lambda: 2, lambda: False, self.others)
        self.traces.frames = lambda: self.viewers.stream(self.viewers.enter("worker"))
        names.append(self.name)


@pytest.mark.slow
async def test_a_page_shows_what_another_worker_serves_and_nothing_is_watched_after_it(router: LiveRouter) -> None:
    names = list[str]()
    one, other = Process(router, names), Process(router, names)
    seen = list[str]()
    async with AsyncExitStack() as stack:
        for process in (one, other):
            await stack.enter_async_context(process.traces.answering())
        viewer = one.viewers.enter("admin")
        workers = 1
        async with asyncio.timeout(60):
            async for part in one.viewers.stream(viewer):
                for event in part.decode().split("\n\n")[:-1]:
                    frame = msgspec.json.decode(event.removeprefix("data: "), type=Frame)
                    seen += [f"{start.lane // APART}" for start in frame.lanes]
                    workers = frame.about.workers if frame.about is not None else workers
                if {"0", "1"} <= {*seen} and workers == 2:
                    viewer.leave()
                elif len(other.viewers):
                    await router.ask()  # both processes of this test watch one service
            await until(lambda: not (router.service.observers or len(other.viewers)))
    assert workers == 2
