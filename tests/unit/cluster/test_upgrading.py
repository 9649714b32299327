"""A new router takes over from an old one behind a real model router, under requests: on, back, and interrupted."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from tercet.protocol import BadRequest, EngineError
from tercet_gateway import upgrading
from tercet_gateway.upgrading import RolloutPlan, Upgrade
from tests.longest_wait import until
from tests.unit.gateway.model_router.test_model_router import Router, World, world

pytestmark = pytest.mark.slow
PLAN = RolloutPlan((0.3, 1.0), hold_s=0.3)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upgrading, "LOOK_SECONDS", 0.02)


class Clients:
    """Ask for the model without a pause; ``statuses`` are what they got."""

    def __init__(self, found: World) -> None:
        self._found = found
        self.statuses = Counter[int]()
        self.over = False

    async def ask(self) -> None:
        while not self.over:
            status, _, text = await self._found.ask("chat")
            self.statuses[status] += 1
            assert status != 200 or text.endswith("data: [DONE]\n\n")


@asynccontextmanager
async def clients(found: World) -> AsyncGenerator[Clients]:
    asking = Clients(found)
    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(asking.ask())
        try:
            yield asking
        finally:
            asking.over = True


async def fleets(*new: str) -> tuple[Router, Router]:
    return await Router("chat").start(), await Router(*(new or ("chat",))).start()


def upgrade_of(found: World, old: Router, new: Router, told: list[str], plan: RolloutPlan = PLAN) -> Upgrade:
    return Upgrade(found.url, "", old.url, new.url, plan, 20.0, told.append)


async def weights(found: World) -> dict[str, float]:
    return {each["url"]: each["weight"] for each in (await found.get("/tercet/v1/backends"))[1]}


async def test_all_requests_are_served_while_the_new_one_takes_over() -> None:
    old, new = await fleets()
    told = list[str]()
    async with world(old) as found, clients(found) as asking:
        await until(lambda: asking.statuses[200] > 10)
        await upgrade_of(found, old, new, told).run()
        assert await weights(found) == {new.url: 1.0}
        served = len(new.bodies)
        await until(lambda: len(new.bodies) > served + 10)
    assert set(asking.statuses) == {200}
    assert [line.split(" has ")[1][:3] for line in told if " has " in line] == ["30%", "100"]
    await new.running.aclose()


async def test_errors_return_all_requests_to_the_old_one() -> None:
    old, new = await fleets()
    new.status = 500
    async with world(old) as found, clients(found) as asking:
        await until(lambda: asking.statuses[200] > 10)
        with pytest.raises(EngineError, match=r"serves all requests again: .* requests failed at the new fleet"):
            await upgrade_of(found, old, new, [], RolloutPlan((0.3, 1.0), hold_s=20.0)).run()
        assert await weights(found) == {old.url: 1.0}
        failed, served = asking.statuses[500], asking.statuses[200]
        await until(lambda: asking.statuses[200] > served + 20)
        assert asking.statuses[500] == failed
    await new.running.aclose()


async def test_a_new_one_that_dies_is_left() -> None:
    old, new = await fleets()
    async with world(old) as found, clients(found) as asking:
        running = asyncio.create_task(upgrade_of(found, old, new, [], RolloutPlan((0.5, 1.0), hold_s=20.0)).run())
        await until(lambda: len(new.bodies) > 5)
        await new.running.aclose()
        with pytest.raises(EngineError, match="the old fleet serves all requests again"):
            await running
        assert await weights(found) == {old.url: 1.0}
        served = asking.statuses[200]
        await until(lambda: asking.statuses[200] > served + 20)


async def test_an_interrupt_returns_and_waits_for_what_runs_at_the_new_one() -> None:
    old, new = await fleets()
    async with world(old) as found:
        found.server._proxy._draw = lambda: 0.5  # one in a hundred requests would go to the old one
        running = asyncio.create_task(upgrade_of(found, old, new, [], RolloutPlan((0.99, 1.0), hold_s=20.0)).run())
        await until(lambda: new.url in {each.url for each in found.server.routes.backends if each.weight > 0})
        new.go.clear()
        stream = asyncio.create_task(found.ask("chat"))
        await until(lambda: new.bodies)
        running.cancel()
        await until(lambda: all(each.weight == 0 for each in found.server.routes.backends if each.url == new.url))
        new.go.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (await stream)[:2] == (200, new.url)
        assert await weights(found) == {old.url: 1.0}
    await new.running.aclose()


async def test_one_that_was_killed_goes_on_where_it_was() -> None:
    old, new = await fleets()
    told = list[str]()
    async with world(old, new, weights=(0.7, 0.3)) as found:
        await upgrade_of(found, old, new, told).run()
        assert await weights(found) == {new.url: 1.0}
    assert sum(" has " in line for line in told) == 1


async def test_a_fleet_that_does_not_serve_the_names_gets_nothing() -> None:
    old, new = await fleets("other")
    async with world(old, weights=(9.0,)) as found:
        with pytest.raises(BadRequest, match="does not serve chat; it must serve the old router's models"):
            await upgrade_of(found, old, new, []).run()
        assert await weights(found) == {old.url: 9.0}
        with pytest.raises(BadRequest, match="has no router at"):
            await upgrade_of(found, new, old, []).run()
    await new.running.aclose()


@pytest.mark.parametrize("interrupted", [False, True])
async def test_the_new_one_serves_on_when_another_command_removes_the_old_one(interrupted: bool) -> None:
    old, new = await fleets()
    told = list[str]()
    async with world(old) as found:
        running = asyncio.create_task(upgrade_of(found, old, new, told, RolloutPlan((0.5, 1.0), hold_s=20.0)).run())
        await until(lambda: any(" has 50%" in line for line in told))
        await found.put([{"url": new.url}])
        if interrupted:
            running.cancel()
        with pytest.raises(asyncio.CancelledError if interrupted else BadRequest):
            await running
        assert await weights(found) == {new.url: 1.0}
        assert told[-1].endswith("another command removed " + old.url + " from the model router")
    await new.running.aclose()


async def test_cancelled_while_the_new_one_is_added_it_is_removed_again() -> None:
    old, new = await fleets()
    new.lists.clear()
    async with world(old) as found:
        running = asyncio.create_task(upgrade_of(found, old, new, []).run())
        await until(lambda: len(found.server.routes.backends) == 2)
        running.cancel()
        new.lists.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await weights(found) == {old.url: 1.0}
    await new.running.aclose()
