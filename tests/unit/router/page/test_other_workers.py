"""Frames of several workers in one: numbers that are apart, sums of programs, and what a new viewer is shown."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack

import msgspec
import pytest
from msgspec.structs import replace

from tercet.router.observe.request_traces import RequestTraces, SharedTraces
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
    reported_loads,
)
from tercet.router.page.watch import APART, FleetWatch, OtherWorkers, Viewers, about_service, added, numbered
from tests.longest_wait import until

from ..conftest import LiveRouter

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
