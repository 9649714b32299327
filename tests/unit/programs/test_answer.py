"""Streams that a program yields: their outputs in its place, their errors at its yield."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from tercet.programs import Answer, outputs_of, run_program
from tercet.protocol import EngineError, Output, OutputStream
from tests.unit.fakes import stream_of

from .cancelling import cancelled_after


class Source:
    """Makes streams, and knows which of them are open."""

    def __init__(self) -> None:
        self.open = 0
        self.closed = list[int]()

    async def outputs(self, *tokens: int, error: BaseException | None = None) -> AsyncGenerator[Output, None]:
        self.open += 1
        try:
            for token in tokens:
                await asyncio.sleep(0)
                yield Output((token,))
            if error is not None:
                raise error
        finally:
            self.open -= 1
            self.closed.append(len(self.closed))

    def stream(self, *tokens: int, error: BaseException | None = None) -> OutputStream:
        return stream_of(self.outputs(*tokens, error=error))


@pytest.fixture
def source() -> Source:
    return Source()


async def tokens(answer: Answer) -> list[int]:
    return [token async for output in outputs_of(answer) for token in output.token_ids]


async def test_outputs_streams_and_programs_in_their_order(source: Source) -> None:
    async def inner() -> Answer:
        yield source.stream(2, 3)
        assert not source.open
        yield Output((4,))

    async def outer() -> Answer:
        yield Output((1,))
        yield inner()
        yield source.outputs(5)  # a bare generator does, too
        yield source.stream()
        yield Output((6,))

    assert await tokens(outer()) == [1, 2, 3, 4, 5, 6]


async def test_an_error_of_a_stream_is_raised_at_the_yield(source: Source) -> None:
    async def program() -> Answer:
        try:
            yield source.stream(1, error=EngineError("it died"))
        except EngineError:
            assert not source.open
            yield source.stream(2, 3)

    assert await tokens(program()) == [1, 2, 3]


async def test_an_error_that_nobody_catches_ends_it_all(source: Source) -> None:
    cleaned = list[str]()

    async def inner() -> Answer:
        try:
            yield source.stream(1, error=EngineError("it died"))
        finally:
            cleaned.append("inner")

    async def outer() -> Answer:
        try:
            yield inner()
        finally:
            cleaned.append("outer")

    outputs = outputs_of(outer())
    assert await anext(outputs) == Output((1,))
    with pytest.raises(EngineError, match="it died"):
        await anext(outputs)
    assert (cleaned, source.open) == (["inner", "outer"], 0)


async def test_a_program_may_end_where_its_stream_failed(source: Source) -> None:
    async def program() -> Answer:
        try:
            yield source.stream(1, error=EngineError("it died"))
        except EngineError:
            return

    assert await tokens(program()) == [1]


@pytest.mark.parametrize("taken", range(4))
async def test_closing_closes_the_stream_before_the_program(source: Source, taken: int) -> None:
    order = list[str]()

    async def program() -> Answer:
        try:
            yield source.stream(1, 2, 3, 4)
        finally:
            order.append(f"program, {source.open} open")

    async with aclosing(outputs_of(program())) as outputs:
        for _ in range(taken):
            await anext(outputs)
    assert (order, source.open) == (["program, 0 open"] if taken else [], 0)


@pytest.mark.parametrize("steps", range(12))
async def test_cancelled_at_every_await(source: Source, steps: int) -> None:
    left = list[bool]()

    async def inner() -> Answer:
        yield source.stream(1, 2)

    async def program() -> Answer:
        try:
            await asyncio.sleep(0)
            yield inner()
            yield source.stream(3)
        finally:
            left.append(True)

    await cancelled_after(steps, lambda: outputs_of(program()))
    assert source.open == 0
    assert left or not steps  # a task that never ran has entered nothing


async def test_what_is_neither_is_passed_on() -> None:
    class Sink:
        def __init__(self) -> None:
            self.parts = list[Any]()

        @property
        def over(self) -> bool:
            return bool(self.parts)

        def put(self, output: Output) -> None:
            self.parts.append(output)

        async def until_asked(self) -> None: ...

    async def program() -> AsyncIterator[Any]:
        yield None
        raise AssertionError("nothing more is wanted")

    sink = Sink()
    await run_program(program(), sink)
    assert sink.parts == [None]


async def test_after_an_output_of_its_own_a_program_waits_until_the_next_one_is_asked_for() -> None:
    went_on = list[bool]()

    async def program() -> Answer:
        yield Output((1,))
        went_on.append(True)
        yield Output((2,))

    outputs = outputs_of(program())
    assert await anext(outputs) == Output((1,))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not went_on
    assert await anext(outputs) == Output((2,))
    await outputs.aclose()


async def test_a_program_that_goes_on_after_its_cancellation_is_cancelled_all_the_same(source: Source) -> None:
    stubborn = list[str]()

    async def program() -> Answer:
        try:
            yield source.stream(*range(1000))
        except asyncio.CancelledError:
            stubborn.append("caught")
            yield source.stream(1)
            stubborn.append("went on")

    task = asyncio.create_task(outputs_of(program()).run(lambda _: None))
    while not source.open:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert (task.cancelled(), stubborn, source.open) == (True, ["caught"], 0)


async def test_who_runs_a_program_is_called_with_the_outputs_of_inner_programs_too(source: Source) -> None:
    async def inner() -> Answer:
        yield source.stream(2, 3, 4)

    async def program() -> Answer:
        yield Output((1,))
        yield inner()

    taken = list[Output]()
    await outputs_of(program()).run(taken.append)
    assert taken == [Output((token,)) for token in (1, 2, 3, 4)]


async def test_what_is_left_of_a_stream_that_was_iterated_is_passed_on_once(source: Source) -> None:
    async def program() -> Answer:
        stream = source.stream(1, 2, 3)
        yield await anext(stream)
        yield stream

    assert await tokens(program()) == [1, 2, 3]
    assert source.closed == [0]


@pytest.mark.parametrize("goes_on", [True, False])
async def test_a_timeout_of_a_program_s_own_ends_its_stream_only(source: Source, goes_on: bool) -> None:
    async def program() -> Answer:
        try:
            async with asyncio.timeout(0.01):
                yield OutputStream(OutputStream.until_over)
        except TimeoutError:
            if goes_on:
                yield source.stream(7, 8)

    assert await tokens(program()) == ([7, 8] if goes_on else [])
