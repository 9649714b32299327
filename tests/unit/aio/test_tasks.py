"""Task sets hold what runs, tell of failures, and end within a bound."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator
from itertools import count

import pytest

from tercet.aio.tasks import TaskSet, run_in_thread
from tests.longest_wait import LONGEST_WAIT_S


async def test_a_task_is_held_until_it_ends() -> None:
    tasks, go = TaskSet(), asyncio.Event()
    done: list[int] = []

    async def work() -> None:
        await go.wait()
        done.append(1)

    held = weakref.ref(tasks.spawn(work()))
    gc.collect()
    assert held() is not None
    assert len(tasks) == 1
    go.set()
    assert await tasks.wait(LONGEST_WAIT_S)
    assert (done, len(tasks)) == ([1], 0)


async def test_close_cancels_and_waits_for_clean_up() -> None:
    tasks, cleaned = TaskSet(), list[int]()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(1)

    for _ in range(3):
        tasks.spawn(work())
    await asyncio.sleep(0)
    assert await tasks.close(10)
    assert cleaned == [1, 1, 1]


async def test_close_is_bounded_by_its_seconds() -> None:
    tasks, go = TaskSet(), asyncio.Event()

    async def stubborn() -> None:
        while not go.is_set():
            try:
                await go.wait()
            except asyncio.CancelledError:
                continue

    tasks.spawn(stubborn())
    await asyncio.sleep(0)
    assert not await tasks.close(0.01)
    assert len(tasks) == 1
    go.set()
    assert await tasks.wait(LONGEST_WAIT_S)


async def test_wait_cancels_nothing() -> None:
    tasks, go = TaskSet(), asyncio.Event()
    task = tasks.spawn(go.wait())
    assert not await tasks.wait(0.01)
    go.set()
    assert await task is True


async def test_a_failure_is_logged_and_raised_to_who_awaits(caplog: pytest.LogCaptureFixture) -> None:
    tasks = TaskSet()

    async def work() -> None:
        raise ValueError("no such thing")

    with caplog.at_level(logging.ERROR, "tercet.aio.tasks"):
        task = tasks.spawn(work(), "counting")
        with pytest.raises(ValueError, match="no such thing"):
            await task
        assert await tasks.wait(LONGEST_WAIT_S)
    assert "counting failed: ValueError: no such thing" in caplog.text


# Work in threads beside a loop that never rests.


class Turns:
    """How often the loop has turned, which it does all the time."""

    def __init__(self) -> None:
        self.number = 0

    async def go_on(self) -> None:
        for self.number in count():
            await asyncio.sleep(0)

    def during(self, seconds: float) -> int:
        """Turns while a thread waits outside of the interpreter."""
        before = self.number
        time.sleep(seconds)
        return self.number - before


@pytest.fixture
async def turns() -> AsyncIterator[Turns]:
    turns = Turns()
    task = asyncio.create_task(turns.go_on())
    yield turns
    task.cancel()
    await asyncio.wait([task])


async def test_a_busy_loop_waits_for_a_thread_that_is_over_soon(turns: Turns) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(20.0)  # soon, also on a machine that runs something else for a while
    try:
        assert {await run_in_thread(turns.during, 0.001) for _ in range(49)} == {0}
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.slow
async def test_and_goes_on_beside_one_that_is_not(turns: Turns) -> None:
    assert await run_in_thread(turns.during, 0.5) > 0


async def test_what_it_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        await run_in_thread(divmod, 1, 0)


async def test_who_is_cancelled_does_not_wait_for_the_thread() -> None:
    go_on, ended = threading.Event(), threading.Event()

    def work() -> None:
        go_on.wait(60)
        ended.set()

    waiting = asyncio.create_task(run_in_thread(work))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert not ended.is_set()
    go_on.set()
    assert await asyncio.to_thread(ended.wait, 60)
