"""A request's trace as spans of a distributed trace, with the GenAI semantic conventions' names where they exist."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tercet.protocol.spans import Span, SpanContext, new_span_id
from tercet.protocol.trace import FALLBACK, RETRY, PickEvent, TraceEvent
from tercet.router.observe.request_traces import RUNNING, SERVED, RequestTrace, SequenceTrace

NANOSECONDS = 1_000_000_000
# Shortest wait (seconds) for admission that gets a span: most requests are admitted at once, and a span costs 50 us.
LEAST_WAIT_S = 0.001
_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
# Fields of an event that become attributes of its span: counts of tokens, and others.
_COUNTS = ("begin", "end", "cached", "received", "computed")
_OTHERS = ("bytes", "chunks", "transport", "to")


def spans_of(trace: RequestTrace, place: SpanContext) -> Iterator[Span]:
    """Yield the span of a request at ``place``, and below it admission, picks, calls, first tokens, retries, moves."""
    at = int(trace.at * NANOSECONDS)
    yield _request(trace, place, at)
    if trace.waited >= LEAST_WAIT_S:
        yield Span("admission", place.child(), place.span_id, at, at + _ns(trace.waited))
    for sequence in trace.sequences:
        begin = at + _ns(sequence.at)
        named = {"tercet.seq_id": sequence.seq_id}
        for pick in sequence.picks:
            if not pick.scores:  # a pick by turns: the span of its call names the engine
                continue
            picked = begin + _ns(pick.at)
            yield Span("pick", place.child(), place.span_id, picked, picked, attributes={**named, **_of_pick(pick)})
        for event in sequence.events:
            yield from _of_event(event, sequence, place, begin, named)
        for event in sequence.failed:
            yield _call(event, sequence, place, begin, named)


def request_attributes(path: str, model: str, request_id: str) -> dict[str, Any]:
    """Return the attributes of a request that are known at its arrival."""
    found = {"http.request.method": "POST", "url.path": path, "tercet.request_id": request_id}
    if path in _OPERATIONS:
        found["gen_ai.operation.name"] = _OPERATIONS[path]
    if model:
        found["gen_ai.request.model"] = model
    return found


def _request(trace: RequestTrace, place: SpanContext, at: int) -> Span:
    told = request_attributes(trace.path, trace.model, trace.request_id)
    told |= {"gen_ai.request.stream": trace.stream, "tercet.outcome": trace.outcome}
    if trace.sequences:
        told["gen_ai.usage.input_tokens"] = sum(each.prompt_tokens for each in trace.sequences)
        told["gen_ai.usage.output_tokens"] = sum(each.output_tokens for each in trace.sequences)
        told["tercet.program"] = trace.sequences[0].program
        if (ttft := trace.sequences[0].ttft) is not None:
            told["tercet.ttft"] = ttft
    error = "" if trace.outcome in (SERVED, RUNNING) else trace.outcome
    ended = at + _ns(trace.seconds)
    return Span(f"POST {trace.path}", place, trace.parent, at, ended, "server", told, (), error, trace.reason)


def _of_pick(pick: PickEvent) -> Mapping[str, Any]:
    found: dict[str, Any] = {"tercet.role": pick.role, "tercet.picker": pick.by, "tercet.engine": pick.engine}
    found |= {f"tercet.score.{name}": score for name, score in pick.scores.items()}
    found |= {f"tercet.scorer.{name}": score for name, score in pick.parts.items()}
    if pick.predicted is not None:
        found["tercet.tokens.predicted"] = pick.predicted
    return found


def _of_event(
    event: TraceEvent, sequence: SequenceTrace, place: SpanContext, begin: int, named: Mapping[str, str]
) -> Iterator[Span]:
    if event.verb in (FALLBACK, RETRY):
        at = begin + _ns(event.at)
        told = {**named, "tercet.engine": event.engine, "tercet.tokens.end": event.end}
        links = [_of_trace(place, event) for event in _calls_failed_before(event, sequence)]
        yield Span(
            event.verb, place.child(), place.span_id, at, at, "internal", told, links, event.code or event.verb,
            event.reason,
        )  # fmt: skip
        return
    call = _call(event, sequence, place, begin, named)
    yield call
    if event.verb == "start_generate":
        first = begin + _ns(event.at + event.seconds)
        yield Span("first_token", call.place.child(), call.place.span_id, call.began_ns, first)


def _call(event: TraceEvent, sequence: SequenceTrace, place: SpanContext, begin: int, named: Mapping[str, str]) -> Span:
    """Return the span of a verb or a move; a send is linked to the reservation on the other engine that it filled."""
    at = begin + _ns(event.at)
    own = SpanContext(place.trace_id, event.span or new_span_id(), place.sampled, place.state)
    told: dict[str, Any] = {**named, "tercet.verb": event.verb, "tercet.engine": event.engine}
    told |= {f"tercet.tokens.{name}": found for name in _COUNTS if (found := getattr(event, name))}
    told |= {f"tercet.{name}": found for name in _OTHERS if (found := getattr(event, name))}
    if event.predicted is not None:
        told["tercet.tokens.predicted"] = event.predicted
    if event.verb == "move":
        told |= _of_move(event, sequence)
    links = [
        _of_trace(place, other)
        for other in sequence.events
        if event.verb == "remote_send" and other.verb == "prep_recv" and other.engine == event.to and other.span
    ]
    ended = at + _ns(max(event.seconds, event.total))
    error = event.code or ("" if event.verb != "move" or event.outcome == "moved" else event.outcome)
    return Span(
        event.verb, own, event.parent or place.span_id, at, ended, "internal" if event.verb == "move" else "client",
        told, links, error, event.reason if error else "",
    )  # fmt: skip


def _calls_failed_before(retry: TraceEvent, sequence: SequenceTrace) -> Sequence[TraceEvent]:
    """Return the last failed call of the engine at fault before a retry or a fallback, in a list; empty without one."""
    failed = [
        call for call in (*sequence.failed, *sequence.events)
        if call.span and call.code and call.engine == retry.engine and call.at <= retry.at
    ]  # fmt: skip
    return sorted(failed, key=lambda call: call.at)[-1:]


def _of_trace(place: SpanContext, event: TraceEvent) -> SpanContext:
    return SpanContext(place.trace_id, event.span, place.sampled)


def _of_move(event: TraceEvent, sequence: SequenceTrace) -> Mapping[str, Any]:
    found: dict[str, Any] = {"tercet.move.reason": event.reason, "tercet.move.outcome": event.outcome}
    if event.pause is not None:
        found["tercet.move.pause"] = event.pause
    stages = next((move.stages for move in sequence.moves if move.number == event.number), ())
    found["tercet.move.stages"] = [f"{stage.begin}-{stage.end}" for stage in stages]
    return found


def _ns(seconds: float) -> int:
    return int(seconds * NANOSECONDS)
