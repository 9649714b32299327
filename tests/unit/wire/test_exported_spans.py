"""Spans by OTLP: what variables ask for, what arrives at a receiver, and that nothing is imported without need."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tercet.protocol import BadRequest, EngineUnreachable
from tercet.protocol.spans import SpanContext, current_span, process, read_traceparent, span_of, working_in
from tercet.wire.exported_spans import GRPC, HTTP, are_spans_wanted, endpoint_of, exporting_spans, protocol_of
from tests.otlp import Receiver

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "TRUE"}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
    ],
)
def test_standard_variables_say_whether_spans_are_told(variables: dict[str, str], wanted: bool) -> None:
    assert are_spans_wanted(variables) is wanted


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(BadRequest, match="OTEL_TRACES_EXPORTER: 'zipkin' is not supported"):
        are_spans_wanted({"OTEL_TRACES_EXPORTER": "zipkin"})
    with pytest.raises(BadRequest, match="OTEL_EXPORTER_OTLP_PROTOCOL: 'http/json'"):
        protocol_of({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})


@pytest.mark.parametrize(
    ("variables", "protocol", "endpoint"),
    [
        ({}, HTTP, "http://localhost:4318/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/"}, HTTP, "http://c:4318/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c/t"}, HTTP, "http://c/t"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, GRPC, "http://localhost:4317"),
        ({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_ENDPOINT": "c:1"}, GRPC, "c:1"),
    ],
)
def test_where_spans_go(variables: dict[str, str], protocol: str, endpoint: str) -> None:
    assert (protocol_of(variables), endpoint_of(variables)) == (protocol, endpoint)


@pytest.mark.parametrize(
    ("given", "is_valid"),
    [
        (PARENT, True),
        (PARENT.replace("00-", "01-", 1) + "-more", True),
        (PARENT + "-more", False),
        ("ff" + PARENT[2:], False),
        (PARENT.upper(), False),
        ("00-" + "0" * 32 + PARENT[35:], False),
        ("00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01", False),
        ("", False),
        ("x" * 100_000, False),
    ],
)
def test_a_traceparent_is_read_as_w3c_says(given: str, is_valid: bool) -> None:
    found = read_traceparent(given, "a=1")
    assert (found is not None) is is_valid
    if found is not None:
        assert found.headers() == {"traceparent": PARENT, "tracestate": "a=1"}


def test_a_tracestate_that_is_too_long_is_left_out() -> None:
    found = read_traceparent(PARENT, "a" * 513)
    assert found is not None
    assert found.headers() == {"traceparent": PARENT}


def test_without_a_sink_work_has_its_callers_place() -> None:
    caller = read_traceparent(PARENT)
    with working_in(caller), span_of("work", {}) as place:
        assert place is None
        assert current_span() is caller
    assert current_span() is None


def test_spans_arrive_with_parents_errors_and_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    with Receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        with exporting_spans("tercet-test", {"service.instance.id": "one"}):
            told = {"gen_ai.usage.input_tokens": 3}
            with (
                working_in(read_traceparent(PARENT)),
                span_of("outer", told, "server"),
                pytest.raises(EngineUnreachable),
                span_of("inner", {}),
            ):
                raise EngineUnreachable("p does not answer")
            assert process.sink is not None
        assert process.sink is None  # what was left is told at the exit
        (outer,), (inner,) = receiver.named("outer"), receiver.named("inner")
    assert (outer.service, outer.instance, outer.trace_id) == ("tercet-test", "one", PARENT[3:35])
    assert (outer.parent, inner.parent) == (PARENT[36:52], outer.span_id)
    assert outer.attributes["gen_ai.usage.input_tokens"] == 3
    assert (inner.is_error, inner.attributes["error.type"], outer.is_error) == (True, "engine_unreachable", False)
    assert outer.began <= inner.began <= inner.ended <= outer.ended


def test_the_sampler_of_the_variables_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    with Receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
        with exporting_spans("tercet-test", {"service.instance.id": "one"}):
            with span_of("mine", {}) as place:
                assert place is not None
                assert not place.sampled
            with working_in(SpanContext("1" * 32, "2" * 16)), span_of("of-caller", {}):
                pass
        assert [(span.name, span.service, span.instance) for span in receiver.spans] == [("of-caller", "mine", "one")]


@pytest.mark.processes
def test_a_process_without_the_variables_imports_nothing_of_opentelemetry() -> None:
    code = (
        "import sys, tercet.router.server, tercet_gateway.sidecar, tercet_lab.sim.sim_server\n"
        "from tercet.wire.exported_spans import exporting_spans\n"
        "with exporting_spans('x'): pass\n"
        "sys.exit(any(name.startswith('opentelemetry.') for name in sys.modules))"
    )
    variables = {"PATH": "/usr/bin", "PYTHONPATH": ":".join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=variables, check=False, timeout=120).returncode == 0
