"""Work in threads beside a loop that never rests."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator
from itertools import count

import pytest

from tercet.aio import run_in_thread


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
