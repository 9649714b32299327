"""Conversion between vLLM's engine-core messages and Tercet's types."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from tercet.protocol import BadRequest, EngineError, MultiModalFeature, Output, Request, TokenLogprob, Usage
from tercet.protocol.grammar_bounds import require_small
from tercet.vllm_plugin.mm_features import to_wire
from tercet.wire.serving.server_access import NOTHING, Asked

FINISH_REASONS: Mapping[str, FinishReason] = {str(reason): reason for reason in FinishReason}
# Fields that the router itself uses to make the text, or that vLLM derives again on the engine.
NOT_FORWARDED = frozenset(
    {"n", "stop", "output_kind", "skip_clone", "detokenize", "output_text_buffer_length", "extra_args",
     "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "stream_interval",
     "flat_logprobs"}
)  # fmt: skip
# Extra arguments that the serving layer has read: a session, and parameters of engines that prefill.
READ_BY_ROUTER = frozenset({"kv_transfer_params", "session_id"})
_DEFAULTS = SamplingParams()
FORWARDED = tuple(
    name for name in SamplingParams.__struct_fields__ if not name.startswith("_") and name not in NOT_FORWARDED
)
_forwarded_of: Callable[[SamplingParams], tuple[Any, ...]] = attrgetter(*FORWARDED)
_FORWARDED_DEFAULTS = _forwarded_of(_DEFAULTS)


def to_request(
    request: EngineCoreRequest,
    headers: Mapping[str, str],
    known: Asked = NOTHING,
    features: tuple[MultiModalFeature, ...] = (),
) -> Request:
    """Return the program's request for vLLM's ``request``.

    ``features`` are its images and other media inputs; ``known`` are the fields read from the request's body.

    Raises ``VLLMValidationError`` (status 400) for features that cannot be sent to engines yet.
    """
    unsupported = {
        "prompt embeddings": request.prompt_embeds is not None,
        "pooling": request.pooling_params is not None,
        "streaming input": request.resumable,
    }
    for what, wanted in unsupported.items():
        if wanted:
            raise VLLMValidationError(f"{what}: not supported by this router; ask an engine directly")
    sampling = sampling_to_wire(request.sampling_params or _DEFAULTS) | _reasoning(request)
    return Request(
        seq_id=request.request_id,
        prompt=tuple(request.prompt_token_ids or ()),
        sampling_params=sampling,
        priority=request.priority,
        cache_salt=request.cache_salt,
        headers=headers,
        user=known.user,
        session=known.session_name,
        adapter=None if request.lora_request is None else request.lora_request.lora_name,
        mm_features=features,
    )


async def features_of(request: EngineCoreRequest, model_dtype: str = "") -> tuple[MultiModalFeature, ...]:
    """Return the images and other media inputs of a request, for engines that compute in ``model_dtype``.

    Raises ``VLLMValidationError``.

    Another thread encodes and digests them: for megabytes of data, this would delay the tokens of other requests.
    """
    return await asyncio.to_thread(_features, request, model_dtype) if request.mm_features else ()


def _features(request: EngineCoreRequest, model_dtype: str) -> tuple[MultiModalFeature, ...]:
    try:
        return tuple(to_wire(spec, model_dtype) for spec in request.mm_features or ())
    except (ValueError, TypeError) as error:
        raise VLLMValidationError(f"multi-modal input: {error}") from error


def _reasoning(request: EngineCoreRequest) -> dict[str, Any]:
    """Return the fields with which vLLM's serving layer tells engines where structured output begins."""
    params = request.sampling_params
    if params is None or params.structured_outputs is None:
        return {}
    said = {name: getattr(request, name) for name in ("reasoning_ended", "reasoning_parser_kwargs")}
    return {name: value for name, value in said.items() if value is not None}


def sampling_to_wire(params: SamplingParams) -> dict[str, Any]:
    """Return the fields that differ from vLLM's defaults, as plain values; raises ``VLLMValidationError``."""
    extra = (params.extra_args or {}).keys() - READ_BY_ROUTER
    if extra:
        raise VLLMValidationError(f"extra_args: {', '.join(sorted(extra))} is not supported by this router")
    given = zip(FORWARDED, _forwarded_of(params), _FORWARDED_DEFAULTS, strict=True)
    wire = {
        name: _plain(value) for name, value, default in given if value is not default and not _is_equal(value, default)
    }
    if "structured_outputs" in wire:
        try:
            require_small(wire["structured_outputs"])
        except BadRequest as error:
            raise VLLMValidationError(error.message, parameter=error.param) from error
    return wire


def _is_equal(value: Any, default: Any) -> bool:
    return not isinstance(value, np.ndarray) and value == default


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {name: kept for name, kept in fields.items() if kept is not None and not name.startswith("_")}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    return value


def to_core_output(seq_id: str, prompt_len: int, output: Output, usage: Usage | None) -> EngineCoreOutput:
    """Return vLLM's message for one output; ``usage`` is None except for the first output."""
    return EngineCoreOutput(
        request_id=seq_id,
        new_token_ids=list(output.token_ids),
        new_logprobs=None if output.logprobs is None else _logprobs_lists(output.logprobs),
        new_prompt_logprobs_tensors=None
        if output.prompt_logprobs is None
        else _prompt_logprobs(output.prompt_logprobs),
        finish_reason=None if output.finish_reason is None else FINISH_REASONS[output.finish_reason],
        stop_reason=output.stop_reason,
        prefill_stats=None if usage is None else _prefill_stats(prompt_len, usage),
    )


def _prefill_stats(prompt_len: int, usage: Usage) -> PrefillStats:
    stats = PrefillStats()
    cached = min(usage.cached, prompt_len)
    stats.set(prompt_len, cached, min(usage.received, prompt_len - cached))
    return stats


def _logprobs_lists(positions: Sequence[Sequence[TokenLogprob]]) -> LogprobsLists:
    """Return vLLM's arrays: the sampled token in column 0 and the token of rank *i* in column *i*.

    The engine's answer has each token once, so a sampled token that is among the top tokens is inserted again.
    """
    width = 1 + max((_depth(position) for position in positions), default=0)
    token_ids = np.zeros((len(positions), width), dtype=np.int64)
    values = np.full((len(positions), width), -np.inf, dtype=np.float32)
    ranks = np.zeros(len(positions), dtype=np.int64)
    for row, position in enumerate(positions):
        sampled, by_rank = position[0], {found.rank: found for found in position}
        ranks[row] = sampled.rank or 0
        for column in range(width):
            found = by_rank.get(column, sampled) if column else sampled
            token_ids[row, column], values[row, column] = found.token_id, found.logprob
    if token_ids.size and token_ids.min() < 0:
        raise EngineError("an output of the program has log probabilities with negative token ids")
    return LogprobsLists(token_ids, values, ranks)


def _depth(position: Sequence[TokenLogprob]) -> int:
    """Return the highest rank among the top tokens; the sampled token may be one of them."""
    sampled, *top = (found.rank or 0 for found in position)
    return max([*top, sampled if sampled <= len(position) else 0])


def _prompt_logprobs(positions: Sequence[Sequence[TokenLogprob] | None]) -> LogprobsTensors:
    import torch

    known = [position for position in positions if position is not None]  # the first one has none
    lists = _logprobs_lists(known)
    return LogprobsTensors(
        torch.from_numpy(lists.logprob_token_ids),
        torch.from_numpy(lists.logprobs),
        torch.from_numpy(lists.sampled_token_ranks),
    )
