"""Embeddings and their like through the router, to servers that are simple ones here."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import httpx
import pytest
from aiohttp import web
from starlette.types import Receive, Scope, Send

from tercet.fleet.admission import Gate
from tercet.protocol import BadRequest, EngineError, EngineUnreachable, UnknownModel
from tercet.protocol.headers import POOLING
from tercet.router import pooling as module
from tercet.router.observe.metrics import Metrics
from tercet.router.pooling import PoolingServers
from tercet.router.router_app import RouterApp
from tercet.settings import EngineAddress, Limits, RouterConfig
from tests.longest_wait import LONGEST_WAIT_S, until
from tests.servers import served
from tests.unit.wire.client.raw_http import parsed, raw_server

from .conftest import JSON, LiveRouter

SECRET = "the fleet's"


class Server:
    """Serves one model at a port; ``go`` lets it answer, and ``breaks`` has it hang up instead."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.bodies: list[Any] = []
        self.keys: set[str | None] = set()
        self.go = asyncio.Event()
        self.go.set()
        self.queries: list[str] = []
        self.breaks = self.breaks_within = False
        self.silent = False
        self.says: dict[str, str] = {}
        self.status = 200
        self.running = AsyncExitStack()
        self.port = 0

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/{path:.*}", self._post)
        url = await self.running.enter_async_context(served(app, port=self.port))
        self.port = int(url.rpartition(":")[2])

    async def stop(self) -> None:
        await self.running.aclose()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _models(self, request: web.Request) -> web.Response:
        self.keys.add(request.headers.get("authorization"))
        if self.silent:
            await self.go.wait()
        return web.json_response({"object": "list", "data": [{"id": self.model, "object": "model"}]})

    async def _post(self, request: web.Request) -> web.StreamResponse:
        self.keys.add(request.headers.get("authorization"))
        self.bodies.append((request.path, await request.json()))
        self.queries.append(request.raw_path.partition("?")[2])
        await self.go.wait()
        if self.breaks and request.transport is not None:
            request.transport.close()
        answer = web.StreamResponse(status=self.status, headers={"content-type": "application/json", **self.says})
        await answer.prepare(request)
        await answer.write(json.dumps({"from": self.port, "object": "list"}).encode())
        if self.breaks_within and request.transport is not None:
            request.transport.close()
        return answer


async def looks(pooling: PoolingServers, times: int) -> None:
    for _ in range(times):
        await pooling.look_at(pooling.servers[0])


async def nothing_here(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 404, "headers": []})
    await send({"type": "http.response.body", "body": b"vLLM's own"})


@pytest.fixture
async def embedders() -> AsyncIterator[list[Server]]:
    """Two of one model, and one of another."""
    servers = [Server("embedder"), Server("embedder"), Server("reranker")]
    for each in servers:
        await each.start()
    yield servers
    for each in servers:
        each.go.set()
        await each.stop()


@pytest.fixture
async def pooling(embedders: list[Server]) -> AsyncIterator[PoolingServers]:
    async with PoolingServers([each.url for each in embedders], SECRET, timeout_s=30.0) as found:
        yield found


@pytest.fixture
async def client(router: LiveRouter, metrics: Metrics, pooling: PoolingServers) -> AsyncIterator[httpx.AsyncClient]:
    gate = Gate(Limits(), router.fleet, metrics)
    front = RouterApp(nothing_here, None, gate, ("key",), router.service.program_called, 10_000, pooling=pooling)
    transport = httpx.ASGITransport(front)
    headers = {"authorization": "Bearer key"}
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as found:
        yield found


@pytest.mark.parametrize("path", sorted(POOLING))
async def test_the_body_goes_to_a_server_of_the_model_and_its_answer_back(
    client: httpx.AsyncClient, embedders: list[Server], path: str
) -> None:
    answer = await client.post(path, json={"model": "reranker", "input": "x"})
    assert (answer.status_code, answer.json()["from"]) == (200, embedders[2].port)
    assert answer.headers["content-type"].startswith("application/json")
    assert embedders[2].bodies == [(path, {"model": "reranker", "input": "x"})]
    assert embedders[2].keys == {f"Bearer {SECRET}"}  # the client's own key is not theirs


