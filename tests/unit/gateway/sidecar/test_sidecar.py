"""The sidecar before engines that are played: what it asks them, in both protocols, and how its answers end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from starlette.requests import Request
from starlette.responses import Response

from tercet.protocol import BadRequest, LeaseEnded, Unauthorized
from tercet.protocol.headers import PREFILLED_HEADER
from tercet.protocol.spans import VerbTrace
from tercet.wire.client import HttpEngine, engine_tls
from tercet.wire.client.remote_prefill import PrefillAttempts
from tercet_gateway.gateway_settings import SidecarConfig
from tercet_gateway.prefill_connectors import NixlPrefill, SplitCall, messages_of
from tercet_gateway.sidecar import SidecarServer, sidecar
from tercet_lab.sim import EngineOptions, SimEngine
from tercet_lab.sim.sim_server import OpenAI, serving
from tests.abort import abort
from tests.longest_wait import LONGEST_WAIT_S, until
from tests.servers import served
from tests.unit.wire.client.certificates import Authority

from .engines import BUDGET, HOST, LOOPBACK, PREFILLER, config_of, prompt_of

PARAMS = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2, 3]], "remote_engine_id": "e-1",
    "remote_request_id": "r-1", "remote_host": "10.0.0.9", "remote_port": 5600, "tp_size": 1,
}  # fmt: skip
NO_PARAMS = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
CHAT = {
    "model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 50, "max_completion_tokens": 60,
    "stream": True, "stream_options": {"include_usage": True}, "min_tokens": 5, "n": 2, "logprobs": True,
    "top_logprobs": 3, "temperature": 0.5, "seed": 7, "cache_salt": "s",
}  # fmt: skip
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Played:
    """A vLLM server that answers as a test says; ``bodies`` and ``headers`` are what it was asked with."""

    def __init__(self) -> None:
        self.bodies = list[dict[str, Any]]()
        self.headers = list[dict[str, str]]()
        self.answer: Handler = self.prefilled
        self.params: Any = PARAMS
        self.address = ""
        self.health: Handler = self.well

    async def handle(self, http: web.Request) -> web.StreamResponse:
        if http.path == "/health":
            return await self.health(http)
        body = await http.read()
        self.bodies.append(
            msgspec.json.decode(body) if http.content_type == "application/json" else {"size": len(body)}
        )
        self.headers.append({name.lower(): value for name, value in http.headers.items()})
        return await self.answer(http)

    async def well(self, http: web.Request) -> web.StreamResponse:
        return web.Response()

    async def gone(self, http: web.Request) -> web.StreamResponse:
        assert http.transport is not None
        http.transport.abort()
        return web.Response()

    async def prefilled(self, http: web.Request) -> web.StreamResponse:
        return web.json_response({"choices": [{"index": 0}], "kv_transfer_params": self.params})

    async def streamed(self, http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(http)
        for number in range(3):
            await response.write(b'data: {"n": %d}\n\n' % number)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def breaks_off(self, http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(http)
        await response.write(b'data: {"n": 0}\n\ndata: {"n":')
        await asyncio.sleep(0.05)
        assert http.transport is not None
        http.transport.abort()
        return response

    async def fails(self, http: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "broken"}}, status=500)

    async def stands_still(self, http: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError


class House:
    def __init__(
        self, session: aiohttp.ClientSession, decode: Played, prefill: Played, url: str, server: SidecarServer
    ) -> None:
        self.session, self.decode, self.prefill, self.url, self.server = session, decode, prefill, url, server

    async def ask(
        self, body: Any = CHAT, named: str | None = None, path: str = "/v1/chat/completions", **headers: str
    ) -> tuple[int, str]:
        told = {PREFILLER: self.prefill.address if named is None else named, "x-tercet-trace": "true", **headers}
        async with self.session.post(self.url + path, json=body, headers=told) as answer:
            return answer.status, await answer.text()


@asynccontextmanager
async def house(**settings: Any) -> AsyncGenerator[House]:
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        played = Played(), Played()
        for each in played:
            app = web.Application(client_max_size=64 * 1024 * 1024)
            app.add_routes([web.route("*", "/{path:.*}", each.handle)])
            each.address = (await stack.enter_async_context(served(app))).removeprefix("http://")
        decode, prefill = played
        decode.answer = decode.streamed
        told: dict[str, Any] = {
            "engine": f"http://{decode.address}", "port": 0, "connector": "nixl", "prefill_hosts": LOOPBACK,
            "prefill_stuck_after": 0.5, "stuck_after_s": 0.5, **settings,
        }  # fmt: skip
        server = await stack.enter_async_context(sidecar(SidecarConfig(**told)))
        yield House(session, decode, prefill, f"http://{HOST}:{server.port}", server)


@pytest.fixture
async def found() -> AsyncIterator[House]:
    async with house() as built:
        yield built


JSON = {"content-type": "application/json"}


# ---- vLLM's own protocol ---------------------------------------------------------------------------------------


async def test_both_requests_field_by_field(found: House) -> None:
    status, said = await found.ask(authorization="Bearer k", other="x")
    assert status == 200
    first, second = found.prefill.bodies[0], found.decode.bodies[0]
    kept = {name: CHAT[name] for name in ("model", "messages", "temperature", "seed", "cache_salt")}
    limits = {"max_tokens": 1, "max_completion_tokens": 1, "stream": False}
    assert first == {**kept, **limits, "kv_transfer_params": NO_PARAMS}
    assert second == {**CHAT, "kv_transfer_params": PARAMS}
    shown, passed = found.prefill.headers[0], found.decode.headers[0]
    assert shown["authorization"] == passed["authorization"] == "Bearer k"
    assert "other" not in shown
    assert passed["other"] == "x"
    assert not {PREFILLER, "x-tercet-trace"} & {*shown, *passed}
    events = said.strip().split("\n\n")
    assert events[:3] == ['data: {"n": 0}', 'data: {"n": 1}', 'data: {"n": 2}']
    assert '"verb":"prefill"' in events[3]
    assert events[4] == "data: [DONE]"


async def test_both_requests_of_a_response() -> None:
    fields = {
        "model": "m", "input": "hello", "instructions": "be brief", "max_output_tokens": 50, "stream": True,
        "store": True, "include": ["message.output_text.logprobs"], "top_logprobs": 2, "temperature": 0.5,
    }  # fmt: skip
    async with house() as found:
        assert (await found.ask(fields, path="/v1/responses"))[0] == 200
        first, second = found.prefill.bodies[0], found.decode.bodies[0]
        kept = {name: fields[name] for name in ("model", "input", "instructions", "temperature")}
        limits = {"max_output_tokens": 1, "store": False, "stream": False}
        assert first == {**kept, **limits, "kv_transfer_params": NO_PARAMS}
        assert second == {**fields, "kv_transfer_params": PARAMS}


async def test_two_clients_with_one_id_are_two_on_engines(found: House) -> None:
    for _ in range(2):
        await found.ask(**{"x-request-id": "mine"})
    first, second = (headers["x-request-id"] for headers in found.prefill.headers)
    assert first != second
    assert first.startswith("mine-")
    assert second.startswith("mine-")
    assert [headers["x-request-id"] for headers in found.decode.headers] == ["mine", "mine"]


async def test_a_request_without_the_header_is_the_engines_alone(found: House) -> None:
    async with found.session.post(f"{found.url}/v1/completions", json={"prompt": "x"}) as answer:
        assert (answer.status, found.decode.bodies, found.prefill.bodies) == (200, [{"prompt": "x"}], [])


@pytest.mark.parametrize(
    "params",
    [None, {}, {**PARAMS, "do_remote_prefill": False}, {**PARAMS, "remote_port": "5600"},
     {**PARAMS, "remote_host": None}, {**PARAMS, "remote_block_ids": None}, {**PARAMS, "remote_engine_id": ""}],
)  # fmt: skip
async def test_parameters_that_nobody_can_use_are_not_passed_on(found: House, params: Any) -> None:
    found.prefill.params = params
    status, said = await found.ask()
    assert (status, found.decode.bodies) == (200, [CHAT])
    assert "kv_transfer_params" in said  # the trace says why


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fails", "stands_still", "breaks_off"])
async def test_a_prefill_that_fails_is_done_here(way: str) -> None:
    async with house(prefill_timeout=1.0) as found:
        found.prefill.answer = getattr(found.prefill, way)
        status, said = await found.ask()
        assert (status, found.decode.bodies) == (200, [CHAT])
        assert "disaggregated -> data_parallel" in said


ERROR = b'data: {"error": {"message": "Internal server error", "code": 500}}\n\ndata: [DONE]\n\n'
CREATED = b'event: response.created\ndata: {"type":"response.created","response":{"error":null}}\n\n'
RESPONSES_ERROR = CREATED + b'event: error\ndata: {"type":"error","message":"Internal server error"}\n\n'


def said_by(*pieces: bytes, breaks_off: bool = False) -> Handler:
    """A stream of exactly this."""

    async def answer(http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(http)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0.02)
        if breaks_off:
            assert http.transport is not None
            http.transport.abort()
        return response

    return answer


@pytest.mark.parametrize(
    ("path", "fails"),
    [
        ("/v1/chat/completions", Played.fails),
        ("/v1/chat/completions", said_by(ERROR)),
        ("/v1/completions", said_by(b": nothing yet\n\n", ERROR[:20], ERROR[20:])),
        ("/v1/completions", said_by(breaks_off=True)),
        ("/v1/responses", said_by(RESPONSES_ERROR)),
        ("/v1/responses", said_by(CREATED, breaks_off=True)),
    ],
    ids=["500", "error event", "in pieces", "breaks off", "response", "response breaks off"],
)
async def test_kv_that_cannot_be_fetched_is_computed(found: House, path: str, fails: Any) -> None:
    """vLLM says of a stream only in the stream that it could not fetch its KV."""

    async def without_only(http: web.Request) -> web.StreamResponse:
        if "kv_transfer_params" not in found.decode.bodies[-1]:
            return await found.decode.streamed(http)
        return await (fails(found.decode, http) if fails is Played.fails else fails(http))

    found.decode.answer = without_only
    status, said = await found.ask(path=path)
    assert (status, "[DONE]" in said) == (200, True)
    assert [("kv_transfer_params" in body) for body in found.decode.bodies] == [True, False]
    assert said.startswith('data: {"n": 0}')
    assert "disaggregated -> data_parallel" in said


@pytest.mark.slow
@pytest.mark.parametrize("begun", [False, True], ids=["no answer", "an empty stream"])
@pytest.mark.parametrize("health", [Played.stands_still, Played.gone], ids=["stopped", "killed"])
async def test_kv_of_an_engine_that_is_gone_is_not_waited_for(found: House, health: Any, begun: bool) -> None:
    """The engine that decodes may never say that it cannot fetch it."""

    async def waits_with_it(http: web.Request) -> web.StreamResponse:
        if "kv_transfer_params" not in found.decode.bodies[-1]:
            return await found.decode.streamed(http)
        found.prefill.health = partial(health, found.prefill)
        if begun:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(http)
            await response.write(b": nothing yet\n\n")
        return await found.decode.stands_still(http)

    found.decode.answer = waits_with_it
    status, said = await found.ask()
    assert (status, "[DONE]" in said) == (200, True)
    assert [("kv_transfer_params" in body) for body in found.decode.bodies] == [True, False]
    assert "disaggregated -> data_parallel" in said


@pytest.mark.parametrize(
    "opening", [b'data: {"n": 0}\n\n', CREATED + b'data: {"type":"response.output_text.delta"}\n\n']
)
async def test_an_error_after_the_first_token_is_the_clients(found: House, opening: bytes) -> None:
    found.decode.answer = said_by(opening, ERROR)
    _, said = await found.ask(path="/v1/responses")
    assert said.encode().startswith(opening + ERROR[:40])
    assert len(found.decode.bodies) == 1


async def test_kv_that_nobody_waits_for_is_fetched_all_the_same(found: House) -> None:
    """Else the engine that prefilled keeps it until its time is over."""
    found.decode.answer = found.decode.prefilled
    url = f"http://{found.decode.address}"
    connector = NixlPrefill(url, found.session, PrefillAttempts(BUDGET), https=False)
    call = SplitCall("/v1/chat/completions", msgspec.json.encode(CHAT), CHAT, {}, "r", "r-1")
    async with connector.prefilled(call, [found.prefill.address], VerbTrace()) as prepared:
        prepared.sent = True
    assert await connector.draining.wait(LONGEST_WAIT_S)
    assert not found.decode.bodies
    async with connector.prefilled(call, [found.prefill.address], VerbTrace()):
        pass  # the client has left
    assert await connector.draining.wait(LONGEST_WAIT_S)
    (fetched,) = found.decode.bodies
    assert (fetched["kv_transfer_params"], fetched["max_tokens"], fetched["stream"]) == (PARAMS, 1, False)


async def test_clients_do_not_say_where_kv_is_fetched(found: House) -> None:
    status, said = await found.ask({**CHAT, "kv_transfer_params": PARAMS})
    assert (status, msgspec.json.decode(said)["error"]["param"]) == (400, "kv_transfer_params")
    assert not found.decode.bodies


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/v1/responses", {"input": "x", "kv_transfer_params": PARAMS}),
     ("/v1/messages", {"messages": [], "kv_transfer_params": PARAMS}),
     ("/inference/v1/generate", {"sampling_params": {"extra_args": {"kv_transfer_params": PARAMS}}}),
     ("/v1/completions", {"prompt": "x", "vllm_xargs": {"kv_transfer_params": "x"}})],
)  # fmt: skip
async def test_nor_by_another_route(found: House, path: str, fields: Any) -> None:
    status, said = await found.ask(fields, path=path)
    assert status == 400
    assert msgspec.json.decode(said)["error"]["message"].startswith("kv_transfer_params: ")
    assert not found.decode.bodies


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
@pytest.mark.parametrize(("body", "kind"), [
    (b'{"top_p": NaN, "kv_transfer_params": {}}', "application/json"),
    ('{"kv_transfer_params": {}}'.encode("utf-16"), "application/json; charset=utf-16"),
])  # fmt: skip
async def test_nor_in_what_only_the_engine_can_read(found: House, path: str, body: bytes, kind: str) -> None:
    async with found.session.post(found.url + path, data=body, headers={"content-type": kind}) as answer:
        assert answer.status == 400
    assert not found.decode.bodies


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/v1/completions", {"prompt": ["a", "b"]}), ("/v1/completions", {"prompt": "a", "echo": True}),
     ("/v1/completions", {"prompt": "a", "prompt_logprobs": 1}),
     ("/v1/completions", {"prompt": "a", "use_beam_search": True}),
     ("/v1/responses", {"input": "a", "previous_response_id": "resp_1"}),
     ("/v1/responses", {"input": "a", "background": True})],
)  # fmt: skip
async def test_what_takes_one_engine_is_one_engines(found: House, path: str, fields: Any) -> None:
    assert (await found.ask(fields, path=path))[0] == 200
    assert (found.decode.bodies, found.prefill.bodies) == ([fields], [])


async def test_a_stranger_is_refused_and_nobody_asked() -> None:
    async with house(prefill_hosts="10.0.0.0/8:8000") as found:
        status, said = await found.ask()
        assert (status, msgspec.json.decode(said)["error"]["param"]) == (400, PREFILLER)
        assert not found.decode.bodies + found.prefill.bodies


async def test_without_an_allow_list_the_header_is_ignored() -> None:
    async with house(prefill_hosts="") as found:
        assert (await found.ask())[0] == 200
        assert (found.decode.bodies, found.prefill.bodies) == ([CHAT], [])


# ---- answers ---------------------------------------------------------------------------------------------------


async def test_a_stream_that_breaks_off_ends_in_an_error_event(found: House) -> None:
    found.decode.answer = found.decode.breaks_off
    status, said = await found.ask()
    first, error, done = said.strip().split("\n\n")
    assert (status, first, done) == (200, 'data: {"n": 0}', "data: [DONE]")
    assert msgspec.json.decode(error.removeprefix("data: "))["error"]["code"] == "engine_unreachable"


async def test_a_stream_of_responses_ends_in_its_own_error_event(found: House) -> None:
    found.decode.answer = found.decode.breaks_off
    _, said = await found.ask(path="/v1/responses")
    _, error = said.strip().split("\n\n")
    assert error.startswith('event: error\ndata: {"type":"error","code":"engine_unreachable"')


async def test_an_answer_that_is_no_stream_breaks_off_where_the_engine_does() -> None:
    async def half(http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-length": "100", "content-type": "application/json"})
        await response.prepare(http)
        await response.write(b'{"a"')
        await asyncio.sleep(0.05)
        assert http.transport is not None
        http.transport.abort()
        return response

    async with house() as found:
        found.decode.answer = half
        with pytest.raises(aiohttp.ClientError):
            async with found.session.post(f"{found.url}/v1/embeddings", json={}) as answer:
                await answer.read()


@pytest.mark.slow
async def test_an_engine_that_is_silent_for_too_long() -> None:
    async with house(idle_timeout_s=1.0) as found:
        found.decode.answer = found.decode.stands_still
        status, said = await found.ask(named="127.0.0.1:1")
        assert (status, msgspec.json.decode(said)["error"]["code"]) == (503, "engine_unreachable")


async def test_no_engine_at_all() -> None:
    async with house(engine="http://127.0.0.1:1") as found:
        status, said = await found.ask(named="127.0.0.1:1")
        assert (status, msgspec.json.decode(said)["error"]["code"]) == (503, "engine_unreachable")


@pytest.mark.parametrize("connector", ["nixl", "tercet"])
async def test_a_long_body_is_taken_from_those_only_whose_key_the_engine_takes(connector: str) -> None:
    async with house(connector=connector, secret="s") as found:

        async def guarded(http: web.Request) -> web.StreamResponse:
            if http.headers.get("authorization") == "Bearer k":
                return await found.decode.streamed(http)
            return web.json_response({"error": {}}, status=401)

        found.decode.answer = guarded
        taken = 0

        async def endless() -> AsyncGenerator[bytes]:
            nonlocal taken
            for _ in range(1000):
                taken += 100_000
                yield b"x" * 100_000

        headers = {PREFILLER: found.prefill.address, "content-type": "application/json"}
        url = f"{found.url}/v1/chat/completions"
        async with found.session.post(url, data=endless(), headers=headers) as answer:
            assert answer.status == 401
            assert (await answer.json())["error"]["code"] == "unauthorized"
        assert taken < 20_000_000
        messages = [{"role": "user", "content": "x" * 200_000}]
        assert (await found.ask({**CHAT, "messages": messages}, authorization="Bearer k"))[0] == 200


async def test_the_largest_of_many_unfinished_bodies_is_let_go() -> None:
    async with house(max_request_bytes=100_000) as found:
        goes_on = asyncio.Event()

        async def unfinished(size: int) -> AsyncGenerator[bytes]:
            yield b"x" * size
            await goes_on.wait()
            yield b"x"

        async def ask(size: int) -> int:
            url, headers = f"{found.url}/v1/completions", {PREFILLER: found.prefill.address, **JSON}
            async with found.session.post(url, data=unfinished(size), headers=headers) as answer:
                return answer.status

        asking = [asyncio.create_task(ask(85_000 + number)) for number in range(5)]
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result() for task in asking if task.done()] == [429]
        assert (await found.ask())[0] == 200
        goes_on.set()
        assert sorted(await asyncio.gather(*asking))[-1] == 429


async def test_bodies_have_a_bound_and_large_ones_pass() -> None:
    async with house(max_request_bytes=2_000_000) as found:
        found.decode.answer = found.decode.prefilled
        assert (await found.ask({"messages": "x" * 1_900_000}))[0] == 200
        assert (await found.ask({"messages": "x" * 2_000_001}))[0] == 413
        # Others are passed on as they come.
        async with found.session.post(f"{found.url}/v1/audio", data=b"x" * 10_000_000) as answer:
            assert (answer.status, found.decode.bodies[-1]) == (200, {"size": 10_000_000})


async def test_a_client_that_leaves_ends_its_request(found: House) -> None:
    left = asyncio.Event()

    async def endless(http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(http)
        try:
            while True:
                await response.write(b"data: {}\n\n")
                await asyncio.sleep(0.01)
        finally:
            left.set()

    found.decode.answer = endless
    async with found.session.post(f"{found.url}/v1/chat/completions", json=CHAT) as answer:
        await answer.content.readline()
        answer.close()
    async with asyncio.timeout(LONGEST_WAIT_S):
        await left.wait()


async def test_clients_that_speak_tls_and_a_certificate_that_is_renewed(tmp_path: Path) -> None:
    first, second = Authority(tmp_path, "first"), Authority(tmp_path, "second")
    certificate, key = first.issue("sidecar")
    async with house(tls_cert=str(certificate), tls_key=str(key)) as found:
        url = found.url.replace("http:", "https:") + "/v1/chat/completions"

        async def served(trusted: Authority) -> bool:
            """By a client that trusts only this authority, over a connection of its own."""
            tls = engine_tls(str(trusted.file), None, None)
            try:
                async with aiohttp.request(
                    "POST", url, json=CHAT, connector=aiohttp.TCPConnector(ssl=tls or True)
                ) as answer:
                    return (await answer.text()).endswith("data: [DONE]\n\n")
            except aiohttp.ClientSSLError:
                return False

        assert (await served(first), await served(second)) == (True, False)
        renewed, renewed_key = second.issue("renewed")
        renewed_key.replace(key)
        assert await served(first), "half of a pair is no pair"
        renewed.replace(certificate)
        assert (await served(first), await served(second)) == (False, True)
        with pytest.raises(aiohttp.ClientError):
            await found.ask()
    halves: list[dict[str, Any]] = [{"tls_cert": str(certificate)}, {"tls_key": str(key)}]
    for half in halves:
        with pytest.raises(BadRequest, match="a certificate needs its key"):
            SidecarConfig(engine="http://127.0.0.1:1", **half)


async def test_verbs_are_for_those_who_know_the_secret() -> None:
    async with house(secret="s") as found:
        async with found.session.get(f"{found.url}/tercet/v1/status") as answer:
            assert answer.status == 401
        shown = {"authorization": "Bearer s"}
        async with found.session.get(f"{found.url}/tercet/v1/status", headers=shown) as answer:
            assert answer.status == 200
    async with house(host="0.0.0.0") as found:
        async with found.session.get(f"{found.url}/tercet/v1/status") as answer:
            assert answer.status == 400
        before = len(found.decode.bodies)
        for path in ("/sleep", "/v1/load_lora_adapter", "//tercet/v1/status", "/x/tercet/v1/status", "/docs"):
            async with found.session.post(found.url + path, json={}) as answer:
                assert (answer.status, path) == (404, path)
                assert "is not for clients" in await answer.text()
        assert len(found.decode.bodies) == before
        assert (await found.ask(path="/tokenize"))[0] == 200


async def test_a_sidecar_that_is_told_to_stop_finishes_what_runs_and_gives_up_when_hurried(found: House) -> None:
    begun, may_end, hurried = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow(http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(http)
        await response.write(b'data: {"n": 0}\n\n')
        begun.set()
        await may_end.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    found.decode.answer = slow
    asking = asyncio.create_task(found.ask(path="/v1/embeddings"))
    async with asyncio.timeout(LONGEST_WAIT_S):
        await begun.wait()
    finishing = asyncio.create_task(found.server.finish(600.0, hurried))
    while not await refuses(found):
        await asyncio.sleep(0.01)
    assert not finishing.done()
    hurried.set()
    async with asyncio.timeout(LONGEST_WAIT_S):
        status, said = await asking
        await finishing
    assert (status, '"n": 0' in said, "shutting_down" in said) == (200, True, True)
    may_end.set()


@pytest.mark.slow
async def test_a_hurried_sidecar_waits_for_no_client_that_does_not_read(found: House) -> None:
    full, hurried = asyncio.Event(), asyncio.Event()

    async def endless(http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(http)
        while True:
            try:
                async with asyncio.timeout(0.3):
                    await response.write(b"data: %s\n\n" % (b"x" * 65_000))
            except TimeoutError:  # nobody takes any more
                full.set()
                await asyncio.Event().wait()

    found.decode.answer = endless
    async with found.session.post(f"{found.url}/v1/embeddings", json=CHAT) as answer:
        async with asyncio.timeout(LONGEST_WAIT_S):
            await full.wait()
        hurried.set()
        async with asyncio.timeout(LONGEST_WAIT_S):
            await found.server.finish(600.0, hurried)
        assert answer.status == 200


async def refuses(found: House) -> bool:
    try:
        async with aiohttp.ClientSession() as another, another.get(found.url + "/health"):
            return False
    except aiohttp.ClientError:
        return True


async def test_a_sidecar_that_is_told_to_stop_waits_for_what_runs(found: House) -> None:
    begun = asyncio.Event()

    async def late(http: web.Request) -> web.StreamResponse:
        begun.set()
        await asyncio.sleep(0.2)
        return web.json_response({"choices": []})

    found.decode.answer = late
    asking = asyncio.create_task(found.ask(path="/v1/embeddings"))
    async with asyncio.timeout(LONGEST_WAIT_S):
        await begun.wait()
    async with asyncio.timeout(LONGEST_WAIT_S):
        await found.server.finish(30.0, asyncio.Event())
    assert (await asking)[0] == 200


# ---- by the verbs ----------------------------------------------------------------------------------------------


@asynccontextmanager
async def by_the_verbs(
    stack: AsyncExitStack, **options: Any
) -> AsyncGenerator[tuple[SimEngine, SimEngine, Callable[..., Awaitable[Any]]]]:
    """Two engines, a sidecar before the first one, and how it is asked to have the second one prefill."""
    session = await stack.enter_async_context(aiohttp.ClientSession())
    configs = config_of("d", prefill_hosts="", options=EngineOptions(stream_every=1, **options)), config_of("p")
    decode, prefill = [await stack.enter_async_context(serving(config)) for config in configs]
    outside = SidecarConfig(engine=configs[0].url, port=0, prefill_hosts=LOOPBACK)
    port = (await stack.enter_async_context(sidecar(outside))).port
    split = {PREFILLER: configs[1].url.removeprefix("http://"), "x-tercet-trace": "true"}

    async def ask(headers: Mapping[str, str] = {}, **fields: Any) -> Any:
        body = {"model": "m", "prompt": prompt_of(1), "max_tokens": 3, **fields}
        url, told = f"http://{HOST}:{port}/v1/completions", {**split, **headers}
        async with session.post(url, json=body, headers=told) as answer:
            return await answer.json()

    async def is_empty() -> bool:
        return not (await decode.status()).leases

    yield decode, prefill, ask
    await until(is_empty)


async def test_by_the_verbs_what_others_computed_is_not_computed_again() -> None:
    async with AsyncExitStack() as stack, by_the_verbs(stack) as (decode, prefill, ask):
        assert (await ask())["choices"]
        block = decode.profile.block_size
        assert prefill.counters.prefill_tokens == 199
        assert decode.counters.prefill_tokens == 200 - 199 // block * block


@pytest.mark.slow
async def test_by_the_verbs_the_engine_is_told_what_the_other_one_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by clients, and not of what it prefills by itself."""
    told = list[str | None]()
    served = OpenAI.completions

    async def completions(self: OpenAI, http: Request) -> Response:
        told.append(http.headers.get(PREFILLED_HEADER))
        return await served(self, http)

    monkeypatch.setattr(OpenAI, "completions", completions)
    async with AsyncExitStack() as stack, by_the_verbs(stack) as (decode, _, ask):
        await ask(headers={PREFILLED_HEADER: "x 100"})
        await ask()
        await ask(headers={PREFILLED_HEADER: "x 100"}, prompt="short")
        cold, warm, alone = (said and said.split(" ") for said in told)
        assert cold is not None
        assert warm is not None
        block = decode.profile.block_size
        assert (cold[1], warm[1], alone) == ("0", str(199 // block * block), None)
        assert "x" != cold[0] != warm[0]


@pytest.mark.slow
async def test_by_the_verbs_clients_with_one_id_do_each_other_no_harm() -> None:
    async with AsyncExitStack() as stack, by_the_verbs(stack) as (_, prefill, ask):
        prompts = [prompt_of(number) for number in range(6)]
        answers = await asyncio.gather(*(ask(prompt=prompt, headers={"x-request-id": "one"}) for prompt in prompts))
        assert all(answer["choices"] for answer in answers)
        assert prefill.counters.prefill_tokens == 6 * 199


async def test_kv_that_the_engine_does_not_book_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ended(*_: Any) -> Any:
        raise LeaseEnded("over")

    monkeypatch.setattr(HttpEngine, "extend_recv", ended)
    async with AsyncExitStack() as stack, by_the_verbs(stack) as (_, prefill, ask):
        assert (await ask())["choices"]
        assert prefill.counters.prefill_tokens == 199


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "wrong"),
    [("model", 7), ("model", ["m"]), ("model", {"m": 1}), ("model", ""), ("cache_salt", 7), ("cache_salt", ["s"]),
     ("prompt", 7), ("prompt", {}), ("prompt", [[1], "a"]), ("prompt", [-1] * 64), ("prompt", [1.5] * 64),
     ("prompt", [2**70] * 64), ("prompt", None), ("echo", {}), ("max_tokens", "many")],
)  # fmt: skip
async def test_fields_of_wrong_types_go_to_the_engine_which_says_so(name: str, wrong: Any) -> None:
    async with asyncio.timeout(60), AsyncExitStack() as stack, by_the_verbs(stack, adapters="sql") as (_, _, ask):
        said = await ask(**{name: wrong})
        assert "choices" in said or (said["error"]["code"], said["error"]["param"]) == ("bad_request", name)


