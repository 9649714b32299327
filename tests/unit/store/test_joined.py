"""A store joins a router by itself, stays while that is away, and leaves at its end within a few seconds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec
import pytest
from aiohttp import web

from tercet.cluster.ports import free_ports
from tercet.protocol.wire import JoinCall, Joined
from tercet.store import server
from tercet.store.server import StoreConfig, joined
from tercet.wire.client import bounded_answers
from tests.longest_wait import until

CONFIG = StoreConfig(name="s", host="127.0.0.1", port=8100, mirrors=[], memory=1)


class Router:
    """The two routes by which members come and go."""

    def __init__(self) -> None:
        self.calls = list[JoinCall]()
        self.left = list[str]()
        self.is_stuck = False

    async def join(self, http: web.Request) -> web.Response:
        assert http.match_info["name"] == "s"
        self.calls.append(msgspec.json.decode(await http.read(), type=JoinCall))
        return web.Response(body=msgspec.json.encode(Joined(0)))

    async def leave(self, http: web.Request) -> web.Response:
        if self.is_stuck:
            await asyncio.sleep(1000)
        self.left.append(http.match_info["uid"])
        return web.Response(body=msgspec.json.encode(Joined(0)))


@pytest.fixture
async def router(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[tuple[Router, StoreConfig]]:
    monkeypatch.setattr(bounded_answers, "AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(server, "LEAVE_SECONDS", 0.2)
    (port,) = free_ports("127.0.0.1", 1)
    found, app = Router(), web.Application()
    app.add_routes([
        web.put("/tercet/v1/members/{name}", found.join), web.delete("/tercet/v1/members/{name}/{uid}", found.leave)
    ])  # fmt: skip
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    yield found, msgspec.structs.replace(CONFIG, join=f"http://127.0.0.1:{port}")
    await runner.cleanup()


async def test_it_joins_as_a_store_and_leaves(router: tuple[Router, StoreConfig]) -> None:
    found, config = router
    async with joined(config):
        await until(lambda: len(found.calls) > 2)
    assert {(call.role, call.url, call.leaving) for call in found.calls} == {("store", "http://127.0.0.1:8100", False)}
    assert found.left == [found.calls[0].uid]


async def test_a_router_that_is_silent_does_not_keep_it(
    router: tuple[Router, StoreConfig], caplog: pytest.LogCaptureFixture
) -> None:
    found, config = router
    found.is_stuck = True
    async with joined(config):
        await until(lambda: found.calls)
    assert "s: stops without leaving the fleet: no answer" in caplog.text


async def test_without_a_router_it_serves_alone() -> None:
    async with joined(CONFIG):
        pass
    async with joined(msgspec.structs.replace(CONFIG, join="http://127.0.0.1:9")):
        pass
