"""Pods as engines of a router: they join and leave its state, and every process that follows it has them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from tercet.fleet.discovery import PodDiscovery
from tercet.protocol import BadRequest
from tercet.router.observe.metrics import Metrics
from tercet.router.state.joined_members import follow_found
from tercet.settings import DiscoverySettings
from tests.longest_wait import until
from tests.unit.fleet.discovery.api_server import FAST, ApiServer, api_server, pod

from .conftest import Engine, LiveRouter, draining
from .test_shared_state import Other, joined


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
