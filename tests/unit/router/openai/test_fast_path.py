"""What the fast path leaves to vLLM's layers, and what it owes them."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from typing import Any

import httpx
import prometheus_client
import pytest

from tercet.vllm_plugin.differences import OFFSETS_OF_SENT_TEXT
from tests.longest_wait import LONGEST_WAIT_S, wait_until

from .conftest import CHAT, COMPLETIONS, MODEL, LiveRouters, Step
from .test_client_connection import connect, read_until

PLAIN: dict[str, Any] = {"model": MODEL, "prompt": "Hello", "stream": True, "max_tokens": 50}
IDS = re.compile(r"[0-9a-f]{16,}")


def script(routers: LiveRouters) -> list[Step]:
    return [*[[token] for token in routers.tokens("one two three")], "stop"]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The routes of requests that took the fast path."""
    from tercet.router.openai.fast_path.request_stream import HttpMetrics

    found: list[str] = []
    observe = HttpMetrics.observe

    def note(self: Any, scope: Any, handler: str, seconds: float) -> None:
        found.append(handler)
        observe(self, scope, handler, seconds)

    monkeypatch.setattr(HttpMetrics, "observe", note)
    return found


@pytest.mark.parametrize(
    ("path", "body"),
    [(COMPLETIONS, PLAIN), (COMPLETIONS, {**PLAIN, "prompt": [1, 2, 3]}),
     (CHAT, {**PLAIN, "messages": [{"role": "user", "content": "x"}]})],
)  # fmt: skip
def test_plain_streams_take_it(routers: LiveRouters, taken: list[str], path: str, body: dict[str, Any]) -> None:
    status, events = routers.ask("fast", path, body, script(routers))
    assert (status, events.endswith("data: [DONE]")) == (200, True)
    wait_until(lambda: taken == [path])


@pytest.mark.parametrize(
    ("more", "headers", "takes"),
    [
        ({"prompt": ["a", "b"]}, {}, False),
        ({"echo": True}, {}, False),
        ({"use_beam_search": True, "n": 2}, {}, False),
        ({}, {"x-tercet-trace": "1"}, False),
        ({"n": 2}, {}, True),
        ({"logprobs": 1}, {}, not OFFSETS_OF_SENT_TEXT.is_here),
        ({"return_token_ids": True}, {}, True),
        ({}, {"origin": "http://browser"}, True),
    ],
)
def test_which_streams_take_it(
    routers: LiveRouters, taken: list[str], more: dict[str, Any], headers: dict[str, str], takes: bool
) -> None:
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    from tercet.router.openai.fast_path.preparing import is_fast_completion

    if not headers:
        assert is_fast_completion(CompletionRequest.model_validate({**PLAIN, **more})) == takes
        return
    status, _ = routers.ask("fast", COMPLETIONS, {**PLAIN, **more}, script(routers), **headers)
    assert status == 200
    if takes:
        wait_until(lambda: taken == [COMPLETIONS])  # it is noted when the stream has ended
    assert taken == [COMPLETIONS] * takes


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        (COMPLETIONS, b"{", {}),
        (COMPLETIONS, b'{"stream": true, "prompt": NaN}', {}),
        (COMPLETIONS, {**PLAIN, "model": "another"}, {}),
        (COMPLETIONS, {**PLAIN, "temperature": -1}, {}),
        (COMPLETIONS, {**PLAIN, "temperature": "hot"}, {}),
        (COMPLETIONS, {**PLAIN, "prompt": [7] * 600}, {}),
        (COMPLETIONS, {**PLAIN, "prompt": []}, {}),
        (COMPLETIONS, {**PLAIN, "suffix": "x"}, {}),
        (CHAT, {"model": MODEL, "stream": True}, {}),
        (CHAT, {"model": MODEL, "stream": True, "messages": "x"}, {}),
        (COMPLETIONS, PLAIN, {"x-tercet-program": "unheard_of"}),
        (COMPLETIONS, PLAIN, {"content-type": "text/plain"}),
    ],
)
def test_refusals_are_vllms(routers: LiveRouters, path: str, body: Any, headers: dict[str, str]) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answers = [
        httpx.post(
            routers.urls[router] + path,
            content=content,
            headers={"content-type": "application/json", **headers},
            timeout=LONGEST_WAIT_S,
        )
        for router in ("fast", "stock")
    ]
    fast, stock = ((answer.status_code, IDS.sub("", answer.text)) for answer in answers)
    assert fast == stock
    assert fast[0] >= 400
    assert not routers.processor.request_states


