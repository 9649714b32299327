"""A consumer that raises ends the stream at once, wherever what produces it is, and its task goes on."""

from __future__ import annotations

import asyncio

import pytest

from tercet.protocol import Output, OutputStream


class Enough(Exception):
    """The consumer wants no more."""


def leave(_: Output) -> None:
    raise Enough


@pytest.mark.parametrize("waits", [True, False])
async def test_what_produces_is_cancelled_and_the_task_goes_on(waits: bool) -> None:
    ended: list[str] = []

    async def produce(stream: OutputStream) -> None:
        try:
            stream.put(Output((1,)))
            if waits:
                await asyncio.Event().wait()
        finally:
            ended.append("ended")

    with pytest.raises(Enough):
        await OutputStream(produce).run(leave)
    assert ended == ["ended"]
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)


async def test_outputs_that_come_from_elsewhere() -> None:
    stream = OutputStream(lambda stream: stream.until_over())
    asyncio.get_running_loop().call_soon(stream.put, Output((1,)))
    with pytest.raises(Enough):
        await stream.run(leave)
    await asyncio.sleep(0)


async def test_a_task_that_somebody_else_has_cancelled_stays_cancelled() -> None:
    async def produce(stream: OutputStream) -> None:
        stream.put(Output((1,)))
        running.cancel()
        await asyncio.Event().wait()

    running = asyncio.create_task(OutputStream(produce).run(leave))
    with pytest.raises(asyncio.CancelledError):
        await running
    assert running.cancelled()
