"""JSON of a parser's delta in a chat chunk.

Relies on a ``DeltaMessage`` being written with the fields that were set, and with ``tool_calls`` only if not empty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall

CONTENT, REASONING = {"content"}, {"reasoning"}
CALLS, CALLS_BESIDE_CONTENT = {"tool_calls"}, {"content", "tool_calls"}
MORE_OF_CALL, ARGUMENTS = {"index", "function"}, {"arguments"}
encode = msgspec.json.Encoder().encode


def is_told(tell: Callable[..., object], *args: Any) -> bool:
    """Call ``tell``; return False if a text cannot be encoded: it has half of a character, from a cut escape."""
    try:
        tell(*args)
    except UnicodeEncodeError:
        return False
    return True


def delta_json(delta: Any) -> bytes:
    """Return a delta's JSON as vLLM writes it; raises vLLM's exception if the delta cannot be written."""
    try:
        written = _usual_json(delta)
    except UnicodeEncodeError:  # half of a character, from an escape that an output has cut
        written = None
    return delta.model_dump_json(exclude_unset=True).encode() if written is None else written


def _usual_json(delta: Any) -> bytes | None:
    """Return the JSON of a delta with text, or with more arguments of a call; None for other deltas, which are rare."""
    if type(delta) is DeltaMessage:
        fields = delta.model_fields_set
        if fields == CONTENT:
            return b'{"content":%b}' % encode(delta.content)
        if fields == REASONING:
            return b'{"reasoning":%b}' % encode(delta.reasoning)
        if (fields in (CALLS, CALLS_BESIDE_CONTENT)) and len(delta.tool_calls) == 1:
            more = _more_arguments(delta.tool_calls[0])
            if more is not None:
                content = b"" if fields == CALLS else b'"content":%b,' % encode(delta.content)
                return b'{%b"tool_calls":[%b]}' % (content, more)
    return None


def _more_arguments(call: Any) -> bytes | None:
    """Return the JSON of a call's delta that has arguments only, as most have; None for other deltas."""
    function = call.function
    if type(call) is not DeltaToolCall or call.model_fields_set != MORE_OF_CALL:
        return None
    if type(function) is not DeltaFunctionCall or function.model_fields_set != ARGUMENTS:
        return None
    return b'{"index":%d,"function":{"arguments":%b}}' % (call.index, encode(function.arguments))
