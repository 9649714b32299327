"""How many requests of batches may run next to others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tercet.decisions.gaps import ENOUGH, FULL, LONG_QUEUE, PATIENCE, Gaps
from tercet.protocol import EngineLoad

loads = st.builds(
    EngineLoad,
    waiting=st.integers(0, 3),
    running=st.integers(0, 300),
    kv_usage=st.floats(0, 1),
    step_time=st.none() | st.floats(0, 1),
)
looks = st.tuples(st.lists(st.none() | loads, max_size=5), st.booleans())


def idle(kv_usage: float = 0.1, waiting: int = 0, step_time: float = 0.01) -> EngineLoad:
    return EngineLoad(waiting=waiting, running=0, kv_usage=kv_usage, step_time=step_time)


@given(st.lists(looks, max_size=60), st.integers(1, 50))
def test_never_more_than_the_most_and_never_more_than_one_more_at_a_look(
    seen: list[tuple[list[EngineLoad | None], bool]], per_engine: int
) -> None:
    gaps, running = Gaps(per_engine), 0
    for engines, waits in seen:
        allowed = gaps.look(engines, waits, running)
        assert 0 <= allowed <= per_engine * sum(load is not None for load in engines)
        assert allowed <= running + 1
        if waits or any(load is not None and load.kv_usage >= FULL for load in engines):
            assert allowed <= running
        running = allowed


def test_it_grows_to_the_most_in_an_idle_fleet_and_stays_there() -> None:
    gaps, running = Gaps(8), 0
    for _ in range(40):
        running = gaps.look([idle(), idle()], False, running)
    assert running == 16


def test_without_a_report_nothing_runs() -> None:
    gaps = Gaps(8)
    assert [gaps.look([None], False, 0) for _ in range(5)] == [0] * 5
    assert gaps.look([], False, 3) == 0


def test_requests_that_wait_for_long_at_the_router_end_others() -> None:
    gaps, running = Gaps(64), 40
    gaps.allowed = 40
    seen = list[int]()
    for _ in range(PATIENCE + 4):
        running = gaps.look([idle()], True, running)
        seen.append(running)
    assert seen[: PATIENCE - 1] == [40] * (PATIENCE - 1)
    assert seen[PATIENCE - 1 :] == [20, 10, 5, 2, 1]


def test_a_queue_on_an_engine_halves_what_may_begin_and_ends_nothing() -> None:
    gaps = Gaps(64)
    gaps.allowed = 40
    assert [gaps.look([idle(waiting=LONG_QUEUE)], False, 40) for _ in range(4)] == [40] * 4
    assert gaps.look([idle()], False, 0) < 6


def test_none_begins_while_every_engine_has_enough_to_do() -> None:
    gaps = Gaps(64)
    gaps.allowed = 40
    assert [gaps.look([idle(waiting=ENOUGH)], False, 40) for _ in range(4)] == [40] * 4
    assert gaps.look([idle(waiting=ENOUGH), idle(waiting=ENOUGH - 1)], False, 40) == 41


def test_a_full_cache_ends_requests_and_slow_steps_let_none_begin() -> None:
    assert Gaps(64).look([idle(kv_usage=0.95)], False, 40) == 20
    gaps = Gaps(64, most_step_s=0.02)
    gaps.allowed = 8
    assert gaps.look([idle(step_time=0.03)], False, 7) == 7
    assert gaps.allowed == 3.5
    assert gaps.look([idle(step_time=0.01)], False, 2) == 3
