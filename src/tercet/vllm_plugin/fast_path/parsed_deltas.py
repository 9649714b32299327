"""What a choice says when vLLM's parser of tools and reasoning reads its text: the parser runs here, on each output.

Relies on a parser's ``parse_delta`` taking the text and the tokens of one output, and giving a ``DeltaMessage`` or
None; on ``count_reasoning_tokens``; and on a ``DeltaMessage`` being written with the fields that were set,
``tool_calls`` only if there are any.
"""

from __future__ import annotations

from typing import Any

from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall

from tercet.vllm_plugin.fast_path.sse_chunks import encode
from tercet.vllm_plugin.fast_path.stream_plan import Parsing

EMPTY = b"{}"
CONTENT, REASONING = {"content"}, {"reasoning"}
CALLS, CALLS_BESIDE_CONTENT = {"tool_calls"}, {"content", "tool_calls"}
MORE_OF_CALL, ARGUMENTS = {"index", "function"}, {"arguments"}


class ParsedDeltas:
    """The deltas of one choice.

    ``tool_calls`` tells whether any were sent. Token ids are kept where ``counts`` says that reasoning tokens are
    counted.
    """

    def __init__(self, parsing: Parsing, *, counts: bool) -> None:
        self._parsing = parsing
        self._parse = parsing.make()
        self._parse_delta = self._parse.parse_delta
        self._token_ids: list[int] | None = [] if counts else None
        self.has_tool_calls = False

    def read(self, text: str, token_ids: list[int], prompt: Any, *, finished: bool) -> bytes | None:
        """The next delta as JSON; None if the parser has nothing to say yet. Raises what the parser raises."""
        delta = self._parse_delta(
            delta_text=text, delta_token_ids=token_ids, request=self._parsing.request, prompt_token_ids=prompt,
            finished=finished,
        )  # fmt: skip
        if self._token_ids is not None:
            self._token_ids.extend(token_ids)
        if delta is None:
            return None
        if delta.tool_calls and not self._parsing.keeps_tool_calls:
            delta.tool_calls = []
            if not (delta.content or delta.reasoning):
                return None
        if delta.tool_calls:
            self.has_tool_calls = True
            if self._parsing.one_call_only:
                delta.tool_calls = [call for call in delta.tool_calls if call.index == 0]
        return delta_json(delta)

    def finish_reason(self, reason: str) -> str:
        """What the choice ends with where the model ended with ``reason``."""
        called = self.has_tool_calls and not self._parsing.is_named and reason == "stop"
        return "tool_calls" if called else reason

    @property
    def reasoning_tokens(self) -> int:
        """How many tokens were reasoning so far; 0 where they are not counted."""
        return self._parse.count_reasoning_tokens(tuple(self._token_ids)) if self._token_ids else 0


def delta_json(delta: Any) -> bytes:
    """A delta as vLLM writes it; raises what vLLM raises if it cannot be written."""
    try:
        written = _usual_json(delta)
    except UnicodeEncodeError:  # half of a character, from an escape that an output has cut
        written = None
    return delta.model_dump_json(exclude_unset=True).encode() if written is None else written


def _usual_json(delta: Any) -> bytes | None:
    """A delta of text, or of more arguments of a call, as most are; None for others."""
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
    """A call that only goes on with its arguments, as most deltas of a call do; None for others."""
    function = call.function
    if type(call) is not DeltaToolCall or call.model_fields_set != MORE_OF_CALL:
        return None
    if type(function) is not DeltaFunctionCall or function.model_fields_set != ARGUMENTS:
        return None
    return b'{"index":%d,"function":{"arguments":%b}}' % (call.index, encode(function.arguments))
