"""A request that takes too long is ended, wherever it is, and gives everything back."""

from __future__ import annotations

import asyncio
import time

import pytest

from tercet.fleet import Trace
from tercet.protocol import DeadlineExceeded, NoSpace, Request
from tercet.router.metrics import Metrics
from tercet.router.service import Service

from .conftest import Door

ANSWER = ("disaggregated", [100, 101, 102])


def limited(door: Door, metrics: Metrics, seconds: float | None) -> Door:
    door.service = Service(door.fleet, "disaggregated", {}, metrics, request_timeout=seconds)
    return door


async def ask(door: Door, began: float | None = None) -> tuple[str, list[int]]:
    return await door.ask(began=began)


@pytest.mark.parametrize("stuck", ["p", "d"])
async def test_a_stuck_engine(door: Door, metrics: Metrics, stuck: str) -> None:
    limited(door, metrics, 0.05).engine(stuck).pause.clear()
    with pytest.raises(DeadlineExceeded, match=r"within 0\.05 s"):
        await ask(door)
    assert await door.has_everything_back()


async def test_no_cancellation_stays_behind(door: Door, metrics: Metrics) -> None:
    limited(door, metrics, 0.05).engine("d").pause.clear()
    task = asyncio.current_task()
    assert task is not None
    with pytest.raises(DeadlineExceeded):
        await door.service.run(Request(seq_id="s", prompt=(1, 2, 3)), Trace()).run(lambda _: None)
    assert task.cancelling() == 0
    await asyncio.sleep(0)  # where it would come


async def test_retries_end_with_it(door: Door, metrics: Metrics) -> None:
    limited(door, metrics, 0.05)
    for name in "pd":
        door.engine(name).failures["start_generate"] = NoSpace("full")
    with pytest.raises(DeadlineExceeded):  # the second retry would begin after 0.2 s
        await ask(door)
    assert await door.has_everything_back()


async def test_a_request_that_comes_too_late_from_the_start(door: Door, metrics: Metrics) -> None:
    with pytest.raises(DeadlineExceeded):
        await ask(limited(door, metrics, 5.0), began=time.monotonic() - 6.0)
    assert await door.has_everything_back()


@pytest.mark.parametrize("seconds", [None, 60.0])
async def test_one_that_ends_in_time(door: Door, metrics: Metrics, seconds: float | None) -> None:
    assert await ask(limited(door, metrics, seconds)) == ANSWER


async def test_a_timeout_of_the_callers_own_stays_one(door: Door, metrics: Metrics) -> None:
    limited(door, metrics, 60.0).engine("d").pause.clear()

    async def ask_impatiently() -> None:
        async with asyncio.timeout(0.02):
            await door.ask()

    with pytest.raises(TimeoutError):
        await ask_impatiently()
    assert await door.has_everything_back()
