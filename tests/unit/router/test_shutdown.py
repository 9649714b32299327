"""How a router ends: what it still takes, how long it waits, and what those hear that it does not wait for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from tercet.fleet.admission import Gate
from tercet.protocol import ShuttingDown, TercetError
from tercet.router.observe.metrics import Metrics
from tercet.router.router_app import RouterApp
from tercet.router.serve.shutdown import Shutdown
from tercet.settings import Limits
from tests.longest_wait import LONGEST_WAIT_S

from .conftest import LiveRouter
from .test_router_app import PATH, App

LONG = 3600.0


class House:
    """An application behind a router that is to end."""

    def __init__(self, router: LiveRouter, metrics: Metrics, timeout_s: float) -> None:
        self.app = App()
        self.gate = Gate(Limits(in_flight=2), router.fleet, metrics)
        self.shutdown = Shutdown(timeout_s)
        self.given_up: list[TercetError] = []
        check = router.service.program_called
        front = RouterApp(self.app, None, self.gate, (), check, 1000, shutdown=self.shutdown)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(front), base_url="http://localhost")
        self.running = asyncio.create_task(self.shutdown.run(self.gate.close, self._give_up))

    def _give_up(self, error: TercetError) -> None:
        self.given_up.append(error)
        self.app.go.set()

    async def post(self) -> asyncio.Task[httpx.Response]:
        """A request that does not end before ``go``."""
        self.app.go.clear()
        task = asyncio.create_task(self.client.post(PATH, json={}))
        await self.settle()
        return task

    async def settle(self) -> None:
        for _ in range(30):
            await asyncio.sleep(0)


@pytest.fixture
async def house(router: LiveRouter, metrics: Metrics) -> AsyncIterator[House]:
    house = House(router, metrics, LONG)
    yield house
    house.running.cancel()
    assert house.shutdown.requests == 0


async def test_what_runs_is_finished_and_nothing_new_is_taken(house: House) -> None:
    first = await house.post()
    house.shutdown.begin()
    await house.settle()
    refused = await house.client.post(PATH, json={})
    assert (refused.status_code, refused.headers["retry-after"], refused.headers["connection"]) == (503, "5", "close")
    assert refused.json()["error"]["code"] == "shutting_down"
    health = await house.client.get("/health")
    assert (health.status_code, health.json()["error"]["message"][-4:]) == (503, "t: 1")
    assert not house.running.done()
    house.app.go.set()
    assert (await first).status_code == 200
    await asyncio.wait_for(house.running, LONGEST_WAIT_S)
    assert house.given_up == []


@pytest.mark.parametrize("path", ["/live", "/metrics", "/tercet/v1/engines"])
async def test_one_may_still_look_how_it_does(house: House, path: str) -> None:
    house.shutdown.begin()
    assert (await house.client.get(path)).status_code == 200


async def test_what_waits_for_a_place_is_refused(house: House) -> None:
    inside, waiting = [await house.post(), await house.post()], await house.post()
    house.shutdown.begin()
    answer = await waiting
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    house.app.go.set()
    assert [(await task).status_code for task in inside] == [200, 200]


async def test_an_idle_router_ends_at_once(house: House) -> None:
    house.shutdown.begin()
    await asyncio.wait_for(house.running, LONGEST_WAIT_S)


async def test_the_second_time_nothing_is_waited_for(house: House) -> None:
    running = await house.post()
    house.shutdown.begin()
    await house.settle()
    house.shutdown.hurry()
    assert (await running).status_code == 200
    await asyncio.wait_for(house.running, LONGEST_WAIT_S)
    assert [error.message[-18:] for error in house.given_up] == ["was not waited for"]


async def test_when_the_time_is_over_what_runs_is_given_up(router: LiveRouter, metrics: Metrics) -> None:
    house = House(router, metrics, 0.05)
    running = await house.post()
    house.shutdown.begin()
    await asyncio.wait_for(house.running, LONGEST_WAIT_S)
    assert (await running).status_code == 200
    assert "did not end within 0.05 s" in house.given_up[0].message


async def test_requests_of_other_workers_are_counted(house: House) -> None:
    house.shutdown.elsewhere = lambda: 7
    house.shutdown.require_serving()
    house.shutdown.begin()
    with pytest.raises(ShuttingDown, match="left: 7"):
        house.shutdown.require_serving()


@pytest.mark.parametrize("stuck", ["p", "d"])
async def test_sequences_that_are_given_up_end_with_that_error_and_hold_nothing(router: LiveRouter, stuck: str) -> None:
    router.engine(stuck).pause.clear()
    asking = asyncio.create_task(router.ask())
    while not len(router.service.sequences):
        await asyncio.sleep(0)
    router.service.give_up(ShuttingDown("it ends"))
    with pytest.raises(ShuttingDown, match="it ends"):
        await asyncio.wait_for(asking, LONGEST_WAIT_S)
    with pytest.raises(ShuttingDown):  # as what was being prepared meanwhile
        await router.ask()
    assert await router.has_everything_back()
