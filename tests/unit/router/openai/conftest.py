"""vLLM's serving layer over an engine that answers by script, behind two routers: fast path and vLLM's own path."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from tercet.cluster.model import resolve_model
from tercet.fleet import EngineFleet, Member
from tercet.fleet.admission import Gate
from tercet.fleet.membership import Membership
from tercet.protocol import BadRequest, Output, OutputStream, Request, TokenLogprob
from tercet.router import admin
from tercet.router.observe.metrics import Metrics
from tercet.router.router_app import RouterApp
from tercet.router.serve.service import Service
from tercet.settings import Limits
from tests.longest_wait import LONGEST_WAIT_S
from tests.own_metrics import own_metrics
from tests.unit.fakes import FakeEngine, stream_of
from tests.unit.router.conftest import shared_over

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MODEL = 'say "text":1'
CREATED = re.compile(r'"created":\d+')
Step = list[int] | str
PARSERS_TOKENS = (
    "<think>", "</think>", "<|python_tag|>", "<|tool_call_start|>", "<|tool_call_end|>", "[TOOL_CALLS]", "[ARGS]",
    "<tool_calls>", "</tool_calls>", "<tool_call>", "</tool_call>", "<tool_sep>", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>", "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>",
    "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>", "<\uff5ctool\u2581sep\uff5c>",
    "<ifm|think>", "</ifm|think>", "<mm:think>", "</mm:think>", "<assistant>", "</assistant>", "<response>",
    "</response>", "<0x0A>",
)  # fmt: skip


def logprobs_of(token_ids: Sequence[int], top: int | None) -> tuple[tuple[TokenLogprob, ...], ...] | None:
    """Numbers that depend on the token: it is among the ``top`` ones, or far below."""
    if top is None:
        return None
    found: list[tuple[TokenLogprob, ...]] = []
    for token in token_ids:
        own = 1 + token % 7 if token % 7 < top else 100 + token
        others = [rank for rank in range(1, top + 1) if rank != own]
        position = [TokenLogprob(token, -0.37 * own / (1 + token % 11), own)]
        position += [TokenLogprob((token * 31 + rank * 17) % 49000, -0.37 * rank, rank) for rank in others]
        found.append(tuple(position))
    return tuple(found)


class ScriptedEngine(FakeEngine):
    """Says what is in ``scripts`` under the request's id: lists of tokens, then a finish reason, or ``error``.

    After the first, each output waits until the client has let it go, or, of requests in ``free``, until ``all_taken``
    tells that vLLM's serving layer has what came before.
    """

    def __init__(self) -> None:
        super().__init__("scripted")
        self.scripts: dict[str, Sequence[Step]] = {}
        self.gates: dict[str, asyncio.Semaphore] = {}
        self.ended: dict[str, threading.Event] = {}
        self.said: dict[str, int] = {}
        self.free: set[str] = set()
        self.all_taken: Callable[[], bool] = lambda: True

    def expect(self, name: str, script: Sequence[Step], *, free: bool = False) -> None:
        """A request of this name is about to come."""
        self.scripts[name], self.gates[name] = script, asyncio.Semaphore(0)
        (self.free.add if free else self.free.discard)(name)

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
                ids = tuple(map(int, step))
                found = logprobs_of(ids, request.sampling_params.get("logprobs"))
                yield Output(ids, cast(Any, last) if is_last else None, logprobs=found)
                await self._next(name)
            raise BadRequest("the engine broke")  # an error that no other engine can help with
        finally:
            self.running -= 1
            self.ended.setdefault(name, threading.Event()).set()

    async def _next(self, name: str) -> None:
        if name not in self.free:
            await self.gate(name).acquire()
            return
        await asyncio.sleep(0)
        while not self.all_taken():
            await asyncio.sleep(0)


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
        self.chats: list[Any] = []
        self.responses: list[Any] = []

    def tokens(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def singly(self, text: str) -> list[Step]:
        """An output for each token of a text."""
        return [[token] for token in self.tokens(text)]

    def parse_with(self, tool: str | None = None, reasoning: str | None = None) -> None:
        """Have chat answers parsed by vLLM's parsers of these names. Raises if this tokenizer cannot be parsed."""
        parser = parser_of(self.tokenizer, tool, reasoning)
        for chat in self.chats:
            chat.parser_cls, chat._include_reasoning_tokens_details = parser, reasoning is not None
            chat.online_renderer.parser, chat.online_renderer.enable_auto_tools = parser, tool is not None
            chat.enable_auto_tools = tool is not None
        for serving in self.responses:
            serving.parser, serving.enable_auto_tools = parser, tool is not None

    def full(self) -> bool:
        """Whether a client of the fast path reads less than is written."""
        return any(connection.flow.write_paused for connection in self.servers["fast"].server_state.connections)

    def let_go(self, name: str, count: int = 1) -> None:
        gate = self.engine.gate(name)  # of this request: the next one may have the same name
        for _ in range(count):
            self.loop.call_soon_threadsafe(gate.release)

    def ask(
        self, router: str, path: str, body: dict[str, Any], script: Sequence[Step],
        free: bool = False, /, **headers: str,
    ) -> tuple[int, str]:  # fmt: skip
        """Status and events of one stream; each output is let go when the client has the one before, or at once."""
        self.number += 1
        name = headers.pop("x-request-id", f"r{self.number}")
        self.engine.expect(name, script, free=free)
        given = {"x-request-id": name, **headers}
        events: list[str] = []
        with httpx.stream("POST", self.urls[router] + path, json=body, headers=given, timeout=LONGEST_WAIT_S) as answer:
            if answer.status_code != 200:
                return answer.status_code, answer.read().decode()
            for line in answer.iter_lines():
                if not line:
                    continue
                events.append(CREATED.sub('"created":0', line))
                if '"role"' not in line:
                    self.let_go(name)
        return answer.status_code, "\n".join(events)

    def ask_both(self, path: str, body: dict[str, Any], script: Sequence[Step], free: bool = False) -> tuple[str, str]:
        """The events of one stream as the fast path writes them, and as vLLM's own does."""
        name = f"both{self.number}"
        fast, stock = (
            self.ask(router, path, body, script, free, **{"x-request-id": name}) for router in ("fast", "stock")
        )
        assert fast[0] == stock[0] == 200, (fast, stock)
        return fast[1], stock[1]


