"""Requests that start with output tokens of another engine: the scheduler's half.

vLLM does most of the work: ``Request.append_output_token_ids`` makes a request equal to a preempted one, so
``max_tokens``, ``min_tokens`` and stop conditions count the output. Three tasks remain. The grammar of a structured
output must accept the output, or its part after the reasoning if there is a reasoning parser. The worker, which expects
no output in new requests, must be notified (:mod:`~tercet.vllm_plugin.worker.model_runner`). Cached tokens are counted
here, since vLLM assumes that they are not more than the prompt.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.stats import PrefillStats

from tercet.vllm_plugin.core.connector_messages import StepMetadata

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request as VLLMRequest
    from vllm.v1.structured_output import StructuredOutputManager


class ResumedRequests:
    """Requests with output from elsewhere that no step has started yet."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._waiting: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, request: VLLMRequest, output: list[int]) -> None:
        """Make ``request`` continue after ``output``; call this before it is first scheduled."""
        request.append_output_token_ids(list(output))
        start_grammar_after(self._scheduler.structured_output_manager, request, output)
        self._waiting[request.request_id] = output
        request.prefill_stats = None  # until the first step: with output, more than the prompt may be cached

    def plan(self, output: SchedulerOutput, metadata: StepMetadata) -> None:
        """Pass the output of requests that ``output`` schedules for the first time to the workers."""
        if not self._waiting:
            return
        starting = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        metadata.resumed = {key: self._waiting.pop(key) for key in starting.keys() & self._waiting.keys()}
        for request_id in metadata.resumed:
            request = self._scheduler.requests[request_id]
            if request.prefill_stats is None and request.num_preemptions == 0:
                request.prefill_stats = PrefillStats()
                # All earlier tokens, including output, count as prefilled: only the rest is computed.
                request.prefill_stats.set(request.num_tokens, starting[request_id], 0)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._waiting.pop(request_id, None)


def start_grammar_after(manager: StructuredOutputManager, request: VLLMRequest, output: Sequence[int]) -> None:
    """Make the request's grammar, which vLLM compiles in the background, start after ``output``.

    ``request`` already contains ``output``. If vLLM's manager has a reasoning parser, the grammar covers neither the
    reasoning nor the token that ends it. If the output ends before that, the grammar starts where vLLM sees the
    reasoning end.
    """
    structured = request.structured_output_request
    if structured is None:
        return
    compiled: Any = structured._grammar
    advanced: Future[Any] = Future()

    def advance(done: Future[Any]) -> None:
        try:
            grammar = done.result()
            # A copy, since the scheduler must not see the grammar before it has accepted the output.
            behind, resumed = copy.copy(structured), copy.copy(request)
            behind.grammar, resumed.structured_output_request = grammar, behind
            accepted = manager.accept_tokens(resumed, list(output))
            structured.reasoning_ended, structured.reasoner = behind.reasoning_ended, behind.reasoner
            if not accepted:
                raise ValueError("output: the tokens generated so far do not follow the requested structure")
        except Exception as error:  # vLLM reports it as this request's grammar failure
            advanced.set_exception(error)
        else:
            advanced.set_result(grammar)

    if not isinstance(compiled, Future):
        ready: Future[Any] = Future()
        ready.set_result(compiled)
        compiled = ready
    structured._grammar = advanced
    compiled.add_done_callback(advance)
