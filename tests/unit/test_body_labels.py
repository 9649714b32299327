"""Labels of bodies and doubled headers, on each route of each server: what is read behind was limited before."""

# pyright: reportAttributeAccessIssue=false
# Modules made from .proto files have no types.

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProtocolConfiguration
from fastapi import FastAPI, Request, UploadFile

from tercet.cluster.ports import free_ports
from tercet.fleet.admission import Gate
from tercet.protocol import TercetError
from tercet.protocol.headers import CLIENTS, GENERATING, POOLING, TRANSCRIBING
from tercet.router import admin
from tercet.router.observe.metrics import Metrics
from tercet.router.pooling import PoolingServers
from tercet.router.router_app import RouterApp
from tercet.settings import Limits
from tercet_gateway.endpoint_picker import Endpoints
from tercet_gateway.exchange import Exchange, refusal
from tercet_gateway.gateway_settings import ModelBackend, ModelRouterConfig, SidecarConfig
from tercet_gateway.model_router import model_router
from tercet_gateway.sidecar import sidecar
from tercet_lab.prompt_texts import PromptTexts
from tercet_lab.sim import load_profile
from tercet_lab.sim.sim_server import ServerConfig
from tercet_lab.sim.sim_server import serving as simulated
from tercet_lab.small_openai import small_app
from tests.conformance.envoy_side import DUPLEX
from tests.servers import served

from .router.conftest import LiveRouter, checkpoint, metrics, router

__all__ = ["checkpoint", "metrics", "router"]  # fixtures
Headers = list[tuple[str, str]]
TYPE, ENCODING = "content-type", "content-encoding"
JSON, TEXT = (TYPE, "application/json"), (TYPE, "text/plain")
REFUSED: tuple[tuple[Headers, int], ...] = (
    ([JSON, (ENCODING, "deflate")], 415),
    ([JSON, (ENCODING, "identity, GZIP")], 415),
    ([JSON, (ENCODING, "identity"), (ENCODING, "br")], 400),
    ([JSON, TEXT], 400),
    ([TEXT, JSON], 400),
    ([(TYPE, "application/json, text/plain")], 400),
    ([TEXT], 415),
    ([(TYPE, "application/a+json")], 415),
    ([(TYPE, "multipart/form-data; boundary=a"), JSON], 400),
)
ACCEPTED: tuple[Headers, ...] = (
    [JSON, JSON], [(TYPE, "APPLICATION/json ;charset=utf-8"), JSON, (ENCODING, ""), (ENCODING, "Identity,")],
    [(TYPE, "application/octet-stream")],
)  # fmt: skip
OPENAI = sorted(GENERATING | POOLING | {"/tokenize", "/v1/load_lora_adapter", "/v1/nothing"})
VERBS = ("prep_recv", "remote_send", "start_generate", "connect", "abort", "release", "sequences/x/move")
PASSED = ("/v1/completions", "/v1/responses", "/v1/embeddings", "/tokenize")
FILE = b'--a\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\nsound\r\n--a--\r\n'


class Asker:
    """Sends labelled bodies, and requires that each is refused."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def ask(self, path: str, headers: Headers, content: bytes = b'{"model": "m"}', method: str = "POST") -> Any:
        return await self._client.request(method, path, content=content, headers=httpx.Headers(headers))

    async def must_refuse(self, path: str, method: str = "POST") -> None:
        for headers, status in REFUSED:
            answer = await self.ask(path, headers, method=method)
            assert answer.status_code == status, (path, headers, answer.text)
            name = ENCODING if (ENCODING in dict(headers)) else TYPE
            assert name in answer.text


@asynccontextmanager
async def asking(app: Any = None, url: str = "http://localhost") -> AsyncGenerator[Asker]:
    async with httpx.AsyncClient(transport=app and httpx.ASGITransport(app), base_url=url) as client:
        client.headers.pop(TYPE, None)
        yield Asker(client)


class Behind:
    """A server behind a proxy: it keeps what it is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[list[tuple[bytes, bytes]], bytes]] = []

    async def handle(self, http: web.Request) -> web.Response:
        if http.path == "/v1/models":
            return web.json_response({"data": [{"id": "m"}]})
        body = await http.read()
        if body:
            self.sent.append(([(name.lower(), value) for name, value in http.raw_headers], body))
        return web.json_response({})

    def labels(self) -> list[tuple[bytes, bytes]]:
        return [each for each in self.sent[-1][0] if each[0] in (TYPE.encode(), ENCODING.encode())]


@asynccontextmanager
async def behind() -> AsyncGenerator[tuple[Behind, str]]:
    found, app = Behind(), web.Application()
    app.add_routes([web.route("*", "/{path:.*}", found.handle)])
    async with served(app) as url:
        yield found, url