def body_of(path: str, most: int = 300, **more: Any) -> dict[str, Any]:
    """The body of a stream of so many tokens at most."""
    prompt = {"prompt": "Hello"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "Hello"}]}
    return {"model": MODEL, "stream": True, "max_tokens": most, **prompt, **more}


def parser_of(tokenizer: Any, tool: str | None, reasoning: str | None) -> Any:
    """vLLM's class of parsers of these names."""
    from vllm.parser import ParserManager

    get: Any = ParserManager.get_parser
    more = {"tokenizer": tokenizer} if "tokenizer" in inspect.signature(get).parameters else {}  # not in vLLM 0.31
    return get(
        tool_parser_name=tool, reasoning_parser_name=reasoning, enable_auto_tools=tool is not None, model_name="m",
        **more,
    )  # fmt: skip


def within(app: Any, router: Any) -> Any:
    """What Starlette does before its layers."""

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        scope["app"] = app
        await router(scope, receive, send)

    return serve


def _all_taken(engine_client: Any) -> Callable[[], bool]:
    """Whether streams of vLLM's own have taken every output: what waits would become one chunk with the next."""
    ready, states = engine_client.engine_core._ready, engine_client.output_processor.request_states
    return lambda: ready.empty() and all(state.queue.output is None for state in states.values())


async def _serve(
    routers: LiveRouters, model: str, membership: Membership, ready: threading.Event, stop: asyncio.Event
) -> None:
    import uvicorn
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    from tercet.router.openai import openai_server as vllm
    from tercet.wire.serving.client_connection import StreamingProtocol

    more = ("--enable-prompt-tokens-details", "--allowed-origins", '["http://browser"]', "--enable-request-id-headers")
    args = vllm.server_args(model, [MODEL], "127.0.0.1", 0, 512, more)
    client = vllm.engine_client_over(routers.service, args)
    stock = await vllm.openai_server(args, client)
    assert stock.fast is None
    server = vllm.with_fast_path(stock, args, client)
    admin.install(server.app, shared_over(routers.service, membership), ["m"])
    assert server.fast is not None
    gate = Gate(Limits(), routers.service.fleet, routers.metrics)
    routers.tokenizer, routers.processor = client.renderer.tokenizer, client.output_processor
    routers.engine.all_taken = _all_taken(client)
    state, prepared = server.app.state, [cast(Any, each.prepare).__self__ for each in server.fast._routes.values()]
    servings = [state.openai_serving_chat, state.anthropic_serving_messages, *prepared]
    routers.chats = [serving for serving in servings if hasattr(serving, "parser_cls")]
    routers.responses = [state.openai_serving_responses, *(each for each in prepared if hasattr(each, "parser"))]
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
    with live_routers(resolve_model("smollm2", lambda _: None)) as live:
        yield live


@pytest.fixture(scope="session")
def agent_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose tokenizer has the special tokens that parsers of tools and reasoning look for."""
    given, folder = Path(resolve_model("smollm2", lambda _: None)), tmp_path_factory.mktemp("agent-model")
    for file in given.iterdir():
        if file.name != "tokenizer.json":
            (folder / file.name).symlink_to(file)
    tokenizer = json.loads((given / "tokenizer.json").read_text())
    first = 1 + max(*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"]))
    common = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    for token_id, content in enumerate(PARSERS_TOKENS, first):
        tokenizer["added_tokens"].append({"id": token_id, "content": content, **common})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return str(folder)


@pytest.fixture(scope="module")
def agent_routers(agent_model: str) -> Iterator[LiveRouters]:
    """Of that model."""
    with live_routers(agent_model) as live:
        yield live


@pytest.fixture
def parsing(agent_routers: LiveRouters) -> Iterator[LiveRouters]:
    """Of that model, too; afterwards answers have no parser again."""
    yield agent_routers
    agent_routers.parse_with()


@contextmanager
def live_routers(model: str) -> Generator[LiveRouters]:
    """The two routers, while entered."""
    loop = asyncio.new_event_loop()
    with own_metrics():
        engine = ScriptedEngine()
        fleet = EngineFleet([Member("scripted", "http://nowhere", "both", engine)])
        metrics = Metrics()
        routers = LiveRouters(loop, engine, Service(fleet, "data_parallel", {}, metrics), metrics)
        membership = Membership(fleet, lambda *_: pytest.fail("nobody joins"))
        ready, stop = threading.Event(), asyncio.Event()
        failed: list[BaseException] = []

        def run() -> None:
            try:
                loop.run_until_complete(_serve(routers, model, membership, ready, stop))
            except BaseException as error:
                failed.append(error)
                ready.set()

        thread = threading.Thread(target=run)
        thread.start()
        assert ready.wait(600), "the routers do not start"
        if failed:
            raise failed[0]
        yield routers
        loop.call_soon_threadsafe(stop.set)
        thread.join(LONGEST_WAIT_S)
        assert not failed
