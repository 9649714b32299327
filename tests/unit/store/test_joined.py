"""A store joins a router by itself, stays while that is away, leaves at its end, and its loops go on after an error at
each await.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from aiohttp import web

from tercet.cluster.ports import free_ports
from tercet.engine.interface import KeyedPrompt
from tercet.protocol import BadRequest
from tercet.protocol.wire import JoinCall, Joined
from tercet.store import server
from tercet.store.announcer import Announcer
from tercet.store.blocks import StoreBlocks
from tercet.store.disk import DiskFolder
from tercet.store.server import StoreConfig, joined
from tercet.transport import KVRegion
from tercet.wire.client import bounded_answers
from tests.longest_wait import until

from ..supervision import Works, with_an_error_at_each_await

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


SIZE, LAYERS, BYTES = 4, 2, 64
SOON_MS = 50


async def test_missed_events_are_repeated() -> None:
    @asynccontextmanager
    async def started() -> AsyncGenerator[Works]:
        announcer = Announcer("127.0.0.1", SIZE, list)
        announcer.start()

        async def works() -> None:
            while not await asked():
                pass

        async def asked() -> bool:
            with zmq.asyncio.Context.instance().socket(zmq.DEALER) as asking:
                socket: Any = asking
                socket.linger = 0
                socket.connect(announcer.addresses["replay"])
                await socket.send_multipart([b"", bytes(8)])
                answers = 0
                while await socket.poll(SOON_MS):  # the loop may have lost the question
                    await socket.recv_multipart()
                    answers += 1
                return answers == 2  # a summary, and the end

        try:
            yield works
        finally:
            await announcer.close()

    await with_an_error_at_each_await("store/announcer.py:Announcer._repeat", started)


async def test_events_are_at_the_ports_that_were_chosen_or_the_port_is_named() -> None:
    first, port = next(announcers_at_ports())
    try:
        assert first.addresses == {"endpoint": f"tcp://127.0.0.1:{port}", "replay": f"tcp://127.0.0.1:{port + 1}"}
        with pytest.raises(BadRequest, match=r"kv-events-port: \d+ or \d+ cannot be used: Address already in use;"):
            Announcer("127.0.0.1", SIZE, list, port)
    finally:
        await first.close()


def announcers_at_ports() -> Iterator[tuple[Announcer, int]]:
    for port in free_ports("127.0.0.1", 20):
        with suppress(BadRequest):  # another process has the port after it
            yield Announcer("127.0.0.1", SIZE, list, port), port


async def test_blocks_are_written_behind(tmp_path: Path) -> None:
    folders, prompts = itertools.count(), itertools.count()

    @asynccontextmanager
    async def started() -> AsyncGenerator[Works]:
        region = KVRegion.create(LAYERS, 4, BYTES)
        folder = DiskFolder(tmp_path / str(next(folders)), "tercet-0123456789abcdef", LAYERS * BYTES)
        blocks = StoreBlocks([region], SIZE, folder, 10_000)
        blocks.start()

        async def works() -> None:
            before = len(blocks.disk)
            while len(blocks.disk) == before:  # a block whose write ended in an error stays in memory only
                await blocks.reserve("lease", KeyedPrompt([next(prompts)] * SIZE))
                await blocks.release("lease", SIZE)
                await until(lambda: not blocks.waiting_writes)
            assert blocks.pool.available == 4

        try:
            yield works
        finally:
            await blocks.close()
            region.close()

    await with_an_error_at_each_await("store/blocks.py:StoreBlocks._write_behind", started)
