"""What a router's /metrics has of vLLM's metrics, and of engines that are there and gone."""

from __future__ import annotations

import re

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from starlette.types import Receive, Scope, Send

from tercet.fleet import Trace
from tercet.protocol import BadRequest
from tercet.protocol.headers import PROGRAM_HEADER
from tercet.protocol.spans import SpanContext, TraceEvent, working_in
from tercet.router.observe import metrics, request_traces
from tercet.router.observe.metrics import (
    KNOWN_HERE,
    MOST_EXEMPLARS,
    MOST_PAIRS,
    MOST_REASONS,
    OTHER_ENGINES,
    WORKERS_VARIABLE,
    Exemplars,
    Metrics,
    by_bucket,
    with_metrics,
)
from tercet.router.observe.request_traces import RequestTraces, SharedTraces, TraceQuestion
from tercet.router.serve.moves import MoveRecord
from tercet.router.serve.plans import Plan, Rule
from tercet.wire import SECONDS

from .conftest import LiveRouter, counted, series


@pytest.fixture
def of_vllm(monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    registry = CollectorRegistry()
    monkeypatch.setattr(metrics, "REGISTRY", registry)
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    labels = ["model_name", "engine"]
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info", "new_one"):
        Gauge(f"vllm:{name}", "Of a scheduler.", labels, registry=registry).labels("m", "0").set(0)
    Counter("vllm:generation_tokens", "Tokens.", labels, registry=registry).labels("m", "0").inc(7)
    Counter("vllm:request_success", "Done.", [*labels, "finished_reason"], registry=registry).labels(
        "m", "0", "stop"
    ).inc()
    Histogram("vllm:time_to_first_token_seconds", "TTFT.", labels, registry=registry).labels("m", "0").observe(0.1)
    Counter("vllm:num_preemptions", "Preempted.", labels, registry=registry).labels("m", "0").inc(0)
    sent = Counter("tercet_kv_sent_bytes", "KV.", ["engine", "to"], registry=registry)
    verbs = Histogram("tercet_verb_seconds", "Verbs.", ["verb", "engine"], registry=registry)
    for engine, to in (("p", "d"), ("gone", "d"), ("p", "gone")):
        sent.labels(engine, to).inc(5)
        verbs.labels("remote_send", engine).observe(1)
    Counter("tercet_errors", "Errors.", ["code"], registry=registry).labels("gone").inc()
    Counter("http_requests", "Requests.", ["handler"], registry=registry).labels("/").inc()
    return registry


async def read(router: LiveRouter, path: str = "/metrics", **headers: str) -> str:
    async def vllms(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b"vLLM's own"})

    transport = httpx.ASGITransport(
        with_metrics(vllms, router.fleet, SharedTraces(RequestTraces(), exemplars=router.metrics.exemplars).exemplars)
    )
    async with httpx.AsyncClient(transport=transport, base_url="http://router", follow_redirects=True) as client:
        return (await client.get(path, headers=headers)).text


@pytest.mark.parametrize("path", ["/metrics", "/metrics/", "/metrics/more"])
async def test_nothing_is_said_under_an_engines_name(router: LiveRouter, of_vllm: CollectorRegistry, path: str) -> None:
    said = await read(router, path)
    assert "vllm:" not in said
    assert 'tercet_served_generation_tokens_total{model_name="m"} 7.0' in said
    assert 'tercet_served_request_success_total{finished_reason="stop",model_name="m"} 1.0' in said
    assert 'tercet_served_time_to_first_token_seconds_bucket{le="+Inf",model_name="m"} 1.0' in said
    found = re.findall(r"^# TYPE tercet_served_(\S+)", said, re.MULTILINE)
    assert not {*found} - {f"{name}{end}" for name in KNOWN_HERE for end in ("", "_total", "_created")}
    assert 'http_requests_total{handler="/"} 1.0' in said


async def test_series_of_engines_that_are_gone_go(router: LiveRouter, of_vllm: CollectorRegistry) -> None:
    said = await read(router)
    assert 'tercet_kv_sent_bytes_total{engine="p",to="d"} 5.0' in said
    assert 'tercet_verb_seconds_count{engine="p",verb="remote_send"} 2.0' in said
    assert 'tercet_engine_up{engine="d"} 1.0' in said
    assert [line for line in said.splitlines() if "gone" in line and "created" not in line] == [
        'tercet_errors_total{code="gone"} 1.0'
    ]
    router.membership.remove("d")
    said = await read(router)
    assert 'engine="d"' not in said
    assert 'to="d"' not in said


async def test_other_paths_are_vllms(router: LiveRouter, of_vllm: CollectorRegistry) -> None:
    assert await read(router, "/v1/metrics") == "vLLM's own"


PLACE = SpanContext("a" * 32, "b" * 16)
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


async def test_exemplars_name_the_trace_to_a_scraper_that_asks_for_openmetrics(router: LiveRouter) -> None:
    for place in (None, PLACE._replace(trace_id="c" * 32, sampled=False), PLACE):
        with working_in(place):
            await router.ask()
    said = await read(router, accept=OPENMETRICS)
    families = {family.name: family for family in text_string_to_metric_families(said)}  # it is strict
    for name in ("tercet_ttft_seconds", "tercet_verb_seconds"):
        found = [sample.exemplar.labels for sample in families[name].samples if sample.exemplar]
        assert {each["trace_id"] for each in found} == {PLACE.trace_id}, name
        assert all(len(each["span_id"]) == 16 for each in found)
    plain = await read(router)
    assert "trace_id" not in plain
    assert "tercet_ttft_seconds_bucket" in plain


