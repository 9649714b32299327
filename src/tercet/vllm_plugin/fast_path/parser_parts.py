"""Parts of vLLM's parsers that are made once and kept, because each costs as much as parsing.

The parts are the labelled counters of calls, the terminals of special tokens, and the texts of single tokens.

Relies on ``record_tool_parser_invocation`` adding one to the counter with these labels; on the result of
``_build_drop_info`` depending on its arguments only, and never being changed by a parser engine; and on a scanner of
token ids keeping each token's text, which depends on the tokenizer only, in ``_token_text_cache``.
"""

from __future__ import annotations

from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.parser import abstract_parser, metrics
from vllm.parser.engine import streaming_parser_engine
from vllm.parser.metrics import RequestType, ToolCallOutcome

# Enough for one or two configurations of each kind of parser.
MOST_KEPT = 64


def keep_parser_parts() -> None:
    """Make vLLM's parsers in this process use the kept parts; calls after the first one change nothing."""
    parsers: Any = abstract_parser
    parser_engine: Any = streaming_parser_engine
    if not isinstance(parsers.record_tool_parser_invocation, ToolParserCalls):
        parsers.record_tool_parser_invocation = TOOL_PARSER_CALLS
    if not isinstance(streaming_parser_engine._build_drop_info, SpecialTokenTerminals):
        streaming_parser_engine._build_drop_info = SpecialTokenTerminals(streaming_parser_engine._build_drop_info)
    if not isinstance(parser_engine.TokenIDScanner, Scanners):
        parser_engine.TokenIDScanner = Scanners(parser_engine.TokenIDScanner)


class ToolParserCalls:
    """Counter of tool parsers' calls in vLLM's metric; looks up each combination of labels once."""

    def __init__(self) -> None:
        self._counter: Any = None
        self._children: dict[tuple[bool, bool, type], Any] = {}

    def __call__(self, *, is_tool_called: bool | Exception, is_streaming: bool, request: object) -> None:
        """Count one call, in place of vLLM's function."""
        self.count(1, is_tool_called is True, is_streaming, request)

    def count(self, times: int, is_tool_called: bool, is_streaming: bool, request: object) -> None:
        """Count ``times`` calls; does nothing while vLLM has no metric."""
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
    """The special tokens that a parser drops, kept for each configuration; ``make`` is vLLM's function."""

    def __init__(self, make: Any) -> None:
        self._make = make
        # Keys are object ids. Both objects are kept with the result, so that their ids are not used again.
        self._kept: dict[tuple[int, int], tuple[Any, Any, Any]] = {}

    def __call__(self, config: Any, tokenizer: Any) -> Any:
        """Return the result of vLLM's function."""
        key = id(config), id(tokenizer)
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= MOST_KEPT:
                self._kept.pop(next(iter(self._kept)))
            found = self._kept[key] = config, tokenizer, self._make(config, tokenizer)
        return found[2]


class Scanners:
    """Maker of scanners of token ids that share the texts of their tokenizer's tokens; ``make`` is vLLM's class."""

    def __init__(self, make: Any) -> None:
        self._make = make
        # Keys are the tokenizers' object ids. The objects are kept, so that their ids are not used again.
        self._texts: dict[int, tuple[Any, dict[int, str]]] = {}

    def __call__(self, token_id_to_terminal: dict[int, str], tokenizer: Any) -> Any:
        """Return vLLM's scanner, in place of its class."""
        scanner = self._make(token_id_to_terminal, tokenizer)
        kept = self._texts.get(id(tokenizer))
        if kept is None:
            if len(self._texts) >= MOST_KEPT:
                self._texts.pop(next(iter(self._texts)))
            kept = self._texts[id(tokenizer)] = tokenizer, {}
        scanner._token_text_cache = kept[1]
        return scanner
