"""A fleet whose members are pods, found by labels or by an InferencePool, over a stand-in for the API server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from tercet.fleet import EngineFleet
from tercet.fleet.discovery import PodDiscovery, follow_found, until_known
from tercet.fleet.members import MemberState
from tercet.fleet.membership import Membership
from tercet.protocol import BadRequest, Engine, EngineUnreachable, Role
from tercet.settings import DiscoverySettings, EngineAddress
from tests.longest_wait import LONGEST_WAIT_S, until
from tests.unit.fakes import FakeEngine

from .api_server import EARLIER_POOLS, FAST, POOLS, ApiServer, api_server, earlier_pool, pod, pool


@asynccontextmanager
async def connect(name: str, _url: str, _admit: Any) -> AsyncGenerator[Engine]:
    yield FakeEngine(name)


class World:
    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.fleet = EngineFleet(())

    def state(self) -> dict[str, tuple[str, str, bool]]:
        return {each.name: (each.url, each.role, each.draining) for each in self.fleet.members}

    async def until(self, wanted: Callable[[dict[str, tuple[str, str, bool]]], bool]) -> None:
        await until(lambda: wanted(self.state()))

    @asynccontextmanager
    async def following(self, *named: EngineAddress, **settings: Any) -> AsyncGenerator[None]:
        discovery, known = PodDiscovery(DiscoverySettings(**settings), self.server.api, FAST), asyncio.Event()
        async with Membership(self.fleet, connect) as membership:
            following = asyncio.create_task(follow_found(discovery, membership, named, known))
            try:
                await until_known(known, discovery.source, 10)
                yield
            finally:
                following.cancel()
                await asyncio.wait({following})


@pytest.fixture
async def world() -> AsyncGenerator[World]:
    async with api_server() as server:
        yield World(server)


async def test_pods_come_change_and_go(world: World, caplog: pytest.LogCaptureFixture) -> None:
    server = world.server
    server.put(pod("p-0", labels={"llm-d.ai/role": "prefill"}))
    server.put(pod("web", "10.0.0.9", labels={"app": "web"}))
    with caplog.at_level(logging.WARNING):
        async with world.following(endpoint_selector="app=engine"):
            assert world.state() == {"p-0": ("http://10.0.0.1:8000", "prefill", False)}
            server.put(pod("d-0", "10.0.0.2", ready=False, labels={"llm-d.ai/role": "decode"}))
            server.put(pod("d-0", "10.0.0.2", labels={"llm-d.ai/role": "decode"}))
            await world.until(lambda state: state.get("d-0") == ("http://10.0.0.2:8000", "decode", False))
            server.put(pod("d-0", "10.0.0.2", deleting=True, labels={"llm-d.ai/role": "decode"}))
            await world.until(lambda state: state["d-0"][2])
            server.delete("d-0")
            server.put(pod("d-0", "10.0.0.3", uid="another"))
            await world.until(lambda state: state.get("d-0") == ("http://10.0.0.3:8000", "both", False))
            server.delete("d-0")
            server.delete("p-0")
            await world.until(lambda state: not state)
    said = [each.getMessage() for each in caplog.records]
    assert "engine_drained: d-0 is drained and not picked: its pod is being deleted" in said
    pods = "reported by the pods of models with app=engine"
    assert f"engine_added: d-0 (http://10.0.0.2:8000) has the role decode: {pods}" in said
    assert f"engine_removed: p-0 gets no new requests, running ones continue: {pods}" in said


async def test_by_an_inference_pool_and_its_changes(world: World, caplog: pytest.LogCaptureFixture) -> None:
    server = world.server
    server.put(pod("a"))
    server.put(pod("b", "10.0.0.2", labels={"app": "other"}))
    with caplog.at_level(logging.WARNING):
        async with world.following(pool_name="mine"):
            assert world.state() == {}, "there is no such pool yet"
            server.put(pool("yours", {"app": "other"}, 7000), POOLS)
            server.put(pool("mine", {"app": "engine"}, 9000), POOLS)
            await world.until(lambda state: state == {"a": ("http://10.0.0.1:9000", "both", False)})
            server.put(pool("mine", {"app": "other"}, 9001), POOLS)
            await world.until(lambda state: state == {"b": ("http://10.0.0.2:9001", "both", False)})
            server.put(pool("mine", {}, 9001), POOLS)
            await world.until(lambda state: state == {})
            server.put(pool("mine", {"app": "engine"}, 9001, 9002), POOLS)
            await world.until(lambda state: set(state) == {"a-rank-0", "a-rank-1"})
            server.delete("mine", POOLS)
            await world.until(lambda state: state == {})
    assert caplog.text.count("pool_missing: no pod of models/mine is an engine") == 2
    assert all(each.get("fieldSelector") in (None, "metadata.name=mine") for each in server.queries)


async def test_by_a_pool_of_the_earlier_group(world: World) -> None:
    server = world.server
    server.put(pod("a"))
    server.put(pod("b", "10.0.0.2", labels={"app": "other"}))
    server.put(pool("mine", {"app": "other"}, 7000), POOLS)
    async with world.following(pool_name="mine", pool_group="inference.networking.x-k8s.io"):
        assert world.state() == {}, "the pool of this name in the other group is another one"
        server.put(earlier_pool("mine", {"app": "engine"}, 9000), EARLIER_POOLS)
        await world.until(lambda state: state == {"a": ("http://10.0.0.1:9000", "both", False)})
        server.put(earlier_pool("mine", {}, 9000), EARLIER_POOLS)
        await world.until(lambda state: state == {})


async def test_named_engines_and_strange_pods(world: World, caplog: pytest.LogCaptureFixture) -> None:
    server = world.server
    server.put(pod("strange", labels={"llm-d.ai/role": "encode"}))
    server.put(pod("a", "10.0.0.2"))
    named = EngineAddress("fixed", "http://10.9.9.9:8000", "decode")
    async with world.following(named, endpoint_selector="app=engine", endpoint_target_ports=(8100,)):
        assert set(world.state()) == {"fixed", "a"}
        assert world.state()["a"][0] == "http://10.0.0.2:8100"
        server.put(pod("b", "10.0.0.3"))
        await world.until(lambda state: "b" in state)
        server.delete("a")
        server.delete("b")
        await world.until(lambda state: set(state) == {"fixed"})
    assert caplog.text.count("the pod strange is not an engine") == 1


async def test_who_begins_without_the_api_server_says_so(world: World) -> None:
    world.server.refuse = (401, {})
    discovery, known = PodDiscovery(DiscoverySettings(endpoint_selector="a=b"), world.server.api, FAST), asyncio.Event()
    async with Membership(world.fleet, connect) as membership:
        following = asyncio.create_task(follow_found(discovery, membership, (), known))
        with pytest.raises(EngineUnreachable, match=r"are not known after 0\.1 s"):
            await until_known(known, discovery.source, 0.1)
        world.server.refuse = None
        await until_known(known, discovery.source, 10)
        following.cancel()
        await asyncio.wait({following})


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"pool_name": "a", "endpoint_selector": "b=c"}, "endpoint-selector"),
        ({"endpoint_selector": " "}, "endpoint-selector"),
        ({"pool_name": "../pods"}, "pool-name"),
        ({"pool_name": "a", "pool_namespace": "Models"}, "pool-namespace"),
        ({"pool_name": "a", "pool_group": "example.com"}, "pool-group"),
        ({"endpoint_selector": "a=b", "pool_group": "inference.networking.x-k8s.io"}, "pool-group"),
        ({"endpoint_selector": "a=b", "endpoint_target_ports": (0,)}, "endpoint-target-ports"),
        ({"endpoint_selector": "a=b", "endpoint_scheme": "grpc"}, "endpoint-scheme"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        DiscoverySettings(**settings)
    assert refused.value.param == param


async def test_watches_end_when_who_follows_them_ends(world: World) -> None:
    world.server.put(pod("a"))
    discovery = PodDiscovery(DiscoverySettings(endpoint_selector="app=engine"), world.server.api, FAST)
    async with aclosing(discovery.changes()) as changes:
        async with asyncio.timeout(LONGEST_WAIT_S):
            await anext(changes)
        assert [task for task in asyncio.all_tasks() if task.get_name() == "watch on pods"]
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "watch on pods"]


async def test_who_follows_pods_and_fails_leaves_no_watch(world: World) -> None:
    world.server.put(pod("a"))
    discovery = PodDiscovery(DiscoverySettings(endpoint_selector="app=engine"), world.server.api, FAST)

    class Broken(Membership):
        async def become(self, wanted: Any) -> Any:
            raise BadRequest("as it happens")

    async with Broken(world.fleet, connect) as membership, asyncio.timeout(LONGEST_WAIT_S):
        with pytest.raises(BadRequest):
            await follow_found(discovery, membership, (), asyncio.Event())
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "watch on pods"]


# A fleet becomes what is wanted: by an operator's state, or as another router lists it.


def wanted(name: str, url: str, role: Role = "both", draining: bool = False) -> MemberState:
    return MemberState(EngineAddress(name, url, role), draining)


async def test_members_come_and_go_and_change_as_is_wanted() -> None:
    fleet, opened, closed = EngineFleet(()), list[str](), list[str]()

    @asynccontextmanager
    async def connect(name: str, url: str, _: Any) -> AsyncGenerator[Engine]:
        opened.append(url)
        yield FakeEngine(name)
        closed.append(url)

    def state() -> list[tuple[str, str, str, bool, bool]]:
        return sorted((each.name, each.url, each.role, each.draining, each.reachable) for each in fleet.members)

    async with Membership(fleet, connect) as members:
        new = await members.become([wanted("a", "http://a"), wanted("b", "http://b")])
        assert [each.name for each in new] == ["a", "b"]
        assert state() == [("a", "http://a", "both", False, False), ("b", "http://b", "both", False, False)]
        fleet.member("b").reachable = True
        new = await members.become([wanted("a", "http://other"), wanted("b", "http://b", "decode", draining=True)])
        assert [each.url for each in new] == ["http://other"]
        assert state() == [("a", "http://other", "both", False, False), ("b", "http://b", "decode", True, True)]
        assert await members.become([]) == []
        assert state() == []
    assert (opened, sorted(closed)) == (["http://a", "http://b", "http://other"], sorted(opened))
