"""What a router keeps of requests: which, for how long, by which id they are found, and in which process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import pytest
import uvloop
from fastapi import FastAPI

from tercet.fleet import Trace
from tercet.fleet.admission import Gate
from tercet.fleet.policy_views import BLOCK, SeenRequests, block_names
from tercet.fleet.sequences import RunningSequence
from tercet.protocol import EngineUnreachable, Request, Saturated
from tercet.protocol.spans import RETRY, LeaseReport, Span, SpanContext, TraceEvent
from tercet.router import admin
from tercet.router.observe.request_traces import (
    SERVED,
    FollowedRequest,
    RequestTrace,
    RequestTraces,
    SequenceTrace,
    SharedTraces,
    TraceQuestion,
    spans_of,
)
from tercet.router.router_app import LONGEST_IN_ANSWERS, RouterApp
from tercet.settings import Limits, RetryBudget
from tercet.settings.fleet_settings import Objectives
from tercet.wire.serving.server_access import RequestContext
from tercet_lab.prompt_texts import PromptTexts
from tercet_lab.small_openai import small_app
from tercet_planner.live_planner import TrafficView, read_traffic
from tests.otlp import Receiver
from tests.simulated_processes import MODEL, ask, fleet

from .conftest import LiveRouter

BODY = {"model": "m", "prompt": " ".join(f"w{number}" for number in range(100)), "max_tokens": 5}


@pytest.fixture
async def client(router: LiveRouter, checkpoint: Path) -> AsyncIterator[httpx.AsyncClient]:
    app: FastAPI = small_app(router.service, PromptTexts(checkpoint), ["m"], 1000)
    admin.install(app, router.shared, ["m"])
    gate = Gate(Limits(), router.fleet, router.metrics)
    app.middleware_stack = RouterApp(
        app.build_middleware_stack(), None, gate, (), router.service.program_called, 100_000,
        traces=router.shared.traces.own,
    )  # fmt: skip
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        yield client


async def traced(client: httpx.AsyncClient, name: str) -> Any:
    answer = await client.get(f"/tercet/v1/traces/{name}")
    assert answer.status_code == 200, answer.text
    (found,) = answer.json()
    return found


async def test_a_request_is_found_by_each_of_its_ids(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/completions", json=BODY, headers={"x-request-id": "mine-7"})
    found = await traced(client, "mine-7")
    (sequence,) = found["sequences"]
    assert (found["outcome"], found["model"], sequence["program"]) == ("served", "m", "disaggregated")
    assert (sequence["prompt_tokens"], sequence["output_tokens"]) == (100, answer.json()["usage"]["completion_tokens"])
    assert [event["verb"] for event in sequence["events"]] == ["prep_recv", "remote_send", "start_generate"]
    assert [(pick["role"], pick["engine"]) for pick in sequence["picks"]] == [("decode", "d"), ("prefill", "p")]
    ends = [event.get("at", 0) + event["seconds"] for event in sequence["events"]]
    assert all(0 <= end <= found["seconds"] for end in ends)
    assert await traced(client, answer.json()["id"]) == found
    assert await traced(client, sequence["seq_id"]) == found


async def test_engines_tell_the_lives_of_the_requests_leases(
    client: httpx.AsyncClient, router: LiveRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = LeaseReport("0a1b2c3d", "s", 7.0, [(0.0, "timers", "asked", "blocks for 100 tokens")])
    asked = list[str]()

    async def stories(seq_id: str) -> list[LeaseReport]:
        asked.append(seq_id)
        return [life]

    async def no_stories(_: str) -> list[LeaseReport]:
        raise EngineUnreachable("p is gone")

    monkeypatch.setattr(router.engines["http://d"], "lease_stories", stories, raising=False)
    monkeypatch.setattr(router.engines["http://p"], "lease_stories", no_stories, raising=False)
    await client.post("/v1/completions", json=BODY, headers={"x-request-id": "mine-8"})
    found = await traced(client, "mine-8")
    assert asked == [found["sequences"][0]["seq_id"]], "of engines with a lease of the request, once"
    assert msgspec.convert(found["leases"], list[LeaseReport]) == [msgspec.structs.replace(life, engine="d")]
    monkeypatch.setattr(router.engines["http://d"], "lease_stories", no_stories, raising=False)
    assert "leases" not in await traced(client, "mine-8"), "a trace is shown without them"


async def test_a_request_without_an_id_gets_one_that_engines_and_the_answer_have(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/completions", json=BODY)
    (newest,) = (await client.get("/tercet/v1/traces")).json()
    assert len(newest["request_id"]) == 32
    assert newest["request_id"] in answer.json()["id"]


@pytest.mark.parametrize("at", ["header", "body"])
async def test_a_long_id_is_kept_as_its_beginning_and_a_digest(client: httpx.AsyncClient, at: str) -> None:
    name = "mine-" + "é" * (at == "body") + "n" * 20_000
    headers, fields = ({"x-request-id": name}, {}) if at == "header" else ({}, {"request_id": name})
    answer = await client.post("/v1/completions", json={**BODY, **fields}, headers=headers)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["id"]) <= LONGEST_IN_ANSWERS + len("cmpl-")
    (newest,) = (await client.get("/tercet/v1/traces")).json()
    assert newest["request_id"].startswith("mine-")
    assert len(json.dumps(newest)) < 3000
    assert await traced(client, newest["request_id"]) == newest
    (found,) = (await client.get("/tercet/v1/traces/" + quote(name))).json()
    assert found == newest


async def test_an_engine_that_fails_is_in_the_trace(client: httpx.AsyncClient, router: LiveRouter) -> None:
    router.engine("p").failures["remote_send"] = EngineUnreachable("p does not answer: gone")
    answer = await client.post("/v1/completions", json=BODY, headers={"x-request-id": "bad"})
    assert answer.status_code == 200
    (sequence,) = (await traced(client, "bad"))["sequences"]
    (failed,) = sequence["failed"]
    assert (failed["verb"], failed["engine"], failed["code"]) == ("remote_send", "p", "engine_unreachable")
    assert [event["verb"] for event in sequence["events"]] == ["prep_recv", "fallback", "start_generate"]


async def test_refusals_have_their_code_and_strangers_leave_no_trace(router: LiveRouter, checkpoint: Path) -> None:
    app: FastAPI = small_app(router.service, PromptTexts(checkpoint), ["m"], 1000)
    traces = RequestTraces()
    gate = Gate(Limits(), router.fleet, router.metrics)
    app.middleware_stack = RouterApp(
        app.build_middleware_stack(), None, gate, ("key",), router.service.program_called, 200, traces=traces
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        assert (await client.post("/v1/completions", json=BODY)).status_code == 401
        assert traces.newest(9) == []
        key = {"authorization": "Bearer key"}
        large = await client.post("/v1/completions", json=BODY, headers=key)
    assert large.status_code == 413
    (found,) = traces.newest(9)
    assert (found.outcome, found.sequences) == ("request_too_large", [])


@pytest.mark.parametrize(
    "query", ["newest=0", "slowest=x", "newest=1&slowest=1", "newest=101", "newest=" + "9" * 5000, "oldest=3"]
)
async def test_wrong_lists_are_refused(client: httpx.AsyncClient, query: str) -> None:
    answer = await client.get(f"/tercet/v1/traces?{query}")
    assert answer.status_code == 400, answer.text


async def test_an_unknown_id_says_what_may_be_wrong(client: httpx.AsyncClient) -> None:
    answer = await client.get("/tercet/v1/traces/nobody")
    assert answer.status_code == 404
    assert "trace-requests" in answer.json()["error"]["message"]


# ---- what is kept ------------------------------------------------------------------------------------------------


def served(traces: RequestTraces, name: str, seconds: float) -> None:
    context = RequestContext("/v1/completions")
    context.began -= seconds
    with traces.following(context, name):
        pass


def test_the_last_and_the_slowest_are_kept() -> None:
    traces = RequestTraces(kept=20)
    for number in range(200):
        served(traces, f"r{number}", 50.0 if number in (3, 7) else 0.0)
    names = [trace.request_id for trace in traces]
    assert names[:20] == [f"r{number}" for number in range(199, 179, -1)]
    assert sorted(names[20:]) == ["r3", "r7"]
    assert [trace.request_id for trace in traces.slowest(2)] == ["r3", "r7"] or traces.slowest(2)[0].request_id == "r7"


def test_none_are_kept_where_none_are_wanted() -> None:
    traces = RequestTraces(kept=0)
    served(traces, "r", 1.0)
    assert list(traces) == []


def test_a_request_that_runs_is_shown_and_its_error_has_a_reason() -> None:
    traces, context = RequestTraces(), RequestContext("/v1/completions")
    with traces.following(context, "mine") as followed:
        assert isinstance(followed, FollowedRequest)
        (running,) = traces.called("mine")
        assert running.outcome == "running"
        context.failed = Saturated("the fleet is full")
    (ended,) = traces.called("mine")
    assert (ended.outcome, ended.reason) == ("saturated", "the fleet is full")


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_other_processes_are_asked_and_one_that_is_gone_is_left_out(
    run: Callable[[Coroutine[Any, Any, None]], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Routers run on uvloop, which is another implementation of sockets."""
    run(_others_are_asked())
    (said,) = caplog.messages
    assert "Connection refused" in said


