"""The whole router but its socket: before vLLM, vLLM's serving layer and the service, over engines in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tercet.fleet.admission import Gate
from tercet.protocol import BadRequest, EngineUnreachable, NoSpace, Request
from tercet.protocol.sse import EventSplitter, object_of
from tercet.settings import Limits
from tests.longest_wait import LONGEST_WAIT_S, until

from .houses import ANSWER, BODY, MESSAGES, PROMPT, REQUEST_TIMEOUT_S, House, built_house, mended

pytestmark = pytest.mark.asyncio(loop_scope="module")
PICTURE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def built() -> AsyncIterator[House]:
    async with built_house() as house:
        yield house


@pytest_asyncio.fixture(loop_scope="module")
async def house(built: House) -> AsyncIterator[House]:
    async with mended(built):
        yield built


def tokens_of(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


@pytest.mark.slow
async def test_an_answer(house: House) -> None:
    assert tokens_of(await house.complete()) == ANSWER


@pytest.mark.parametrize("after", [1, 2, 5])
async def test_a_decode_engine_that_dies_costs_no_token(house: House, after: int) -> None:
    expected = [event["choices"][0]["text"] for event in await house.events()]
    house.engines["d"].fail_after, house.engines["d"].failures["stream"] = after, EngineUnreachable("gone")
    assert tokens_of(await house.complete()) == ANSWER
    house.fleet.member("d").reachable = True
    assert "".join(e["choices"][0]["text"] for e in await house.events()) == "".join(expected)


@pytest.mark.slow
async def test_what_no_engine_can_serve_is_an_error_in_openais_words(house: House) -> None:
    for engine in house.engines.values():
        engine.failures["start_generate"] = NoSpace("full")
    house.engines["d"].failures["prep_recv"] = NoSpace("full")
    answer = await house.complete()
    expected = {"message": "full", "type": "NoSpace", "param": None, "code": "no_space"}
    assert (answer.status_code, answer.json()["error"]) == (503, expected)
    for fields in ({}, {"logprobs": 1}):  # by the fast path, and by vLLM's own stream
        *_, last = await house.events(**fields)
        assert last["error"] == expected


def events_in(answer: httpx.Response) -> list[dict[str, Any]]:
    """Of a stream, what its events say."""
    assert answer.status_code == 200, answer.text
    return [said for event in EventSplitter().split(answer.content) if (said := object_of(event))]


@pytest.mark.parametrize("after", [0, 2])
async def test_streams_of_every_api_end_with_an_event_that_says_what_failed(house: House, after: int) -> None:
    for path, fields in (
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 6}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 6}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 6}),
    ):
        for engine in house.engines.values():
            engine.failures["stream"], engine.fail_after = BadRequest("x: not with me", "x"), after
        async with house.client() as client:
            *_, last = events_in(await client.post(path, json={"model": "m", "stream": True, **fields}))
        house.mend()
        if path == "/v1/messages":
            error = {"type": "invalid_request_error", "message": "x: not with me"}
            assert last == {"type": "error", "error": error}
        elif path == "/v1/responses":
            assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
            assert last["response"]["error"]["message"] == "x: not with me"
        else:
            assert last["error"]["message"] == "x: not with me"


async def test_an_error_of_vllms_own_in_a_converted_stream_is_no_pydantic_text(house: House) -> None:
    schema = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}}
    fields = {"messages": MESSAGES, "max_tokens": 6, "output_config": {"format": schema}}
    async with house.client() as client:
        answer = await client.post("/v1/messages", json={"model": "m", "stream": True, **fields})
    *_, last = events_in(answer)
    assert (last["type"], last["error"]["type"]) == ("error", "invalid_request_error")
    assert "pydantic" not in last["error"]["message"]
    assert "ChatCompletionStreamResponse" not in last["error"]["message"]


HALF = "\\ud83d"
TEXT_FIELDS = [
    ("/v1/completions", '{"model": "m", "prompt": "x", "request_id": "HALF"}'),
    ("/v1/completions", '{"model": "m", "prompt": "HALF"}'),
    ("/v1/completions", '{"model": "m", "prompt": ["x", "HALF"]}'),
    ("/v1/completions", '{"model": "HALF", "prompt": "x"}'),
    ("/v1/completions", '{"model": "m", "prompt": "x", "stop": ["HALF"]}'),
    ("/v1/completions", '{"model": "m", "prompt": "x", "user": "HALF"}'),
    ("/v1/completions", '{"model": "m", "prompt": "x", "cache_salt": "HALF"}'),
    ("/v1/completions", '{"model": "m", "prompt": "x", "structured_outputs": {"choice": ["HALF"]}}'),
    ("/v1/completions", '{"model": "m", "prompt": "x", "stream": true, "structured_outputs": {"regex": "HALF"}}'),
    ("/v1/completions", '{"model": "m", "prompt": "x", "HALF": 1}'),
    ("/v1/chat/completions", '{"model": "m", "messages": [{"role": "user", "content": "HALF"}]}'),
    ("/v1/chat/completions", '{"model": "m", "messages": [{"role": "HALF", "content": "x"}]}'),
    ("/v1/messages", '{"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "HALF"}]}'),
    ("/v1/responses", '{"model": "m", "input": "HALF"}'),
    ("/v1/responses", '{"model": "m", "input": "x", "metadata": {"k": "HALF"}}'),
    ("/tokenize", '{"model": "m", "prompt": "HALF"}'),
    ("/invocations", '{"model": "m", "prompt": "HALF"}'),
]


@pytest.mark.parametrize(("path", "body"), TEXT_FIELDS)
async def test_half_an_emoji_is_its_clients_error_in_every_field(house: House, path: str, body: str) -> None:
    async with house.client() as client:
        for _ in range(6):  # more than failures that a program may have in a row
            content = body.replace("HALF", HALF)
            answer = await client.post(path, content=content, headers={"content-type": "application/json"})
            assert answer.status_code == 400
            assert answer.headers["content-type"].startswith("application/json")
            assert "surrogate" in answer.json()["error"]["message"]
    assert not house.service.routing.failures
    assert tokens_of(await house.complete()) == ANSWER


@pytest.mark.parametrize("half", ["\\ud83d", "\\\\ud83d"])
async def test_half_an_emoji_in_json_in_a_text_blames_nobody_else(house: House, half: str) -> None:
    arguments = '"{\\"a\\": \\"HALF\\"}"'.replace("HALF", half)
    function = f'{{"name": "f", "arguments": {arguments}}}'
    call = f'{{"role": "assistant", "tool_calls": [{{"id": "c", "type": "function", "function": {function}}}]}}'
    content = f'{{"model": "m", "max_tokens": 2, "messages": [{{"role": "user", "content": "x"}}, {call}]}}'
    async with house.client() as client:
        answer = await client.post(
            "/v1/chat/completions", content=content, headers={"content-type": "application/json"}
        )
    assert answer.status_code in (200, 400)
    assert not house.service.routing.failures


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"model": "another", "prompt": "x"}, 404),
        ("/v1/completions", {"model": "m", "prompt": [7] * 600}, 400),
        ("/v1/completions", {"model": "m"}, 400),
        ("/v1/completions", {"model": "m", "prompt": "x", "temperature": -1}, 400),
        ("/v1/completions", {"model": "m", "prompt": "x", "suffix": "y"}, 400),
        ("/v1/chat/completions", {"model": "m", "messages": [PICTURE]}, 400),
        ("/v1/embeddings", {"model": "m", "input": "x"}, 404),
        ("/v1/nothing", {}, 404),
    ],
)
async def test_refusals(house: House, path: str, body: dict[str, Any], status: int) -> None:
    async with house.client() as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert answer.json().get("error") or answer.json().get("detail")
    assert not any(engine.running for engine in house.engines.values())


# ---- requests of many sequences ------------------------------------------------------------------------------


@pytest.fixture
def three_at_once(house: House) -> Iterator[None]:
    """Three sequences of one request at once, of at most eight, in a fleet that takes four."""
    front = house.app.middleware_stack
    before = front._gate
    front._gate = house.gate = Gate(Limits(in_flight=4, sequences=8, at_once=3), house.fleet, house.metrics)
    house.service._request_timeout = None
    yield
    front._gate = house.gate = before
    house.service._request_timeout = REQUEST_TIMEOUT_S


@pytest.mark.usefixtures("three_at_once")
@pytest.mark.parametrize(
    ("path", "fields"),
    [("/v1/completions", {"prompt": ["x"] * 9}), ("/v1/completions", {"prompt": PROMPT, "n": 9}),
     ("/v1/completions", {"prompt": ["x"] * 1024, "n": 16384}),
     ("/v1/chat/completions", {"messages": MESSAGES, "n": 9}),
     ("/v1/chat/completions/batch", {"messages": [MESSAGES] * 9}), ("/invocations", {"prompt": "x", "n": 9})],
)  # fmt: skip
async def test_a_request_of_too_many_sequences_is_refused(house: House, path: str, fields: dict[str, Any]) -> None:
    async with house.client() as client:
        answer = await client.post(path, json={"model": "m", "max_tokens": 2, **fields})
    assert (answer.status_code, "max-sequences" in answer.text) == (400, True)
    assert house.is_empty


@pytest.mark.usefixtures("three_at_once")
@pytest.mark.parametrize("fields", [{"n": 8}, {"prompt": [PROMPT] * 8}, {"prompt": [PROMPT] * 2, "n": 4}])
@pytest.mark.parametrize("stream", [False, True])
async def test_sequences_come_in_by_portions_and_count_in_the_limits(
    house: House, fields: dict[str, Any], stream: bool
) -> None:
    house.engines["d"].pause.clear()
    request = asyncio.create_task(house.complete(**fields, stream=stream, temperature=1))
    await house.until(3, request)
    assert house.gate._admission.in_flight == 3
    other = asyncio.create_task(house.complete())
    await house.until(4, other)
    house.engines["d"].pause.set()
    assert tokens_of(await other) == ANSWER
    answer = await request
    if stream:
        chunks = [said["choices"][0] for event in EventSplitter().split(answer.content) if (said := object_of(event))]
        assert {chunk["index"] for chunk in chunks if chunk["finish_reason"]} == set(range(8))
    else:
        assert [choice["token_ids"] for choice in answer.json()["choices"]] == [ANSWER] * 8
    assert house.gate._admission.in_flight == 0


class Leaving:
    """A client with a request of eight sequences that closes its connection on command."""

    def __init__(self, house: House, fields: dict[str, Any]) -> None:
        body = json.dumps({**BODY, **fields, "temperature": 1}).encode()
        self._messages: list[Any] = [{"type": "http.request", "body": body}]
        self._left = asyncio.Event()
        self.leave = self._left.set
        headers = [(b"authorization", b"Bearer secret"), (b"content-type", b"application/json")]
        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers,
            "http_version": "1.1", "scheme": "http", "app": house.app, "root_path": "",
        }  # fmt: skip
        self.request = asyncio.create_task(house.app.middleware_stack(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        if self._messages:
            return self._messages.pop()
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, _: Any) -> None: ...


@pytest.mark.usefixtures("three_at_once")
@pytest.mark.parametrize("fields", [{"n": 8}, {"prompt": [PROMPT] * 8}])
async def test_a_request_of_many_ends_with_its_client(house: House, fields: dict[str, Any]) -> None:
    started: list[Request] = []
    house.engines["d"].on_request, pause = started.append, house.engines["d"].pause
    pause.clear()
    client = Leaving(house, fields)
    await house.until(3, client.request)
    client.leave()
    async with asyncio.timeout(LONGEST_WAIT_S):
        await until(lambda: not (house.fleet.member("d").in_flight or house.gate._admission.in_flight))
        pause.set()
        await client.request
    assert not started


@pytest.mark.slow
@pytest.mark.usefixtures("three_at_once")
@pytest.mark.parametrize("fields", [{"n": 8}, {"prompt": [PROMPT] * 8}])
async def test_a_client_may_leave_while_its_sequences_begin(house: House, fields: dict[str, Any]) -> None:
    client = house.app.state.engine_client
    house.engines["d"].pause.clear()
    for steps in range(60):
        leaving = Leaving(house, fields)
        while not client.output_processor.request_states:
            assert not leaving.request.done()
            await asyncio.sleep(0)
        for _ in range(steps):
            await asyncio.sleep(0)
        leaving.leave()
        async with asyncio.timeout(LONGEST_WAIT_S):
            await leaving.request
            while house.fleet.member("d").in_flight or house.gate._admission.in_flight:
                await asyncio.sleep(0.001)
        kept = client.output_processor.request_states.keys() | client.output_processor.parent_requests.keys()
        assert not kept, steps
    house.engines["d"].pause.set()
