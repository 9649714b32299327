"""Tercet's changes in vLLM's model runner: requests that begin with output, and seeded prompts on a CPU."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tercet.vllm_plugin.core.connector_messages import StepMetadata
from tercet.vllm_plugin.differences import DRAWS_FOR_THE_VOCABULARY
from tercet.vllm_plugin.start.patching import Method, wrap

if TYPE_CHECKING:
    import torch
    from vllm.v1.core.sched.output import SchedulerOutput


def begin_requests_with_output() -> None:
    """Make the model runner begin requests with the output that their step's metadata contains.

    The model runner creates a request's state without output and hands it to the input batch, which copies prompt and
    output; the output is inserted in between. The newer model runner (V2) takes both from the scheduler and needs no
    hook.
    """
    from vllm.v1.worker.gpu_input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    pending: dict[str, list[int]] = {}

    def update_states_with_output(update_states: Method, self: Any, scheduler_output: SchedulerOutput) -> Any:
        metadata = scheduler_output.kv_connector_metadata
        if isinstance(metadata, StepMetadata):
            pending.update(metadata.resumed)
        return update_states(self, scheduler_output)

    def add_request_with_output(add_request: Method, self: Any, request: Any) -> Any:
        output = pending.pop(request.req_id, None)
        if output:
            request.output_token_ids.extend(output)
            advance(request.generator, len(output), self.vocab_size)
        return add_request(self, request)

    wrap(GPUModelRunner, "_update_states", update_states_with_output)
    wrap(InputBatch, "add_request", add_request_with_output)


def advance(generator: torch.Generator | None, steps: int, vocab_size: int) -> None:
    """Draw from a seeded request's generator as often as ``steps`` sampling steps draw."""
    if generator is None:
        return
    import torch

    one_of_a_token = generator.device.type == "cpu" and not DRAWS_FOR_THE_VOCABULARY.is_here
    for _ in range(steps):
        if one_of_a_token:  # TopKTopPSampler.forward_cpu draws one integer
            torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
        else:  # random_sample draws one exponential per entry of the vocabulary
            torch.empty(vocab_size, device=generator.device).exponential_(generator=generator)


def keep_generators_of_unfinished_prompts() -> None:
    """Allow seeded requests to take several steps for their prompt on a CPU.

    A step that ends inside a prompt samples an unused token, and vLLM rewinds the request's generator by its offset.
    Generators on a CPU have no offset: vLLM raises in the worker, and the engine is lost. There the generator's state
    is saved and restored instead.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def sample_and_put_back(sample: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
        states = [(generator, generator.get_state()) for generator in _unfinished(self).values()]
        output = sample(self, *args, **kwargs)
        for generator, state in states:
            generator.set_state(state)
        return output

    def bookkeeping_without_rewinding(bookkeeping: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
        with _hidden(self.input_batch.generators, _unfinished(self)):
            return bookkeeping(self, *args, **kwargs)

    wrap(GPUModelRunner, "_sample", sample_and_put_back)
    wrap(GPUModelRunner, "_bookkeeping_sync", bookkeeping_without_rewinding)


def _unfinished(runner: Any) -> dict[int, Any]:
    """Return the generators, by row, of requests whose prompt is not fully computed; empty except on a CPU."""
    generators: dict[int, Any] = runner.input_batch.generators
    if not generators:
        return {}
    discarded = runner.discard_request_mask.np
    return {
        row: generator
        for row, generator in generators.items()
        if discarded[row] and generator.device.type == "cpu"
    }  # fmt: skip


@contextmanager
def _hidden(generators: dict[int, Any], some: dict[int, Any]) -> Generator[None]:
    for row in some:
        del generators[row]
    try:
        yield
    finally:
        generators.update(some)