async def test_a_query_goes_with_it_as_it_is(client: httpx.AsyncClient, embedders: list[Server]) -> None:
    query = "truncate=no&x=a%2Fb+c&y"
    assert (await client.post(f"/v1/embeddings?{query}", json={"model": "reranker"})).status_code == 200
    await client.post("/v1/embeddings", json={"model": "reranker"})
    assert embedders[2].queries == [query, ""]


async def asked_through(front: RouterApp, body: bytes, scope: dict[str, Any]) -> list[dict[str, Any]]:
    """What the router's own server is given to write."""
    waits = asyncio.Event()
    received = [{"type": "http.request", "body": body, "more_body": False}]
    sent = list[dict[str, Any]]()

    async def receive() -> Any:
        if not received:
            await waits.wait()
        return received.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    await front({"type": "http", "http_version": "1.1", "method": "POST", **scope}, receive, send)
    return sent


async def test_requests_and_answers_pass_byte_for_byte(router: LiveRouter, metrics: Metrics) -> None:
    packed, asked = gzip.compress(b"y" * 1000), b'{"input":  "y"}'
    said = [
        (b"Content-Type", b"application/octet-stream"), (b"Content-Encoding", b"gzip"), (b"X-Latin", b"caf\xe9"),
        (b"Set-Cookie", b"a=1"), (b"Set-Cookie", b"b=2"), (b"Content-Length", b"%d" % len(packed)),
    ]  # fmt: skip
    hop = b"Date: then\r\nServer: theirs\r\nConnection: X-Hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\n"
    head = b"".join(name + b": " + value + b"\r\n" for name, value in said)
    answer = b"HTTP/1.1 201 Made\r\n" + head + hop + b"\r\n" + packed
    models = b'HTTP/1.1 200 OK\r\nSet-Cookie: c=3\r\nContent-Length: 21\r\n\r\n{"data":[{"id":"m"}]}'
    fields = [
        (b"content-type", b"application/json"), (b"accept", b"a/b"), (b"accept", b"*/*"), (b"cookie", b"z=1"),
        (b"x-latin", b"caf\xe9"), (b"x-long", b"l" * 40_000), (b"x-empty", b""),
    ]  # fmt: skip
    dropped = [
        (b"host", b"router"), (b"authorization", b"Bearer key"), (b"connection", b"x-hop"), (b"x-hop", b"1"),
        (b"te", b"trailers"), (b"x-prefiller-host-port", b"h:1"), (b"expect", b"100-continue"),
        (b"content-length", b"%d" % len(asked)),
    ]  # fmt: skip
    scope = {
        "path": "/v1/embeddings", "raw_path": b"/v1%2fembeddings", "query_string": b"a=%2F&b=+",
        "headers": [*fields, *dropped],
    }  # fmt: skip
    gate = Gate(Limits(), router.fleet, metrics)
    async with raw_server(answer=models) as server, PoolingServers([server.url], SECRET) as pooling:
        front = RouterApp(nothing_here, None, gate, ("key",), router.service.program_called, 10_000, pooling=pooling)
        await pooling.look()
        server.answer = answer
        heard = list[Any]()
        for _ in range(2):
            start, *parts = await asked_through(front, asked, scope)
            assert (start["status"], start["headers"]) == (201, said)
            assert b"".join(each["body"] for each in parts) == packed
            # Polls use connections of the same session, so any of them may carry the request.
            raw = next(bytes(each) for each in server.heard if b"POST " in each)
            heard.append(parsed(raw[raw.rindex(b"POST ") :]))
        first = heard[0]
        assert first.start == b"POST /v1%2fembeddings?a=%2F&b=+ HTTP/1.1"
        host = (b"host", server.url.removeprefix("http://").encode())
        known = [(b"authorization", b"Bearer " + SECRET.encode()), (b"content-length", b"%d" % len(asked))]
        as_sent = [(name, "café".encode() if name == b"x-latin" else value) for name, value in fields]
        assert first.fields == [host, *as_sent, *known]
        assert first.body == asked
        assert b"c=3" not in b"".join(server.heard)


