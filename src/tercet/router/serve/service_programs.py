"""The interface through which vLLM's layer runs the programs of a service."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from http import HTTPStatus

from tercet.fleet import RunningSequence, Trace
from tercet.logs import REQUEST_FAILED
from tercet.protocol import BadRequest, ProgramFailed, Request, TercetError, Usage
from tercet.protocol.names import sequence_id
from tercet.router.serve.service import Service, SessionTurns
from tercet.wire.serving.request_context import RequestContext

# Beginning of the names of sampling parameters in engines' refusals.
OF_SAMPLING = "sampling_params."


class ServicePrograms:
    """The programs of ``service`` for HTTP requests; each request's context keeps the traces of its sequences."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def run(self, request: Request, context: RequestContext) -> TracedRun:
        context.prepared()
        return TracedRun(self._service, request, context)

    @property
    def model_dtype(self) -> str:
        """The dtype in which the engines compute; empty if they differ."""
        return self._service.fleet.model_dtype


def _with_cause(error: TercetError) -> str:
    """Return the message of an error, with the program's own error, which clients do not get."""
    cause = error.__cause__ if isinstance(error, ProgramFailed) else None
    return error.message if cause is None else f"{error.message} ({type(cause).__name__}: {cause})"


def _answered(sessions: SessionTurns, request: Request, context: RequestContext) -> None:
    sessions.answered(request, calls_tool=context.calls_tool)


def _in_clients_words(error: TercetError, named: Mapping[str, str]) -> TercetError:
    """Return an engine's refusal of a sampling parameter with the name of the field that the client sent.

    ``named`` are the client's fields by parameter (:class:`~tercet.wire.serving.request_context.Asked`).
    """
    if not isinstance(error, BadRequest) or error.param is None or not error.param.startswith(OF_SAMPLING):
        return error
    parameter = error.param.removeprefix(OF_SAMPLING)
    first, _, rest = parameter.partition(".")
    field = named.get(first, "")
    # A part of a structure has its place in the client's own field only.
    own = f"{field}.{rest}" if rest and field.endswith(first) else field or parameter
    return BadRequest(error.message.replace(error.param, own, 1), own)


class TracedRun:
    """The run of one sequence's program; ``stream`` has its outputs.

    Raises :class:`~tercet.protocol.BadRequest` for a request that no engine accepts.
    """

    def __init__(self, service: Service, request: Request, context: RequestContext) -> None:
        self._trace = Trace()
        self._service, self._context = service, context
        self._seq_id = sequence_id(request.seq_id)
        self.stream = service.run(request, self._trace, context.asked.model or "", context.began, self._begins)
        context.traces.append(self._trace)

    def _begins(self, sequence: RunningSequence) -> None:
        self._context.sequences.append(sequence)
        if self._service.sessions is not None:
            self._context.when_ended.append(partial(_answered, self._service.sessions, sequence.request))

    def failed(self, error: TercetError) -> TercetError:
        """Count a sequence that ended in an error, log the error unless the client caused it; return it for clients."""
        self._service.metrics.errors.labels(error.code).inc()
        if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            REQUEST_FAILED.tell(seq_id=self._seq_id, code=error.code, reason=_with_cause(error))
        return _in_clients_words(error, self._context.asked.parameters)

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
