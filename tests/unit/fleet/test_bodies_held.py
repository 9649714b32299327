"""Bodies of clients who have not come in yet: small ones pass, and the largest makes room."""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress

import pytest

from tercet.fleet.bodies_held import BodiesHeld
from tercet.protocol import Saturated
from tercet.wire.serving.request_body import read_whole


async def test_the_largest_body_makes_room_while_it_waits() -> None:
    bodies = BodiesHeld(1000)
    with bodies.one() as large, bodies.one() as small:
        large.add(800)
        ended: list[str] = []

        async def wait() -> None:
            try:
                async with large.until_let_go():
                    await asyncio.Event().wait()
            except Saturated as error:
                ended.append(error.message)

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        for _ in range(3):
            small.add(100)
        await waiting
        assert "1000 bytes" in ended[0]
        assert (bodies.size, len(bodies)) == (300, 1)
        with pytest.raises(Saturated):
            large.add(1)
        with pytest.raises(Saturated):
            async with large.until_let_go():
                pass
        assert bodies.size == 300
    assert (bodies.size, len(bodies)) == (0, 0)


async def test_a_body_that_is_the_largest_itself_is_refused() -> None:
    bodies = BodiesHeld(1000)
    with bodies.one() as first, bodies.one() as second:
        first.add(400)
        second.add(500)
        with pytest.raises(Saturated) as refused:
            second.add(200)
        assert refused.value.retry_after
        first.add(600)
    assert (bodies.size, len(bodies)) == (0, 0)


async def test_bodies_without_bytes_are_not_counted() -> None:
    bodies = BodiesHeld(10)
    with bodies.one():
        assert (bodies.size, len(bodies)) == (0, 0)


class Piece(bytes):
    """Says when it is gone."""

    gone = 0

    def __del__(self) -> None:
        Piece.gone += 1


async def test_bytes_of_a_body_that_is_let_go_are_gone_at_once() -> None:
    """What is raised refers to where it was raised, and to itself: only a full collection would find it."""
    bodies, Piece.gone = BodiesHeld(1000), 0
    gc.collect()
    gc.disable()

    async def receive() -> dict[str, object]:
        if received:
            await asyncio.Event().wait()
        received.append(True)
        return {"type": "http.request", "body": Piece(900), "more_body": True}

    async def read() -> None:
        with suppress(Saturated), bodies.one() as body:
            async with body.until_let_go():
                await read_whole(receive, "", 10_000, "this", body.add)

    received: list[bool] = []
    try:
        reading = asyncio.create_task(read())
        await asyncio.sleep(0.01)
        with bodies.one() as other:
            other.add(500)
            await reading
        assert Piece.gone == 1
    finally:
        gc.enable()
