"""Task sets hold what runs, tell of failures, and end within a bound."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref

import pytest

from tercet.aio import TaskSet
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
