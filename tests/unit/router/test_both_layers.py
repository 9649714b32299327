"""Promises of the OpenAI API that both layers keep: vLLM's, and the small one of simulated fleets."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from tercet.decisions.sessions import session_named
from tercet.fleet import RunningSequence
from tercet.protocol import BadRequest, EngineLoad, Request
from tercet.router.batches.batch_files import BatchFiles
from tests.longest_wait import LONGEST_WAIT_S, until

from .houses import BODY, LENGTH, MESSAGES, PROMPT, House, built_house, mended

pytestmark = pytest.mark.asyncio(loop_scope="module")
JSON = {"content-type": "application/json"}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
PICTURE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
# Requests that are complete, so that one more field decides about the answer.
WHOLE: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "m", "prompt": "x", "max_tokens": 2},
    CHATS: {"model": "m", "messages": MESSAGES, "max_tokens": 2},
}


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["small", pytest.param("vllm", marks=pytest.mark.vllm)]
)
async def built(request: pytest.FixtureRequest) -> AsyncIterator[House]:
    async with built_house(small=request.param == "small") as house:
        yield house


@pytest_asyncio.fixture(loop_scope="module")
async def house(built: House) -> AsyncIterator[House]:
    """The house; afterwards no engine works, and no program is said to have failed."""
    async with mended(built):
        yield built
    assert not built.service.routing.failures


async def post(house: House, path: str, body: Any, **headers: str) -> httpx.Response:
    content = body if isinstance(body, (str, bytes)) else json.dumps(body)
    async with house.client() as client:
        return await client.post(path, content=content, headers={**JSON, **headers})


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer, which has all fields of OpenAI's form."""
    assert answer.headers["content-type"].startswith("application/json")
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert isinstance(error["code"], str)
    if error["param"] is not None:  # vLLM's name of a body's field begins so
        error["param"] = error["param"].removeprefix("body.")
    return error