async def test_a_prompt_with_an_adapter_is_prefilled_where_it_decodes() -> None:
    async with AsyncExitStack() as stack, by_the_verbs(stack, adapters="sql") as (decode, prefill, ask):
        said = await ask(model="sql")  # whom a simulated engine does not serve by its OpenAI API
        assert "LoRA" in said["tercet"]["events"][-1]["reason"]
        assert (decode.counters.prefill_tokens, prefill.counters.prefill_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("fields", "messages"),
    [({"input": "hi"}, [{"role": "user", "content": "hi"}]),
     ({"input": "hi", "instructions": "be brief"},
      [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]),
     ({"input": [{"role": "user",
                  "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
                 {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
                 {"role": "user", "content": "d"}]},
      [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
       {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}])],
)  # fmt: skip
def test_the_messages_of_a_response(fields: Any, messages: Any) -> None:
    assert messages_of(fields) == messages


@pytest.mark.parametrize(
    "fields",
    [{}, {"input": 3}, {"input": ["a"]}, {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
     {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
     {"input": "a", "tools": [{"type": "function", "name": "f"}]}, {"input": "a", "reasoning": {"effort": "low"}}],
)  # fmt: skip
def test_responses_of_more_than_text_are_prefilled_where_they_decode(fields: Any) -> None:
    with pytest.raises(BadRequest):
        messages_of(fields)


@pytest.mark.parametrize("part", ["c", {"type": "output_text", "text": "c"}, {"type": "output_text"}])
def test_an_assistants_part_may_be_a_text_or_lack_one(part: Any) -> None:
    text = None if part == {"type": "output_text"} else "c"
    assert messages_of({"input": [{"role": "assistant", "content": [part]}]}) == [
        {"role": "assistant", "content": text}
    ]


@pytest.mark.parametrize(("path", "name"), [("/v1/chat/completions", "messages"), ("/v1/responses", "input")])
def test_a_part_whose_kind_is_no_text_is_no_text(path: str, name: str) -> None:
    fields = {name: [{"role": "user", "content": [{"type": ["text"], "text": "a"}]}]}
    with pytest.raises(BadRequest):
        SplitCall(path, b"", fields, {}, "a", "a-1").to_tokenize()


@pytest.mark.parametrize("of_the_engine", ["s3cret", ""])
async def test_a_call_is_proved_to_the_sidecar_and_by_it_to_its_engine(of_the_engine: str) -> None:
    async with AsyncExitStack() as stack:
        config = config_of("d", secret=of_the_engine)
        await stack.enter_async_context(serving(config))
        outside = SidecarConfig(engine=config.url, port=0, secret="s3cret")
        port = (await stack.enter_async_context(sidecar(outside))).port
        url = f"http://{HOST}:{port}"
        member = await stack.enter_async_context(HttpEngine("d", url, secret="s3cret"))
        assert (await member.status()).engine == "d"
        for _ in range(2):
            await abort(member, "nobody")
        stranger = await stack.enter_async_context(HttpEngine("d", url, secret="other"))
        with pytest.raises(Unauthorized):
            await stranger.status()
