"""The verbs at the edge, over a core that answers when it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from vllm import exceptions
from vllm.exceptions import GenerationError, VLLMValidationError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import RequestOutputCollector

from tercet.aio.tasks import TaskSet
from tercet.engine.agents import AgentCalls
from tercet.engine.edge import Edge
from tercet.engine.interface import EngineDescription, KeyedPrompt, PinnedPrefix
from tercet.engine.liveness_probe import LivenessProbe
from tercet.engine.verbs import remote_send
from tercet.protocol import (
    BadRequest,
    EngineError,
    KVAddrInfo,
    Output,
    RankAddress,
    TercetError,
    UnknownSequence,
    Usage,
    content_of,
    packed,
)
from tercet.protocol.wire import ReleaseCall, RemoteSendCall
from tercet.transport import Push, SendDone
from tercet.vllm_plugin.core.connector_messages import TercetParams
from tercet.vllm_plugin.core.core_methods import CoreCalls, end_send, push_cached, push_longest
from tercet.vllm_plugin.edge.llm_requests import LLMGeneration, LLMRequest
from tercet.vllm_plugin.endpoint import TercetEndpoints
from tercet.vllm_plugin.start.plugin_settings import MAX_REQUEST_BYTES, parse_settings
from tercet.wire.callers import Callers, Prover, digest_of
from tercet.wire.serving import verb_routes
from tercet.wire.serving.http_server import call_in
from tercet.wire.serving.server_access import ASKS_FOR_A_KEY
from tercet.wire.serving.verb_routes import EventStream, VerbServer
from tests.longest_wait import LONGEST_WAIT_S

from .tiny_engine import LAYOUT, NO_ADAPTERS, FakeAgent

INFO = KVAddrInfo("f" * 32, "decode-0", 0, 48, "tcp", (RankAddress(0, ("tcp://127.0.0.1:9000",)),), LAYOUT)
PHASES = "asking", "cached", "computing", "computed", "asking for the longest", "longest"
SEND = RemoteSendCall(prompt=[1] * 48, seq_id="s", kv_addr_info=INFO, begin=0)


class Core(CoreCalls):
    """Has all KV cached, or none; what is asked of one that ``hangs`` does not come back."""

    def __init__(self, cached: bool, hangs: bool) -> None:
        self.cached, self.hangs = cached, hangs
        self.asked = asyncio.Event()
        self.ended: list[str] = []

    async def call(self, method: Any, *args: Any) -> Any:
        if method is end_send:
            self.ended.append(args[0])
            return None
        assert method in (push_cached, push_longest)
        self.asked.set()
        if self.hangs:
            await asyncio.Event().wait()
        if method is push_longest:
            send = args[1]
            return PinnedPrefix(32, [Push(send.send_id, 0, (1, 2))]) if self.cached else PinnedPrefix(send.begin, [])
        return [Push(args[1].send_id, 0, (1, 2, 3))] if self.cached else None


class Client:
    """As much of ``AsyncLLM`` as a send needs: ``computes`` says whether the forward pass ends."""

    def __init__(self, computes: bool) -> None:
        self._computes = computes
        self.log_stats = False
        self.output_processor = SimpleNamespace(update_scheduler_stats=lambda stats: None)
        model = SimpleNamespace(get_vocab_size=lambda: 1000, max_model_len=512, served_model_name="m")
        self.renderer = SimpleNamespace(mm_processor=None)
        self.vllm_config = SimpleNamespace(model_config=model, lora_config=None)
        self.generating = asyncio.Event()
        self.left = False

    async def generate(self, *_: Any, **__: Any) -> AsyncGenerator[Any]:
        self.generating.set()
        try:
            if not self._computes:
                await asyncio.Event().wait()
            choice = SimpleNamespace(token_ids=[1], finish_reason="length", stop_reason=None, logprobs=None)
            yield SimpleNamespace(outputs=[choice], num_cached_tokens=0, prompt_logprobs=None)
        finally:
            self.left = True


class Phase:
    """A send that got as far as ``phase`` and no further."""

    def __init__(self, phase: str) -> None:
        self.core = Core(cached=phase in ("cached", "longest"), hangs=phase in ("asking", "asking for the longest"))
        self.client = Client(computes=phase == "computed")
        about = EngineDescription([["tcp://127.0.0.1:1"]], [], [], LAYOUT, "token", 60.0, 1.0, None)
        client: Any = self.client
        self.agent = FakeAgent()
        probe = LivenessProbe(partial(self.core.call, "status"), [], [])
        generation = LLMGeneration(client, "token")
        self.edge = Edge("e", about, self.core, generation, AgentCalls([self.agent]), NO_ADAPTERS, probe)

    async def begin(self, phase: str) -> asyncio.Task[Any]:
        call = msgspec.structs.replace(SEND, cached_only="longest" in phase)
        sending = asyncio.create_task(remote_send(self.edge, call))
        await self.core.asked.wait()
        if phase in ("computing", "computed"):
            await self.client.generating.wait()
        if phase == "computed":
            while not self.client.left:
                await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not sending.done()
        return sending

    async def require_back(self) -> None:
        tasks: TaskSet = self.edge.tasks
        assert await tasks.wait(LONGEST_WAIT_S)
        assert len(self.core.ended) == 1
        assert self.agent.cancelled == self.core.ended, "before the blocks are unpinned"
        assert not len(self.edge.work)
        assert not self.edge.reports._sends
        if self.client.generating.is_set():
            assert self.client.left
        self.edge.reports._task.cancel()


@pytest.mark.parametrize("phase", PHASES)
async def test_an_abort_ends_a_send_wherever_it_is(phase: str) -> None:
    found = Phase(phase)
    sending = await found.begin(phase)
    assert await found.edge.abort("s")
    with pytest.raises(UnknownSequence, match="s was aborted while its KV was being sent"):
        await asyncio.wait_for(sending, LONGEST_WAIT_S)
    assert not await found.edge.abort("s")
    await found.require_back()


@pytest.mark.parametrize("phase", PHASES)
async def test_a_caller_that_leaves_ends_a_send_wherever_it_is(phase: str) -> None:
    found = Phase(phase)
    sending = await found.begin(phase)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    await found.require_back()


async def test_an_abort_of_one_sequence_leaves_the_others_sends() -> None:
    found = Phase("cached")
    sending = await found.begin("cached")
    other = asyncio.create_task(remote_send(found.edge, msgspec.structs.replace(SEND, seq_id="other")))
    await asyncio.sleep(0.01)
    await found.edge.abort("other")
    with pytest.raises(UnknownSequence):
        await other
    assert not sending.done()
    sending.cancel()
    await asyncio.wait([sending])
    assert await found.edge.tasks.wait(LONGEST_WAIT_S)
    found.edge.reports._task.cancel()


async def test_a_send_of_cached_kv_alone_says_how_far_it_came_and_computes_nothing() -> None:
    found = Phase("longest")
    sending = await found.begin("longest")
    (pushed,) = found.agent.pushed
    assert (pushed.plan.end, pushed.plan.content) == (32, content_of(packed([1] * 32), None))
    found.edge.reports._sends[pushed.plan.send_id].take(SendDone(pushed.plan.send_id, 0, 8, 2, "host"))
    sent = await sending
    assert (sent.begin, sent.end, sent.bytes, sent.usage) == (0, 32, 8, Usage(cached=32))
    assert not found.client.generating.is_set()
    await found.require_back()


async def test_without_cached_kv_no_agent_is_called_and_nothing_is_computed() -> None:
    found = Phase("nothing")
    sent = await remote_send(found.edge, msgspec.structs.replace(SEND, begin=16, cached_only=True))
    assert (sent.begin, sent.end, sent.bytes, sent.usage) == (16, 16, 0, Usage())
    assert await found.edge.tasks.wait(LONGEST_WAIT_S)
    assert (found.agent.pushed, found.agent.cancelled, found.core.ended) == ([], [], [])
    assert not found.client.generating.is_set()
    assert not len(found.edge.work)
    found.edge.reports._task.cancel()


async def test_cached_only_has_no_first_token() -> None:
    found = Phase("nothing")
    with pytest.raises(BadRequest, match="cached_only: computes nothing"):
        await remote_send(found.edge, msgspec.structs.replace(SEND, cached_only=True, sample=True))
    found.edge.reports._task.cancel()


# How large the body of a verb may be, and what a caller is told of one that is larger.

MOST = 1000
PATHS = ("prep_recv", "remote_send", "start_generate", "connect", "abort", "release", "sequences/x/move", "adapters")


@pytest.fixture
def app() -> FastAPI:
    """An engine's server, of which the verbs are never reached."""
    found = FastAPI()
    TercetEndpoints().attach_router(found)
    verbs: Any = SimpleNamespace(incarnation="i")
    connections: Any = None
    taker = "this engine (max_request_bytes in kv_connector_extra_config)"
    found.state.tercet_verbs = VerbServer(verbs, connections, Callers(()), ASKS_FOR_A_KEY, taker, MOST)
    found.state.tercet_prefillers = None
    return found