async def _others_are_asked() -> None:
    here, there = RequestTraces(), RequestTraces()
    served(here, "both", 0.0)
    served(there, "both", 1.0)
    served(there, "only-there", 3.0)

    alive = ["test-there", "test-gone"]

    async def others() -> list[str]:
        return alive

    asking = SharedTraces(here, "test-here", others)
    async with SharedTraces(there, "test-there").answering():
        found = await asking.find(TraceQuestion(id="only-there"))
        assert [trace.request_id for trace in found] == ["only-there"]
        alive.remove("test-gone")
        assert len(await asking.find(TraceQuestion(id="both"))) == 2
        assert [trace.request_id for trace in await asking.find(TraceQuestion(slowest=1))] == ["only-there"]
        assert len(await asking.find(TraceQuestion(newest=2))) == 2


async def test_what_is_no_question_gets_no_answer() -> None:
    async with SharedTraces(RequestTraces(), "test-odd").answering():
        from tercet.router.observe.request_traces import _address

        reader, writer = await asyncio.open_unix_connection(_address("test-odd"))
        writer.write(json.dumps({"id": 3}).encode() + b"\n")
        assert await reader.read() == b""
        writer.close()


# Spans of a request's trace: what an engine failed ends in an error, and its retry is linked to it.

PLACE = SpanContext("a" * 32, "b" * 16)


