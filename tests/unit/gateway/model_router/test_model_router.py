"""A model router before routers that are simple ones here: what it passes on, refuses, and counts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tercet.protocol import BadRequest
from tercet.settings import Source, decode_settings
from tercet_gateway import model_router as server
from tercet_gateway.gateway_settings import ModelBackend, ModelRouterConfig
from tercet_gateway.model_router import ModelRouterServer, model_router
from tests.longest_wait import LONGEST_WAIT_S, until
from tests.servers import served

CHAT = "/v1/chat/completions"


class Router:
    """Serves models by name; ``answers`` lets its streams begin, ``go`` lets them end, ``breaks`` cuts them off.

    ``lists`` lets it say which models it has. With ``pace_s`` it writes more until it may end, at this pace.
    """

    def __init__(self, *models: str) -> None:
        self.models = models
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.seen: list[str] = []
        self.forwarded: list[list[str]] = []
        self.go = asyncio.Event()
        self.go.set()
        self.answers = asyncio.Event()
        self.answers.set()
        self.lists = asyncio.Event()
        self.lists.set()
        self.breaks = False
        self.pace_s = 0.0
        self.status = 200
        self.key = ""
        self.running = AsyncExitStack()
        self.url = ""

    async def start(self) -> Router:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/{path:.*}", self._post)
        port = int(self.url.rpartition(":")[2] or 0)
        self.url = await self.running.enter_async_context(served(app, port=port))
        return self

    async def _models(self, request: web.Request) -> web.Response:
        await self.lists.wait()
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "key"}}, status=401)
        return web.json_response({"object": "list", "data": [{"id": name, "root": self.url} for name in self.models]})

    async def _post(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(request.raw_path)
        self.forwarded.append(request.headers.getall("forwarded", []))
        self.bodies.append(await request.read())
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        await self.answers.wait()
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        answer = web.StreamResponse(headers={"content-type": "text/event-stream", "x-by": self.url})
        await answer.prepare(request)
        await answer.write(b'data: {"text": "first"}\n\n')
        while self.pace_s and not self.go.is_set():
            await answer.write(b'data: {"text": "more"}\n\n')
            await asyncio.sleep(self.pace_s)
        await self.go.wait()
        if self.breaks:
            assert request.transport is not None
            request.transport.abort()
            return answer
        await answer.write(b"data: [DONE]\n\n")
        return answer


class World:
    def __init__(self, server: ModelRouterServer, session: aiohttp.ClientSession) -> None:
        self.server, self.session = server, session
        self.url = f"http://127.0.0.1:{server.port}"

    async def ask(self, model: object = None, path: str = CHAT, **headers: str) -> tuple[int, str, str]:
        body = {} if model is None else {"model": model}
        async with self.session.post(self.url + path, json={**body, "text": "ä"}, headers=headers) as answer:
            return answer.status, answer.headers.get("x-by", ""), await answer.text()

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path, headers=headers) as answer:
            text = await answer.text()
            is_json = answer.headers.get("content-type", "").startswith("application/json")
            return answer.status, json.loads(text) if is_json else text

    async def put(self, routers: object, **headers: str) -> tuple[int, Any]:
        body = {"routers": routers}
        async with self.session.put(f"{self.url}/tercet/v1/backends", json=body, headers=headers) as answer:
            return answer.status, await answer.json()


@asynccontextmanager
async def world(*routers: Router, weights: tuple[float, ...] = (), **settings: Any) -> AsyncGenerator[World]:
    shares = weights or (1.0,) * len(routers)
    listed = tuple(ModelBackend(each.url, weight) for each, weight in zip(routers, shares, strict=True))
    config = ModelRouterConfig(routers=listed, port=0, poll_s=0.05, **settings)
    async with model_router(config) as server, aiohttp.ClientSession() as session:
        try:
            yield World(server, session)
        finally:
            for each in routers:
                each.go.set()
                await each.running.aclose()


async def two() -> tuple[Router, Router]:
    return await Router("a", "alias").start(), await Router("b").start()


async def test_requests_go_to_the_router_of_their_model_unchanged() -> None:
    a, b = await two()
    async with world(a, b) as found:
        for model, router in (("a", a), ("alias", a), ("b", b)):
            status, by, text = await found.ask(model, authorization="Bearer mine", x_tercet_program="p")
            assert (status, by) == (200, router.url)
            assert text == 'data: {"text": "first"}\n\ndata: [DONE]\n\n'
        assert [json.loads(body)["model"] for body in (*a.bodies, *b.bodies)] == ["a", "alias", "b"]
        assert a.headers[0]["authorization"] == "Bearer mine"
        assert (await found.get("/v1/models"))[1]["data"] == [
            {"id": name, "root": router.url} for name, router in (("a", a), ("alias", a), ("b", b))
        ]


@pytest.mark.parametrize(
    ("path", "error"),
    [
        (CHAT, {"message": "The model `c` does not exist.", "type": "NotFoundError", "param": "model", "code": 404}),
        ("/v1/messages", {"message": "The model `c` does not exist.", "type": "not_found_error"}),
    ],
)
async def test_an_unknown_model_is_refused_as_vllm_does(path: str, error: dict[str, Any]) -> None:
    async with world(*await two()) as found:
        status, _, text = await found.ask("c", path)
        assert (status, json.loads(text)["error"]) == (404, error)


async def test_refusals() -> None:
    async with world(*await two(), max_request_bytes=1000) as found:
        assert (await found.ask())[0] == 400
        assert (await found.ask(7))[0] == 400
        assert (await found.ask("a" * 2000))[0] == 413
        status, said = await found.get("/tercet/v1/engines")
        assert (status, "is served by the router of each model" in said["error"]["message"]) == (404, True)
        async with found.session.post(found.url + CHAT, data=b"{", headers={"content-type": "application/json"}) as bad:
            assert bad.status == 400


async def test_one_model_needs_no_name() -> None:
    a = await Router("a").start()
    async with world(a) as found:
        assert (await found.ask())[:2] == (200, a.url)


async def test_a_router_that_is_not_there_is_passed_over_and_taken_again() -> None:
    first, second = await Router("a").start(), await Router("a").start()
    async with world(first, second) as found:
        await first.running.aclose()
        assert {(await found.ask("a"))[:2] for _ in range(20)} == {(200, second.url)}
        await first.start()
        async with asyncio.timeout(LONGEST_WAIT_S):
            while (await found.ask("a"))[1] != first.url:
                await asyncio.sleep(0.01)
        await first.running.aclose()
        await second.running.aclose()
        status, _, text = await found.ask("a")
        assert (status, json.loads(text)["error"]["code"]) == (503, "engine_unreachable")
        async with asyncio.timeout(LONGEST_WAIT_S):
            while (await found.get("/health"))[0] != 503:
                await asyncio.sleep(0.01)
        assert (await found.get("/live"))[0] == 200


async def test_a_stream_that_is_cut_off_ends_with_an_error_and_counts() -> None:
    a, b = await two()
    a.breaks = True
    async with world(a, b) as found:
        status, _, text = await found.ask("a")
        assert status == 200
        assert '"code":"engine_unreachable"' in text
        assert text.endswith("data: [DONE]\n\n")
        b.status = 500
        assert (await found.ask("b"))[0] == 500
        shown = (await found.get("/tercet/v1/backends"))[1]
        assert [(each["requests"], each["failures"], each["in_flight"]) for each in shown] == [(1, 1, 0), (1, 1, 0)]
        metrics = (await found.get("/metrics"))[1]
        assert f'tercet_model_router_requests_total{{model="b",router="{b.url}",status="500"}} 1.0' in metrics


@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_leaves_is_not_a_failure_of_its_router(begun: bool) -> None:
    a = await Router("a").start()
    async with world(a) as found:
        a.go.clear()
        a.answers.clear()
        if begun:
            a.answers.set()
        asking = asyncio.create_task(found.ask("a"))
        await until(lambda: a.bodies and found.server.routes.backends[0].in_flight == 1)
        asking.cancel()
        await until(lambda: not found.server.routes.backends[0].in_flight)
        a.answers.set()
        assert found.server.routes.backends[0].failures == 0


async def test_weights_are_changed_while_streams_run() -> None:
    old, new = await Router("a").start(), await Router("a").start()
    async with world(old) as found:
        old.go.clear()
        running = asyncio.create_task(found.ask("a"))
        await until(lambda: old.bodies)
        status, shown = await found.put([{"url": new.url}, {"url": old.url, "weight": 0}])
        assert status == 200
        assert [(each["url"], each["weight"], each["in_flight"]) for each in shown] == [
            (new.url, 1, 0),
            (old.url, 0, 1),
        ]
        assert {(await found.ask("a"))[1] for _ in range(10)} == {new.url}
        await found.put([{"url": new.url}])  # what runs at the old one goes on
        old.go.set()
        assert (await running)[:2] == (200, old.url)
    await old.running.aclose()


@pytest.mark.parametrize(
    ("routers", "field"), [([], "routers"), ([{"url": "nonsense"}], "url"), ([{"url": "http://a", "weight": -1}], "")]
)
async def test_routers_that_cannot_be(routers: Any, field: str) -> None:
    a = await Router("a").start()
    async with world(a) as found:
        status, said = await found.put(routers)
        assert status == 400
        assert field in (said["error"]["param"] or "")
        assert [each["url"] for each in (await found.get("/tercet/v1/backends"))[1]] == [a.url]


async def test_a_list_of_routers_is_no_longer_than_any_body() -> None:
    a = await Router("a").start()
    async with world(a, max_request_bytes=1000) as found:
        status, said = await found.put([{"url": a.url}, {"url": "http://b/" + "x" * 1000}])
        assert status == 413
        assert "--max-request-bytes" in said["error"]["message"]
        assert [each["url"] for each in (await found.get("/tercet/v1/backends"))[1]] == [a.url]


async def test_the_admin_key_opens_the_list_and_nothing_else_does() -> None:
    a = await Router("a").start()
    async with world(a, admin_key="key") as found:
        assert (await found.put([{"url": a.url}]))[0] == 401
        assert (await found.put([{"url": a.url}], authorization="Bearer key"))[0] == 200
        assert (await found.ask("a"))[0] == 200
    async with world(await a.start()) as found:
        assert (await found.put([{"url": a.url}], origin="http://elsewhere"))[0] == 403
        assert (await found.put([{"url": a.url}], host="elsewhere"))[0] == 403


async def test_routers_that_ask_for_keys() -> None:
    a = Router("a")
    a.key = "theirs"
    await a.start()
    async with world(a, router_key="theirs") as found:
        assert (await found.get("/v1/models"))[0] == 401
        assert [each["id"] for each in (await found.get("/v1/models", authorization="Bearer theirs"))[1]["data"]] == [
            "a"
        ]


@pytest.mark.parametrize(
    ("routers", "said"),
    [
        ([], "is empty; give at least one router"),
        (["http://127.0.0.1:1", "http://127.0.0.1:1/"], "is given twice"),
        (["http://127.0.0.1:1,weight=x"], "is not a number"),
        (["http://127.0.0.1:1,weight=-1"], "weight"),
        (["127.0.0.1:1"], "is not a URL"),
    ],
)
def test_settings_that_cannot_be(routers: list[str], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        decode_settings(ModelRouterConfig, Source({"routers": routers}))


async def test_a_router_whose_addition_was_interrupted_is_polled_and_may_be_removed() -> None:
    old, new = await Router("a").start(), await Router("b").start()
    new.lists.clear()
    async with world(old) as found:
        asking = asyncio.create_task(found.put([{"url": old.url}, {"url": new.url}]))
        await until(lambda: len(found.server.routes.backends) == 2)
        asking.cancel()
        await asyncio.wait({asking})
        new.lists.set()
        await until(lambda: found.server.routes.backends[1].answers)
        assert (await found.ask("b"))[:2] == (200, new.url)
        assert (await found.put([{"url": old.url}]))[0] == 200
        assert [each.url for each in found.server.routes.backends] == [old.url]
    await new.running.aclose()


@pytest.mark.parametrize("begun", [False, True])
async def test_requests_of_a_router_that_stands_still_end(begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    a = await Router("a").start()
    async with world(a) as found:
        a.go.clear()
        if not begun:
            a.answers.clear()
        asking = asyncio.create_task(found.ask("a"))
        await until(lambda: a.bodies)
        a.lists.clear()
        monkeypatch.setattr(server, "POLL_TIMEOUT", aiohttp.ClientTimeout(total=0.1))
        status, _, text = await asyncio.wait_for(asking, LONGEST_WAIT_S)
        assert status == (200 if begun else 503)
        assert '"code":"engine_unreachable"' in text
        await until(lambda: not found.server.routes.backends[0].in_flight)
        assert found.server.routes.backends[0].failures == 1
        a.answers.set()
        a.lists.set()


async def test_a_stream_of_an_overloaded_router_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers no poll, so it gets no new request; what it sends is passed on."""
    a = await Router("a").start()
    async with world(a) as found:
        a.pace_s = 0.02
        a.go.clear()
        asking = asyncio.create_task(found.ask("a"))
        await until(lambda: a.bodies)
        a.lists.clear()
        monkeypatch.setattr(server, "POLL_TIMEOUT", aiohttp.ClientTimeout(total=0.2))
        await until(lambda: found.server.routes.backends[0].silent >= 3 * server.SILENT_POLLS)
        assert (await found.ask("a"))[0] == 503
        a.go.set()
        status, _, text = await asking
        assert (status, text.endswith("data: [DONE]\n\n")) == (200, True)
        a.lists.set()