async def sent(app: FastAPI, path: str, body: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.post(f"/tercet/v1/{path}", content=body)


async def in_parts(size: int, part: int = 100) -> Any:
    for _ in range(-(-size // part)):
        yield b" " * part


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_that_is_too_large_is_refused_with_the_limit(path: str, announced: bool, app: FastAPI) -> None:
    answer = await sent(app, path, b" " * (MOST + 1) if announced else in_parts(MOST + 100))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (413, "request_too_large")
    assert str(MOST) in error["message"]
    assert "max_request_bytes" in error["message"]


@pytest.mark.parametrize("path", PATHS)
async def test_one_that_is_just_as_large_is_read(path: str, app: FastAPI) -> None:
    answer = await sent(app, path, in_parts(MOST))
    assert answer.status_code == 400  # spaces are no call


async def test_what_is_read_is_the_call() -> None:
    messages = [
        {"type": "http.request", "body": b'{"lease":', "more_body": True},
        {"type": "http.request", "body": b'"l"}', "more_body": False},
    ]

    async def receive() -> Any:
        return messages.pop(0)

    request: Any = SimpleNamespace(receive=receive, headers={}, scope={"headers": []}, state=None)
    assert msgspec.to_builtins(await call_in(request, ReleaseCall, MOST, "this engine")) == {"lease": "l"}


async def test_a_packed_call_is_read_as_well() -> None:
    body = msgspec.msgpack.encode({"lease": "l"})

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    request: Any = SimpleNamespace(
        receive=receive, headers={}, state=None, scope={"headers": [(b"content-type", b"application/msgpack")]}
    )
    assert msgspec.to_builtins(await call_in(request, ReleaseCall, MOST, "this engine")) == {"lease": "l"}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("labels", "status"),
    [([("content-type", "text/json")], 415), ([("content-encoding", "gzip")], 415),
     ([("content-type", "application/json"), ("content-type", "application/msgpack")], 400)],
)  # fmt: skip
async def test_a_call_is_what_its_labels_say_or_refused(path: str, labels: Any, status: int, app: FastAPI) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        answer = await client.post(f"/tercet/v1/{path}", content=b"{}", headers=httpx.Headers(labels))
    assert (answer.status_code, "content-" in answer.json()["error"]["param"]) == (status, True)


def test_the_limit_is_a_setting() -> None:
    assert parse_settings({}).max_request_bytes == MAX_REQUEST_BYTES
    assert parse_settings({"max_request_bytes": 5}).max_request_bytes == 5


# ---- who calls -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page",
    [{"origin": "http://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}, {"host": "evil.example"},
     {"x-forwarded-for": "10.0.0.1"}, {"content-type": "text/plain"},
     {"content-type": "application/x-www-form-urlencoded"}],
)  # fmt: skip
@pytest.mark.parametrize("path", PATHS)
async def test_without_a_key_no_page_calls_a_verb(path: str, page: dict[str, str], app: FastAPI) -> None:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.post(f"/tercet/v1/{path}", content=b"{}", headers=page)
    assert answer.status_code in (403, 415)


@pytest.mark.parametrize("path", PATHS)
async def test_a_stranger_gets_a_challenge_and_a_member_answers_it(path: str, app: FastAPI) -> None:
    app.state.tercet_verbs = replace(app.state.tercet_verbs, callers=Callers(["secret"]))
    prover, body = Prover("secret"), b"not json"
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        answer = await client.post(f"/tercet/v1/{path}", content=body)
        assert answer.status_code == 401
        assert prover.meets(answer.headers.get_list("www-authenticate"))
        headers = prover.headers("POST", f"/{path}", digest_of(body))
        answer = await client.post(f"/tercet/v1/{path}", content=body, headers=headers)
        assert answer.status_code == 400  # it is no call
        headers = prover.headers("POST", f"/{path}", digest_of(body))
        answer = await client.post(f"/tercet/v1/{path}", content=body + b" ", headers=headers)
        assert answer.status_code == 401


# Errors of vLLM's that end a request on an engine: those of the request are its client's, others are the engine's.

# vLLM 0.31 has no class for it.
PAUSED: Exception = getattr(exceptions, "RetryableRequestError", GenerationError)(
    "Generation is paused. Please retry after it resumes."
)
ERRORS = [
    (PAUSED, EngineError),
    (GenerationError(), EngineError),
    (VLLMValidationError("Invalid structured outputs"), BadRequest),
]


class Refusing:
    """A client of vLLM's whose engine ends each request with an error."""

    def __init__(self, error: Exception, queue: RequestOutputCollector | None = None) -> None:
        self._error, self._queue = error, queue

    async def add_request(self, request_id: str, *_: Any, **__: Any) -> RequestOutputCollector:
        assert self._queue is not None
        return self._queue

    async def generate(self, *_: Any, **__: Any) -> AsyncGenerator[Any, None]:
        raise self._error
        yield


def request_to(client: Any) -> LLMRequest:
    return LLMRequest(client, KeyedPrompt([1, 2, 3]), {"max_tokens": 4}, TercetParams("token"))


@pytest.mark.parametrize(("error", "expected"), ERRORS)
@pytest.mark.parametrize("early", [False, True])
async def test_what_ends_a_decoding_request(error: Exception, expected: type[TercetError], early: bool) -> None:
    queue: Any = RequestOutputCollector(RequestOutputKind.DELTA, "r")
    taken: list[Any] = []
    if early:  # while the request is being submitted
        queue.put(error)
    await request_to(Refusing(error, queue)).start(taken.append)
    if not early:
        queue.put(error)
    (found,) = taken
    assert type(found) is expected
    assert str(error) in found.message


@pytest.mark.parametrize(("error", "expected"), ERRORS)
async def test_what_ends_a_prompt(error: Exception, expected: type[TercetError]) -> None:
    with pytest.raises(expected, match=str(error)):
        await request_to(Refusing(error)).first()


async def test_an_end_without_a_token_is_the_engines() -> None:
    class Ending(Refusing):
        async def generate(self, *_: Any, **__: Any) -> AsyncGenerator[Any, None]:
            choice = SimpleNamespace(
                token_ids=(), finish_reason="error", stop_reason=None, logprobs=None, prompt_logprobs=None
            )
            yield SimpleNamespace(num_cached_tokens=0, outputs=[choice], prompt_logprobs=None)

    with pytest.raises(EngineError, match="error"):
        await request_to(Ending(PAUSED)).first()


# A caller of the engine that leaves its events unread has its sequence ended.


@pytest.mark.parametrize("reads", [True, False])
async def test_events_that_nobody_reads(reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb_routes, "UNREAD_SECONDS", 60.0 if reads else 0.02)
    ended = asyncio.Event()

    async def outputs() -> AsyncGenerator[Output, None]:
        try:
            yield Output((2,))
            yield Output((3,), "stop")
        finally:
            ended.set()

    rest = outputs()
    events: Any = EventStream(await anext(rest), rest).body_iterator
    found = [await anext(events)]
    if not reads:
        await asyncio.wait_for(ended.wait(), LONGEST_WAIT_S)
    found += [event async for event in events]
    assert ended.is_set()
    assert (b"read nothing" in found[-1]) is not reads
    assert (b'"finish_reason":"stop"' in found[-1]) is reads