def spans(events: list[TraceEvent], failed: list[TraceEvent]) -> list[Span]:
    sequence = SequenceTrace("s-0", "data_parallel", 0.0, 8, 4, 0.1, 0.1, events, [], failed, [])
    trace = RequestTrace("r", "/v1/completions", "m", 1.0, 2.0, SERVED, sequences=[sequence])
    return [*spans_of(trace, PLACE)]


def test_a_retry_is_linked_to_the_call_that_failed_last_on_the_engine_at_fault() -> None:
    killed = TraceEvent("start_generate", "d", code="engine_unreachable", at=0.2, total=0.5, span="2" * 16)
    retry = TraceEvent(RETRY, "d", code="engine_unreachable", at=0.8, reason="d does not answer")
    again = TraceEvent("start_generate", "e", at=0.9, total=0.3, span="3" * 16)
    other = TraceEvent("prep_recv", "p", code="no_space", at=0.1, span="4" * 16)
    earlier = TraceEvent("prep_recv", "d", code="no_space", at=0.05, span="5" * 16)
    later = TraceEvent("prep_recv", "d", code="no_space", at=0.95, span="6" * 16)
    found = spans([killed, retry, again], [earlier, other, later])
    by_name = {span.name: span for span in found if span.name != "start_generate"}
    assert [link.span_id for link in by_name["retry"].links] == [killed.span]
    errors = {span.context.span_id: span.error for span in found if span.name == "start_generate"}
    assert errors == {killed.span: "engine_unreachable", again.span: ""}
    assert by_name["POST /v1/completions"].error == ""


def test_a_retry_of_a_program_that_failed_by_itself_has_no_link() -> None:
    retry = TraceEvent(RETRY, "", code="program_failed", at=0.8)
    found = spans([TraceEvent("prep_recv", "d", at=0.1, span="1" * 16), retry], [])
    assert [span.links for span in found if span.name == "retry"] == [[]]


def test_a_retry_does_not_move_the_sequences_after_it() -> None:
    retried = [TraceEvent(RETRY, "d", code="engine_unreachable", at=0.8)]
    sequences = [
        SequenceTrace("s-0", "data_parallel", 0.0, 8, 4, 0.1, 0.1, retried, [], [], []),
        SequenceTrace("s-1", "data_parallel", 0.25, 8, 4, 0.1, 0.1, [TraceEvent("prep_recv", "e", at=0.5)], [], [], []),
    ]
    found = spans_of(RequestTrace("r", "/v1/completions", "m", 1.0, 2.0, SERVED, sequences=sequences), PLACE)
    assert [span.began_ns for span in found] == [1_000_000_000, 1_800_000_000, 1_750_000_000]


# A simulated fleet in processes of its own: one trace over router and engines, one id in every log line.


@pytest.mark.processes
@pytest.mark.usefixtures("forked")
def test_one_trace_and_one_id_over_router_and_engines(tmp_path: Path) -> None:
    with Receiver() as receiver:
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "OTEL_BSP_SCHEDULE_DELAY": "200"}
        with fleet(tmp_path, "--access-log", "--log-format", "json", **variables) as (url, _):
            body = {"model": MODEL, "prompt": list(range(1000)), "max_tokens": 8}
            ask(f"{url}/v1/completions", body, x_request_id="mine-1")
            other = {**body, "prompt": list(range(2000, 3000))}
            made = ask(f"{url}/v1/completions", other)["id"].removeprefix("cmpl-")
            traces = ask(f"{url}/tercet/v1/traces/mine-1")
            receiver.wait_for(
                lambda spans: (
                    sum(span.service == "tercet-engine" for span in spans) >= 5
                    and sum(span.name.startswith("POST") for span in spans) >= 2
                )
            )
    assert traces[0]["sequences"][0]["events"]
    for names in (("p",), ("d", "e"), ("router",)):
        text = "".join((tmp_path / f"{name}.log").read_text() for name in names)
        lines = [json.loads(line) for line in text.splitlines() if line[:1] == "{"]
        about = [line for line in lines if line["logger"] == "tercet.access" and "seq_id" in line]
        about += [line for line in lines if line.get("path") == "/v1/completions"]
        assert about, names
        assert {line["request_id"] for line in about} == {"mine-1", made}, names
        assert all("trace_id" in line for line in about), names
    _is_one_trace(receiver)


