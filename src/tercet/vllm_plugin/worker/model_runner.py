"""Tercet's changes in vLLM's workers: requests that begin with output, seeded prompts, LoRA and waiting on CPUs."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from tercet.settings.process_settings import spin_seconds
from tercet.vllm_plugin.core.connector_messages import step_in
from tercet.vllm_plugin.differences import DRAWS_FOR_THE_VOCABULARY
from tercet.vllm_plugin.hooks import Method, wrap

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
        metadata = step_in(scheduler_output.kv_connector_metadata)
        if metadata is not None:
            pending.update(metadata.resumed)
        return update_states(self, scheduler_output)

    def add_request_with_output(add_request: Method, self: Any, request: Any) -> Any:
        output = pending.pop(request.req_id, None)
        if output:
            # A moved sequence goes on with the random numbers that its former engine would have drawn next.
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
        generators, unfinished = self.input_batch.generators, _unfinished(self)
        for row in unfinished:
            del generators[row]
        try:
            return bookkeeping(self, *args, **kwargs)
        finally:
            generators.update(unfinished)

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


BASE_MODEL = -1


def leave_the_base_model_alone() -> None:
    """Make rows without an adapter stay as the base model computes them.

    vLLM gives these rows the index -1, with which its operators for CPUs pick the last adapter of the batch's slots. A
    request for the base model would then be computed with that adapter, and its KV be taken for the base model's. For
    embeddings only the second product uses an operator.
    """
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for module in (lora_ops, punica_cpu):
        wrap(module, "bgmv_shrink", shrink_rows_with_an_adapter)
        wrap(module, "bgmv_expand", expand_rows_with_an_adapter)


def shrink_rows_with_an_adapter(
    shrink: Method, inputs: Any, weights: Any, output: Any, indices: torch.Tensor, *more: Any, **named: Any
) -> None:  # fmt: skip
    """Run vLLM's operator, then set the base model's rows to zeros: their product adds nothing."""
    shrink(inputs, weights, output, indices, *more, **named)
    output[indices == BASE_MODEL] = 0


def expand_rows_with_an_adapter(
    expand: Method, inputs: torch.Tensor, weights: Any, output: Any, indices: torch.Tensor, *more: Any, **named: Any
) -> None:  # fmt: skip
    """Run vLLM's operator with zeros as the base model's rows."""
    expand(inputs.masked_fill((indices == BASE_MODEL)[:, None], 0), weights, output, indices, *more, **named)


NAP_MS = 2
NAPS_AFTER_READ = 1.0  # vLLM's own limit between polling and sleeping


def let_queue_readers_sleep() -> None:
    """Make readers of vLLM's message queues sleep as soon as there is nothing to read.

    A waiting process polls for a second before it sleeps. With an accelerator, polling only occupies a core; if engines
    compute on those cores, polling slows down the steps of this engine and others, and the processes that send tokens
    to clients. With sleeping, a step begins a fraction of a millisecond later.

    vLLM's reader polls for ``busy_loop_s`` seconds and then waits on a socket that writers notify with every message.
    The socket drops a notice while it still carries an earlier one, so right after a read no sleep is longer than
    ``NAP_MS`` milliseconds; the caller checks again after each return.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.platforms import current_platform

    seconds = spin_seconds(os.environ, current_platform.is_cpu())
    if seconds is None:
        return

    def nap_or_sleep(wait: Method, self: Any, timeout_ms: int | None = None) -> None:
        self.busy_loop_s = seconds  # only readers wait
        if time.monotonic() <= self.last_read + NAPS_AFTER_READ:
            timeout_ms = NAP_MS if timeout_ms is None else min(NAP_MS, timeout_ms)
        wait(self, timeout_ms)

    wrap(SpinCondition, "wait", nap_or_sleep)
