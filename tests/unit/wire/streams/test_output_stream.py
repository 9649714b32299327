"""A stream's observers and its consumer see the same outputs in the same order, and its work ends once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.protocol import EngineError, Output, OutputStream
from tests.longest_wait import until
from tests.unit.fakes import stream_of


class Observer:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.outputs = list[Output]()
        self.starts = 0
        self.ends = list[BaseException | None]()

    def on_start(self, stream: OutputStream) -> None:
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
    await until(lambda: fed.produced)
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
    # Python closes a generator that a loop left in a step of its own
    await until(lambda: not (fed.producing or len(fed.observer.ends) < fed.observer.starts))
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
    with pytest.raises(EngineError, match="has not read"):
        assert len([output async for output in stream]) <= 10


# ---- another producer goes on ------------------------------------------------------------------------------------


async def turns(condition: Callable[[], bool]) -> None:
    for _ in range(100):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to that")


@pytest.mark.parametrize("iterates", [False, True])
async def test_another_producer_goes_on_and_the_consumer_does_not_notice(iterates: bool) -> None:
    first, second = Fed(), Fed()
    consumed = list[Output]()

    async def iterate() -> None:
        async for output in first.stream:
            consumed.append(output)

    consumer = asyncio.create_task(iterate() if iterates else first.stream.run(consumed.append))
    await turns(lambda: first.producing == 1)
    first.stream.put(Output((1,)))
    assert first.stream.hand_over(lambda: second.stream)
    first.stream.put(Output((2,)))  # it was on its way already
    await turns(lambda: second.producing == 1)
    assert (first.producing, first.produced, first.observer.ends) == (0, 1, [None])
    assert not first.stream.begun
    first.stream.put(Output((3,), "stop"))
    await consumer
    assert [output.token_ids for output in consumed] == [(1,), (2,), (3,)]
    assert [output.token_ids for output in first.observer.outputs] == [(1,), (2,)]
    assert [output.token_ids for output in second.observer.outputs] == [(3,)]
    assert (second.producing, second.observer.ends) == (0, [None])


async def test_what_is_over_is_not_handed_over() -> None:
    fed = Fed()
    consumer = asyncio.create_task(fed.stream.run(lambda _: None))
    await turns(lambda: fed.producing == 1)
    fed.stream.put(Output((), "stop"))
    assert not fed.stream.hand_over(lambda: Fed().stream)
    await consumer
    assert not fed.stream.hand_over(lambda: Fed().stream)


async def test_what_has_not_begun_begins_with_the_other_producer() -> None:
    first, second = Fed(), Fed()
    assert first.stream.hand_over(lambda: second.stream)
    consumer = asyncio.create_task(first.stream.run(lambda _: None))
    await turns(lambda: second.producing == 1)
    assert (first.produced, first.observer.starts) == (0, 0)
    first.stream.put(Output((), "stop"))
    await consumer


@pytest.mark.parametrize("iterates", [False, True])
async def test_a_consumer_that_leaves_while_it_is_handed_over(iterates: bool) -> None:
    first, second = Fed(), Fed()
    consumer = asyncio.create_task(first.consume() if iterates else first.stream.run(lambda _: None))
    await turns(lambda: first.producing == 1)
    first.stream.hand_over(lambda: second.stream)
    consumer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consumer
    assert (first.producing, second.producing) == (0, 0)
    assert first.observer.starts == len(first.observer.ends)
    assert second.observer.starts == len(second.observer.ends)


async def test_an_error_of_the_one_that_is_left_ends_nothing() -> None:
    async def fails(_: OutputStream) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise EngineError("its engine went away")

    second, stream = Fed(), OutputStream(fails)
    consumer = asyncio.create_task(stream.run(lambda _: None))
    await asyncio.sleep(0)
    assert stream.hand_over(lambda: second.stream)
    await turns(lambda: second.producing == 1)
    stream.put(Output((), "stop"))
    await consumer


async def test_a_failure_after_several_producers_reaches_the_consumer() -> None:
    fed = [Fed() for _ in range(4)]
    stream = fed[0].stream
    consumer = asyncio.create_task(stream.run(lambda _: None))
    for before, after in pairwise(fed):
        await turns(lambda before=before: before.producing == 1)
        assert stream.hand_over(lambda after=after: after.stream)
    await turns(lambda: fed[-1].producing == 1)
    stream.fail(EngineError("gone"))
    with pytest.raises(EngineError, match="gone"):
        await consumer
    assert [len(each.observer.ends) for each in fed] == [1] * 4


# A consumer that raises ends the stream at once, wherever what produces it is, and its task goes on.


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
