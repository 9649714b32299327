"""Long bodies: one of each client is prepared at a time, a client's others wait, and the loop takes one at a time."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from tercet.fleet.admission import ClientLeft
from tercet.fleet.bodies import LONG_BYTES, LONG_ITEMS, LongBodies, is_long, is_short
from tercet.protocol import Saturated
from tercet.settings import Limits
from tercet.wire.serving.server_access import BodyTurn


@pytest.fixture
def refused() -> list[str]:
    return []


@pytest.fixture
def bodies(refused: list[str]) -> LongBodies:
    return LongBodies(Limits(long_queued=2, queue_timeout_s=5.0), refused.append)


def never() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


async def wanted(bodies: LongBodies, client: str) -> asyncio.Task[BodyTurn]:
    task = asyncio.create_task(bodies.turn(client, never))
    await asyncio.sleep(0)
    return task


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"x" * LONG_BYTES, True),
        (b"x" * (LONG_BYTES - 1), False),
        (b"{" * (LONG_ITEMS // 2) + b"[" * (LONG_ITEMS // 2), True),
        (b"{" * (LONG_ITEMS - 1), False),
        (b",5" * (16 * LONG_ITEMS), True),
        (b"", False),
    ],
)
def test_what_is_long(content: bytes, expected: bool) -> None:
    assert is_long(content) is expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"x" * (LONG_BYTES // 8 - 1), True),
        (b"x" * (LONG_BYTES // 8), False),
        (b"{" * (LONG_ITEMS // 8 - 1), True),
        (b"[" * (LONG_ITEMS // 8), False),
        (b",5" * (2 * LONG_ITEMS), False),
        (b"", True),
    ],
)
def test_what_is_short(content: bytes, expected: bool) -> None:
    assert is_short(content) is expected


async def test_a_client_has_one_in_work_and_others_have_theirs(bodies: LongBodies) -> None:
    first = await bodies.turn("a", never)
    second, other = await wanted(bodies, "a"), await wanted(bodies, "b")
    assert (await other) is not first
    assert not second.done()
    first.end()
    (await second).end()
    other.result().end()
    assert len(bodies) == 0


async def test_a_turn_ends_once(bodies: LongBodies) -> None:
    first = await bodies.turn("a", never)
    second, third = await wanted(bodies, "a"), await wanted(bodies, "a")
    first.end()
    first.end()
    await second
    await asyncio.sleep(0)
    assert not third.done()
    second.result().end()
    (await third).end()


async def test_beyond_the_queue_it_is_429_and_for_that_client_alone(bodies: LongBodies, refused: list[str]) -> None:
    turn = await bodies.turn("a", never)
    waiting = [await wanted(bodies, "a") for _ in range(2)]
    with pytest.raises(Saturated, match=r"limit \(max-long-queued\)") as error:
        await bodies.turn("a", never)
    assert error.value.retry_after
    assert refused == ["long_queue_full"]
    (await bodies.turn("b", never)).end()
    turn.end()
    for each in waiting:
        (await each).end()
    assert len(bodies) == 0


async def test_one_that_waits_for_too_long_is_429(refused: list[str]) -> None:
    bodies = LongBodies(Limits(long_queued=2, queue_timeout_s=0.01), refused.append)
    turn = await bodies.turn("a", never)
    with pytest.raises(Saturated, match=r"0\.01 s"):
        await bodies.turn("a", never)
    assert refused == ["long_queue_timeout"]
    turn.end()
    assert len(bodies) == 0


async def test_a_client_that_leaves_while_it_waits_waits_no_longer(bodies: LongBodies) -> None:
    turn, left = await bodies.turn("a", never), never()
    waiting = asyncio.create_task(bodies.turn("a", lambda: left))
    await asyncio.sleep(0)
    left.set_result(None)
    with pytest.raises(ClientLeft):
        await waiting
    turn.end()
    assert len(bodies) == 0


@pytest.mark.parametrize("steps", range(4))
async def test_a_turn_that_is_cancelled_as_it_comes_goes_to_the_next(bodies: LongBodies, steps: int) -> None:
    turn = await bodies.turn("a", never)
    cancelled, last = await wanted(bodies, "a"), await wanted(bodies, "a")
    turn.end()
    for _ in range(steps):
        await asyncio.sleep(0)
    if cancelled.done():
        cancelled.result().end()
    cancelled.cancel()
    (await asyncio.wait_for(last, 1)).end()
    await asyncio.gather(cancelled, return_exceptions=True)
    assert len(bodies) == 0


async def test_the_loop_takes_one_long_body_at_a_time(bodies: LongBodies) -> None:
    """Everything else that is ready runs between two of them."""
    order: list[str] = []

    async def prepare(name: str) -> None:
        await bodies.alone("a")
        order.append(name)

    async def stream() -> None:
        while len(order) < 9:
            order.append("token")
            await asyncio.sleep(0)

    await asyncio.gather(*(prepare(name) for name in "abcd"), stream())
    long = [at for at, each in enumerate(order) if each != "token"]
    assert [order[at] for at in long] == list("abcd")
    assert all(after - before > 1 for before, after in itertools.pairwise(long))


async def test_clients_take_turns_at_the_loop(bodies: LongBodies) -> None:
    order: list[str] = []

    async def prepare(client: str) -> None:
        await bodies.alone(client)
        order.append(client)

    await asyncio.gather(*(prepare(client) for client in "aaaaabbc"))
    assert order == list("aabcabaa")


async def test_one_that_is_cancelled_before_it_is_alone_holds_up_nobody(bodies: LongBodies) -> None:
    await bodies.alone("a")
    waiting = [asyncio.create_task(bodies.alone("a")) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.wait_for(asyncio.gather(*waiting[1:]), 1)
    await asyncio.wait_for(bodies.alone("a"), 1)
