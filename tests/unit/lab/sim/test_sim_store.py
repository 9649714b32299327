"""A store in virtual time: what it keeps, what it sends, and what its failures cost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from tercet.protocol import BadRequest, Conflict, EngineUnreachable, NoSpace, Request, Sent
from tercet_lab.sim import Network, SimEngine, run_virtual
from tercet_lab.sim.engine_options import StoreSpec
from tercet_lab.sim.sim_store import SimStore

from .models import BLOCK, KV_BYTES, collect, is_empty, profile_of, request_of

SPEED = 1e6  # bytes per second of links
RATE = 1e5  # and of the disk


class House:
    """Two engines and a store of ``blocks`` blocks in memory and ``disk`` on disk."""

    def __init__(self, blocks: int = 20, disk: int = 0) -> None:
        self.network = Network()
        profile = profile_of(speed=SPEED)
        self.a, self.b = (SimEngine(name, profile, self.network) for name in "ab")
        spec = StoreSpec(tokens=blocks * BLOCK, disk_tokens=disk * BLOCK, disk_rate=RATE)
        self.store = SimStore("s", profile, self.network, spec)

    async def keep(self, request: Request) -> Sent | None:
        """Compute a prompt on ``a``, and copy it to the store as write-behind does; None if the store has all."""
        await collect(self.a.start_generate(request))
        async with self.store.prep_recv(request) as space:
            if space.missing < BLOCK:
                return None
            return await self.a.remote_send(request, space, space.matched_len, cached_only=True)

    async def fetch(self, request: Request) -> Sent:
        """Pull from the store to ``b``, which then drops it, as its prefix cache is small enough to be asked again."""
        async with self.b.prep_recv(request, request.num_tokens - 1) as space:
            sent = await self.store.remote_send(request, space, space.matched_len, cached_only=True)
        self.b.fail()
        self.b.recover()
        return sent

    def require_given_back(self) -> None:
        assert not self.store.busy
        assert self.store.memory.available == self.store.memory.slots
        assert is_empty(self.a)
        assert is_empty(self.b)


def in_house(check: Callable[[House], Coroutine[Any, Any, None]], **sizes: int) -> None:
    async def run() -> None:
        house = House(**sizes)
        await check(house)
        await asyncio.sleep(1)
        house.require_given_back()

    run_virtual(run())


def other(number: int, blocks: int = 6) -> Request:
    return request_of(f"r{number}", blocks * BLOCK + 3, first=1000 * number)


def test_a_prompt_is_kept_and_sent_in_the_time_of_its_link() -> None:
    async def check(house: House) -> None:
        request = other(1)
        kept = await house.keep(request)
        assert kept is not None
        assert (kept.begin, kept.end) == (0, 6 * BLOCK)
        assert await house.keep(request_of("again", 6 * BLOCK + 3, first=1000)) is None
        async with house.b.prep_recv(request, request.num_tokens - 1) as space:
            sent = await house.store.remote_send(request, space, 0, cached_only=True)
            (first, *_) = await collect(house.b.start_generate(request, sent.end))
        assert sent.end == 6 * BLOCK
        assert sent.seconds == pytest.approx(6 * BLOCK * KV_BYTES / SPEED)
        assert first.usage is not None
        assert (first.usage.received, first.usage.computed) == (6 * BLOCK, 3)

    in_house(check)


def test_the_longest_beginning_that_is_held_is_sent_and_other_salts_share_nothing() -> None:
    async def check(house: House) -> None:
        await house.keep(other(1, 3))
        assert (await house.fetch(other(1, 6))).end == 3 * BLOCK
        salted = Request(seq_id="salted", prompt=other(1).prompt, cache_salt="tenant")
        assert (await house.fetch(salted)).bytes == 0

    in_house(check)


def test_what_was_used_least_recently_is_evicted_from_its_end_and_never_while_it_is_pinned() -> None:
    async def check(house: House) -> None:
        for number in (1, 2, 3):
            await house.keep(other(number))
        assert (await house.fetch(other(1))).end == 6 * BLOCK  # now the second is the oldest
        await house.keep(other(4, 5))
        assert [(await house.fetch(other(number))).end // BLOCK for number in (1, 2, 3, 4)] == [6, 2, 6, 5]
        async with house.store.prep_recv(other(5, 10)):  # reserved, and nothing arrives
            with pytest.raises(NoSpace):
                async with house.store.prep_recv(other(6, 10)):
                    pass
            assert (await house.fetch(other(4))).end > 0

    in_house(check, blocks=20)


def test_the_disk_keeps_what_memory_evicts_and_costs_its_time() -> None:
    async def check(house: House) -> None:
        for number in (1, 2, 3):
            await house.keep(other(number))
            await asyncio.sleep(10)
        sent = await house.fetch(other(1))
        assert sent.end == 6 * BLOCK
        assert sent.seconds == pytest.approx(6 * BLOCK * KV_BYTES * (1 / SPEED + 1 / RATE))
        assert house.store.counts["read_tokens"] == 6 * BLOCK
        house.store.fail()
        with pytest.raises(EngineUnreachable):
            await house.fetch(other(1))
        house.store.recover()
        assert [(await house.fetch(other(number))).end // BLOCK for number in (1, 2, 3)] == [6, 6, 6]
        for number in (4, 5):
            await house.keep(other(number))
            await asyncio.sleep(10)
        assert [(await house.fetch(other(number))).end // BLOCK for number in (1, 3, 5)] == [0, 6, 6]

    in_house(check, blocks=8, disk=18)


def test_a_disk_that_is_too_slow_is_a_miss() -> None:
    async def check(house: House) -> None:
        house.store._block_seconds = 2.0
        await house.keep(other(1))
        await asyncio.sleep(20)
        await house.keep(other(2, 7))
        assert (await house.fetch(other(1))).end == 2 * BLOCK  # two blocks in the five seconds of a send

    in_house(check, blocks=8, disk=12)


def test_calls_that_a_store_refuses() -> None:
    async def check(house: House) -> None:
        request = other(1)
        async with house.b.prep_recv(request) as space:
            with pytest.raises(BadRequest, match="cached_only"):
                await house.store.remote_send(request, space, 0)
        with pytest.raises(BadRequest, match="computes nothing"):
            house.store.start_generate(request)
        async with house.store.prep_recv(request):
            with pytest.raises(Conflict):
                async with house.store.prep_recv(request):
                    pass

    in_house(check)
    with pytest.raises(BadRequest, match="tokens"):
        in_house(check, blocks=0)


@pytest.mark.parametrize("moment", range(12))
def test_a_call_that_is_cancelled_leaves_nothing(moment: int) -> None:
    async def check(house: House) -> None:
        await house.keep(other(1))
        await house.keep(other(2))

        async def both() -> None:
            await house.fetch(other(1))
            await house.keep(other(3, 4))

        running = asyncio.create_task(both())
        await asyncio.sleep(moment * 0.01)
        running.cancel()
        await asyncio.wait({running})

    in_house(check, blocks=8, disk=12)


@pytest.mark.parametrize("stop", ["fail", "freeze"])
def test_a_store_that_stops_ends_or_holds_its_calls(stop: str) -> None:
    async def check(house: House) -> None:
        await house.keep(other(1))
        getattr(house.store, stop)()
        waiting: Awaitable[Sent] = asyncio.ensure_future(house.fetch(other(1)))
        if stop == "fail":
            with pytest.raises(EngineUnreachable):
                await waiting
            house.store.recover()
            assert (await house.fetch(other(1))).bytes == 0  # it had no disk
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(waiting), 10)
            assert house.store.load().stalled_s == pytest.approx(10)
            house.store.thaw()
            assert (await waiting).end == 6 * BLOCK

    in_house(check)
