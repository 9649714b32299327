"""Spans of a request's trace: what an engine failed ends in an error, and its retry is linked to it."""

from __future__ import annotations

from tercet.protocol.spans import RETRY, Span, SpanContext, TraceEvent
from tercet.router.observe.request_traces import SERVED, RequestTrace, SequenceTrace, spans_of

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
    errors = {span.place.span_id: span.error for span in found if span.name == "start_generate"}
    assert errors == {killed.span: "engine_unreachable", again.span: ""}
    assert by_name["POST /v1/completions"].error == ""


def test_a_retry_of_a_program_that_failed_by_itself_has_no_link() -> None:
    retry = TraceEvent(RETRY, "", code="program_failed", at=0.8)
    found = spans([TraceEvent("prep_recv", "d", at=0.1, span="1" * 16), retry], [])
    assert [span.links for span in found if span.name == "retry"] == [[]]
