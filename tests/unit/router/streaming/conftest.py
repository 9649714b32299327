"""vLLM's serving layer over an engine that says what it is told to, behind two doors: the short way and vLLM's own."""

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
from tercet.fleet import EngineFleet, Member, Trace
from tercet.fleet.membership import Membership
from tercet.protocol import BadRequest, Output, OutputCallback, OutputStream, Request
from tercet.router import admin
from tercet.router.entrance import Entrance
from tercet.router.gate import Gate
from tercet.router.metrics import Metrics
from tercet.router.scheduling_file import SchedulingFile
from tercet.router.service import Service
from tercet.settings import EngineAddress, Limits, RouterConfig

from ...fakes import FakeEngine
from ..conftest import shared_over

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
        return OutputStream.of(self._generate(request))

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


class CountedStream(OutputStream):
    """Counts what its callback takes."""

    taken = 0
    callbacks = True
    _given: OutputCallback | None = None

    @property
    def callback(self) -> OutputCallback | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._take if self._given is not None and self.callbacks else None

    @callback.setter
    def callback(self, given: OutputCallback | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._given = given

    def _take(self, output: Output) -> bool:
        taken = self._given is not None and self._given(output)
        CountedStream.taken += taken
        return taken


class CountedService(Service):
    """Whose streams are counted."""

    def run(self, request: Request, trace: Trace, model: str = "", began: float | None = None) -> OutputStream:
        stream = super().run(request, trace, model, began)
        return CountedStream(lambda counted: stream.run(counted.put, counted.until_asked))


class Doors:
    """Two ports of one front door: ``short`` writes plain streams from templates, ``stock`` has vLLM do everything."""

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
        """Whether a client of the short way reads less than is written."""
        return any(connection.flow.write_paused for connection in self.servers["short"].server_state.connections)

    def let_go(self, name: str, count: int = 1) -> None:
        gate = self.engine.gate(name)  # of this request: the next one may have the same name
        for _ in range(count):
            self.loop.call_soon_threadsafe(gate.release)

    def ask(
        self, door: str, path: str, body: dict[str, Any], script: Sequence[Step], **headers: str
    ) -> tuple[int, str]:
        """Status and events of one stream; each output is let go when the client has the one before."""
        self.number += 1
        name = headers.pop("x-request-id", f"r{self.number}")
        self.engine.expect(name, script)
        given = {"x-request-id": name, **headers}
        events: list[str] = []
        with httpx.stream("POST", self.urls[door] + path, json=body, headers=given, timeout=30) as answer:
            if answer.status_code != 200:
                return answer.status_code, answer.read().decode()
            for line in answer.iter_lines():
                if not line:
                    continue
                events.append(CREATED.sub('"created":0', line))
                if '"role"' not in line:
                    self.let_go(name)
        return answer.status_code, "\n".join(events)


def within(app: Any, entrance: Any) -> Any:
    """What Starlette does before its layers."""

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        scope["app"] = app
        await entrance(scope, receive, send)

    return serve


async def _serve(doors: Doors, membership: Membership, ready: threading.Event, stop: asyncio.Event) -> None:
    import uvicorn
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app

    from tercet.router import server
    from tercet.router.streaming import StreamingProtocol, StreamStats, short_way

    config = RouterConfig(
        model=resolve_model("smollm2", lambda _: None), served_model_name="say \"text\":1", program="data_parallel",
        engines=(EngineAddress("scripted", "http://nowhere"),),
    )  # fmt: skip
    args = server._vllm_args(config, 512)
    client = server._engine_client(args, doors.service)
    app = build_app(args, await client.get_supported_tasks(), client.model_config)
    admin.install(
        app,
        admin.State(
            doors.service, shared_over(doors.service, membership, doors.metrics), SchedulingFile(doors.service.fleet)
        ),
    )
    await init_app_state(client, app.state, args, await client.get_supported_tasks())
    stock = app.middleware_stack or app.build_middleware_stack()
    stats = StreamStats(client.logger_manager)
    short = short_way(stock, app.state, args, client, stats, doors.service.program_called)
    assert short is not stock
    gate = Gate(Limits(), doors.service.fleet, doors.metrics)
    doors.tokenizer, doors.processor = client.renderer.tokenizer, client.output_processor
    running: list[tuple[uvicorn.Server, asyncio.Task[None]]] = []
    with ExitStack() as stack:
        for name, inner, protocol in (("short", short, StreamingProtocol), ("stock", stock, HttpToolsProtocol)):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # so that a client can fall behind
            sock.bind(("127.0.0.1", 0))
            doors.urls[name] = f"http://127.0.0.1:{sock.getsockname()[1]}"
            door = within(app, Entrance(inner, gate, [], 100_000))
            web = uvicorn.Server(uvicorn.Config(door, http=protocol, log_level="warning", lifespan="off"))
            doors.servers[name] = web
            running.append((web, asyncio.create_task(web.serve([sock]))))
        while not all(web.started for web, _ in running):
            await asyncio.sleep(0.01)
        ready.set()
        await stop.wait()
        for web, _ in running:
            web.should_exit = True
        await asyncio.gather(*(task for _, task in running))
        client.shutdown()


@pytest.fixture(scope="module", params=[True, False], ids=["at once", "waited for"])
def doors(request: pytest.FixtureRequest) -> Iterator[Doors]:
    loop = asyncio.new_event_loop()
    before = set(prometheus_client.REGISTRY._collector_to_names)
    engine = ScriptedEngine()
    CountedStream.taken, CountedStream.callbacks = 0, request.param
    fleet = EngineFleet([Member("scripted", "http://nowhere", "both", engine)])
    metrics = Metrics()
    doors = Doors(loop, engine, CountedService(fleet, "data_parallel", {}, metrics), metrics)
    membership = Membership(fleet, lambda *_: pytest.fail("nobody joins"))
    ready, stop = threading.Event(), asyncio.Event()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            loop.run_until_complete(_serve(doors, membership, ready, stop))
        except BaseException as error:
            failed.append(error)
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait(120)
    if failed:
        raise failed[0]
    yield doors
    assert bool(CountedStream.taken) is request.param
    loop.call_soon_threadsafe(stop.set)
    thread.join(30)
    for collector in set(prometheus_client.REGISTRY._collector_to_names) - before:
        prometheus_client.REGISTRY.unregister(collector)
    assert not failed