PLAIN = [(TYPE.encode(), b"application/json")]


# ---- the router ------------------------------------------------------------------------------------------------


class VLLM:
    """An application that reads bodies as vLLM's does; ``read`` has the JSON that it has parsed."""

    def __init__(self) -> None:
        self.read: list[Any] = []
        self.app = FastAPI()

        @self.app.post("/v1/audio/transcriptions")
        async def transcribe(file: UploadFile) -> None:
            self.read.append((await file.read()).decode())

        @self.app.api_route("/raw", methods=["POST", "GET", "DELETE"])
        async def raw(request: Request) -> None:
            if await request.body():
                self.read.append(await request.json())

        @self.app.post("/{path:path}")
        async def model(body: dict[str, Any]) -> None:
            self.read.append(body)


@pytest.fixture
def vllm() -> VLLM:
    return VLLM()


def front_of(app: Any, router: LiveRouter, metrics: Metrics, items: int = 4096, **more: Any) -> RouterApp:
    gate = Gate(Limits(items=items), router.fleet, metrics)
    return RouterApp(app, None, gate, (), router.service.program_called, 100_000, **more)


async def test_a_router_refuses_them_on_each_route(vllm: VLLM, router: LiveRouter, metrics: Metrics) -> None:
    async with behind() as (server, url), PoolingServers([url]) as pooling:
        await pooling.look()
        async with asking(front_of(vllm.app, router, metrics, pooling=pooling)) as asker:
            for path in (*OPENAI, "/raw"):
                await asker.must_refuse(path)
            assert (vllm.read, server.sent) == ([], [])
            for headers in ACCEPTED:
                assert (await asker.ask("/v1/completions", headers)).status_code == 200
                assert (await asker.ask("/v1/embeddings", headers)).status_code == 200
                assert server.labels() == PLAIN
            assert vllm.read == [{"model": "m"}] * len(ACCEPTED)


WORDS = ("application/json", "text/plain", "application/a+json", "APPLICATION/JSON; charset=x", "",
         "multipart/form-data", "application/json, text/plain", "text/plain; a=application/json",
         "application/json,", "application/octet-stream")  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/completions", "/raw", "/v1/audio/transcriptions"])
async def test_no_labels_let_a_long_body_through(path: str, vllm: VLLM, router: LiveRouter, metrics: Metrics) -> None:
    content = json.dumps({"messages": [{}] * 50}).encode()
    labels = [(), *itertools.product([TYPE], WORDS)]
    encodings = [(), (ENCODING, "identity"), (ENCODING, "deflate"), (ENCODING, "")]
    async with asking(front_of(vllm.app, router, metrics, items=8)) as asker:
        for first, second, encoding in itertools.product(labels, labels, encodings):
            headers: Any = [each for each in (first, second, encoding) if each]
            assert (await asker.ask(path, headers, content)).status_code in (400, 415, 422)
        for method in ("GET", "DELETE", "OPTIONS"):
            await asker.ask(path, [JSON], content, method)
    assert vllm.read == []


async def test_a_form_with_a_file_is_read_where_it_is_one(vllm: VLLM, router: LiveRouter, metrics: Metrics) -> None:
    form = (TYPE, "Multipart/Form-Data; boundary=a")
    async with asking(front_of(vllm.app, router, metrics)) as asker:
        for path in sorted(TRANSCRIBING):
            assert (await asker.ask(path, [TEXT])).status_code == 415
            assert (await asker.ask(path, [JSON])).status_code in (200, 422)  # what the layer behind says
            assert (await asker.ask(path, [form, (ENCODING, "gzip")], FILE)).status_code == 415
            assert (await asker.ask(path, [form, (TYPE, "multipart/form-data; boundary=b")], FILE)).status_code == 400
        assert (await asker.ask("/v1/audio/transcriptions", [form, form], FILE)).status_code == 200
        assert vllm.read[-1] == "sound"
        assert (await asker.ask("/v1/audio/transcriptions", [form], b" " * 100_001)).status_code == 413


async def test_a_simulated_fleets_router_and_the_admin_routes_refuse_them(
    router: LiveRouter, metrics: Metrics, checkpoint: Path
) -> None:
    app = small_app(router.service, PromptTexts(checkpoint), ["m"], 1000)
    admin.install(app, router.shared, ["m"])
    routes = [(path, method) for path, methods in paths_of(app) for method in methods & {"POST", "PUT", "PATCH"}]
    assert {path for path, _ in routes} > {"/v1/completions", "/v1/chat/completions", "/tokenize", "/tercet/v1/program"}
    async with asking(front_of(app, router, metrics)) as asker:
        for path, method in routes:
            if not path.startswith("/tercet/v1/members"):
                await asker.must_refuse(path.replace("{", "").replace("}", ""), method)
        asked = b'{"prompt": "w1", "max_tokens": 1}'
        for headers in ACCEPTED:
            assert (await asker.ask("/v1/completions", headers, asked)).status_code == 200


