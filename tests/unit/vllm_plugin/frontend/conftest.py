"""vLLM's serving layer over an engine that answers by script, behind two routers: fast path and vLLM's own path."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, cast

import httpx
import prometheus_client
import pytest

from tercet.cluster.model import resolve_model
from tercet.fleet import EngineFleet, Member
from tercet.fleet.admission import Gate
from tercet.fleet.membership import Membership
from tercet.protocol import BadRequest, Output, OutputStream, Request
from tercet.router import admin
from tercet.router.metrics import Metrics
from tercet.router.router_app import RouterApp
from tercet.router.service import Service
from tercet.router.service_programs import ServicePrograms
from tercet.settings import Limits
from tests.unit.fakes import FakeEngine, stream_of
from tests.unit.router.conftest import shared_over

CREATED = re.compile(r'"created":\d+')
Step = list[int] | str


class ScriptedEngine(FakeEngine):
    """Says what is in ``scripts`` under the request's id: lists of tokens, then a finish reason, or ``error``.

    After the first, each output waits until the client has let it go.
    """

    def __init__(self) -> None:
        super().__init__("scripted")
        self.scripts: dict[str, Sequence[Step]] = {}
        self.gates: dict[str, asyncio.Semaphore] = {}
        self.ended: dict[str, threading.Event] = {}
        self.said: dict[str, int] = {}

    def expect(self, name: str, script: Sequence[Step]) -> None:
        """A request of this name is about to come."""
        self.scripts[name], self.gates[name] = script, asyncio.Semaphore(0)

    def gate(self, name: str) -> asyncio.Semaphore:
        return self.gates[name]

    def start_generate(self, request: Request, begin: int = 0, output: Sequence[int] = ()) -> OutputStream:
        return stream_of(self._generate(request))

    async def _generate(self, request: Request) -> AsyncGenerator[Output, None]:
        name = request.headers["x-request-id"]
        *steps, last = self.scripts[name]
        self.running += 1
        try:
            for index, step in enumerate(steps):
                is_last = index == len(steps) - 1 and last != "error"
                self.said[name] = index + 1
                yield Output(tuple(map(int, step)), cast(Any, last) if is_last else None)
                await self.gate(name).acquire()
            raise BadRequest("the engine broke")  # an error that no other engine can help with
        finally:
            self.running -= 1
            self.ended.setdefault(name, threading.Event()).set()


class LiveRouters:
    """Two ports of one router: ``fast`` writes plain streams itself, ``stock`` has vLLM do everything."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, engine: ScriptedEngine, service: Service, metrics: Metrics
    ) -> None:
        self.loop, self.engine, self.service, self.metrics = loop, engine, service, metrics
        self.urls: dict[str, str] = {}
        self.servers: dict[str, Any] = {}
        self.number = 0
        self.tokenizer: Any = None
        self.processor: Any = None

    def tokens(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def full(self) -> bool:
        """Whether a client of the fast path reads less than is written."""
        return any(connection.flow.write_paused for connection in self.servers["fast"].server_state.connections)

    def let_go(self, name: str, count: int = 1) -> None:
        gate = self.engine.gate(name)  # of this request: the next one may have the same name
        for _ in range(count):
            self.loop.call_soon_threadsafe(gate.release)

    def ask(
        self, router: str, path: str, body: dict[str, Any], script: Sequence[Step], **headers: str
    ) -> tuple[int, str]:
        """Status and events of one stream; each output is let go when the client has the one before."""
        self.number += 1
        name = headers.pop("x-request-id", f"r{self.number}")
        self.engine.expect(name, script)
        given = {"x-request-id": name, **headers}
        events: list[str] = []
        with httpx.stream("POST", self.urls[router] + path, json=body, headers=given, timeout=30) as answer:
            if answer.status_code != 200:
                return answer.status_code, answer.read().decode()
            for line in answer.iter_lines():
                if not line:
                    continue
                events.append(CREATED.sub('"created":0', line))
                if '"role"' not in line:
                    self.let_go(name)
        return answer.status_code, "\n".join(events)


def within(app: Any, router: Any) -> Any:
    """What Starlette does before its layers."""

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        scope["app"] = app
        await router(scope, receive, send)

    return serve


async def _serve(routers: LiveRouters, membership: Membership, ready: threading.Event, stop: asyncio.Event) -> None:
    import uvicorn
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    from tercet.vllm_plugin.frontend import openai_server as vllm
    from tercet.wire.serving.client_connection import StreamingProtocol

    model = resolve_model("smollm2", lambda _: None)
    more = ("--enable-prompt-tokens-details",)
    args = vllm.server_args(model, ['say "text":1'], "127.0.0.1", 0, 512, more)
    client = vllm.engine_client_over(ServicePrograms(routers.service), args)
    stock = await vllm.openai_server(args, client)
    assert stock.fast is None
    server = vllm.with_fast_path(stock, args, client)
    admin.install(server.app, shared_over(routers.service, membership), ["m"])
    assert server.fast is not None
    gate = Gate(Limits(), routers.service.fleet, routers.metrics)
    routers.tokenizer, routers.processor = client.renderer.tokenizer, client.output_processor
    running: list[tuple[uvicorn.Server, asyncio.Task[None]]] = []
    with ExitStack() as stack:
        for name, fast, protocol in (
            ("fast", server.fast, StreamingProtocol),
            ("stock", stock.fast, HttpToolsProtocol),
        ):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # so that a client can fall behind
            sock.bind(("127.0.0.1", 0))
            routers.urls[name] = f"http://127.0.0.1:{sock.getsockname()[1]}"
            front = RouterApp(server.layers, fast, gate, (), routers.service.program_called, 100_000)
            router = within(server.app, front)
            web = uvicorn.Server(uvicorn.Config(router, http=protocol, log_level="warning", lifespan="off"))
            routers.servers[name] = web
            running.append((web, asyncio.create_task(web.serve([sock]))))
        while not all(web.started for web, _ in running):
            await asyncio.sleep(0.01)
        ready.set()
        await stop.wait()
        for web, _ in running:
            web.should_exit = True
        await asyncio.gather(*(task for _, task in running))
        client.shutdown()


@pytest.fixture(scope="module")
def routers() -> Iterator[LiveRouters]:
    loop = asyncio.new_event_loop()
    before = set(prometheus_client.REGISTRY._collector_to_names)
    engine = ScriptedEngine()
    fleet = EngineFleet([Member("scripted", "http://nowhere", "both", engine)])
    metrics = Metrics()
    routers = LiveRouters(loop, engine, Service(fleet, "data_parallel", {}, metrics), metrics)
    membership = Membership(fleet, lambda *_: pytest.fail("nobody joins"))
    ready, stop = threading.Event(), asyncio.Event()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            loop.run_until_complete(_serve(routers, membership, ready, stop))
        except BaseException as error:
            failed.append(error)
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait(120)
    if failed:
        raise failed[0]
    yield routers
    loop.call_soon_threadsafe(stop.set)
    thread.join(30)
    for collector in set(prometheus_client.REGISTRY._collector_to_names) - before:
        prometheus_client.REGISTRY.unregister(collector)
    assert not failed
