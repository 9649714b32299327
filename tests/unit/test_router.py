"""The router without vLLM: which program runs, what happens when it fails, and how a trace reaches the client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prometheus_client
import pytest

from tercet.fleet import EngineFleet, Member, Trace
from tercet.fleet.admission import Gate
from tercet.protocol import BadRequest, EngineUnreachable, NoSpace, ProgramFailed, Request, TransferFailed
from tercet.router.observe.metrics import Metrics
from tercet.router.router_app import RouterApp
from tercet.router.serve.service import Service
from tercet.settings import EngineAddress, Limits, RetryBudget, RouterConfig
from tercet.wire.serving.server_access import current
from tests.own_metrics import own_metrics

from .fakes import FakeEngine


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    with own_metrics():
        yield Metrics()


def counted(name: str, **labels: str) -> float:
    return prometheus_client.REGISTRY.get_sample_value(name, labels) or 0.0


class LiveRouter:
    def __init__(self, metrics: Metrics, program: str = "disaggregated", retries: int = 2) -> None:
        self.prefill, self.decode = FakeEngine("p"), FakeEngine("d")
        members = [Member("p", "", "prefill", self.prefill), Member("d", "", "decode", self.decode)]
        self.fleet = EngineFleet(members)
        self.service = Service(self.fleet, program, {}, metrics, retries=RetryBudget(retries=retries))
        self.trace = Trace()

    async def ask(self, headers: dict[str, str] | None = None, **sampling: Any) -> list[int]:
        request = Request(seq_id="s", prompt=tuple(range(100)), sampling_params=sampling, headers=headers or {})
        return [token async for item in self.service.run(request, self.trace) for token in item.token_ids]


async def test_the_configured_program_runs(metrics: Metrics) -> None:
    router = LiveRouter(metrics)
    assert await router.ask() == [100, 101, 102]
    assert router.trace.program == "disaggregated"
    assert router.trace.ttft is not None
    assert counted("tercet_sequences_total", program="disaggregated") == 1
    assert counted("tercet_sequences_running") == 0


async def test_a_header_picks_another_one(metrics: Metrics) -> None:
    router = LiveRouter(metrics)
    await router.ask({"x-tercet-program": "data_parallel"})
    assert router.trace.program == "data_parallel"
    with pytest.raises(BadRequest):
        await router.ask({"x-tercet-program": "/etc/passwd:main"})


async def test_prompt_logprobs_run_on_one_engine(metrics: Metrics) -> None:
    router = LiveRouter(metrics)
    await router.ask(prompt_logprobs=1)
    assert [event.verb for event in router.trace.events] == ["start_generate"]


@pytest.mark.parametrize(
    ("engine", "verb", "error"),
    [
        ("d", "prep_recv", NoSpace("full")),
        ("p", "remote_send", TransferFailed("lost")),
        ("p", "remote_send", EngineUnreachable("gone")),
    ],
)
async def test_a_pattern_that_fails_before_its_first_token_is_replaced(
    metrics: Metrics, engine: str, verb: str, error: Any
) -> None:
    router = LiveRouter(metrics)
    (router.prefill if engine == "p" else router.decode).failures[verb] = error
    assert await router.ask() == [100, 101, 102]
    assert router.trace.program == "disaggregated -> data_parallel"
    assert counted("tercet_fallbacks_total", program="disaggregated", code=error.code) == 1
    assert [member.in_flight for member in router.fleet.members] == [0, 0]
    assert not router.decode.leases


async def test_bad_input_is_not_tried_elsewhere(metrics: Metrics) -> None:
    router = LiveRouter(metrics)
    router.decode.failures["prep_recv"] = BadRequest("no", "prompt")
    with pytest.raises(BadRequest):
        await router.ask()
    assert router.prefill.calls == []


async def test_a_program_that_ends_early_is_an_error_and_not_a_hang(metrics: Metrics, tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text(
        "from tercet.protocol import Output\nasync def short(request, fleet):\n    yield Output((1,))\n"
    )
    router = LiveRouter(metrics, f"{tmp_path / 'short.py'}:short", retries=0)
    with pytest.raises(ProgramFailed, match="ended before"):
        await router.ask()


# ---- configuration -------------------------------------------------------------------------------------------


def test_engines_need_names_of_their_own() -> None:
    twice = (EngineAddress("a", "http://h:1"), EngineAddress("a", "http://h:2"))
    with pytest.raises(BadRequest, match="called a"):
        RouterConfig(model="m", served_model_name="m", engines=twice)
    with pytest.raises(BadRequest, match="engines: there are none; give --engine"):
        RouterConfig(model="m", served_model_name="m", engines=())


# ---- context and trace ---------------------------------------------------------------------------------------


class App:
    """An ASGI application that answers as vLLM would, under the middleware."""

    def __init__(self, content_type: str, *chunks: bytes, metrics: Metrics) -> None:
        self.content_type, self.chunks = content_type, chunks
        self.headers: dict[str, str] = {}
        self.router, self.metrics = LiveRouter(metrics), metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        context = current()
        self.headers = dict(context.headers)
        context.traces.append(Trace(program="disaggregated"))
        length = str(sum(map(len, self.chunks))).encode()
        headers = [(b"content-type", self.content_type.encode()), (b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for index, chunk in enumerate(self.chunks):
            more = index < len(self.chunks) - 1
            await send({"type": "http.response.body", "body": chunk, "more_body": more})


async def get(app: App, **headers: str) -> tuple[int, dict[bytes, bytes], bytes]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    gate = Gate(Limits(), app.router.fleet, app.metrics)
    front = RouterApp(app, None, gate, (), app.router.service.program_called, 1000, client_traces=True)
    scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": raw}
    await front(scope, lambda: None, send)  # type: ignore[arg-type]
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], dict(sent[0]["headers"]), body


async def test_headers_reach_the_program_and_plain_answers_stay_as_they_are(metrics: Metrics) -> None:
    app = App("application/json", b'{"a": 1}', metrics=metrics)
    status, _, body = await get(app, x_mine="yes")
    assert (status, body, app.headers) == (200, b'{"a": 1}', {"x-mine": "yes"})
    assert current().headers == {}


async def test_a_traced_json_answer_has_one_more_key(metrics: Metrics) -> None:
    _, headers, body = await get(App("application/json", b'{"a"', b": 1}", metrics=metrics), x_tercet_trace="1")
    answer = json.loads(body)
    assert answer["a"] == 1
    assert answer["tercet"]["program"] == "disaggregated"
    assert headers[b"content-length"] == str(len(body)).encode()


async def test_a_traced_stream_has_one_more_event_before_done(metrics: Metrics) -> None:
    app = App("text/event-stream", b'data: {"a": 1}\n\n', b"data: [DONE]\n\n", metrics=metrics)
    _, _, body = await get(app, x_tercet_trace="1")
    events = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line]
    assert json.loads(events[0]) == {"a": 1}
    assert json.loads(events[1])["tercet"]["program"] == "disaggregated"
    assert events[2] == b"[DONE]"


async def test_an_unknown_program_is_refused_before_anything_runs(metrics: Metrics) -> None:
    app = App("application/json", b"{}", metrics=metrics)
    status, _, body = await get(app, x_tercet_program="nonsense")
    assert status == 400
    assert json.loads(body)["error"]["param"] == "x-tercet-program"
    assert app.headers == {}