async def test_exemplars_of_all_workers_of_one_router_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKERS_VARIABLE, "/one/router")
    labels = {"program": "p"}
    ours, theirs, far = Exemplars(), Exemplars(), PLACE._replace(trace_id="d" * 32)
    ours.note("tercet_ttft_seconds", labels, 0.3, 5.0, PLACE)
    ours.note("tercet_ttft_seconds", labels, 0.01, 5.0, PLACE)
    theirs.note("tercet_ttft_seconds", labels, 0.4, 6.0, far)
    theirs.note("tercet_ttft_seconds", labels, 700.0, 4.0, far)

    async def others() -> list[str]:
        return ["test-exemplars"]

    asking = SharedTraces(RequestTraces(), "test-asks", others, ours)
    async with SharedTraces(RequestTraces(), "test-exemplars", exemplars=theirs).answering():
        found = by_bucket(await asking.exemplars())
        monkeypatch.setenv(WORKERS_VARIABLE, "/another")
        question = TraceQuestion(exemplars="/one/router")
        assert await asking._of_others(question, request_traces._exemplars) == [], "it counts elsewhere"
        monkeypatch.delenv(WORKERS_VARIABLE)
        assert len(await asking.exemplars()) == 2, "one process asks nobody"
    of_bound = {dict(labels)["le"]: exemplar for (_, labels), exemplar in found.items()}
    assert {le: (each.value, each.labels["trace_id"][0]) for le, each in of_bound.items()} == {
        "0.01": (0.01, "a"), "0.5": (0.4, "d"), "+Inf": (700.0, "d"),
    }  # fmt: skip


def test_no_more_exemplars_are_kept_than_that() -> None:
    kept = Exemplars()
    for number in range(MOST_EXEMPLARS + 5):
        kept.note("h", {"engine": str(number)}, 1.0, 1.0, PLACE)
    kept.note("h", {"engine": "5"}, 1.0, 2.0, PLACE)
    found = [each.labels["engine"] for each in kept.kept()]
    assert (len(found), found[0], found[-1]) == (MOST_EXEMPLARS, "6", "5")


HOSTILE = ("x-tercet-program", "x-request-id", "x-session-token", "x-tenant", "x-priority", "user-agent", "traceparent")


async def test_no_value_of_a_client_makes_a_series(router: LiveRouter) -> None:
    """Names of models and programs, tenants, classes by header, reasons of moves: each request has other ones."""
    by_class = Rule(program="disaggregated", header="x-class", value="gold")
    await router.use(Plan(program="data_parallel", rules=(by_class,)))

    async def asked(number: int) -> None:
        text = f"{number}-\N{SNOWMAN}-{'x' * 200}"
        headers = dict.fromkeys(HOSTILE[1:], text) | {"x-class": "gold" if number % 2 else text}
        await router.ask(headers, model=text)
        with pytest.raises(BadRequest):
            await router.ask({PROGRAM_HEADER: text})
        router.metrics.moved(MoveRecord(number, "s", "p", "d", text, 0.0, 9, "moved"))

    for number in range(MOST_REASONS + 4):
        await asked(number)
    before = series()
    for number in range(100, 130):
        await asked(number)
    assert series() == before
    assert len(before) < 1000


# What a router counts: predictions against caches, and pairs of engines.


def test_what_was_predicted_and_found_is_counted_by_program_and_engine(metrics: Metrics) -> None:
    first = TraceEvent("prep_recv", "d", predicted=100, cached=64)
    second = TraceEvent("remote_send", "p", predicted=32, cached=96)
    metrics.finished(Trace("disaggregated", [first, second, TraceEvent("start_generate", "d", cached=64)]))
    metrics.finished(Trace("disaggregated", [first]))

    def tokens(what: str, engine: str) -> float:
        return counted(f"tercet_prefix_{what}_tokens_total", program="disaggregated", engine=engine)

    assert [tokens(what, "d") for what in ("predicted", "delivered", "missing")] == [200, 128, 72]
    assert [tokens(what, "p") for what in ("predicted", "delivered", "missing")] == [32, 96, 0]


@pytest.mark.slow
def test_pairs_of_engines_are_bounded_and_no_byte_is_lost(metrics: Metrics) -> None:
    for number in range(MOST_PAIRS + 10):
        metrics.finished(Trace("p", [TraceEvent("remote_send", "a", bytes=2, to=f"d{number}")]))
    pairs = [labels for name, labels in series() if name == "tercet_kv_sent_bytes_total"]
    assert len(pairs) == MOST_PAIRS + 1
    assert counted("tercet_kv_sent_bytes_total", engine="a", to=OTHER_ENGINES) == 20
    metrics.finished(Trace("p", [TraceEvent("remote_send", "a", bytes=2, to="d0")]))
    assert counted("tercet_kv_sent_bytes_total", engine="a", to="d0") == 4


def test_buckets_reach_from_a_millisecond_to_ten_minutes(metrics: Metrics) -> None:
    assert (SECONDS[0], SECONDS[-1]) == (0.001, 600)
    metrics.finished(Trace("p", [], ttft=0.0008, tpot=300.0))
    assert counted("tercet_ttft_seconds_bucket", program="p", le="0.001") == 1
    assert counted("tercet_tpot_seconds_bucket", program="p", le="120.0") == 0
    assert counted("tercet_tpot_seconds_bucket", program="p", le="300.0") == 1
