"""The service, as vLLM's layer asks for its programs."""

from __future__ import annotations

from functools import partial
from http import HTTPStatus

from tercet.fleet import Trace
from tercet.protocol import ProgramFailed, Request, TercetError, Usage
from tercet.router.metrics import Metrics
from tercet.router.service import Service, SessionTurns
from tercet.settings.log_events import REQUEST_FAILED
from tercet.wire.serving.request_context import RequestContext


class ServicePrograms:
    """Runs the programs of ``service`` for the sequences of HTTP requests, each of which keeps their traces."""

    def __init__(self, service: Service[Metrics]) -> None:
        self._service = service

    def run(self, request: Request, context: RequestContext) -> TracedRun:
        context.prepared()
        return TracedRun(self._service, request, context)

    @property
    def model_dtype(self) -> str:
        """In what the engines compute; empty if they differ."""
        return self._service.fleet.model_dtype

    def failed(self, seq_id: str, error: TercetError) -> None:
        """A sequence has ended in an error; an error that the client caused is not reported further."""
        self._service.metrics.errors.labels(error.code).inc()
        if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            REQUEST_FAILED.tell(seq_id=seq_id, code=error.code, reason=_with_cause(error))


def _with_cause(error: TercetError) -> str:
    """Why, with what a client is not told of its program."""
    cause = error.__cause__ if isinstance(error, ProgramFailed) else None
    return error.message if cause is None else f"{error.message} ({type(cause).__name__}: {cause})"


def _answered(sessions: SessionTurns, request: Request, context: RequestContext) -> None:
    sessions.answered(request, calls_tool=context.calls_tool)


class TracedRun:
    """One sequence's program; ``stream`` are its outputs."""

    def __init__(self, service: Service[Metrics], request: Request, context: RequestContext) -> None:
        self._trace = Trace()
        if service.sessions is not None:
            context.when_ended.append(partial(_answered, service.sessions, request))
        context.traces.append(self._trace)
        self.stream = service.run(
            request, self._trace, context.asked.model or "", context.began, context.sequences.append
        )

    def prompt_usage(self, usage: Usage | None) -> Usage:
        """What the engine that prefilled had in its cache: KV that another one received was computed for it."""
        sent = self._trace.filled()
        if sent is None or (usage is not None and self._is_of_own_cache(usage)):
            return usage or Usage()
        return Usage(cached=sent.cached)

    def _is_of_own_cache(self, usage: Usage) -> bool:
        """Whether the engine that generates has taken nothing of what it was sent, and prefilled by itself."""
        reserved = next((event.cached for event in reversed(self._trace.events) if event.verb == "prep_recv"), 0)
        return not usage.received and usage.cached <= reserved