@pytest.mark.parametrize("head", [b"200 OK\r\nX: a\x01b", b"700 Odd"])
async def test_an_answer_that_could_not_be_sent_is_an_error_of_its_own(head: bytes) -> None:
    answer = b"HTTP/1.1 " + head + b"\r\nContent-Length: 0\r\n\r\n"
    async with raw_server(answer=answer) as server, PoolingServers([server.url]) as pooling:
        pooling.servers[0].serves(frozenset({"m"}))
        with pytest.raises(EngineError, match="is invalid"):
            await pooling.answer(b"POST", b"/score", "m", b"{}", (), 1e9)
        assert pooling.servers[0].in_flight == 0


async def test_a_password_is_shown_to_its_server_and_to_nobody_else(embedders: list[Server]) -> None:
    told = list[str]()
    url = embedders[2].url.replace("http://", "http://me:p%40ss@")
    async with PoolingServers([url], SECRET, on_poll=lambda url, _: told.append(url)) as pooling:
        answer = await pooling.answer(b"POST", b"/score", "reranker", b"{}", (), 1e9)
        answer.close()
        await embedders[2].stop()
        with pytest.raises(EngineUnreachable) as refused:
            await pooling.answer(b"POST", b"/score", "reranker", b"{}", (), 1e9)
    assert embedders[2].keys == {aiohttp.encode_basic_auth("me", "p@ss")}
    assert {*told} == {embedders[2].url}
    assert embedders[2].url in refused.value.message
    assert "ss@" not in refused.value.message


async def test_what_is_in_flight_counts_them_and_the_room_of_engines_does_not(
    router: LiveRouter, metrics: Metrics, pooling: PoolingServers, embedders: list[Server]
) -> None:
    limits = Limits(in_flight=2, in_flight_per_engine=1, queued=0)
    gate = Gate(limits, router.fleet, metrics)
    front = RouterApp(nothing_here, None, gate, (), router.service.program_called, 10_000, pooling=pooling)
    embedders[2].go.clear()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(front), base_url="http://localhost") as client:

        def asking() -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(client.post("/rerank", json={"model": "reranker"}))

        first, second = asking(), asking()
        await until(lambda: len(embedders[2].bodies) == 2)
        third = await asyncio.wait_for(asking(), LONGEST_WAIT_S)
        assert (third.status_code, third.json()["error"]["code"]) == (429, "saturated")
        embedders[2].go.set()
        assert [(await each).status_code for each in (first, second)] == [200, 200]
        assert (await client.post("/rerank", json={"model": "reranker"})).status_code == 200


