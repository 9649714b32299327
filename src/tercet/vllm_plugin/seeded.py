"""Seeded requests whose prompt takes several steps, on CPU.

A step that ends inside a prompt samples a token for nothing, and vLLM winds the request's generator back. It does so
by the generator's offset, which CPU generators do not have: vLLM 0.32 then raises in the worker, and the engine is
lost. So on CPU the generator's state is kept and put back instead.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any


def install_seeded_prompt_hook() -> None:
    """Keep the generators of unfinished prompts as they are.

    Relies on ``GPUModelRunner._sample`` drawing from ``input_batch.generators``, ``_bookkeeping_sync`` rewinding those
    of the rows in ``discard_request_mask``, and neither changing which row a request has.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if getattr(GPUModelRunner._sample, "tercet_hook", False):
        return
    sample: Callable[..., Any] = GPUModelRunner._sample
    bookkeeping: Callable[..., Any] = GPUModelRunner._bookkeeping_sync

    def sample_and_put_back(self: Any, *args: Any, **kwargs: Any) -> Any:
        states = [(generator, generator.get_state()) for generator in _unfinished(self).values()]
        output = sample(self, *args, **kwargs)
        for generator, state in states:
            generator.set_state(state)
        return output

    def bookkeeping_without_rewinding(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _hidden(self.input_batch.generators, _unfinished(self)):
            return bookkeeping(self, *args, **kwargs)

    sample_and_put_back.tercet_hook = True  # type: ignore[attr-defined]
    GPUModelRunner._sample = sample_and_put_back  # type: ignore[method-assign]
    GPUModelRunner._bookkeeping_sync = bookkeeping_without_rewinding  # type: ignore[method-assign]


def _unfinished(runner: Any) -> dict[int, Any]:
    """The generators, by row, of requests whose prompt is not computed to its end; none but on CPU."""
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
