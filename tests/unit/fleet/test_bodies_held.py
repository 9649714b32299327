"""Bodies of clients who have not come in yet: small ones pass, and the largest makes room."""

from __future__ import annotations

import asyncio

import pytest

from tercet.fleet.bodies_held import BodiesHeld
from tercet.protocol import Saturated


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
