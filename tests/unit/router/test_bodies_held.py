"""Bodies of clients who have not come in yet: small ones pass, and the largest makes room."""

from __future__ import annotations

import asyncio
import gc
from contextlib import ExitStack, suppress
from mmap import PAGESIZE
from pathlib import Path

import pytest

from tercet.protocol import Saturated
from tercet.router.limits.bodies import BodiesHeld
from tercet.wire.serving.server_access import read_whole


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
                await read_whole(receive, "", 10_000, "this", body)

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


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGESIZE


@pytest.mark.parametrize("sizes", [(1,), (70_000,), (300_000,), (5_000_000, 200_000)])
async def test_a_body_is_what_its_pieces_were(sizes: tuple[int, ...]) -> None:
    bodies = BodiesHeld(100_000_000)
    for size in sizes:
        expected = bytes(range(256)) * (size // 256 + 1)
        with bodies.one() as body:
            for begin in range(0, len(expected), 65_521):
                body.take(expected[begin : begin + 65_521])
            assert bodies.size == body.size == len(expected)
            body.end()
            assert body.content == expected
            assert bodies.size == len(expected)
            body.forget()
            assert (body.content, bodies.size, len(bodies)) == (b"", 0, 0)


async def test_unfinished_bodies_take_the_memory_of_their_limit_and_give_it_back() -> None:
    """Measured in pages of the process: between pieces of dropped bodies lie objects that stay."""
    bodies, between, most = BodiesHeld(32 * 2**20), list[bytes](), 0
    before = resident()
    with ExitStack() as held:
        begun = [held.enter_context(bodies.one()) for _ in range(14)]
        for _ in range(240):
            for body in [*begun]:
                try:
                    body.take(bytes(64 * 1024))
                except Saturated:
                    begun.remove(body)
                between.append(bytes(600))
            most = max(most, resident() - before)
            assert bodies.size <= 32 * 2**20
    assert len(begun) < 5
    assert most < 48 * 2**20
    assert resident() - before < 16 * 2**20
