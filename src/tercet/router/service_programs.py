"""The interface through which vLLM's layer runs the programs of a service."""

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
    """The programs of ``service`` for HTTP requests; each request's context keeps the traces of its sequences."""

    def __init__(self, service: Service[Metrics]) -> None:
        self._service = service

    def run(self, request: Request, context: RequestContext) -> TracedRun:
        context.prepared()
        return TracedRun(self._service, request, context)

    @property
    def model_dtype(self) -> str:
        """The dtype in which the engines compute; empty if they differ."""
        return self._service.fleet.model_dtype

    def failed(self, seq_id: str, error: TercetError) -> None:
        """Count a sequence that ended in an error, and log the error unless the client caused it."""
        self._service.metrics.errors.labels(error.code).inc()
        if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            REQUEST_FAILED.tell(seq_id=seq_id, code=error.code, reason=_with_cause(error))


def _with_cause(error: TercetError) -> str:
    """Return the message of an error, with the program's own error, which clients do not get."""
    cause = error.__cause__ if isinstance(error, ProgramFailed) else None
    return error.message if cause is None else f"{error.message} ({type(cause).__name__}: {cause})"


def _answered(sessions: SessionTurns, request: Request, context: RequestContext) -> None:
    sessions.answered(request, calls_tool=context.calls_tool)


class TracedRun:
    """The run of one sequence's program; ``stream`` has its outputs."""

    def __init__(self, service: Service[Metrics], request: Request, context: RequestContext) -> None:
        self._trace = Trace()
        if service.sessions is not None:
            context.when_ended.append(partial(_answered, service.sessions, request))
        context.traces.append(self._trace)
        self.stream = service.run(
            request, self._trace, context.asked.model or "", context.began, context.sequences.append
        )

    def prompt_usage(self, usage: Usage | None) -> Usage:
        """Return the usage with the cached tokens of the engine that prefilled; KV that was sent counts as computed."""
        sent = self._trace.filled()
        if sent is None or (usage is not None and self._is_of_own_cache(usage)):
            return usage or Usage()
        return Usage(cached=sent.cached)

    def _is_of_own_cache(self, usage: Usage) -> bool:
        """True if the engine that generates has used no KV that it received, but prefilled itself."""
        reserved = next((event.cached for event in reversed(self._trace.events) if event.verb == "prep_recv"), 0)
        return not usage.received and usage.cached <= reserved
