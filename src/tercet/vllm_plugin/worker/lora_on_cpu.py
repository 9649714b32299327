"""A change to vLLM's LoRA operators for CPUs: rows of the base model get no adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tercet.vllm_plugin.start.patching import Method, wrap

if TYPE_CHECKING:
    import torch

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
    shrink: Method,
    inputs: torch.Tensor,
    weights: torch.Tensor,
    output: torch.Tensor,
    indices: torch.Tensor,
    *more: Any,
    **named: Any,
) -> None:
    """Run vLLM's operator, then set the base model's rows to zeros: their product adds nothing."""
    shrink(inputs, weights, output, indices, *more, **named)
    output[indices == BASE_MODEL] = 0


def expand_rows_with_an_adapter(
    expand: Method,
    inputs: torch.Tensor,
    weights: torch.Tensor,
    output: torch.Tensor,
    indices: torch.Tensor,
    *more: Any,
    **named: Any,
) -> None:
    """Run vLLM's operator with zeros as the base model's rows."""
    expand(inputs.masked_fill((indices == BASE_MODEL)[:, None], 0), weights, output, indices, *more, **named)
