"""Export of spans by OpenTelemetry's SDK and OTLP exporter, according to its standard variables (``OTEL_*``).

This module is imported only where spans are wanted. Spans are made when they are over, with Tercet's own ids
(:mod:`tercet.protocol.spans`): it uses the SDK's sampler, resource, batches and exporters.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, NonRecordingSpan, SpanKind, Status, StatusCode, TraceFlags, set_span_in_context
from opentelemetry.trace import SpanContext as OtelContext
from opentelemetry.trace.span import TraceState

from tercet import __version__
from tercet.protocol.spans import Span, SpanContext, new_span_id

logger = logging.getLogger("tercet.traces")
CLOSE_SECONDS = 5.0
_KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}
_SAMPLED, _NOT_SAMPLED = TraceFlags(TraceFlags.SAMPLED), TraceFlags(TraceFlags.DEFAULT)
_FINE = Status(StatusCode.UNSET)


class OneResource(Resource):
    """The resource of this process, hashed by identity.

    Exporters hash the resource of each span. The SDK hashes all attributes as JSON, which takes a seventh of a span's
    time.
    """

    __hash__ = object.__hash__
    __eq__ = object.__eq__  # pyright: ignore[reportAssignmentType]


class OtelSpans:
    """The :class:`~tercet.protocol.spans.SpanSink` of one process, called ``service`` unless a variable names it.

    ``attributes`` are those of its resource. ``exporter`` sends the spans.
    """

    def __init__(self, service: str, attributes: Mapping[str, str], exporter: SpanExporter) -> None:
        resource = Resource.create({"service.name": service, "service.version": __version__, **attributes})
        resource = resource.merge(OTELResourceDetector().detect())  # variables override these values
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._resource = OneResource(dict(provider.resource.attributes), provider.resource.schema_url)
        self._sampler = provider.sampler
        self._scope = InstrumentationScope("tercet", __version__)
        self._batches = BatchSpanProcessor(exporter)

    def enters(self, caller: SpanContext | None, name: str, attributes: Mapping[str, Any]) -> SpanContext:
        """Return the place of a new span: see :class:`~tercet.protocol.spans.SpanSink`.

        ``OTEL_TRACES_SAMPLER`` decides whether it is sampled.
        """
        trace_id = os.urandom(16).hex() if caller is None else caller.trace_id
        parent = None if caller is None else set_span_in_context(NonRecordingSpan(_context(caller, is_remote=True)))
        sampled = self._sampler.should_sample(parent, int(trace_id, 16), name, SpanKind.SERVER, attributes)
        state = "" if caller is None else caller.state
        return SpanContext(trace_id, new_span_id(), sampled.decision.is_sampled(), state)

    def take(self, spans: Iterable[Span]) -> None:
        for span in spans:
            if not span.context.sampled:
                continue
            context = _context(span.context)
            parent = None
            if span.parent:
                parent = OtelContext(context.trace_id, int(span.parent, 16), is_remote=span.kind == "server")
            attributes = {**span.attributes, "error.type": span.error} if span.error else span.attributes
            readable = ReadableSpan(
                span.name, context, parent, self._resource, attributes,
                links=[Link(_context(each)) for each in span.links], kind=_KINDS[span.kind],
                status=Status(StatusCode.ERROR, span.reason) if span.error else _FINE,
                start_time=span.began_ns, end_time=span.ended_ns, instrumentation_scope=self._scope,
            )  # fmt: skip
            self._batches.on_end(readable)

    def close(self) -> None:
        """Export the remaining spans, for at most ``CLOSE_SECONDS``: an exporter waits longer for a silent receiver."""
        # In a thread that is left behind if need be: the exporter retries for longer than a process should take to end.
        ending = threading.Thread(target=self._batches.shutdown, name="tercet-traces", daemon=True)
        ending.start()
        ending.join(CLOSE_SECONDS)
        if ending.is_alive():
            logger.warning("traces: the last spans are lost: the receiver does not answer within %g s", CLOSE_SECONDS)


def _context(place: SpanContext, is_remote: bool = False) -> OtelContext:
    state = TraceState.from_header([place.state]) if place.state else None
    flags = _SAMPLED if place.sampled else _NOT_SAMPLED
    return OtelContext(int(place.trace_id, 16), int(place.span_id, 16), is_remote, flags, state)