async def test_a_request_that_servers_break_off_at_takes_none_of_them_from_others(
    client: httpx.AsyncClient, embedders: list[Server], pooling: PoolingServers
) -> None:
    await pooling.look()
    for each in embedders[:2]:
        each.breaks = True
    answer = await client.post("/v1/embeddings", json={"model": "embedder"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unreachable")
    assert all(each.models for each in pooling.servers)
    for each in embedders[:2]:
        each.breaks = False
    assert (await client.post("/v1/embeddings", json={"model": "embedder"})).status_code == 200


async def test_a_request_that_breaks_servers_does_not_get_to_all_of_them() -> None:
    servers = [Server("m") for _ in range(module.MOST_BROKEN + 2)]
    for each in servers:
        await each.start()
        each.breaks = True
    async with PoolingServers([each.url for each in servers]) as pooling:
        with pytest.raises(EngineUnreachable):
            await pooling.answer(b"POST", b"/score", "m", b"{}", (), 1e9)
    assert sum(len(each.bodies) for each in servers) == module.MOST_BROKEN
    for each in servers:
        await each.stop()


async def test_one_that_is_gone_after_it_broke_off_is_asked_no_more(
    client: httpx.AsyncClient, embedders: list[Server], pooling: PoolingServers
) -> None:
    await pooling.look()
    pooling.servers[1].asked = 1  # so the other one is first
    embedders[0].go.clear()
    asking = asyncio.create_task(client.post("/v1/embeddings", json={"model": "embedder"}))
    await until(lambda: len(embedders[0].bodies) == 1)
    embedders[0].breaks = True
    embedders[0].go.set()
    await embedders[0].stop()
    assert (await asking).status_code == 200
    await until(lambda: pooling.servers[0].models is None)


async def test_an_answer_whose_header_is_too_large_is_an_error_of_its_own(
    client: httpx.AsyncClient, embedders: list[Server], pooling: PoolingServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in embedders[:2]:
        each.says = {"metadata": "x" * (module.HEADER_BYTES + 1)}
    answer = await client.post("/pooling", json={"model": "embedder"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (500, "engine_error")
    assert "is invalid" in error["message"]
    assert sum(len(each.bodies) for each in embedders) == 1
    assert all(each.models for each in pooling.servers[:2])


async def test_who_has_least_to_do_is_asked(client: httpx.AsyncClient, embedders: list[Server]) -> None:
    for each in embedders:
        each.go.clear()
    asking = [asyncio.create_task(client.post("/v1/embeddings", json={"model": "embedder"})) for _ in range(6)]
    await until(lambda: sum(len(each.bodies) for each in embedders) == 6)
    assert [len(each.bodies) for each in embedders] == [3, 3, 0]
    for each in embedders:
        each.go.set()
    assert {(await each).status_code for each in asking} == {200}


async def test_one_that_breaks_off_is_left_for_another(client: httpx.AsyncClient, embedders: list[Server]) -> None:
    embedders[0].breaks = True
    answers = [await client.post("/v1/embeddings", json={"model": "embedder"}) for _ in range(4)]
    assert {(each.status_code, each.json()["from"]) for each in answers} == {(200, embedders[1].port)}


async def test_one_that_is_silent_is_left_for_another_even_by_those_who_wait_for_it(
    client: httpx.AsyncClient, embedders: list[Server], pooling: PoolingServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pooling.look()
    silent = embedders[0]
    silent.silent = True
    silent.go.clear()
    monkeypatch.setattr(module, "POLL_TIMEOUT", aiohttp.ClientTimeout(total=0.02))
    pooling.servers[1].asked = 1  # so the silent one is first
    asking = asyncio.create_task(client.post("/v1/embeddings", json={"model": "embedder"}))
    await until(lambda: len(silent.bodies) == 1)
    looked_at = pooling.servers[0]
    looked_at.silent = 0
    await looks(pooling, 1)
    assert looked_at.models is not None  # it may be busy
    await looks(pooling, module.SILENT_POLLS)
    answer = await asyncio.wait_for(asking, LONGEST_WAIT_S)
    assert (answer.status_code, answer.json()["from"]) == (200, embedders[1].port)
    assert [each.in_flight for each in pooling.servers] == [0, 0, 0]


async def test_an_answer_that_breaks_off_has_no_end(embedders: list[Server], pooling: PoolingServers) -> None:
    embedders[2].breaks_within = True
    answer = await pooling.answer(b"POST", b"/score", "reranker", b"{}", (), 1e9)
    with pytest.raises(EngineUnreachable, match="broke off"):
        async for _ in answer.parts():
            pass
    answer.close()
    assert [each.in_flight for each in pooling.servers] == [0, 0, 0]


async def test_whose_bytes_are_whose_is_said_in_a_header(client: httpx.AsyncClient, embedders: list[Server]) -> None:
    embedders[2].says = {"metadata": "x" * 100_000, "server": "theirs"}
    answer = await client.post("/pooling", json={"model": "reranker"})
    assert answer.headers["metadata"] == "x" * 100_000
    assert "server" not in answer.headers


async def test_what_a_server_refuses_is_its_clients(client: httpx.AsyncClient, embedders: list[Server]) -> None:
    embedders[2].status = 400
    answer = await client.post("/rerank", json={"model": "reranker"})
    assert (answer.status_code, answer.json()["from"]) == (400, embedders[2].port)
    assert len(embedders[2].bodies) == 1


async def test_a_server_that_is_back_is_asked_again(
    client: httpx.AsyncClient, embedders: list[Server], pooling: PoolingServers
) -> None:
    await embedders[2].stop()
    answer = await client.post("/rerank", json={"model": "reranker"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unreachable")
    await embedders[2].start()
    await pooling.look()
    assert (await client.post("/rerank", json={"model": "reranker"})).status_code == 200


async def test_a_model_that_nobody_serves_is_not_there(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/embeddings", json={"model": "other", "input": "x"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "unknown_model", "model")
    assert "embedder, reranker" in error["message"]


async def test_without_a_name_any_server_will_do(client: httpx.AsyncClient) -> None:
    assert (await client.post("/v1/embeddings", json={"input": "x"})).status_code == 200


async def test_the_routers_key_and_size_hold(client: httpx.AsyncClient, embedders: list[Server]) -> None:
    assert (await client.post("/pooling", json={}, headers={"authorization": "Bearer no"})).status_code == 401
    assert (await client.post("/pooling", content=b" " * 10_001, headers=JSON)).status_code == 413
    assert not any(each.bodies for each in embedders)


async def test_a_client_that_leaves_ends_its_request(embedders: list[Server], pooling: PoolingServers) -> None:
    embedders[2].go.clear()
    asking = asyncio.create_task(pooling.answer(b"POST", b"/score", "reranker", b"{}", (), 1e9))
    await until(lambda: len(embedders[2].bodies) == 1)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert [each.in_flight for each in pooling.servers] == [0, 0, 0]


async def test_without_such_servers_vllm_answers(router: LiveRouter, metrics: Metrics) -> None:
    async with PoolingServers(()) as none:
        front = RouterApp(
            nothing_here,
            None,
            Gate(Limits(), router.fleet, metrics),
            (),
            router.service.program_called,
            1000,
            pooling=none,
        )
        async with httpx.AsyncClient(transport=httpx.ASGITransport(front), base_url="http://localhost") as client:
            assert (await client.post("/v1/embeddings", json={})).content == b"vLLM's own"


async def test_nobody_listens_and_others_say_no_models() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        async with PoolingServers([url]) as pooling:
            with pytest.raises(EngineUnreachable):
                await pooling.answer(b"POST", b"/score", "m", b"{}", (), 0.0)


async def test_a_model_is_unknown_only_once_all_have_told_theirs(embedders: list[Server]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        silent = f"http://127.0.0.1:{closed.getsockname()[1]}"
        async with PoolingServers([silent, embedders[0].url]) as pooling:
            with pytest.raises(EngineUnreachable):
                await pooling.answer(b"POST", b"/score", "perhaps", json.dumps({}).encode(), (), 0.0)
        async with PoolingServers([embedders[0].url]) as pooling:
            with pytest.raises(UnknownModel):
                await pooling.answer(b"POST", b"/score", "perhaps", json.dumps({}).encode(), (), 0.0)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://here", "http://", "http://here:0", "http://[", ""])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(BadRequest, match="pooling-servers"):
        RouterConfig(engines=(EngineAddress("a", "http://a"),), pooling_servers=(url,))


def test_a_server_is_named_once() -> None:
    with pytest.raises(BadRequest, match="pooling-servers"):
        RouterConfig(engines=(EngineAddress("a", "http://a"),), pooling_servers=("http://b", "http://b/"))
