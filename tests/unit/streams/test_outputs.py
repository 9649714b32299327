"""A sequence's outputs: for who waits for them, or for a tap."""

from __future__ import annotations

import asyncio

import pytest

from tercet.protocol import EngineError, Output
from tercet.streams import Outputs


class Taken(list[Output]):
    """Takes outputs of one token."""

    def take(self, output: Output) -> bool:
        if len(output.token_ids) != 1:
            return False
        self.append(output)
        return True


async def _waiting(outputs: Outputs) -> asyncio.Task[Output]:
    task = asyncio.create_task(outputs.get())
    await asyncio.sleep(0)
    return task


async def test_what_comes_while_the_reader_waits_may_be_taken() -> None:
    outputs, taken = Outputs(), Taken()
    outputs.take = taken.take
    reader = await _waiting(outputs)
    outputs.put(Output((1,)))
    outputs.put(Output((2,)))
    await asyncio.sleep(0)
    assert (taken, reader.done()) == ([Output((1,)), Output((2,))], False)
    outputs.put(Output((3, 4)))  # not taken
    assert await reader == Output((3, 4))


async def test_what_comes_while_nobody_waits_is_kept_in_order() -> None:
    outputs, taken = Outputs(), Taken()
    outputs.take = taken.take
    outputs.put(Output((1,)))
    assert await outputs.get() == Output((1,))
    reader = await _waiting(outputs)
    outputs.put(Output((2, 3)))
    outputs.put(Output((4,)))  # the reader is woken up for what was before this
    assert (await reader, await outputs.get(), taken) == (Output((2, 3)), Output((4,)), [])


async def test_an_end_and_an_error_are_the_readers() -> None:
    outputs = Outputs()
    outputs.take = lambda _: True
    reader = await _waiting(outputs)
    outputs.put(Output((1,), "stop"))
    assert (await reader).finished
    reader = await _waiting(outputs)
    outputs.put(EngineError("it died"))
    with pytest.raises(EngineError, match="it died"):
        await reader


async def test_a_reader_that_was_cancelled_does_not_wait_any_more() -> None:
    outputs, taken = Outputs(), Taken()
    outputs.take = taken.take
    reader = await _waiting(outputs)
    reader.cancel()
    outputs.put(Output((1,)))
    await asyncio.wait([reader])
    assert (taken, reader.cancelled()) == ([], True)
    assert await outputs.get() == Output((1,))
