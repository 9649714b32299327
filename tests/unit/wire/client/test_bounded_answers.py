"""What servers answer that may be anybody's: compressed, from somewhere else, or without an end."""

from __future__ import annotations

import gzip
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from tercet.protocol import EngineError, EngineUnreachable, Request, TercetError, from_wire
from tercet.wire.client import HttpEngine, bounded_answers
from tercet.wire.client.bounded_answers import ask_router
from tercet_gateway.scraped_engine import ScrapedEngine
from tests.servers import served

BOMB = gzip.compress(b" " * 50_000_000)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Answers all paths in one way; ``paths`` are those that were asked for."""

    def __init__(self, handler: Handler) -> None:
        self.paths: list[str] = []
        self.encodings: set[str] = set()
        self.url = ""
        self._handler = handler

    async def handle(self, http: web.Request) -> web.StreamResponse:
        self.paths.append(http.path)
        self.encodings.add(http.headers.get("accept-encoding", ""))
        return await self._handler(http)


@asynccontextmanager
async def serving(handler: Handler) -> AsyncGenerator[Server]:
    server = Server(handler)
    app = web.Application()
    app.add_routes([web.route("*", "/{path:.*}", server.handle)])
    async with served(app) as server.url:
        yield server


async def bomb(_: web.Request) -> web.StreamResponse:
    return web.Response(body=BOMB, headers={"content-encoding": "gzip", "content-type": "application/json"})


async def elsewhere(http: web.Request) -> web.StreamResponse:
    raise web.HTTPTemporaryRedirect("/elsewhere" if http.path != "/elsewhere" else "/further")


async def endless(http: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(http)
    while True:
        await response.write(b" " * 100_000)


async def engine_status(url: str) -> Any:
    async with HttpEngine("e", url, secret="s") as engine:
        return await engine.status()


async def engine_stream(url: str) -> Any:
    async with HttpEngine("e", url) as engine:
        return [each async for each in engine.start_generate(Request(seq_id="a", prompt=(1,)))]


async def engine_page(url: str) -> Any:
    async with ScrapedEngine("e", url, 3600.0, lambda _: None, lambda: None) as engine:
        return await engine.status()


async def router(url: str) -> Any:
    return await ask_router(url, "GET", "/engines", admin_key="k")


@pytest.mark.parametrize("asks", [engine_status, engine_stream, engine_page, router])
@pytest.mark.parametrize("handler", [bomb, elsewhere, endless])
async def test_an_answer_that_is_not_read_is_an_error(
    handler: Handler, asks: Callable[[str], Awaitable[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_answers, "LONGEST", 1_000_000)
    async with serving(handler) as server:
        with pytest.raises((EngineUnreachable, EngineError)) as refused:
            await asks(server.url)
        assert len(refused.value.message) < 500
        assert not {"/elsewhere", "/further"} & {*server.paths}
        assert server.encodings == {"identity"}


@pytest.mark.parametrize("body", [{"error": {"message": "x" * 10**6}}, {"odd": "x" * 10**6}, {"error": "x" * 10**6}])
def test_what_an_engine_says_of_an_error_is_kept_in_part(body: Any) -> None:
    error: TercetError = from_wire(500, body)
    assert len(error.message) < 5000
