"""Failures of structured outputs in the engine's API server: each request gets the reason that its core gave.

The core sends the reason as the stop reason of a last output that is an error (:mod:`..core.grammar_time`). Here it
becomes an exception in the request's queue, for the verbs and for vLLM's own API alike: 400 if the structure is wrong,
503 if it could not be tried.

Relies on ``OutputProcessor.process_outputs`` ignoring what follows an exception in a request's queue.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.v1.engine import FinishReason
from vllm.v1.engine.output_processor import OutputProcessor

from tercet.protocol import BadRequest, GrammarsBusy, TercetError
from tercet.vllm_plugin.core.grammar_time import REFUSED, UNTRIED
from tercet.vllm_plugin.start.patching import Method, wrap


class StructureRefused(VLLMClientError):
    """The client's structure is wrong or takes too much: vLLM's API answers 400."""

    def to_tercet(self) -> TercetError:
        return BadRequest(str(self), "structured_outputs")


class StructureUntried(GracefulHTTPError):
    """The structure could not be tried: vLLM's API answers 503."""

    def __init__(self, message: str) -> None:
        super().__init__(message, HTTPStatus.SERVICE_UNAVAILABLE)

    def to_tercet(self) -> TercetError:
        return GrammarsBusy(self.message)


def failure_of(output: Any) -> StructureRefused | StructureUntried | None:
    """Return the failure of a structured output that the core's ``output`` ends with, or None."""
    if output.finish_reason != FinishReason.ERROR or not isinstance(output.stop_reason, str):
        return None
    said: str = output.stop_reason
    if said.startswith(REFUSED):
        return StructureRefused(said.removeprefix(REFUSED))
    return StructureUntried(said.removeprefix(UNTRIED)) if said.startswith(UNTRIED) else None


def tell_failures() -> None:
    """Make the requests of this process end with these failures."""
    wrap(OutputProcessor, "process_outputs", _process)


def _process(original: Method, processor: Any, engine_core_outputs: list[Any], *args: Any, **more: Any) -> Any:
    for output in engine_core_outputs:
        if output.finish_reason is not None and (failure := failure_of(output)) is not None:
            state = processor.request_states.get(output.request_id)
            if state is not None and state.queue is not None:
                state.queue.put(failure)
    return original(processor, engine_core_outputs, *args, **more)