def _is_one_trace(receiver: Receiver) -> None:
    root = next(span for span in receiver.spans if span.attributes.get("tercet.request_id") == "mine-1")
    trace = [span for span in receiver.spans if span.trace_id == root.trace_id]
    by_id = {span.span_id: span for span in trace}
    assert root.parent == ""
    assert all(span.parent in by_id for span in trace if span is not root)
    of_engines = [(span.instance, span.name) for span in trace if span.service == "tercet-engine"]
    decoding = next(engine for engine, name in of_engines if name == "prep_recv")
    assert {*of_engines} == {(decoding, "prep_recv"), ("p", "remote_send"), (decoding, "start_generate")}
    for span in trace:
        if span.service == "tercet-engine":
            assert (by_id[span.parent].service, by_id[span.parent].name) == ("tercet-router", span.name)
    send = next(span for span in trace if span.name == "remote_send" and span.service == "tercet-router")
    assert [by_id[link].name for link in send.links] == ["prep_recv"]
    assert root.attributes["gen_ai.usage.output_tokens"] == 8


# What a router tells a planner: requests by times, lengths and blocks, engines, and no text.


async def test_requests_are_seen_from_the_first_question_on(router: LiveRouter) -> None:
    async with router.client() as client:
        await router.ask()
        first = (await client.get("/traffic")).json()
        assert first["arrivals"] == []
        assert first["program"] == "disaggregated"
        assert {each["name"]: each["role"] for each in first["engines"]} == {"p": "prefill", "d": "decode"}
        await router.ask()
        await router.ask()
        answer = await client.get("/traffic?window=30")
    found = read_traffic(answer.json())
    assert found.processes == 1
    assert len(found.arrivals) == 2
    view = TrafficView()
    view.heard(found)
    one, other = view.observed().arrivals
    assert found.since <= one.at <= other.at <= found.now
    assert one.ended
    assert one.prompt_tokens > 0
    assert one.output_tokens > 0
    assert one.met is True
    assert 'prompt"' not in answer.text


@pytest.mark.parametrize("window", ["0", "x", "-1", "nan", "601"])
async def test_a_window_that_is_none_is_named(router: LiveRouter, window: str) -> None:
    async with router.client() as client:
        answer = await client.get(f"/traffic?window={window}")
    assert answer.status_code == 400
    assert "window" in answer.json()["error"]["message"]


def test_equal_beginnings_have_equal_blocks() -> None:
    prompt = list(range(3 * BLOCK + 7))
    names = block_names(prompt)
    assert len(names) == 3
    assert block_names(prompt[: 2 * BLOCK]) == names[:2]
    assert block_names([1, *prompt[1:]])[2] != names[2]
    assert block_names(prompt[: BLOCK - 1]) == ()


def test_what_left_the_window_is_forgotten() -> None:
    seen = SeenRequests(10.0, Objectives(), lambda: 0.0)
    for background in (False, True):
        request = Request(seq_id="s", prompt=(1,), background=background)
        sequence = RunningSequence(request, "p", RetryBudget(), 0.0)
        seen.begins(sequence, Trace())
        seen.ends(sequence, Trace(), "served")
    assert (seen.arrived, seen.ended) == (1, 1)  # plans are made without those in the background
    assert len(seen.arrivals(0.0)) == 1
    assert seen.arrivals(100.0) == ()


async def test_a_planner_reports_and_the_last_report_is_shown(router: LiveRouter) -> None:
    plan = {"at": 1.0, "fleet": "1P1D", "wanted": "1P2D", "reason": "it grows", "steps": ["start one to decode"]}
    told = {"act": "advise", "planner": "simulate", "interval": 15.0, "margin": 0.1, "plans": [plan]}
    async with router.client() as client:
        assert (await client.get("/planner")).json() is None
        assert (await client.put("/planner", json=told)).status_code == 200
        shown = (await client.get("/planner")).json()
        refused = await client.put("/planner", json={**told, "mood": "good"})
    assert shown["plans"] == [{**plan, "expected": None, "ttft_p99": None, "came": None, "proposal": ""}]
    assert refused.status_code == 400
    assert "mood" in refused.json()["error"]["message"]
