"""Engines that join a running router: the fleet's secret, who stays whose member, leaving, and those that are gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import httpx
import pytest

from tercet.fleet import FleetView
from tercet.protocol import BadRequest, Conflict, Forbidden, Unauthorized
from tercet.protocol.access import BearerKeys, Callers
from tercet.protocol.wire import JoinCall
from tercet.router.state import joined_members
from tercet.router.state.joined_members import GoneEngines, join, leave, remove_gone
from tercet.wire.client.bounded_answers import RouterMembership
from tercet.wire.serving.server_access import AdminAccess
from tests.longest_wait import until
from tests.servers import served_asgi

from .conftest import JSON, Engine, LiveRouter


def call(name: str = "e", uid: str = "1", **rest: bool) -> JoinCall:
    return JoinCall(url=f"http://{name}", uid=uid, role="decode", **rest)


@pytest.fixture
def world(router: LiveRouter) -> LiveRouter:
    for name in ("e", "f"):
        router.engines[f"http://{name}"] = Engine(name)
    return router


def states(router: LiveRouter) -> dict[str, tuple[str, bool]]:
    return {each.name: (each.role, each.leaving) for each in router.fleet.members if each.name in "ef"}


async def test_an_engine_joins_stays_and_leaves(world: LiveRouter) -> None:
    shared = world.shared
    assert (await join(shared, "e", call())).in_flight == 0
    assert states(world) == {"e": ("decode", False)}
    version = shared.state.version
    await join(shared, "e", call())
    assert shared.state.version == version, "who stays changes nothing"

    with (
        FleetView(world.fleet).pick(by="least_loaded", role="decode"),
        FleetView(world.fleet).pick(by="least_loaded", role="decode"),
    ):
        left = await join(shared, "e", call(leaving=True))
        assert left.in_flight == world.fleet.member("e").in_flight
    assert states(world) == {"e": ("decode", True)}
    assert (await leave(shared, "e", "another start")).in_flight == 0
    assert states(world), "another start's leaving is not this one's"
    await leave(shared, "e", "1")
    await leave(shared, "e", "1")
    assert not states(world)


async def test_what_an_operator_said_holds_for_this_start_alone(world: LiveRouter) -> None:
    shared = world.shared
    await join(shared, "e", call())
    await shared.change(lambda state: state.with_draining("e", True).with_role("e", "prefill"))
    await join(shared, "e", call())
    assert states(world) == {"e": ("prefill", True)}
    await join(shared, "e", call(uid="2"))
    assert states(world) == {"e": ("decode", False)}


async def test_names_and_addresses_are_one_engines(world: LiveRouter) -> None:
    shared = world.shared
    with pytest.raises(Conflict, match="this fleet already has an engine 'p'"):
        await join(shared, "p", call())
    with pytest.raises(Conflict, match="as p"):
        await join(shared, "e", call("p"))
    await join(shared, "e", call())
    with pytest.raises(Conflict, match="this fleet already has an engine 'e'"):
        await join(shared, "e", call("f", uid="2"))


async def test_who_does_not_fit_does_not_join(world: LiveRouter) -> None:
    world.engine("e").max_model_len = 10
    world.membership.served_model = None
    with pytest.raises(BadRequest, match="url"):
        await join(world.shared, "e", JoinCall(url="nonsense", uid="1"))
    assert not states(world)


async def test_found_engines_leave_joined_ones_alone(world: LiveRouter) -> None:
    await join(world.shared, "e", call())
    await world.shared.change(lambda state: state.with_found((), {}))
    assert states(world) == {"e": ("decode", False)}


def test_gone_is_who_is_away_all_the_time() -> None:
    now = 0.0
    gone = GoneEngines(lambda: now, 10)
    a, b = ("a", "1"), ("b", "1")
    assert not gone.look({a, b})
    now = 9.0
    assert not gone.look({a})
    now = 10.0
    assert gone.look({a, b}) == {a}
    assert gone.look({a, b}) == {a}, "again, if it could not be removed"
    now = 20.0
    assert gone.look({b, ("a", "2")}) == {b}


async def test_gone_engines_are_forgotten_and_come_back(world: LiveRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined_members, "POLL_INTERVAL_S", 0.005)
    await join(world.shared, "e", call())
    removing = asyncio.create_task(remove_gone(world.shared, GoneEngines(asyncio.get_running_loop().time, 0.02)))
    try:
        await asyncio.sleep(0.05)
        assert states(world)
        world.fleet.member("e").reachable = False
        await until(lambda: not states(world))
    finally:
        removing.cancel()
        await asyncio.wait({removing})
    await join(world.shared, "e", call())
    assert states(world)


# ---- over HTTP -------------------------------------------------------------------------------------------------


@asynccontextmanager
async def served(world: LiveRouter, *secrets: str) -> AsyncGenerator[str]:
    app = world.application()
    app._admins = AdminAccess(BearerKeys(["admin"]), BearerKeys(["client"]), Callers(secrets))
    async with served_asgi(app) as url:
        yield url


async def test_the_secret_is_proved_and_opens_nothing_else(world: LiveRouter) -> None:
    async with served(world, "right") as url:
        async with RouterMembership(url, "e", "right") as member:
            for _ in range(3):
                assert (await member.join(call())).in_flight == 0
            assert states(world) == {"e": ("decode", False)}
            await member.leave("1")
            assert not states(world)
        for secret in ("wrong", ""):
            async with RouterMembership(url, "e", secret) as member:
                with pytest.raises(Unauthorized, match="fleet's secret"):
                    await member.join(call())
        async with httpx.AsyncClient(base_url=f"{url}/tercet/v1", headers=JSON) as client:
            for key in ("admin", "client"):
                shown = {"authorization": f"Bearer {key}"}
                answer = await client.put("/members/e", json={"url": "http://e", "uid": "1"}, headers=shown)
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"].startswith("Tercet challenge=")
            assert (await client.get("/engines", headers={"authorization": "Bearer right"})).status_code == 401
            sent = {"authorization": "Bearer right"}
            page = {**sent, "origin": "http://evil.example"}
            answer = await client.put("/members/e", json={"url": "http://e", "uid": "1"}, headers=page)
            assert answer.status_code == Forbidden.status
    assert not states(world)


async def test_without_a_secret_engines_of_this_machine_join(world: LiveRouter) -> None:
    async with served(world) as url, RouterMembership(url, "e") as member:
        await member.join(call())
        assert states(world) == {"e": ("decode", False)}
    remote = httpx.ASGITransport(world.application(), client=("10.0.0.8", 4000))
    async with httpx.AsyncClient(transport=remote, base_url="http://localhost/tercet/v1", headers=JSON) as client:
        answer = await client.put("/members/f", json={"url": "http://f", "uid": "1"})
    assert (answer.status_code, "on its machine" in answer.text) == (403, True)
