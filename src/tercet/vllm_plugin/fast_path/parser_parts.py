"""Parts of vLLM's parsers that cost as much as parsing, made once: counters of calls, and terminals of special tokens.

Relies on ``record_tool_parser_invocation`` adding one to the counter with these labels; and on ``_build_drop_info``
giving a result that depends on its arguments alone, which engines only read.
"""

from __future__ import annotations

from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.parser import abstract_parser, metrics
from vllm.parser.engine import streaming_parser_engine
from vllm.parser.metrics import RequestType, ToolCallOutcome

# Each kind of parser has a configuration or two.
MOST_KEPT = 64


def keep_parser_parts() -> None:
    """Let vLLM's parsers in this process use the kept parts; calls after the first one change nothing."""
    parsers: Any = abstract_parser
    if not isinstance(parsers.record_tool_parser_invocation, ToolParserCalls):
        parsers.record_tool_parser_invocation = TOOL_PARSER_CALLS
    if not isinstance(streaming_parser_engine._build_drop_info, SpecialTokenTerminals):
        streaming_parser_engine._build_drop_info = SpecialTokenTerminals(streaming_parser_engine._build_drop_info)


class ToolParserCalls:
    """Counts calls of tool parsers in vLLM's metric, without looking its labels up each time."""

    def __init__(self) -> None:
        self._counter: Any = None
        self._children: dict[tuple[bool, bool, type], Any] = {}

    def __call__(self, *, is_tool_called: bool | Exception, is_streaming: bool, request: object) -> None:
        """Count a call, in place of vLLM's function."""
        self.count(1, is_tool_called is True, is_streaming, request)

    def count(self, times: int, is_tool_called: bool, is_streaming: bool, request: object) -> None:
        """Count calls; does nothing while vLLM has no metric."""
        counter = metrics._tool_call_parser_invocations
        if counter is None:
            return
        if counter is not self._counter:
            self._counter, self._children = counter, {}
        key = is_tool_called, is_streaming, type(request)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._child(*key)
        child.inc(times)

    def _child(self, called: bool, is_streaming: bool, kind: type) -> Any:
        outcome = ToolCallOutcome.TOOL_CALL if called else ToolCallOutcome.NO_TOOL_CALL
        return self._counter.labels(
            model_name=metrics._model_name,
            mode="streaming" if is_streaming else "non_streaming",
            outcome=outcome.value,
            request_type=_request_type(kind).value,
        )


def _request_type(kind: type) -> RequestType:
    if issubclass(kind, ChatCompletionRequest):
        return RequestType.CHAT_COMPLETIONS
    return RequestType.RESPONSES if issubclass(kind, ResponsesRequest) else RequestType.OTHER


TOOL_PARSER_CALLS = ToolParserCalls()


class SpecialTokenTerminals:
    """What a parser drops of a tokenizer's special tokens, kept for each configuration; ``make`` is vLLM's function."""

    def __init__(self, make: Any) -> None:
        self._make = make
        # Both are kept with the result, so that no other object can have their ids.
        self._kept: dict[tuple[int, int], tuple[Any, Any, Any]] = {}

    def __call__(self, config: Any, tokenizer: Any) -> Any:
        """The result of vLLM's function."""
        key = id(config), id(tokenizer)
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= MOST_KEPT:
                self._kept.pop(next(iter(self._kept)))
            found = self._kept[key] = config, tokenizer, self._make(config, tokenizer)
        return found[2]