def failure_in(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer, or with which its stream ends if that had begun."""
    if answer.headers["content-type"].startswith("application/json"):
        return error_of(answer)
    *events, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return json.loads(events[-1].removeprefix("data: "))["error"]


def seen_by(house: House) -> list[Request]:
    """The requests that the decode engine gets from now on."""
    seen: list[Request] = []
    house.engines["d"].on_request = seen.append
    return seen


# ---- ids ---------------------------------------------------------------------------------------------------------

LONG_IDS = ["x" * 200, "x" * 201, "x" * 300, "y" * 5000, "a b", "a.1", "/../", '"quoted"']


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["header", "body"])
async def test_an_id_of_any_length_is_served_and_carried(house: House, stream: bool, where: str) -> None:
    seen = seen_by(house)
    given = [*LONG_IDS, *(["a\nb", "\u00e9\u6f22"] if where == "body" else [])]
    for name in given:
        body = {**BODY, "stream": stream, **({"request_id": name} if where == "body" else {})}
        answer = await post(house, COMPLETIONS, body, **({"x-request-id": name} if where == "header" else {}))
        assert answer.status_code == 200, answer.text
        event = json.loads(answer.text.removeprefix("data: ").partition("\n")[0]) if stream else answer.json()
        assert event["id"] == f"cmpl-{name}"
    assert all(len(request.seq_id) <= 256 and request.seq_id.isprintable() for request in seen)
    assert len({request.seq_id for request in seen}) == len(seen) == len(given)


@pytest.mark.parametrize("header", ["x-request-id", "x-session-token", "user-agent", "traceparent"])
async def test_odd_bytes_in_a_header_are_carried_or_refused(house: House, header: str) -> None:
    async with house.client() as client:
        for value in (b"\xed\xa0\xbd", b"\xff\xfe", "gr\u00f6\u00dfe".encode()):
            answer = await client.post(COMPLETIONS, json=BODY, headers={header.encode(): value})
            assert answer.status_code == 200, answer.text


# ---- fields that clients get wrong -------------------------------------------------------------------------------

HUGE = 10**40
# The refused value of a field, and the field that the error names.
WRONG: list[tuple[str, Any]] = [
    ("priority", HUGE), ("priority", -HUGE), ("priority", 2**63), ("priority", -(2**63) - 1), ("priority", 1.5),
    ("priority", "high"), ("priority", [1]), ("priority", str(HUGE)),
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", "many"), ("max_tokens", {}),
    ("max_tokens", [2]), ("n", 0), ("n", -1), ("n", 1.5), ("n", "two"),
    ("stream", "maybe"), ("stream", 2), ("stream", 0.5), ("stream", []), ("stream", {}),
    ("temperature", -1), ("temperature", "hot"), ("temperature", HUGE), ("temperature", "nan"), ("temperature", "inf"),
    ("top_p", 0), ("top_p", 1.1), ("top_p", "x"), ("top_k", -2), ("top_k", 1.5), ("min_p", -0.1), ("min_p", 2),
    ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("repetition_penalty", 0), ("repetition_penalty", "nan"),
    ("seed", 2**63), ("seed", "x"), ("seed", HUGE), ("min_tokens", -1), ("min_tokens", 3), ("min_tokens", "x"),
    ("cache_salt", ""), ("cache_salt", "x" * 129), ("cache_salt", "a/b"), ("cache_salt", "a\\b"), ("cache_salt", "a@b"),
    ("cache_salt", "a\0"), ("cache_salt", 1), ("user", 1), ("user", ["x"]),
    ("request_id", 1), ("session_id", 1), ("session_id", ["x"]), ("model", 1),
    ("stream_options", "x"), ("stream_options", []), ("stream_options", {"include_usage": True}),
]  # fmt: skip


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
@pytest.mark.parametrize(("field", "value"), WRONG, ids=lambda value: str(value)[:20])
async def test_a_wrong_value_is_its_clients_error(house: House, path: str, field: str, value: Any) -> None:
    answer = await post(house, path, {**WHOLE[path], field: value})
    assert answer.status_code == 400, answer.text
    error = error_of(answer)
    assert error["code"] == "bad_request"
    # For some parameters, vLLM says the name in the message only.
    assert error["param"] == field or (error["param"] is None and error["message"].startswith(field))


# Forms of a value that vLLM's models accept.
ACCEPTED: list[tuple[str, list[Any]]] = [
    ("stream", ["true", "True", "on", "yes", "y", "t", "1", 1, 1.0, "false", "OFF", "no", "n", "f", "0", 0, None]),
    ("ignore_eos", ["true", "off", 1, 0.0]),
    ("max_tokens", ["2", 2.0, "2.0", " 2 ", True]),
    ("priority", ["-3", 2.0, True, 2**63 - 1, -(2**63)]),
    ("n", [1, "1", 1.0, True]),
    ("temperature", ["0.5", 1, "1", True, None]), ("top_k", ["5", 5.0, 0, -1, None]), ("seed", ["7", 7.0, -(2**63)]),
    ("user", ["ann", "", None]), ("cache_salt", ["x" * 128, "+=.: \u00e9"]), ("max_tokens", [LENGTH]),
    ("model", [None, ""]),
    ("priority_level", [HUGE // 10**30, "x", [1], None]),
]  # fmt: skip


@pytest.mark.parametrize(("field", "values"), ACCEPTED, ids=lambda value: value if isinstance(value, str) else "")
async def test_the_forms_of_a_value_that_are_accepted(house: House, field: str, values: list[Any]) -> None:
    for path, value in [(path, value) for path in WHOLE for value in values]:
        answer = await post(house, path, {**WHOLE[path], field: value})
        assert answer.status_code == 200, (path, value, answer.text)
        streams = field == "stream" and str(value).lower() in {"true", "on", "yes", "y", "t", "1", "1.0"}
        assert answer.headers["content-type"].startswith("text/event-stream" if streams else "application/json")


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (COMPLETIONS, {"model": "another", "prompt": "x"}, 404, "model"),
        (COMPLETIONS, {"model": "m", "prompt": [7] * (LENGTH + 1)}, 400, None),
        (COMPLETIONS, {"model": "m", "prompt": "x", "max_tokens": LENGTH + 1}, 400, "max_tokens"),
        (COMPLETIONS, {"model": "m", "prompt": "x", "max_tokens": HUGE}, 400, "max_tokens"),
        (COMPLETIONS, {"model": "m", "prompt": ""}, 400, None),
        (COMPLETIONS, {"model": "m", "prompt": []}, 400, None),
        (COMPLETIONS, {"model": "m", "prompt": [-1]}, 400, "prompt"),
        (COMPLETIONS, {"model": "m", "prompt": [HUGE]}, 400, None),
        (COMPLETIONS, {"model": "m", "prompt": {"a": 1}}, 400, "prompt"),
        (COMPLETIONS, {"model": "m"}, 400, None),
        (COMPLETIONS, {"model": "m", "prompt": "x", "suffix": "y"}, 400, None),
        (COMPLETIONS, [], 400, None), (COMPLETIONS, "", 400, None), (COMPLETIONS, "{", 400, None),
        (COMPLETIONS, b"\xff{", 400, None), (COMPLETIONS, '{"prompt": NaN}', 400, "prompt"),
        (COMPLETIONS, '{"prompt": "x", "temperature": -Infinity}', 400, "temperature"),
        (COMPLETIONS, '{"prompt": "x", "priority": 1e999}', 400, "priority"),
        (COMPLETIONS, "[" * 5000, 400, None),
        (CHATS, {"model": "another", "messages": MESSAGES}, 404, "model"),
        (CHATS, {"model": "m", "messages": []}, 400, None),
        (CHATS, {"model": "m", "messages": "x"}, 400, "messages"),
        (CHATS, {"model": "m", "messages": [{"content": "x"}]}, 400, None),
        (CHATS, {"model": "m", "messages": [1]}, 400, None),
        (CHATS, {"model": "m", "messages": [PICTURE]}, 400, None),
        (CHATS, {"model": "m", "messages": [{"role": "user", "content": "x " * 2000}]}, 400, None),
        (CHATS, {"model": "m"}, 400, "messages"),
        ("/v1/embeddings", {"model": "m", "input": "x"}, 404, None),
        ("/v1/nothing", {}, 404, None), ("/v1/%ED%A0%BD", {}, 404, None),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
async def test_refusals(house: House, path: str, body: Any, status: int, param: str | None) -> None:
    for more in ({}, {"stream": True}) if isinstance(body, dict) else ({},):
        answer = await post(house, path, {**body, **more} if isinstance(body, dict) else body if body != [] else "[]")
        # A stream may have begun when vLLM sees that the prompt is too long, or has unknown tokens.
        assert answer.status_code in {status, 200 if more else status}, answer.text
        error = failure_in(answer)
        assert param is None or error["param"].partition(".")[0] == param
    assert not any(engine.running for engine in house.engines.values())


HALF = "\\ud83d"


@pytest.mark.parametrize("field", ["prompt", "user", "cache_salt", "request_id", "session_id", "model", "unknown"])
async def test_half_an_emoji_is_its_clients_error(house: House, field: str) -> None:
    body = json.dumps({**WHOLE[COMPLETIONS], field: "HALF"}).replace("HALF", HALF)
    for _ in range(6):  # more than failures that a program may have in a row
        answer = await post(house, COMPLETIONS, body)
        assert (answer.status_code, "surrogate" in error_of(answer)["message"]) == (400, True)


@pytest.mark.parametrize("value", ["nan", str(HUGE), "9" * 5000, "1.5", "-9223372036854775809", "x", ""])
async def test_a_priority_in_a_header(house: House, value: str) -> None:
    answer = await post(house, COMPLETIONS, BODY, **{"x-vllm-priority": value})
    if value in (str(HUGE), "-9223372036854775809"):
        assert (answer.status_code, error_of(answer)["param"]) == (400, "priority")
    else:  # what is no integer is ignored
        assert answer.status_code == 200


# ---- what programs get -------------------------------------------------------------------------------------------


async def test_user_priority_and_salt_reach_the_program(house: House) -> None:
    seen = seen_by(house)
    answer = await post(house, COMPLETIONS, {**BODY, "user": "ann", "priority": -4, "cache_salt": "s"})
    assert answer.status_code == 200
    assert (await post(house, COMPLETIONS, BODY, **{"x-vllm-priority": "7"})).status_code == 200
    assert [(each.user, each.priority, each.cache_salt) for each in seen] == [("ann", -4, "s"), (None, 7, None)]


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({"session_id": "s"}, {}), ({"vllm_xargs": {"session_id": "s"}}, {}), ({"program_id": "s"}, {}),
        ({"nvext": {"agent_context": {"trajectory_id": "s", "session_id": "t"}}}, {}),
        ({"nvext": {"agent_context": {"session_id": "s"}}}, {}),
        ({"nvext": {"session_control": {"session_id": "s"}}}, {}),
        ({"session_id": "s", "vllm_xargs": {"session_id": "t"}, "program_id": "u"}, {}),
        ({}, {"x-session-id": "s"}), ({}, {"x-session-token": "s"}), ({}, {"x-dynamo-session-id": "s"}),
        ({"program_id": "t"}, {"x-session-id": "s"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
async def test_sessions(house: House, path: str, body: dict[str, Any], headers: dict[str, str]) -> None:
    seen = seen_by(house)
    assert (await post(house, path, {**WHOLE[path], **body}, **headers)).status_code == 200
    named = [session_named(request) for request in seen]
    house.engines["d"].on_request = lambda _: None
    assert len(named) == 1
    other = seen_by(house)
    body_of_another = json.loads(json.dumps(body).replace('"s"', '"another"'))
    given = {name: "another" if value == "s" else value for name, value in headers.items()}
    assert (await post(house, path, {**WHOLE[path], **body_of_another}, **given)).status_code == 200
    assert None not in (named[0], session_named(other[0]))
    assert named[0] != session_named(other[0])


async def test_what_a_program_refuses_names_the_field(house: House) -> None:
    for engine in house.engines.values():
        engine.failures["start_generate"] = BadRequest("max_tokens: too many", "max_tokens")
    answer = await post(house, COMPLETIONS, BODY)
    expected = {"message": "max_tokens: too many", "type": "BadRequest", "param": "max_tokens", "code": "bad_request"}
    assert (answer.status_code, error_of(answer)) == (400, expected)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_an_engine_refuses_names_the_field_that_the_client_sent(house: House, stream: bool) -> None:
    for engine in house.engines.values():
        engine.failures["start_generate"] = BadRequest("sampling_params.seed: is odd", "sampling_params.seed")
    answer = await post(house, COMPLETIONS, {**BODY, "seed": 7, "stream": stream})
    error = failure_in(answer)
    assert (error["param"], error["message"]) == ("seed", "seed: is odd")


# ---- errors of the router ----------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_request_that_takes_too_long(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(house.service, "_request_timeout", 0.3)
    house.engines["d"].pause.clear()
    answer = await post(house, COMPLETIONS, BODY)
    assert (answer.status_code, error_of(answer)["code"]) == (504, "deadline_exceeded")
    assert "0.3 s" in error_of(answer)["message"]
    streamed = await post(house, COMPLETIONS, {**BODY, "stream": True})
    assert failure_in(streamed)["code"] == "deadline_exceeded"


async def test_a_saturated_fleet(house: House) -> None:
    house.engines["d"].pause.clear()
    others = [asyncio.create_task(post(house, COMPLETIONS, {**BODY, "prompt": PROMPT[:40]})) for _ in range(2)]
    await until(lambda: house.fleet.member("d").in_flight >= 2)
    refused = await post(house, COMPLETIONS, BODY)
    assert (refused.status_code, error_of(refused)["code"]) == (429, "saturated")
    assert int(refused.headers["retry-after"]) >= 1
    async with house.client() as client:
        assert (await client.get("/v1/models")).status_code == 200  # costs no engine anything
    house.engines["d"].pause.set()
    assert [(await other).status_code for other in others] == [200, 200]
    assert (await post(house, COMPLETIONS, BODY)).status_code == 200


async def test_the_key(house: House) -> None:
    for path in ("/v1/models", "/tokenize", "/tercet/v1/program", "/openapi.json"):
        async with house.client("wrong") as client:
            answer = await client.get(path)
        assert (answer.status_code, error_of(answer)["code"]) == (401, "unauthorized")
    async with house.client("wrong") as client:
        for path in ("/health", "/version", "/metrics"):
            assert (await client.get(path, follow_redirects=True)).status_code == 200


@pytest.mark.parametrize("path", ["/v2/models", "/v1", "/v1/completions/x", "/V1/completions", "//v1/completions"])
async def test_a_path_that_is_not_served(house: House, path: str) -> None:
    async with house.client() as client:
        answer = await client.get("http://localhost" + path)
    error = error_of(answer)
    assert (answer.status_code, error["code"]) == (404, "unknown_path")
    assert "GET" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "takes"),
    [("GET", COMPLETIONS, "POST"), ("DELETE", "/v1/models", "GET"), ("PUT", CHATS, "POST"),
     ("PATCH", "/tokenize", "POST")],
)  # fmt: skip
async def test_a_method_that_a_path_does_not_take(house: House, method: str, path: str, takes: str) -> None:
    async with house.client() as client:
        answer = await client.request(method, path)
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["type"]) == (405, "method_not_allowed", "MethodNotAllowed")
    assert takes in answer.headers["allow"]
    assert path in error["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, "/tokenize"])
async def test_a_body_that_is_too_large(house: House, path: str) -> None:
    answer = await post(house, path, {"prompt": "x" * 10_001})
    assert (answer.status_code, error_of(answer)["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("target", ["/v1/completions?x=%ED%A0%BD", "/v1/completions?\u00ff"])
async def test_odd_bytes_in_a_query(house: House, target: str) -> None:
    assert (await post(house, target, BODY)).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/xml", "application/x-www-form-urlencoded"])
async def test_another_media_type(house: House, kind: str) -> None:
    answer = await post(house, COMPLETIONS, BODY, **{"content-type": kind})
    assert (answer.status_code, error_of(answer)["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
async def test_an_ended_request_leaves_no_reference_cycle(house: House, path: str, stream: bool) -> None:
    """Its prompt and tokens would wait for the garbage collector."""

    def sequences() -> set[int]:
        return {id(found) for found in gc.get_objects() if type(found) is RunningSequence}

    gc.collect()
    gc.disable()
    before = sequences()  # that other tests of this process hold
    try:
        for _ in range(3):
            assert (await post(house, path, {**WHOLE[path], "stream": stream})).status_code == 200
        await until(
            lambda: sequences() <= before
        )  # the tasks of the last request end; without a collector, cycles stay
    finally:
        gc.enable()


# ---- batches ---------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def openai_of(house: House, key: str = "secret") -> AsyncGenerator[AsyncOpenAI]:
    async with house.client(key) as http:
        own: Any = http  # it takes any client of this form
        yield AsyncOpenAI(api_key=key, base_url="http://localhost/v1", http_client=own)


def batch_file(*bodies: dict[str, Any]) -> bytes:
    lines = [
        {"custom_id": f"r{number}", "method": "POST", "url": CHATS, "body": body} for number, body in enumerate(bodies)
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def test_a_batch_of_openais_client(house: House) -> None:
    seen = seen_by(house)
    for name in "pd":
        house.fleet.report(name, EngineLoad(waiting=0, running=0, kv_usage=0.0))
    assert (await post(house, CHATS, WHOLE[CHATS])).status_code == 200
    running = asyncio.ensure_future(house.batches.run())
    try:
        async with openai_of(house) as client, asyncio.timeout(LONGEST_WAIT_S):
            content = batch_file(WHOLE[CHATS], {**WHOLE[CHATS], "model": "other"}, WHOLE[CHATS])
            file = await client.files.create(file=("in.jsonl", content), purpose="batch")
            assert (file.filename, file.bytes, file.purpose) == ("in.jsonl", len(content), "batch")
            batch = await client.batches.create(
                input_file_id=file.id, endpoint=CHATS, completion_window="24h", metadata={"a": "b"}
            )
            while batch.status != "completed":
                await asyncio.sleep(0.02)
                batch = await client.batches.retrieve(batch.id)
            assert batch.request_counts is not None
            assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 1)
            assert [each.background for each in seen] == [False, True, True]
            output = (await client.files.content(batch.output_file_id or "")).text
            lines = [json.loads(line) for line in output.splitlines()]
            assert [line["custom_id"] for line in lines] == ["r0", "r2"]
            assert lines[0]["response"]["body"]["usage"]["completion_tokens"] == 2
            failed = json.loads((await client.files.content(batch.error_file_id or "")).text)
            assert (failed["custom_id"], failed["response"]["status_code"]) == ("r1", 404)
            assert [each.id async for each in client.batches.list()] == [batch.id]
            assert {each.id async for each in client.files.list()} == {
                file.id, batch.output_file_id, batch.error_file_id
            }  # fmt: skip
            for each in (file.id, batch.output_file_id or "", batch.error_file_id or ""):
                assert (await client.files.delete(each)).deleted
            assert house.batches.files.used().total() == 0
    finally:
        running.cancel()
        await asyncio.wait({running})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/nothing"}, "endpoint"), ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "99d"}, "completion_window"), ({"input_file_id": "file-none"}, "file_id"),
        ({"input_file_id": 3}, "input_file_id"), ({"surplus": 3}, "surplus"),
    ],
)  # fmt: skip
async def test_a_batch_that_cannot_be(house: House, fields: dict[str, Any], param: str) -> None:
    async with house.client() as client:
        form = {"purpose": (None, "batch"), "file": ("in.jsonl", batch_file(WHOLE[CHATS]))}
        file = (await client.post("/v1/files", files=form)).json()
        asked = {"input_file_id": file["id"], "endpoint": CHATS, "completion_window": "24h", **fields}
        answer = await client.post("/v1/batches", json=asked)
        assert 400 <= answer.status_code < 500
        assert param in error_of(answer)["message"]
        assert (await client.delete(f"/v1/files/{file['id']}")).status_code == 200


async def test_a_full_disk_is_named(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/some/path")

    monkeypatch.setattr(BatchFiles, "add_file", full)
    async with house.client() as client:
        answer = await client.post("/v1/files", files={"purpose": (None, "batch"), "file": ("in.jsonl", b"x")})
    assert answer.status_code == 500
    assert error_of(answer)["code"] == "router_failed"
    assert "No space left on device" in error_of(answer)["message"]
    assert "/some/path" not in error_of(answer)["message"]


async def test_a_file_that_cannot_be(house: House) -> None:
    async with house.client() as client:
        for form, param in (
            ({"purpose": (None, "fine-tune"), "file": ("x", b"x")}, "purpose"),
            ({"purpose": (None, "batch")}, "file"),
            ({"purpose": (None, "batch"), "file": ("x", b"")}, "file"),
            ({"purpose": (None, "batch"), "file": ("x", b"x"), "more": (None, "y")}, "more"),
        ):
            answer = await client.post("/v1/files", files=form)
            assert (answer.status_code, error_of(answer)["param"]) == (400, param)
        assert (await client.post("/v1/files", json={})).status_code == 415
        assert (await client.get("/v1/files?limit=0")).status_code == 400
    async with house.client("wrong") as client:
        assert (await client.get("/v1/files")).status_code == 401
