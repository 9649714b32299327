"""Let a request start with output tokens that another engine generated.

The scheduler's side is vLLM's own: ``Request.append_output_token_ids`` makes it what a preempted request is, so
``max_tokens``, ``min_tokens`` and stop conditions count the output. Two things remain. The grammar of a structured
output must have accepted the output, and the worker, which believes that new requests have none, must be told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from tercet.vllm_plugin.messages import StepMetadata

if TYPE_CHECKING:
    import torch
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request as VLLMRequest


def start_grammar_after(request: VLLMRequest, output: Sequence[int]) -> None:
    """Make the request's grammar, which vLLM compiles in the background, start after ``output``."""
    structured = request.structured_output_request
    if structured is None:
        return
    compiled: Any = structured._grammar
    advanced: Future[Any] = Future()

    def advance(done: Future[Any]) -> None:
        try:
            grammar = done.result()
            if not grammar.accept_tokens(request.request_id, list(output)):
                raise ValueError("output: the tokens generated so far do not follow the requested structure")
        except Exception as error:  # reported by vLLM as this request's grammar failure
            advanced.set_exception(error)
        else:
            advanced.set_result(grammar)

    if not isinstance(compiled, Future):
        ready: Future[Any] = Future()
        ready.set_result(compiled)
        compiled = ready
    structured._grammar = advanced
    compiled.add_done_callback(advance)


def install_worker_hook() -> None:
    """Let the model runner begin requests with the output that their step's metadata names.

    Relies on: ``GPUModelRunner._update_states`` creating a ``CachedRequestState`` with empty ``output_token_ids`` for
    each new request and handing it to ``InputBatch.add_request``, which copies prompt and output into the batch. The
    newer model runner (V2) takes prompt and output from the scheduler and needs no hook.
    """
    from vllm.v1.worker.gpu_input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if getattr(GPUModelRunner._update_states, "tercet_hook", False):
        return
    update_states: Callable[..., Any] = GPUModelRunner._update_states
    add_request: Callable[..., Any] = InputBatch.add_request
    pending: dict[str, list[int]] = {}

    def update_states_with_output(self: Any, scheduler_output: SchedulerOutput) -> Any:
        metadata = scheduler_output.kv_connector_metadata
        if isinstance(metadata, StepMetadata):
            pending.update(metadata.resumed)
        return update_states(self, scheduler_output)

    def add_request_with_output(self: Any, request: Any) -> Any:
        output = pending.pop(request.req_id, None)
        if output:
            request.output_token_ids.extend(output)
            _advance(request.generator, len(output), self.vocab_size)
        return add_request(self, request)

    update_states_with_output.tercet_hook = True  # type: ignore[attr-defined]
    GPUModelRunner._update_states = update_states_with_output  # type: ignore[method-assign]
    InputBatch.add_request = add_request_with_output  # type: ignore[method-assign]


def _advance(generator: torch.Generator | None, steps: int, vocab_size: int) -> None:
    """Draw from a seeded request's generator what ``steps`` sampling steps would have drawn."""
    if generator is None:
        return
    import torch

    for _ in range(steps):
        if generator.device.type == "cpu":  # TopKTopPSampler.forward_cpu draws one integer per token
            torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
        else:  # elsewhere random_sample draws one exponential per entry of the vocabulary
            torch.empty(vocab_size, device=generator.device).exponential_(generator=generator)
