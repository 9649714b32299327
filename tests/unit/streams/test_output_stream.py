"""A stream's observers and its consumer see the same outputs in the same order, and its work ends once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.protocol import EngineError, Output, OutputStream

from ..fakes import stream_of


class Observer:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.outputs = list[Output]()
        self.starts = 0
        self.ends = list[BaseException | None]()

    def on_start(self) -> None:
        assert not self.starts
        self.starts += 1

    def on_output(self, output: Output) -> None:
        assert not self.ends
        self.outputs.append(output)

    def on_end(self, error: BaseException | None) -> None:
        assert self.starts
        self.ends.append(error)


class Fed:
    """A stream that a test feeds, with an observer and a consumer."""

    def __init__(self) -> None:
        self.producing = self.produced = 0
        self.stream = OutputStream(self._produce)
        self.observer = Observer()
        self.stream.subscribe(self.observer)
        self.consumed = list[Output]()

    async def _produce(self, stream: OutputStream) -> None:
        self.producing += 1
        try:
            await stream.until_over()
            await asyncio.sleep(0)  # giving back takes a while
        finally:
            self.producing -= 1
            self.produced += 1

    def take(self, output: Output) -> bool:
        assert output == self.observer.outputs[-1], "observers come first"
        self.consumed.append(output)
        return True

    async def consume(self) -> None:
        async for output in self.stream:
            self.consumed.append(output)
            await asyncio.sleep(0)


STEPS = st.sampled_from(["put", "put", "turn"])
ENDS = st.sampled_from(["finish", "fail", "close", "cancel"])


@given(st.lists(STEPS, max_size=30), ENDS, st.lists(STEPS, max_size=6))
def test_observers_and_consumer_see_the_same_in_the_same_order(steps: list[str], end: str, late: list[str]) -> None:
    async def check() -> None:
        fed, put = Fed(), list[Output]()
        consumer = asyncio.create_task(fed.consume())
        await asyncio.sleep(0)
        await asyncio.sleep(0)

        async def do(step: str) -> None:
            if step == "turn":
                await asyncio.sleep(0)
            else:
                put.append(Output((len(put),)))
                fed.stream.put(put[-1])

        for step in steps:
            await do(step)
        if end == "finish":
            put.append(Output((), "stop"))
            fed.stream.put(put[-1])
        elif end == "fail":
            fed.stream.fail(EngineError("it died"))
        elif end == "cancel":
            consumer.cancel()
        else:
            await fed.stream.aclose()
        whole = list(put)
        if end == "cancel":
            await asyncio.wait([consumer])
        for step in late:
            await do(step)
        await asyncio.wait([consumer])
        assert fed.observer.outputs == whole
        if end in ("finish", "fail"):
            assert fed.consumed == whole
        assert fed.consumed == whole[: len(fed.consumed)]
        assert (fed.observer.starts, len(fed.observer.ends)) == (1, 1)
        assert isinstance(fed.observer.ends[0], EngineError) is (end == "fail")
        assert (fed.producing, fed.produced) == (0, 1)
        error = None if consumer.cancelled() else consumer.exception()
        assert isinstance(error, EngineError) is (end == "fail")

    asyncio.run(check())


async def test_nothing_begins_before_somebody_asks() -> None:
    fed = Fed()
    await asyncio.sleep(0)
    assert (fed.observer.starts, fed.producing) == (0, 0)
    await fed.stream.aclose()
    assert [output async for output in fed.stream] == []
    await fed.stream.run(fed.take)
    assert (fed.observer.starts, fed.observer.ends) == (0, [])


async def test_an_error_is_raised_once_all_is_given_back() -> None:
    fed = Fed()
    asking = asyncio.create_task(anext(fed.stream))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    fed.stream.fail(EngineError("it died"))
    with pytest.raises(EngineError, match="it died"):
        await asking
    assert fed.producing == 0
    assert await anext(fed.stream, None) is None


async def test_what_a_consumer_raises_ends_what_it_runs() -> None:
    fed = Fed()

    def consume(output: Output) -> None:
        raise ValueError(output.token_ids)

    running = asyncio.create_task(fed.stream.run(consume))
    await asyncio.sleep(0)
    for token in range(2):
        fed.stream.put(Output((token,)))
    with pytest.raises(ValueError, match=r"\(0,\)"):
        await running
    assert fed.observer.outputs == [Output((0,))]
    assert fed.producing == 0


async def test_a_loop_that_is_left_early_ends_the_stream_by_itself() -> None:
    fed = Fed()

    async def leave() -> None:
        async for _ in fed.stream:
            return

    leaving = asyncio.create_task(leave())
    await asyncio.sleep(0)
    fed.stream.put(Output((1,)))
    await leaving
    async with asyncio.timeout(5):
        while not fed.produced:
            await asyncio.sleep(0)
    assert len(fed.observer.ends) == 1


async def test_closing_after_the_end_leaves_the_producer_to_give_back() -> None:
    undisturbed = list[bool]()

    async def produce(stream: OutputStream) -> None:
        await stream.until_over()
        for _ in range(5):
            await asyncio.sleep(0)
        undisturbed.append(True)

    async with aclosing(OutputStream(produce)) as stream:
        asking = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        stream.put(Output((), "stop"))
        assert (await asking).finished
    assert undisturbed == [True]


async def test_a_generator_is_asked_for_more_when_the_consumer_is_done_with_what_it_has() -> None:
    made = list[int]()

    async def generate() -> AsyncGenerator[Output, None]:
        for token in range(3):
            made.append(token)
            yield Output((token,))

    stream = stream_of(generate())
    assert await anext(stream) == Output((0,))
    await asyncio.sleep(0)
    assert made == [0]
    assert await anext(stream) == Output((1,))
    await stream.aclose()
    assert made == [0, 1]


@pytest.mark.parametrize("turns", range(8))
async def test_cancelled_in_any_turn(turns: int) -> None:
    fed = Fed()
    consumer = asyncio.create_task(fed.consume())
    for turn in range(turns):
        await asyncio.sleep(0)
        fed.stream.put(Output((turn,)))
    consumer.cancel()
    await asyncio.wait([consumer])
    assert consumer.cancelled()
    async with asyncio.timeout(5):  # Python closes a generator that a loop left in a step of its own
        while fed.producing or len(fed.observer.ends) < fed.observer.starts:
            await asyncio.sleep(0)
    assert len(fed.observer.ends) == fed.observer.starts


async def test_a_consumer_that_stops_taking_ends_the_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercet.protocol.stream.MOST_QUEUED", 10)
    stream = OutputStream(OutputStream.until_over)
    first = asyncio.ensure_future(anext(stream))
    for _ in range(5):  # until ``produce`` runs
        await asyncio.sleep(0)
    for token in range(100):
        stream.put(Output((token,)))
    assert stream.over
    assert (await first).token_ids == (0,)
    with pytest.raises(EngineError, match="nobody has taken"):
        assert len([output async for output in stream]) <= 10
