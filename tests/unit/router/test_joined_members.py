"""Engines that join a running router: the fleet's secret, who stays whose member, leaving, those that are gone; and a
worker that takes another one's place while engines are away.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import httpx
import pytest

from tercet.fleet import FleetView, membership
from tercet.fleet.discovery import PodDiscovery
from tercet.fleet.membership import ServedModel
from tercet.protocol import BadRequest, Conflict, EngineStatus, EngineUnreachable, Forbidden, Unauthorized
from tercet.protocol.addresses import TextFingerprint
from tercet.protocol.wire import JoinCall
from tercet.router.observe.metrics import Metrics
from tercet.router.state import joined_members
from tercet.router.state.joined_members import GoneEngines, follow_found, join, leave, remove_gone
from tercet.settings import DiscoverySettings, EngineAddress
from tercet.wire.callers import BearerKeys, Callers
from tercet.wire.client.bounded_answers import RouterMembership
from tercet.wire.serving.server_access import AdminAccess
from tests.longest_wait import LONGEST_WAIT_S, until
from tests.servers import served_asgi
from tests.unit.fleet.discovery.api_server import FAST, ApiServer, api_server, pod

from .conftest import JSON, Engine, LiveRouter, draining
from .test_shared_state import Other, joined


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


# Pods as engines of a router: they join and leave its state, and every process that follows it has them.


@asynccontextmanager
async def following(router: LiveRouter, server: ApiServer) -> AsyncGenerator[None]:
    discovery = PodDiscovery(DiscoverySettings(endpoint_selector="app=engine"), server.api, FAST)
    task = asyncio.create_task(follow_found(router.shared, discovery))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


def open_members(router: LiveRouter | Other) -> set[str]:
    return {each.name for each in router.fleet.members if not each.leaving and each.reachable}


@pytest.fixture
async def server(router: LiveRouter) -> AsyncGenerator[ApiServer]:
    for number in range(1, 4):
        router.engines[f"http://10.0.0.{number}:8000"] = Engine(f"engine-{number}")
    async with api_server() as made:
        yield made


async def test_pods_serve_and_are_drained_before_they_go(
    router: LiveRouter, server: ApiServer, metrics: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
    server.put(pod("e-1", "10.0.0.1"))
    async with joined(router, metrics) as other, following(router, server):
        await until(lambda: open_members(other) == {"p", "d", "e-1"} == open_members(router))
        version = router.shared.state.version
        server.elsewhere()
        server.compact()
        server.drop()
        await until(lambda: server.lists == 2)
        await asyncio.sleep(0.05)
        assert router.shared.state.version == version, "the same pods are no change"
        with caplog.at_level(logging.WARNING):
            server.put(pod("e-1", "10.0.0.1", deleting=True))
            await until(lambda: open_members(other) == {"p", "d"} == open_members(router))
        assert router.fleet.member("e-1").leaving, "it is followed, so that what runs there can be moved"
        assert "engine_drained: e-1 is drained and not picked: its pod is being deleted" in caplog.text
        server.delete("e-1")
        await until(lambda: [each.name for each in other.fleet.members] == ["p", "d"])


async def test_what_an_operator_decided_of_a_pod_stays(router: LiveRouter, server: ApiServer) -> None:
    server.put(pod("e-1", "10.0.0.1"))
    server.put(pod("e-2", "10.0.0.2"))
    async with following(router, server):
        await until(lambda: open_members(router) >= {"e-1", "e-2"})
        await router.shared.change(draining("e-1", True))
        await router.shared.change(lambda state: state.with_role("e-1", "prefill"))
        server.put(pod("e-1", "10.0.0.1", ready=False))
        server.put(pod("e-1", "10.0.0.1"))
        server.delete("e-2")
        await until(lambda: len(router.fleet.members) == 3)
        member = router.fleet.member("e-1")
        assert (member.draining, member.role) == (True, "prefill")
        await router.shared.change(draining("e-1", False))
        assert "e-1" in open_members(router)


async def test_a_pod_that_does_not_fit_is_not_picked(router: LiveRouter, server: ApiServer) -> None:
    router.engines["http://10.0.0.3:8000"] = Engine("engine-3", model="another")
    server.put(pod("e-3", "10.0.0.3"))
    async with following(router, server):
        await until(lambda: len(router.fleet.members) == 3)
        assert open_members(router) == {"p", "d"}


async def test_a_state_that_cannot_be_written_is_written_later(
    router: LiveRouter, server: ApiServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tercet.router.state.joined_members.RETRY_DELAY_S", 0.01)
    change, failures = router.shared.change, iter((True, True))

    async def fails(*given: object) -> object:
        if next(failures, False):
            raise BadRequest("state: cannot be written: disk full", "state")
        return await change(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(router.shared, "change", fails)
    server.put(pod("e-1", "10.0.0.1"))
    async with following(router, server):
        await until(lambda: "e-1" in open_members(router))
    assert caplog.text.count("members stay unchanged: state: cannot be written") == 2


async def test_engines_that_do_not_answer_are_asked_later(router: LiveRouter) -> None:
    router.engine("p").gone = True
    assert await router.membership.until_ready(0.01) == ServedModel(("m",), 1000)
    assert [member.reachable for member in router.fleet.members] == [False, True]


async def test_a_fleet_of_which_none_answers_promises_nothing(router: LiveRouter) -> None:
    for name in ("p", "d"):
        router.engine(name).gone = True
    with pytest.raises(EngineUnreachable, match="no engine"):
        await router.membership.until_ready(0.01)


async def test_where_clients_were_promised_something_nobody_waits(router: LiveRouter) -> None:
    for name in ("p", "d"):
        router.engine(name).gone = True
    assert (await router.shared.until_ready()).max_model_len == 1000
    assert [member.reachable for member in router.fleet.members] == [False, False]


async def test_an_engine_that_comes_back_as_another_model_is_not_picked(router: LiveRouter) -> None:
    router.engine("p").model = "another"
    await router.membership.look(0.01)
    assert [member.reachable for member in router.fleet.members] == [False, True]
    router.engine("p").model = "m"
    await router.membership.look(0.01)
    assert [member.reachable for member in router.fleet.members] == [True, True]


async def test_engines_that_have_become_another_models_are_told_of_as_what_they_are(router: LiveRouter) -> None:
    for name in ("p", "d"):
        router.engine(name).model = "another"
    await router.membership.look(0.01)
    why = "the engine at this URL serves the model another, and this fleet serves m"
    assert {member.refused for member in router.fleet.members} == {why}
    with pytest.raises(EngineUnreachable) as refused:
        router.fleet.health.require_answers()
    assert f"p answers, but {why}. Start engines" in refused.value.message
    router.engine("d").gone = True
    await router.membership.look(0.01)
    assert [member.refused for member in router.fleet.members] == [why, ""]
    said = router.shared.reports.refusal()
    assert said is not None
    assert f"{why}, and 1 of 2 do not answer" in said.message
    router.engine("p").gone = True
    await router.membership.ask(router.fleet.members)
    with pytest.raises(EngineUnreachable, match="no engine that may be picked answers"):
        router.fleet.health.require_answers()
    for name in ("p", "d"):
        router.engine(name).gone, router.engine(name).model = False, "m"
    await router.membership.ask(router.fleet.members)
    assert [(member.reachable, member.refused) for member in router.fleet.members] == [(True, ""), (True, "")]


OURS = TextFingerprint("words", "template")


@pytest.mark.parametrize(
    ("theirs", "is_refused"),
    [(OURS, False), (TextFingerprint("swapped", "template"), True), (TextFingerprint("words", "another"), True),
     (TextFingerprint(), False), (TextFingerprint("words"), False), (TextFingerprint("", "another"), True)],
)  # fmt: skip
async def test_an_engine_with_other_words_is_not_picked(
    router: LiveRouter, theirs: TextFingerprint, is_refused: bool
) -> None:
    router.engine("p").text, router.engine("d").text = theirs, OURS
    await router.membership.speak(OURS)
    assert [member.reachable for member in router.fleet.members] == [not is_refused, True]
    assert ("fingerprint" in router.fleet.member("p").refused) == is_refused
    router.engine("p").text = OURS
    await router.membership.ask(router.fleet.members)
    assert [member.refused for member in router.fleet.members] == ["", ""]


@pytest.mark.parametrize("ours", [TextFingerprint(), TextFingerprint("words")])
async def test_what_this_router_does_not_go_by_is_not_compared(router: LiveRouter, ours: TextFingerprint) -> None:
    for name in ("p", "d"):
        router.engine(name).text = TextFingerprint("words", "another")
    await router.membership.speak(ours)
    assert router.fleet.health.answers


async def test_a_router_whose_words_no_engine_shares_does_not_start(router: LiveRouter) -> None:
    for name in ("p", "d"):
        router.engine(name).text = TextFingerprint("swapped", "template")
    with pytest.raises(BadRequest, match="another tokenizer") as refused:
        await router.membership.speak(OURS)
    assert refused.value.param == "model"
    router.engine("p").gone = router.engine("d").gone = True
    await router.membership.speak(OURS)  # who does not answer has not said that it is another one


async def test_an_engine_with_other_words_does_not_join(router: LiveRouter) -> None:
    await router.membership.speak(OURS)
    new = router.engines["http://new"] = Engine("new")
    new.text = TextFingerprint("swapped", "template")
    with pytest.raises(BadRequest, match="another tokenizer") as refused:
        await router.membership.check(EngineAddress("new", "http://new"))
    assert refused.value.param == "url"


async def test_a_router_that_joins_holds_engines_to_what_was_promised(router: LiveRouter) -> None:
    router.membership.served_model = None
    router.engine("p").model = "another"
    await router.shared.until_ready()
    assert [member.reachable for member in router.fleet.members] == [False, True]


async def test_no_engine_holds_up_or_ends_the_watch_over_others(
    router: LiveRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "POLL_INTERVAL_S", 0.01)
    frozen, asked = router.engine("p"), 0

    async def freeze() -> EngineStatus:
        nonlocal asked
        asked += 1
        await asyncio.Event().wait()
        raise AssertionError

    async def raise_any() -> EngineStatus:
        monkeypatch.undo()
        raise RuntimeError("Session is closed")

    monkeypatch.setattr(frozen, "status", freeze)
    before = asyncio.all_tasks()
    watching = asyncio.ensure_future(router.membership.watch())
    for member in router.fleet.members:
        member.reachable = False
    await until(lambda: router.fleet.member("d").reachable)
    assert asked == 1, "its question is still open"
    monkeypatch.setattr(router.engine("d"), "status", raise_any)
    router.fleet.member("d").reachable = False
    await until(lambda: router.fleet.member("d").reachable)
    watching.cancel()
    await asyncio.wait({watching})
    assert asyncio.all_tasks() == before


async def test_a_change_asks_only_engines_that_are_away(router: LiveRouter) -> None:
    router.engine("p").gone = True  # too busy to answer in time
    router.fleet.member("d").reachable = False
    await router.shared.change(draining("d", True))
    assert [member.reachable for member in router.fleet.members] == [True, True]


@pytest.mark.parametrize("how", ["refuses", "is silent"])
async def test_a_router_begins_by_those_that_answer(
    router: LiveRouter, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(membership, "OTHERS_SECONDS", 0.05)

    async def silent() -> EngineStatus:
        await asyncio.sleep(LONGEST_WAIT_S * 10)
        raise AssertionError

    router.engine("p").gone = True
    if how == "is silent":
        monkeypatch.setattr(router.engine("p"), "status", silent)
    async with asyncio.timeout(LONGEST_WAIT_S):
        for wait in (router.membership.until_ready, router.membership.until_one_answers):
            assert await wait(LONGEST_WAIT_S * 10) == ServedModel(("m",), 1000)
    assert [member.reachable for member in router.fleet.members] == [False, True]


async def test_engines_that_answer_a_moment_later_than_the_first_count_for_the_promise(
    router: LiveRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "OTHERS_SECONDS", LONGEST_WAIT_S)
    late = router.engine("d")
    late.max_model_len, late.gone = 500, True
    asyncio.get_running_loop().call_later(0.05, setattr, late, "gone", False)
    assert await router.membership.until_ready() == ServedModel(("m",), 500)