def paths_of(app: FastAPI) -> list[tuple[str, set[str]]]:
    return [(each.path, each.methods) for each in app.routes if hasattr(each, "methods")]  # type: ignore[attr-defined]


# ---- proxies ---------------------------------------------------------------------------------------------------


@pytest.mark.processes
async def test_a_model_router_refuses_them() -> None:
    async with behind() as (server, url):
        config = ModelRouterConfig(routers=(ModelBackend(url),), port=0)
        async with model_router(config) as found, asking(url=f"http://127.0.0.1:{found.port}") as asker:
            for path in PASSED:
                await asker.must_refuse(path)
            for headers, status in REFUSED:  # a page's types are refused first
                answer = await asker.ask("/tercet/v1/backends", headers, b'{"routers": []}', "PUT")
                assert answer.status_code in (status, 415)
            assert server.sent == []
            for headers in ACCEPTED:
                assert (await asker.ask("/v1/completions", headers)).status_code == 200
                assert server.labels() == PLAIN
            form = [(TYPE, "multipart/form-data; boundary=a")]
            assert (await asker.ask("/v1/audio/transcriptions", form, FILE)).status_code == 200
            assert server.sent[-1][1] == FILE


@pytest.mark.processes
async def test_a_sidecar_refuses_them() -> None:
    async with behind() as (server, url):
        config = SidecarConfig(engine=url, port=0, connector="nixl")
        async with sidecar(config) as found, asking(url=f"http://127.0.0.1:{found.port}") as asker:
            for path in PASSED:
                await asker.must_refuse(path)
            assert server.sent == []
            for headers, path in itertools.product(ACCEPTED, ("/v1/completions", "/tokenize")):
                assert (await asker.ask(path, headers)).status_code == 200
                assert server.labels() == PLAIN


def exchanged(path: str, labels: Sequence[tuple[str, str]], method: str = "POST") -> Exchange:
    exchange = Exchange(1000)
    message = ProcessingRequest(protocol_config=ProtocolConfiguration(request_body_mode=DUPLEX))  # type: ignore[arg-type]
    for key, value in ((":method", method), (":path", path), *labels):
        message.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    exchange.receive(message)
    return exchange


@pytest.mark.parametrize(("labels", "status"), REFUSED)
def test_a_picker_refuses_them(labels: Headers, status: int) -> None:
    for path in sorted(CLIENTS - TRANSCRIBING):
        with pytest.raises(TercetError) as refused:
            exchanged(path, labels)
        reply: Any = refusal(refused.value, path)
        assert reply.immediate_response.status.code == status
        assert exchanged(path, labels, "GET").call is None


def test_a_picker_tells_the_engine_what_it_has_decided() -> None:
    exchange = exchanged("/v1/completions", ACCEPTED[0])
    first: Any = next(iter(exchange.picked(Endpoints(["10.0.0.1:8000"]))))
    told = {
        each.header.key: each.header.raw_value for each in first.request_headers.response.header_mutation.set_headers
    }
    assert told[TYPE] == b"application/json"
    exchange = exchanged("/v1/completions", [JSON])
    first = next(iter(exchange.picked(Endpoints(["10.0.0.1:8000"]))))
    assert TYPE not in {each.header.key for each in first.request_headers.response.header_mutation.set_headers}


# ---- engines ---------------------------------------------------------------------------------------------------


@pytest.mark.processes
async def test_a_simulated_engine_refuses_them() -> None:
    (port,) = free_ports("127.0.0.1", 1)
    url = f"http://127.0.0.1:{port}"
    config = ServerConfig(name="e", profile=load_profile("llama-3.1-8b-h100-tp1"), port=port, url=url, model="m")
    async with simulated(config), asking(url=url) as asker:
        for path in ("/v1/completions", "/tokenize", *(f"/tercet/v1/{verb}" for verb in VERBS)):
            for headers, status in REFUSED:
                answer = await asker.ask(path, headers)
                assert answer.status_code in (status, 415), (path, headers)
        labels = [
            (TYPE, "APPLICATION/json ;charset=utf-8"),
            (ENCODING, "Identity,"),
        ]  # aiohttp refuses all doubled ones
        assert (await asker.ask("/v1/completions", labels, b'{"prompt": "x", "max_tokens": 1}')).status_code == 200
