"""What servers answer that may be anybody's: compressed, from somewhere else, or without an end."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web

from tercet.protocol import (
    EngineError,
    EngineNotReached,
    EngineStatus,
    EngineUnreachable,
    Request,
    TercetError,
    from_wire,
)
from tercet.wire.client import HttpEngine, StreamListener, bounded_answers
from tercet.wire.client.bounded_answers import ask_router
from tercet_gateway.scraped_engine import ScrapedEngine, VllmMetrics, parsed
from tests.servers import served
from tests.unit.router.conftest import Engine

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


# Whoever asks an engine learns whether it can have begun with what it was asked for.


REQUEST = Request(seq_id="s", prompt=(1, 2, 3))


@asynccontextmanager
async def serving_status() -> AsyncGenerator[int]:
    """A server that says how it is, and hangs up on whatever else it is asked; gives its port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET"):
            body = msgspec.json.encode(await Engine("e").status())
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (len(body), body))
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_of_an_engine_that_nobody_runs_one_knows_that_it_did_nothing() -> None:
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    async with StreamListener() as listener, HttpEngine("e", f"http://127.0.0.1:{port}", listener) as engine:
        with pytest.raises(EngineNotReached):
            async with engine.prep_recv(REQUEST):
                pass
        with pytest.raises(EngineNotReached):
            await anext(engine.start_generate(REQUEST))


async def test_an_engine_that_is_refused_was_not_asked_either() -> None:
    def refuse(_status: EngineStatus) -> None:
        raise EngineUnreachable("another model")

    async with serving_status() as port, HttpEngine("e", f"http://127.0.0.1:{port}", admit=refuse) as engine:
        with pytest.raises(EngineNotReached, match="another model"):
            async with engine.prep_recv(REQUEST):
                pass


async def test_of_one_that_is_gone_after_it_got_the_call_one_does_not() -> None:
    async with serving_status() as port, HttpEngine("e", f"http://127.0.0.1:{port}") as engine:
        with pytest.raises(EngineUnreachable) as failed:
            async with engine.prep_recv(REQUEST):
                pass
        assert not isinstance(failed.value, EngineNotReached)


# What is read from a page as vLLM writes it.


PAGE = """# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 9141.0
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.76e+09
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="org/a \\"b\\", c"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="org/a"} 7.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="org/a",reason="capacity"} 100.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="org/a"} 0.25
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="1000"} 1.0
vllm:prompt_tokens_total{engine="0",model_name="org/a"} 1.0e+06
"""


def test_a_page() -> None:
    assert parsed(PAGE) == VllmMetrics(7, 3, 0.25, "org/a", 16, 1000, "1.76e+09")


def test_data_parallel_ranks_are_one_engine() -> None:
    more = PAGE + PAGE.replace('engine="0"', 'engine="1"').replace("} 0.25", "} 0.75").replace("} 7.0", "} 1.0")
    assert parsed(more) == VllmMetrics(8, 6, 0.5, "org/a", 16, 2000, "1.76e+09")


def test_an_older_page() -> None:
    old = PAGE.replace("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
    assert parsed("\n".join(line for line in old.splitlines() if "config_info" not in line)).kv_usage == 0.25


@pytest.mark.parametrize(
    "page",
    [
        "",
        "hello",
        PAGE.replace("num_requests_waiting{", "queue{"),
        PAGE.replace("} 0.25", "} NaN"),
        PAGE.encode().hex(),
    ],
)
def test_what_is_none_of_vllms(page: str) -> None:
    with pytest.raises(ValueError, match="lacks"):
        parsed(page)
