"""What errors of vLLM's look like once they have passed the router."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tercet.protocol import NoSpace
from tercet.wire.serving.answers import ErrorSend, with_named_code
from tercet.wire.serving.server_access import RequestContext


def vllms(code: int, **more: Any) -> bytes:
    error = {"message": "no", "type": "BadRequestError", "param": "top_p", "code": code, **more}
    return json.dumps({"error": error}).encode()


async def sent(context: RequestContext, status: int, *bodies: bytes) -> list[Any]:
    """What comes out behind, of an answer in these parts."""
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    passing = ErrorSend(send, context)
    length = str(sum(map(len, bodies))).encode()
    headers = [(b"content-length", length)] if status >= 400 else [(b"content-type", b"text/event-stream")]
    await passing({"type": "http.response.start", "status": status, "headers": headers})
    for index, body in enumerate(bodies):
        await passing({"type": "http.response.body", "body": body, "more_body": index + 1 < len(bodies)})
    return messages


def context() -> RequestContext:
    return RequestContext("/v1/completions", {})


@pytest.mark.parametrize(
    ("code", "name"), [(400, "bad_request"), (404, "not_found"), (500, "internal_server_error"), (599, "599")]
)
def test_vllms_errors_have_the_name_of_their_status_as_code(code: int, name: str) -> None:
    error = json.loads(with_named_code(vllms(code)))["error"]
    assert error == {"message": "no", "type": "BadRequestError", "param": "top_p", "code": name}


def test_a_model_that_is_not_served_has_the_code_that_it_has_elsewhere() -> None:
    assert json.loads(with_named_code(vllms(404, param="model")))["error"]["code"] == "unknown_model"


@pytest.mark.parametrize("body", [b"", b"no JSON", b"[1]", b'{"error": "text"}', b'{"error": {"code": 400}}', b"\xff"])
def test_what_has_another_form_stays_as_it_is(body: bytes) -> None:
    assert with_named_code(body) == body


async def test_an_answer_is_as_long_as_it_says() -> None:
    body = vllms(400)
    start, answer = await sent(context(), 400, body[:20], body[20:])
    assert start["status"] == 400
    assert json.loads(answer["body"])["error"]["code"] == "bad_request"
    assert dict(start["headers"])[b"content-length"] == str(len(answer["body"])).encode()


@pytest.mark.parametrize(
    "body",
    [b'{"type":"error","error":{"type":"BadRequestError","message":"no"}}', vllms(400), b'{"detail":"no"}',
     b'{"error":"no"}'],
)  # fmt: skip
async def test_errors_have_the_form_of_the_path(body: bytes) -> None:
    start, answer = await sent(RequestContext("/v1/messages", {}), 400, body)
    error = {"type": "invalid_request_error", "message": "no"}
    assert json.loads(answer["body"]) == {"type": "error", "error": error}
    assert dict(start["headers"])[b"content-length"] == str(len(answer["body"])).encode()
    assert json.loads((await sent(RequestContext("/cohere/v2/chat", {}), 400, body))[1]["body"]) == {"message": "no"}


@pytest.mark.parametrize("body", [b'{"detail":"Not Found"}', b'{"error":"Not Found"}'])
async def test_errors_of_layers_below_vllms_have_openais_form(body: bytes) -> None:
    _, answer = await sent(context(), 404, body)
    expected = {"message": "Not Found", "type": "Not Found", "param": None, "code": "not_found"}
    assert json.loads(answer["body"]) == {"error": expected}


@pytest.mark.parametrize("body", [b"", b"[1]", b'{"status": "loading"}'])
async def test_what_tells_of_no_error_passes(body: bytes) -> None:
    assert (await sent(context(), 503, body))[1]["body"] == body


async def test_an_event_of_anthropics_says_what_the_chat_stream_has_said() -> None:
    event = b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"pydantic"}}\n\n'
    asked = RequestContext("/v1/messages", {})
    asked.stream_error = {"message": "too long", "code": 400}
    _, sent_event = await sent(asked, 200, event)
    error = {"type": "invalid_request_error", "message": "too long"}
    assert json.loads(sent_event["body"].partition(b"data: ")[2]) == {"type": "error", "error": error}
    asked.failed = NoSpace("no room")
    _, sent_event = await sent(asked, 200, event)
    assert json.loads(sent_event["body"].partition(b"data: ")[2])["error"]["message"] == "no room"


async def test_events_are_found_whatever_the_parts_are() -> None:
    stream = b'data: {"choices": []}\n\ndata: ' + vllms(400) + b"\n\ndata: [DONE]\n\n"
    for size in (1, 3, 50):
        messages = await sent(context(), 200, *(stream[at : at + size] for at in range(0, len(stream), size)))
        found = b"".join(message["body"] for message in messages[1:])
        assert b'"code":"bad_request"' in found
        assert found.startswith(b'data: {"choices": []}\n\n')
        assert found.endswith(b"data: [DONE]\n\n")


async def test_errors_in_streams_have_named_codes_and_other_events_pass() -> None:
    event, token = b"data: " + vllms(400) + b"\n\n", b'data: {"choices": []}\n\n'
    _, first, error, last = await sent(context(), 200, token, event, b"data: [DONE]\n\n")
    assert first["body"] == token
    assert json.loads(error["body"].removeprefix(b"data: "))["error"]["code"] == "bad_request"
    assert error["body"].endswith(b"\n\n")
    assert last["body"] == b"data: [DONE]\n\n"


async def test_a_program_that_failed_is_said_in_our_words() -> None:
    asked = context()
    asked.failed = NoSpace("no room")
    start, answer = await sent(asked, 500, vllms(500))
    assert json.loads(answer["body"]) == NoSpace("no room").to_wire()
    assert dict(start["headers"])[b"content-length"] == str(len(answer["body"])).encode()
    _, event = await sent(asked, 200, b"data: " + vllms(500) + b"\n\n")
    assert json.loads(event["body"].removeprefix(b"data: ")) == NoSpace("no room").to_wire()
