"""The event loop in virtual time: order, jumps, and what it refuses."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator
from contextvars import Context, ContextVar

import pytest

from tercet.protocol import EngineError
from tercet_lab.sim import run_virtual
from tests.longest_wait import LONGEST_WAIT_S


def test_sleeping_an_hour_takes_no_time() -> None:
    async def main() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    began = time.monotonic()
    assert run_virtual(main()) == 3600
    assert time.monotonic() - began < LONGEST_WAIT_S


def test_timers_fire_in_order_and_among_equals_in_the_order_of_the_calls() -> None:
    async def main() -> list[str]:
        loop, seen = asyncio.get_running_loop(), list[str]()
        for when, name in ((2.0, "c"), (1.0, "a"), (2.0, "d"), (1.0, "b")):
            loop.call_at(when, seen.append, name)
        await asyncio.sleep(2)
        return seen

    assert run_virtual(main()) == ["a", "b", "c", "d"]


def test_time_stands_still_while_anything_is_ready() -> None:
    async def main() -> float:
        for _ in range(1000):
            await asyncio.sleep(0)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 0


def test_timeouts_and_queues_work() -> None:
    async def main() -> tuple[str, float]:
        queue: asyncio.Queue[str] = asyncio.Queue()
        asyncio.get_running_loop().call_later(5, queue.put_nowait, "late")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await queue.get()
        return await queue.get(), asyncio.get_running_loop().time()

    assert run_virtual(main()) == ("late", 5)


def test_many_cancelled_timers_are_dropped() -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()
        for _ in range(10_000):
            loop.call_later(1000, print).cancel()
        return sum(map(len, loop._timers.values()))  # type: ignore[attr-defined]

    assert run_virtual(main()) < 2000


def test_what_goes_away_with_a_cancelled_timer_may_cancel_others_and_set_one() -> None:
    """Clients of engines and their connections do at the end of a run: the last reference to them is a timer's."""

    class Client:
        def __init__(self, loop: asyncio.AbstractEventLoop, done: asyncio.Event) -> None:
            self.timers = [loop.call_later(100 + number, print) for number in range(3000)]
            self.loop, self.done = loop, done

        def __del__(self) -> None:
            for timer in self.timers:
                timer.cancel()
            self.loop.call_later(1, self.done.set)

    async def main() -> float:
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        client: ContextVar[Client] = ContextVar("client")
        context = Context()
        context.run(client.set, Client(loop, done))
        loop.call_later(1, print, context=context).cancel()
        del context
        await done.wait()
        return loop.time()

    assert run_virtual(main()) == 1.0


def test_a_task_keeps_a_context_that_was_empty_at_first() -> None:
    seen, here = ContextVar("seen", default="nothing"), Context()

    async def task() -> str:
        before = seen.get()
        seen.set("its own")
        await asyncio.sleep(1)
        return f"{before}, {seen.get()}"

    async def main() -> str:
        seen.set("main's")
        return await asyncio.create_task(task(), context=here)

    assert run_virtual(main()) == "nothing, its own"
    assert here[seen] == "its own"


def test_a_deadlock_is_said_at_once() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(EngineError, match="every task waits"):
        run_virtual(main())


@pytest.mark.parametrize("seconds", [1e11, 1e300, float("inf")])
def test_a_time_in_which_milliseconds_are_lost_is_refused(seconds: float) -> None:
    """At 1e17 s a step of 10 ms ends when it begins: a run would go on for ever, and its figures would be 0."""

    async def main() -> None:
        await asyncio.sleep(1e9)
        await asyncio.sleep(seconds)

    with pytest.raises(EngineError, match="virtual time"):
        run_virtual(main())


def test_what_main_left_running_is_cancelled() -> None:
    ended: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.sleep(1e9)
        finally:
            ended.append("cancelled")

    async def main() -> asyncio.Task[None]:
        task = asyncio.create_task(forever())
        await asyncio.sleep(1)
        return task

    run_virtual(main())
    assert ended == ["cancelled"]


def test_a_dropped_generator_is_closed() -> None:
    closed: list[float] = []

    async def numbers() -> AsyncGenerator[int]:
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(1)
            closed.append(asyncio.get_running_loop().time())

    async def main() -> None:
        async for _ in numbers():
            break
        await asyncio.sleep(5)

    run_virtual(main())
    assert closed == [1]


def test_an_exception_in_a_callback_ends_the_run() -> None:
    def broken() -> None:
        raise ZeroDivisionError

    async def main() -> None:
        asyncio.get_running_loop().call_soon(broken)
        await asyncio.sleep(1)

    with pytest.raises(ZeroDivisionError):
        run_virtual(main())


async def _connect() -> None:
    await asyncio.open_connection("127.0.0.1", 1)


async def _thread() -> None:
    await asyncio.to_thread(time.sleep, 0)


async def _socket() -> None:
    with socket.socket() as sock:
        await asyncio.get_running_loop().sock_recv(sock, 1)


@pytest.mark.parametrize("what", [_connect, _thread, _socket])
def test_the_real_world_is_refused(what) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RuntimeError, match="needs real time"):
        run_virtual(what())


def test_a_run_inside_a_running_loop_leaves_that_loop_as_it_was() -> None:
    async def inner(depth: int) -> float:
        await asyncio.sleep(3600)
        if depth:
            assert run_virtual(inner(depth - 1)) == 3600
        return asyncio.get_running_loop().time()

    async def notebook() -> None:
        around = asyncio.get_running_loop()
        assert run_virtual(inner(2)) == 3600
        assert asyncio.get_running_loop() is around
        with pytest.raises(EngineError, match="cannot continue"):
            run_virtual(_waits_for_ever())
        await asyncio.sleep(0)  # the caller's loop goes on, also after a run that has failed

    asyncio.run(notebook())
    with pytest.raises(RuntimeError, match="no running event loop"):
        asyncio.get_running_loop()


async def _waits_for_ever() -> None:
    await asyncio.get_running_loop().create_future()
