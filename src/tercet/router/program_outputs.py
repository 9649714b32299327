"""One request's program, as vLLM's layer sees it: its outputs, and its failures in vLLM's words."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from http import HTTPStatus

from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.v1.engine import EngineCoreOutput

from tercet.fleet import Trace
from tercet.protocol import EngineError, Output, Request, TercetError, Usage
from tercet.router.context import RequestContext
from tercet.router.convert import to_core_output
from tercet.router.service import Service

logger = logging.getLogger(__name__)


class ProgramOutputs:
    """``stream`` has the outputs of ``request``'s program, which runs as they are asked for."""

    def __init__(self, service: Service, request: Request, context: RequestContext) -> None:
        self._service = service
        self._request = request
        self._trace = Trace()
        self._is_first = True
        context.traces.append(self._trace)
        self.stream = service.run(request, self._trace, context.asked.model, context.began)

    @property
    def seq_id(self) -> str:
        """The request's id."""
        return self._request.seq_id

    def to_core_output(self, output: Output) -> EngineCoreOutput:
        """vLLM's message for the next output."""
        usage = _prompt_usage(self._trace, output.usage) if self._is_first else None
        self._is_first = False
        return to_core_output(self.seq_id, self._request.num_tokens, output, usage)

    @contextmanager
    def failures(self) -> Generator[None]:
        """While entered, what fails is raised as an exception from which vLLM makes the client's error."""
        try:
            yield
        except TercetError as error:
            self._service.failed(error)
            raise _http_error(error) from error
        except Exception as error:  # it fails its own request only
            logger.exception("request %s failed", self.seq_id)
            failure = EngineError(f"the front door failed: {type(error).__name__}: {error}")
            self._service.failed(failure)
            raise _http_error(failure) from error


def _prompt_usage(trace: Trace, usage: Usage | None) -> Usage:
    """What the client's ``usage`` shall call cached: prompt tokens that no engine had to compute."""
    if usage is not None:
        return usage
    found = next((event for event in reversed(trace.events) if event.verb == "remote_send"), None)
    cached_there = sum(event.cached for event in trace.events if event.verb == "prep_recv")
    return Usage(cached=max(cached_there, found.cached if found is not None else 0))


def _http_error(error: TercetError) -> Exception:
    if error.status == HTTPStatus.BAD_REQUEST:
        return VLLMValidationError(error.message, parameter=error.param)
    return GracefulHTTPError(error.message, HTTPStatus(error.status))
