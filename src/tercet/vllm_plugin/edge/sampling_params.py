"""Sampling parameters of calls, checked and converted to vLLM's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

import msgspec
import numpy as np
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams

from tercet.protocol import BadRequest
from tercet.protocol.grammar_bounds import require_small

# Fields that only the engine sets, or that have another name in the verbs.
NOT_FOR_CALLERS = frozenset({"output_kind", "skip_clone", "detokenize", "output_text_buffer_length", "extra_args"})
_PLACE = re.compile(r"`\$\.(\w+)")
# Fields of vLLM's serving layer about the reasoning, in addition to the parameters; only structured output needs them.
REASONING_FIELDS = ("reasoning_ended", "reasoning_parser_kwargs")
CALLER_FIELDS = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")} - NOT_FOR_CALLERS


class Reasoning(msgspec.Struct, frozen=True):
    """Whether the prompt ends after the reasoning, None if unknown, and the arguments of the reasoning parser."""

    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None


def reasoning_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of ``given`` about the reasoning, in ``AsyncLLM``'s form.

    Raises :class:`~tercet.protocol.BadRequest`.
    """
    found = {name: given[name] for name in REASONING_FIELDS if given.get(name) is not None}
    try:
        return found and msgspec.to_builtins(msgspec.convert(found, Reasoning, strict=True))
    except msgspec.ValidationError as error:
        raise BadRequest(f"sampling_params: {error}", "sampling_params") from error


def to_vllm(given: Mapping[str, Any], kv_transfer_params: Mapping[str, Any], min_tokens_done: int) -> SamplingParams:
    """Return vLLM's ``SamplingParams`` for a request whose tokens Tercet streams.

    ``min_tokens_done`` output tokens exist already. Raises :class:`~tercet.protocol.BadRequest`, which names the field.
    """
    fields = {name: value for name, value in given.items() if name not in REASONING_FIELDS}
    unknown = next((name for name in fields if name not in CALLER_FIELDS), None)
    if unknown is not None:
        raise BadRequest(f"sampling_params: unknown field `{unknown}`", f"sampling_params.{unknown}")
    if fields.get("n", 1) != 1:
        raise BadRequest("sampling_params.n: a sequence has one output; start one per choice", "sampling_params.n")
    max_tokens = fields.get("max_tokens")
    if isinstance(max_tokens, int) and 1 <= max_tokens <= min_tokens_done:
        raise BadRequest(
            f"sampling_params.max_tokens: {max_tokens} is already reached by the {min_tokens_done} tokens of output",
            "sampling_params.max_tokens",
        )
    if isinstance(structured := fields.get("structured_outputs"), Mapping):
        require_small(cast("Mapping[str, Any]", structured), "sampling_params.structured_outputs")
    ours = {
        "detokenize": bool(fields.get("stop")),
        "output_kind": RequestOutputKind.DELTA.value,
        "extra_args": {"kv_transfer_params": dict(kv_transfer_params)},
    }
    try:
        # The engine's core decodes requests with these types, and a wrong type ends the core; vLLM's constructor checks
        # few of them.
        msgspec.msgpack.encode(fields)
        return msgspec.convert({**fields, **ours}, SamplingParams, str_keys=True, dec_hook=_array)
    except VLLMValidationError as error:
        raise BadRequest(f"sampling_params: {error}", _field(error.parameter)) from error
    except msgspec.ValidationError as error:
        found = _PLACE.search(str(error))
        raise BadRequest(f"sampling_params: {error}", _field(found and found.group(1))) from error
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadRequest(f"sampling_params: {error}", "sampling_params") from error


def _array(kind: type, value: Any) -> Any:
    if kind is not np.ndarray:
        raise TypeError(f"a value of type {kind.__name__} is not accepted")
    return np.array(value, dtype=np.int64)


def _field(parameter: str | None) -> str:
    return "sampling_params" if parameter is None else f"sampling_params.{parameter}"


def first_token_only(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same parameters for a sender that samples one token.

    ``min_tokens`` of 1 masks the end of sequence for the first token, as a larger value does.
    """
    min_tokens = given.get("min_tokens", 0)
    return {**given, "max_tokens": 1, "min_tokens": min(min_tokens, 1) if isinstance(min_tokens, int) else min_tokens}
