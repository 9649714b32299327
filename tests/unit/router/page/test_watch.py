"""Frames of a live fleet: what requests, engines, programs and moves leave in them, and what is bounded."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import numpy as np
import pytest

from tercet.fleet import RunningSequence, Trace
from tercet.protocol import EngineLoad, OutputStream, Request, TercetError
from tercet.protocol.spans import TraceEvent, VerbTrace
from tercet.router.page import records
from tercet.router.page.records import (
    DEAD,
    DRAINING,
    MOST_OPEN,
    MOST_PROGRAMS,
    OTHER,
    SILENT,
    EngineTTFT,
    FirstTokenTimes,
    Frame,
    KeptRecords,
    Lanes,
    ProgramCounts,
    percentile,
    reported_loads,
)
from tercet.router.page.watch import MOVES_PER_FRAME, FleetWatch, about_service
from tercet.router.serve.moves import MoveRecord
from tercet.settings import RetryBudget
from tests.longest_wait import until
from tests.unit.router.conftest import LiveRouter

from .test_viewers import picture


def watch_of(router: LiveRouter) -> FleetWatch:
    service = router.service
    return FleetWatch(service, reported_loads(router.fleet), lambda: about_service(service, "m"), epoch=1000.0)


def sequence(name: str = "s", tokens: int = 0, program: str = "x") -> RunningSequence:
    made = RunningSequence(Request(seq_id=name, prompt=(1, 2, 3), sampling_params={}), program, RetryBudget(), 0.0)
    made.tokens.extend(range(tokens))
    return made


async def test_a_request_is_a_lane_with_its_verbs_in_order(router: LiveRouter) -> None:
    watch = watch_of(router)
    watch.frame()
    _, tokens = await router.ask(max_tokens=4)
    frame = watch.frame()
    (start,), (end,) = frame.lanes, frame.ends
    assert (start.program, start.prompt, start.seq_id) == ("disaggregated", 100, "s1")
    assert [(span.verb, span.engine, span.to) for span in frame.spans] == [
        ("prep_recv", "d", ""), ("remote_send", "p", "d"), ("start_generate", "d", ""),
    ]  # fmt: skip
    assert all(start.t - 1e-5 <= span.begin <= span.end <= end.t + 1e-5 for span in frame.spans)
    assert (end.done, end.tokens) == (True, len(tokens))
    assert end.ttft is not None
    assert start.t >= 1000  # the clock of frames
    watch.close()


async def test_points_count_requests_and_tokens_by_program(router: LiveRouter) -> None:
    watch = watch_of(router)
    watch.frame()
    for headers in ({}, {}, {"x-tercet-program": "data_parallel"}):
        await router.ask(headers)
    (point,) = watch.frame().points
    assert {name: values.done for name, values in point.programs.items()} == {"data_parallel": 1, "disaggregated": 2}
    assert point.programs["disaggregated"].tokens > 2
    assert point.programs["disaggregated"].ttft_p50 is not None
    (after,) = watch.frame().points
    assert after.programs == {}
    watch.close()


async def test_a_request_that_fails_is_unfinished(router: LiveRouter) -> None:
    watch = watch_of(router)
    for name in ("p", "d"):
        router.fleet.remove(name)
    with suppress(TercetError):
        await router.ask()
    frame = watch.frame()
    assert [end.done for end in frame.ends] == [False]
    assert [values.unfinished for values in frame.points[0].programs.values()] == [1]
    watch.close()


async def test_engines_have_rows_that_come_again_only_when_they_change(router: LiveRouter) -> None:
    watch = watch_of(router)
    first = watch.frame()
    assert first.engines is not None
    assert [seat.name for seat in first.engines] == ["p", "d"]
    assert [row[-1] for row in first.loads] == [SILENT, SILENT]
    router.fleet.report("d", EngineLoad(waiting=3, running=2, kv_usage=0.25, step_time=0.0125))
    router.fleet.drain("p")
    found = watch.frame()
    assert found.engines is None
    assert found.loads == [[0, 0, 0, 0, 0, 0, 0, DRAINING + SILENT], [1, 250, 2, 3, 12500, 0, 0, 0]]
    assert (found.points[0].running, found.points[0].waiting) == (2, 3)
    assert not watch.frame().loads
    router.fleet.member("d").reachable = False
    (row,) = watch.frame().loads
    assert row[-1] & DEAD
    watch.close()


async def test_another_role_is_another_list_of_engines(router: LiveRouter) -> None:
    watch = watch_of(router)
    watch.frame()
    router.fleet.member("p").role = "both"
    found = watch.frame()
    assert found.engines is not None
    assert found.engines[0].role == "both"
    assert len(found.loads) == 2
    watch.close()


async def test_engines_beyond_those_that_are_drawn_are_sums(
    router: LiveRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MOST_ENGINES", 1)
    watch = watch_of(router)
    router.fleet.report("d", EngineLoad(waiting=3, running=2, kv_usage=0.25))
    found = watch.frame()
    assert (len(found.engines or ()), len(found.loads)) == (1, 1)
    assert [(more.role, more.engines, more.kv, more.running) for more in found.unseen] == [("decode", 1, 250, 2)]
    watch.close()


async def test_a_new_viewer_sees_what_the_others_have_seen(router: LiveRouter) -> None:
    watch, seen = watch_of(router), list[Frame]()
    for _ in range(3):
        await router.ask()
        seen.append(watch.frame())
    router.fleet.drain("d")
    seen.append(watch.frame())
    await router.ask()  # of the next frame
    assert picture([watch.whole()]) == picture(seen)
    watch.close()


async def test_a_move_is_under_way_and_then_over(router: LiveRouter) -> None:
    watch = watch_of(router)
    unknown = sequence("gone")
    await router.service.moves.follow(unknown, "p", "test")
    (move,) = watch.frame().moves
    assert (move.outcome, move.to, move.reason, move.seq_id) == ("dropped", "p", "test", "gone")
    assert watch.whole().moves == [move]
    watch.close()


async def test_nothing_is_observed_after_the_end(router: LiveRouter) -> None:
    watch = watch_of(router)
    assert watch in router.service.observers
    watch.close()
    assert not router.service.observers
    assert router.service.moves.observer is None
    await router.ask()
    assert not watch.frame().lanes


async def test_a_watch_that_has_been_replaced_takes_nothing_from_the_next(router: LiveRouter) -> None:
    first = watch_of(router)
    second = watch_of(router)
    first.close()
    assert second in router.service.observers
    second.close()


# ---- bounds --------------------------------------------------------------------------------------------------


def test_lanes_are_a_bounded_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    found = Lanes(lambda: now, lambda at: at)
    running = [sequence(str(number)) for number in range(200)]
    for each in running:
        found.begins(each, Trace())
    assert len(found.take()[0]) == int(records.MOST_PER_SECOND)
    for _ in range(100):
        now += 1.0
        running += [sequence() for _ in range(10)]
        for each in running[-10:]:
            found.begins(each, Trace())
    started, _, _ = found.take()
    assert len(started) <= MOST_OPEN
    for each in running:
        found.ends(each, None, None)
    kept = KeptRecords()
    for _ in range(50):  # that end at once
        now += 1.0
        each = sequence()
        found.begins(each, Trace())
        found.ends(each, 0.5, None)
        starts, _, ends = found.take()
        kept.add(Frame(t=now, lanes=starts, ends=ends))
    whole = kept.with_whole(Frame(t=now, whole=True))
    assert len(whole.lanes) == len(whole.ends) == records.LANES_KEPT


def test_a_lane_has_room_for_so_many_verbs() -> None:
    found, trace = Lanes(time.monotonic, lambda at: at), Trace()
    found.begins(sequence(), trace)
    for _ in range(1000):
        trace.events.append(TraceEvent("prep_recv", "e", 0.001, reason="x" * 10_000))
    _, spans, _ = found.take()
    assert len(spans) == records.MOST_SPANS
    assert len(spans[0].said) == records.LONGEST_WORDS
    assert len(trace.events) == 1000


def test_programs_beyond_those_with_lines_are_one() -> None:
    counts = ProgramCounts(())
    for number in range(3 * MOST_PROGRAMS):
        ended, trace = sequence(tokens=2), Trace()
        ended.ended, trace.program = True, f"p{number}"
        counts.ends(ended, trace)
    found = counts.take(())
    assert len(found) == MOST_PROGRAMS + 1
    assert found[OTHER].done == 2 * MOST_PROGRAMS
    assert sum(point.tokens for point in found.values()) == 6 * MOST_PROGRAMS


def test_tokens_count_once_and_only_from_the_first_look_on() -> None:
    old, new = sequence(tokens=5), sequence(tokens=1)
    counts = ProgramCounts([old])
    old.tokens += [1, 2]
    assert counts.take([old, new])["x"].tokens == 3
    new.tokens += [1]
    trace = Trace()
    trace.program, new.ended = "x", True
    counts.ends(new, trace)
    assert counts.take([old])["x"].tokens == 1


def test_percentiles_are_of_the_times_in_milliseconds() -> None:
    assert percentile([], 0.5) is None
    assert percentile([0.001, 0.002, 0.003], 0.5) == 2.0
    assert percentile([0.001 * n for n in range(1, 11)], 0.9) == 10.0


@pytest.mark.parametrize(
    ("events", "slowest"),
    [
        ([], ""),
        ([TraceEvent("start_generate", "d", 0.1)], "d"),
        ([TraceEvent("prep_recv", "d", 0.1), TraceEvent("remote_send", "p", 0.4)], "p"),
        ([TraceEvent("retry", "x", 9.0), TraceEvent("start_generate", "d", 0.1), TraceEvent("move", "d", 9.0)], "d"),
    ],
)  # fmt: skip
def test_the_slowest_engine_is_that_of_the_longest_verb_before_the_first_token(
    events: list[TraceEvent], slowest: str
) -> None:
    assert VerbTrace("p", events).slowest_engine == slowest


async def test_an_engines_ttft_forgets(router: LiveRouter) -> None:
    now = 0.0
    times = FirstTokenTimes(lambda: now)
    times.add("p", 1.0)
    assert times.in_ms(router.fleet.members) == [1000, 0]
    now = 60.0
    times.add("p", 0.1)
    assert 100 < times.in_ms(router.fleet.members)[0] < 250
    now = 60.0 + records.FORGOTTEN_AFTER + 1
    assert times.in_ms(router.fleet.members) == [0, 0]


async def test_an_engines_ttft_is_that_of_all_workers(router: LiveRouter) -> None:
    now = 0.0
    times, others = FirstTokenTimes(lambda: now), FirstTokenTimes(lambda: now)
    times.add("p", 1.0)
    for seconds in (2.0, 3.0):
        others.add("p", seconds)
    told = others.take()
    assert (told, others.take()) == ([EngineTTFT("p", 2, 5.0)], [])
    for each in told:
        times.add_of_others(each)
    assert times.in_ms(router.fleet.members) == [2000, 0]
    assert times.take() == [EngineTTFT("p", 1, 1.0)], "others hear of this one's requests alone"


async def test_a_fleet_without_engines_has_a_frame(router: LiveRouter) -> None:
    for name in ("p", "d"):
        router.fleet.remove(name)
    watch = watch_of(router)
    found = watch.frame()
    assert (list(found.loads), found.points[0].running) == ([], 0)
    assert np.isfinite(found.t)
    watch.close()
    await asyncio.sleep(0)


def test_a_move_that_was_shown_is_shown_to_its_end(router: LiveRouter) -> None:
    watch = watch_of(router)
    burst = [MoveRecord(number, f"s{number}", "d", "e", "test", 1000.0, 9) for number in range(2 * MOVES_PER_FRAME)]
    for move in burst:
        watch.moved(move)
    shown = {move.number for move in watch.frame().moves}
    assert len(shown) == MOVES_PER_FRAME
    for move in sorted(burst, key=lambda each: each.number in shown):
        move.outcome = "moved"
        watch.moved(move)
    assert shown <= {move.number for move in watch.frame().moves if move.outcome == "moved"}
    assert all(move.outcome == "moved" for move in watch.whole().moves)
    watch.close()


async def test_a_request_that_moves_is_followed_from_its_first_token_on(router: LiveRouter) -> None:
    found = list[RunningSequence]()
    for name in ("p", "d"):
        router.engine(name).let(3)
    request = Request(seq_id="s", prompt=tuple(range(100)), sampling_params={"max_tokens": 9})
    stream = router.service.run(request, trace := Trace(), on_sequence=found.append)
    serving = asyncio.ensure_future(_tokens_of(stream))
    await until(lambda: found and len(found[0].tokens) >= 3)
    watch = watch_of(router)  # it began before a page was open
    to = "p" if found[0].engine == "d" else "d"
    router.engine(to).let(None)
    await router.service.moves.follow(found[0], to, "test")
    frame = watch.frame()
    verbs = [span.verb for span in frame.spans]
    assert (verbs[0], verbs[-1]) == ("start_generate", "move")
    assert frame.lanes[0].t == pytest.approx(1000 + found[0].began, abs=1e-5)
    generated = next(event for event in trace.events if event.verb == "start_generate")
    begin = 1000 + found[0].began + generated.at
    assert (frame.spans[0].begin, frame.spans[0].end) == pytest.approx((begin, begin + generated.seconds), abs=1e-5)
    assert trace.events[-1].verb == "move"
    assert await serving > 3
    watch.close()


async def _tokens_of(stream: OutputStream) -> int:
    return sum([len(output.token_ids) async for output in stream])
