"""When an engine that has ended is started anew."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tercet.cluster.running_fleet import FIRST_PAUSE, LIVED_SECONDS, LONGEST_PAUSE, Restarts


def test_each_start_waits_twice_as_long_up_to_a_bound() -> None:
    restarts = Restarts(8)
    assert [restarts.ended(now) for now in range(9)] == [1, 2, 4, 8, 16, 30, 30, 30, None]


def test_never_is_never() -> None:
    restarts = Restarts(0)
    restarts.ready(0.0)
    assert restarts.ended(10 * LIVED_SECONDS) is None


def test_an_engine_that_has_lived_gets_all_of_them_back() -> None:
    restarts = Restarts(1)
    assert restarts.ended(0.0) == FIRST_PAUSE
    restarts.ready(5.0)
    assert restarts.ended(5.0 + LIVED_SECONDS) == FIRST_PAUSE
    restarts.ready(100.0)
    assert restarts.ended(99.0 + LIVED_SECONDS) is None


def test_time_in_which_it_was_loading_is_not_life() -> None:
    restarts = Restarts(1)
    restarts.ready(0.0)
    assert restarts.ended(1.0) == FIRST_PAUSE
    assert restarts.ended(1.0 + 2 * LIVED_SECONDS) is None, "it never became ready again"


@given(limit=st.integers(0, 60), lives=st.lists(st.none() | st.floats(0, 2 * LIVED_SECONDS), max_size=40))
def test_no_engine_gets_more_in_a_row_than_the_limit(limit: int, lives: list[float | None]) -> None:
    restarts, now, in_a_row = Restarts(limit), 0.0, 0
    for life in lives:
        if life is not None:
            restarts.ready(now)
            now += life
            in_a_row = 0 if life >= LIVED_SECONDS else in_a_row
        pause = restarts.ended(now)
        if pause is None:
            assert in_a_row == limit
        else:
            in_a_row += 1
            assert in_a_row <= limit
            assert FIRST_PAUSE <= pause <= LONGEST_PAUSE
            now += pause
