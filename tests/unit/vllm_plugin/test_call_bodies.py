"""How large the body of a verb may be, and what a caller is told of one that is larger."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from tercet.protocol.access import Callers, Prover, digest_of
from tercet.protocol.wire import ReleaseCall
from tercet.vllm_plugin.endpoint import TercetEndpoints, _call
from tercet.vllm_plugin.start.plugin_settings import MAX_REQUEST_BYTES, parse_settings

MOST = 1000
PATHS = ("prep_recv", "remote_send", "start_generate", "connect", "abort", "release", "sequences/x/move", "adapters")


@pytest.fixture
def app() -> FastAPI:
    """An engine's server, of which the verbs are never reached."""
    found = FastAPI()
    TercetEndpoints().attach_router(found)
    found.state.tercet = SimpleNamespace(edge=SimpleNamespace(incarnation="i"))
    found.state.tercet_callers = Callers(())
    found.state.tercet_prefillers = None
    found.state.tercet_max_request_bytes = MOST
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


async def test_what_is_read_is_the_call(app: FastAPI) -> None:
    messages = [
        {"type": "http.request", "body": b'{"lease":', "more_body": True},
        {"type": "http.request", "body": b'"l"}', "more_body": False},
    ]

    async def receive() -> Any:
        return messages.pop(0)

    request: Any = SimpleNamespace(app=app, receive=receive, headers={}, scope={"headers": []}, state=None)
    assert msgspec.to_builtins(await _call(request, ReleaseCall)) == {"lease": "l"}


async def test_a_packed_call_is_read_as_well() -> None:
    body = msgspec.msgpack.encode({"lease": "l"})

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    state = SimpleNamespace(tercet_max_request_bytes=MOST)
    request: Any = SimpleNamespace(
        app=SimpleNamespace(state=state),
        receive=receive,
        headers={},
        state=None,
        scope={"headers": [(b"content-type", b"application/msgpack")]},
    )
    assert msgspec.to_builtins(await _call(request, ReleaseCall)) == {"lease": "l"}


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
    app.state.tercet_callers = Callers(["secret"])
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
