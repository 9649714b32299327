"""A task in which a group failed does not count as cancelled ever after; one that somebody cancels does."""

from __future__ import annotations

import asyncio

import pytest

from tercet.aio.tasks import is_cancelled, keep_cancellation_counts


@pytest.fixture(autouse=True)
def mended() -> None:
    keep_cancellation_counts()
    keep_cancellation_counts()  # once is enough, twice does no harm


async def fail() -> None:
    await asyncio.sleep(0)
    raise ValueError("a mistake")


async def waits_at_its_end() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(fail())
        group.create_task(asyncio.sleep(60))


async def waits_inside() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(fail())
        await asyncio.sleep(60)


async def waits_in_another() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(fail())
        async with asyncio.TaskGroup() as inner:
            inner.create_task(fail())


@pytest.mark.parametrize("work", [waits_at_its_end, waits_inside, waits_in_another])
async def test_a_group_that_failed_leaves_nothing_behind(work: object) -> None:
    for _ in range(3):
        with pytest.raises(ExceptionGroup):
            await work()  # type: ignore[operator]
        assert not is_cancelled()
    await asyncio.sleep(0)  # where a cancellation would come


async def test_a_cancellation_from_elsewhere_stays() -> None:
    left: list[int] = []

    async def work() -> None:
        try:
            await waits_at_its_end()
        except* ValueError:
            task = asyncio.current_task()
            left.append(task.cancelling() if task is not None else -1)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() or left == [1]