def test_headers_are_vllms(routers: LiveRouters) -> None:
    found: list[dict[str, str]] = []
    for router in ("fast", "stock"):
        routers.engine.expect("headers", script(routers))
        routers.let_go("headers", 10)
        answer = httpx.post(
            routers.urls[router] + COMPLETIONS, json=PLAIN, headers={"x-request-id": "headers"}, timeout=LONGEST_WAIT_S
        )
        # ``vary`` is for caches, and none keeps the answer to a POST.
        found.append({name: value for name, value in answer.headers.items() if name not in ("date", "vary")})
    assert found[0] == found[1]


def test_it_counts_in_vllms_http_metrics(routers: LiveRouters) -> None:
    def total() -> float:
        labels = {"handler": COMPLETIONS, "method": "POST", "status": "2xx"}
        return prometheus_client.REGISTRY.get_sample_value("http_requests_total", labels) or 0.0

    def idle() -> bool:
        return not any(server.server_state.tasks for server in routers.servers.values())

    def counted(router: str) -> float:
        wait_until(idle)  # requests before are counted once they are over
        before = total()
        routers.ask(router, COMPLETIONS, PLAIN, script(routers))
        wait_until(idle)
        return total() - before

    assert counted("fast") == counted("stock") == 1.0


def test_a_client_that_leaves_before_the_first_token(routers: LiveRouters) -> None:
    ended = routers.engine.ended["early"] = threading.Event()
    client = connect(routers, "early", [[], *script(routers)])
    wait_until(lambda: "early" in routers.engine.said)
    client.shutdown(socket.SHUT_RDWR)
    client.close()
    assert ended.wait(LONGEST_WAIT_S)
    wait_until(lambda: not routers.processor.request_states and not routers.engine.running)


@pytest.mark.parametrize("router", ["fast", "stock"])
@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"stream": False}], ids=str)
def test_a_client_that_leaves_while_its_media_are_encoded(
    routers: LiveRouters, monkeypatch: pytest.MonkeyPatch, router: str, fields: dict[str, Any]
) -> None:
    """vLLM has registered the request then, and has no task yet that would abort it."""
    from tercet.router.openai import program_client

    begun = threading.Event()

    async def encode(*_: object) -> tuple[()]:
        begun.set()
        await asyncio.sleep(LONGEST_WAIT_S)
        return ()

    monkeypatch.setattr(program_client, "features_of", encode)
    processor = routers.processor
    client = connect(routers, "media", ["stop"], router=router, **fields)
    assert begun.wait(LONGEST_WAIT_S)
    assert processor.request_states
    client.close()
    wait_until(lambda: not processor.request_states)
    assert not processor.parent_requests
    assert not processor.external_req_ids


def test_a_client_that_leaves_counts_as_vllm_counts_it(routers: LiveRouters) -> None:
    """By the head of its answer, which was sent."""

    def totals() -> dict[str, float]:
        labels = {"handler": COMPLETIONS, "method": "POST"}
        found = {
            status: prometheus_client.REGISTRY.get_sample_value("http_requests_total", {**labels, "status": status})
            for status in ("2xx", "3xx", "4xx", "5xx")
        }
        return {status: total or 0.0 for status, total in found.items()}

    def idle() -> bool:
        return not any(server.server_state.tasks for server in routers.servers.values())

    def counted(router: str) -> dict[str, float]:
        wait_until(idle)
        before = totals()
        client = connect(routers, router, script(routers), router=router)
        read_until(client, b'"text":"one"')
        client.close()
        wait_until(idle)
        return {status: total - before[status] for status, total in totals().items() if total != before[status]}

    assert counted("fast") == counted("stock") == {"2xx": 1.0}


def test_a_connection_is_used_again(routers: LiveRouters) -> None:
    with httpx.Client(timeout=LONGEST_WAIT_S) as client:
        for number in range(3):
            name = f"again{number}"
            routers.engine.expect(name, script(routers))
            routers.let_go(name, 10)
            answer = client.post(routers.urls["fast"] + COMPLETIONS, json=PLAIN, headers={"x-request-id": name})
            assert answer.text.endswith("data: [DONE]\n\n")
    wait_until(lambda: not routers.processor.request_states)
