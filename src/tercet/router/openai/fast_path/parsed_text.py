"""Texts that vLLM's parser would pass on unchanged: this module recognises them without calling the parser.

Between markers, a parser passes on reasoning, content and the arguments of a call. If no marker is open, and a text has
no character that can begin a marker, the parser's result is the text itself. The parser's state is updated before the
parser reads again ("settle").

Relies on ``DelegatingParser.parse_delta`` reading in phases by its ``_stream_state``; on ``StreamingParserEngine.feed``
passing on a text that has neither the first character of a marker nor a special token; and on ``Hermes2ProToolParser``
reading the whole text again for each output, and recording in ``_sent_content_idx``, ``streamed_args_for_tool`` and
``prev_tool_call_arr`` the parts that it has passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.parser import abstract_parser, metrics
from vllm.parser.abstract_parser import DelegatingParser
from vllm.parser.engine import streaming_parser_engine
from vllm.parser.engine.adapters import ParserEngineReasoningAdapter, ParserEngineToolAdapter
from vllm.parser.engine.events import EventType
from vllm.parser.engine.parser_engine import ParserEngine
from vllm.parser.engine.parser_engine_config import ParserState
from vllm.parser.engine.streaming_parser_engine import StreamingParserEngine
from vllm.parser.metrics import RequestType, ToolCallOutcome
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

# Number of passed texts after which vLLM's metric of tool parsers' calls is updated.
COUNTED_AT_ONCE = 64
# vLLM's functions. A parser that overrides one of them reads each text.
READ = DelegatingParser.parse_delta
OF_REASONING = {"extract_reasoning_streaming": ParserEngineReasoningAdapter.extract_reasoning_streaming}
OF_TOOLS = {"extract_tool_calls_streaming": ParserEngineToolAdapter.extract_tool_calls_streaming}
OF_ENGINE = {
    name: getattr(ParserEngine, name)
    for name in (
        "extract_reasoning_streaming", "extract_tool_calls_streaming", "_events_to_delta", "_feed", "_preprocess_feed",
        "_strip_trailing_reasoning",
    )
}  # fmt: skip
OF_LEXER = {name: getattr(StreamingParserEngine, name) for name in ("feed", "_emit_for_state")}


@dataclass(frozen=True)
class Parsing:
    """Parsing of an answer."""

    request: Any
    #: Makes one parser per choice, which reads its options in the request.
    make: Callable[[], Any]
    #: The request names the tool to call.
    is_named: bool
    one_call_only: bool
    hides_reasoning: bool
    keeps_tool_calls: bool
    #: The tokens are kept, since usage has the number of reasoning tokens.
    counts: bool


class Passed(Enum):
    """The kind of a text that is passed on."""

    CONTENT = auto()
    REASONING = auto()
    ARGUMENTS = auto()


# A phase of a parser recognises the texts that the parser passes on in it: ``take`` returns the kind of a text, None if
# the parser must read it. All texts until ``settle``, which updates the parser with them, are of one kind.
# ``is_counted``: vLLM's metric counts each text as a call of the tool parser.


class AllText:
    """A phase in which the parser does not look for calls: every text is content, and the parser keeps nothing."""

    is_counted = False

    def __init__(self, *, even_empty: bool) -> None:
        self._even_empty = even_empty

    def take(self, text: str, token_ids: Sequence[int]) -> Passed | None:
        del token_ids
        return Passed.CONTENT if text or self._even_empty else None

    def settle(self) -> None:
        pass


ANY_TEXT = AllText(even_empty=True)


class EngineText:
    """The texts that one of vLLM's parser engines passes on in ``state``."""

    def __init__(self, engine: Any, state: ParserState) -> None:
        self._engine = engine
        self._state = state
        self._reader = engine._engine
        self._first_characters = self._reader._lexer._literal_first_chars
        self._special = self._reader._resolved_token_ids.keys()
        self.is_counted = state is not ParserState.REASONING
        self._passed = Passed.CONTENT if self.is_counted else Passed.REASONING
        # True if the engine, after the texts it has read, passes on texts without markers; None if not known yet.
        self._passes: bool | None = None

    def take(self, text: str, token_ids: Sequence[int]) -> Passed | None:
        if self._passes is None:
            # In this state, with nothing that the engine has read and still holds back: else the next text may
            # complete a marker.
            engine, reader = self._engine, self._reader
            holds_back = reader._lexer.buffer or reader._scanner._deferred_terminals or engine._deferred_content
            is_in_state = reader.state is self._state and engine._streaming_initialized and not holds_back
            # White space before an answer's first text is dropped.
            self._passes = is_in_state and (self._passed is Passed.REASONING or engine._content_has_nonws)
        if not (self._passes and text and self._first_characters.isdisjoint(text)):
            return None
        if token_ids:
            if not self._special.isdisjoint(token_ids):
                return None
            self._reader._ever_had_token_ids = True
            if self._passed is Passed.REASONING:
                self._reader._reasoning_token_count += len(token_ids)
        return self._passed

    def settle(self) -> None:
        self._passes = None  # the engine is about to read, and may have another state at the next text


class HermesText:
    """The texts that Hermes' parser passes on: content before the first call, and arguments of the open call.

    ``state`` has the text that the parser has read. ``passes_arguments``: the parser's deltas are sent unchanged.
    """

    is_counted = True

    def __init__(self, parser: Any, state: Any, *, passes_arguments: bool) -> None:
        self._parser = parser
        self._passes_arguments = passes_arguments
        self._state = state
        self._is_known = self._is_content = False
        # The index of the open call, if all of its arguments so far were sent; None otherwise.
        self.call: int | None = None
        self._arguments: list[str] = []

    def take(self, text: str, token_ids: Sequence[int]) -> Passed | None:
        del token_ids
        if not text or "<" in text:
            return None
        if not self._is_known:
            self._look()
        if self._is_content:
            self._parser._sent_content_idx += len(text)
            return Passed.CONTENT
        # If the last character is neither "}" nor a space, the call's JSON is not complete, and the parser holds
        # nothing back.
        if self.call is None or text[-1] == "}" or text[-1].isspace():
            return None
        self._arguments.append(text)
        return Passed.ARGUMENTS

    def settle(self) -> None:
        self._is_known = False
        if self._arguments and self.call is not None:
            sent = self._parser.streamed_args_for_tool[self.call] + "".join(self._arguments)
            self._parser.streamed_args_for_tool[self.call] = sent
            self._parser.prev_tool_call_arr[self.call]["arguments"] = sent
            self._arguments.clear()

    def _look(self) -> None:
        """Determine the parser's position, at a time at which it has read the whole text."""
        text, parser = self._state.previous_text, self._parser
        has_call = parser.tool_call_start_token in text
        self._is_known = True
        self._is_content = not has_call and parser._sent_content_idx == len(text)
        self.call = None
        if not has_call or not self._passes_arguments:
            return
        # The last call's arguments are passed on if the parser has sent all of them so far, and holds nothing back.
        regions, calls = parser._extract_tool_call_jsons(text), parser.prev_tool_call_arr
        json, is_whole = regions[-1]
        if is_whole or len(calls) != len(regions) or "name" not in calls[-1] or not json.startswith("{"):
            return
        sent = parser.streamed_args_for_tool[-1]
        holds_back = not text.endswith(json) or "<" in text[-len(parser.tool_call_end_token) :]
        if not holds_back and sent and parser._extract_tool_args(json, False) == sent:
            self.call = len(regions) - 1


PassingPhase = AllText | EngineText | HermesText


class PassedText:
    """The texts that the parser of one choice passes on, in each of its phases."""

    def __init__(self, parser: Any, parsing: Parsing) -> None:
        self._state = parser._stream_state
        self._request = parsing.request
        reader, self._reasoning = parser._reasoning_parser, None
        if isinstance(reader, ParserEngineReasoningAdapter) and _is_own(reader, OF_REASONING):
            engine = reader._parser_engine
            self._reasoning = _engine_text(engine, ParserState.REASONING, EventType.REASONING_CHUNK)
        self._has_tools = parser._tool_parser is not None
        self._tools = _tool_text(parser._tool_parser, self._state, parsing) if self._has_tools else None
        # The present phase, until the parser reads again; None if the parser must read each text.
        self._phase: PassingPhase | None = None
        self._is_phase_known = False
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._uncounted = 0
        self._calls_tool = False

    def take(self, text: str, token_ids: Sequence[int]) -> Passed | None:
        """Return the kind of the next text if it is passed on; None if the parser must read it."""
        if not self._is_phase_known:
            # In vLLM's order: the parser looks for the end of a reasoning in the prompt first, then for calls.
            state, self._is_phase_known = self._state, True
            if not state.prompt_reasoning_checked:
                self._phase = None
            elif not state.reasoning_ended:
                self._phase = self._reasoning
            elif not self._has_tools:
                self._phase = ANY_TEXT
            else:
                self._phase = self._tools if state.tool_call_text_started else None
        phase = self._phase
        passed = None if phase is None else phase.take(text, token_ids)
        if phase is not None and passed is not None:
            self._texts.append(text)
            self._token_ids += token_ids
            if phase.is_counted:
                self._uncounted += 1
                self._calls_tool = passed is Passed.ARGUMENTS
                if self._uncounted == COUNTED_AT_ONCE:
                    self._count()
        return passed

    def _count(self) -> None:
        if self._uncounted:
            TOOL_PARSER_CALLS.count(self._uncounted, self._calls_tool, True, self._request)
            self._uncounted = 0

    def settle(self) -> None:
        """Update the parser with the passed texts; call this before the parser reads."""
        # The parser has not seen the texts that were passed on. It must not notice that: its state is set to what it
        # would be if it had read them.
        if self._phase is not None:
            self._phase.settle()
        self._phase, self._is_phase_known = None, False
        self._count()
        if not self._texts:
            return
        if not self._state.engine_based:
            self._state.previous_text += "".join(self._texts)
            self._state.previous_token_ids = self._state.previous_token_ids + self._token_ids
        self._texts, self._token_ids = [], []

    @property
    def call(self) -> int:
        """The index of the call whose arguments were passed on last."""
        return (self._tools.call or 0) if isinstance(self._tools, HermesText) else 0


def _tool_text(parser: Any, state: Any, parsing: Parsing) -> PassingPhase | None:
    choice = parsing.request.tool_choice
    if choice not in (None, "auto", "none"):
        return None
    if choice == "none" and not state.engine_based:
        return AllText(even_empty=False)
    if type(parser) is Hermes2ProToolParser:
        return HermesText(parser, state, passes_arguments=parsing.keeps_tool_calls and not parsing.one_call_only)
    if not isinstance(parser, ParserEngineToolAdapter) or not _is_own(parser, OF_TOOLS):
        return None
    return _engine_text(parser._parser_engine, ParserState.CONTENT, EventType.TEXT_CHUNK)


def _engine_text(engine: Any, state: ParserState, passes: EventType) -> EngineText | None:
    is_known = _is_own(engine, OF_ENGINE) and _is_own(engine._engine, OF_LEXER)
    if not is_known or engine._strip_trailing_reasoning_ws or engine._engine.config.content_events.get(state) != passes:
        return None
    return EngineText(engine, state)


def _is_own(parser: Any, names: dict[str, Any]) -> bool:
    """True if the class of ``found`` has vLLM's common functions under ``names``, not overridden."""
    return all(getattr(type(parser), name, None) is function for name, function in names.items())


# ---- parts that are made once ----------------------------------------------------------------------------------------

# The labelled counters of calls, the terminals of special tokens, and the texts of single tokens each cost as much as
# parsing.
#
# Relies on ``record_tool_parser_invocation`` adding one to the counter with these labels; on the result of
# ``_build_drop_info`` depending on its arguments only, and never being changed by a parser engine; and on a scanner of
# token ids keeping each token's text, which depends on the tokenizer only, in ``_token_text_cache``.


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
        route = RequestType.OTHER
        if issubclass(kind, ChatCompletionRequest):
            route = RequestType.CHAT_COMPLETIONS
        elif issubclass(kind, ResponsesRequest):
            route = RequestType.RESPONSES
        outcome = ToolCallOutcome.TOOL_CALL if called else ToolCallOutcome.NO_TOOL_CALL
        return self._counter.labels(
            model_name=metrics._model_name, mode="streaming" if is_streaming else "non_streaming",
            outcome=outcome.value, request_type=route.value,
        )  # fmt: skip


TOOL_PARSER_CALLS = ToolParserCalls()


class KeptParts:
    """What was made from some objects, by their ids. The objects are kept too, so that their ids are not used again."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self._kept: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def get(self, *objects: Any, make: Callable[[], Any]) -> Any:
        """Return what ``make`` made from these objects, if it was ever called for them."""
        key = tuple(map(id, objects))
        kept = self._kept.get(key)
        if kept is None:
            if len(self._kept) >= MOST_KEPT:
                self._kept.pop(next(iter(self._kept)))
            kept = self._kept[key] = objects, make()
        return kept[1]


class SpecialTokenTerminals(KeptParts):
    """The special tokens that a parser drops, kept for each configuration; ``make`` is vLLM's function."""

    def __call__(self, config: Any, tokenizer: Any) -> Any:
        return self.get(config, tokenizer, make=lambda: self._make(config, tokenizer))


class Scanners(KeptParts):
    """Maker of scanners of token ids that share the texts of their tokenizer's tokens; ``make`` is vLLM's class."""

    def __call__(self, token_id_to_terminal: dict[int, str], tokenizer: Any) -> Any:
        scanner = self._make(token_id_to_terminal, tokenizer)
        scanner._token_text_cache = self.get(tokenizer, make=dict[int, str])
        return scanner


# ---- the deltas of one choice ----------------------------------------------------------------------------------------

# Relies on a parser's ``parse_delta`` taking the text and the tokens of one output, and returning a ``DeltaMessage`` or
# None; and on ``count_reasoning_tokens``.


class ParsedDeltas:
    """The deltas of one choice. ``has_tool_calls``: True once a delta with a tool call was returned."""

    def __init__(self, parsing: Parsing) -> None:
        self._parsing = parsing
        self._parse = parsing.make()
        self._parse_delta = self._parse.parse_delta
        # A parser of another kind reads each text, and so does one whose deltas are changed before they are sent.
        is_known = type(self._parse).parse_delta is READ and not parsing.hides_reasoning
        self._passed = PassedText(self._parse, parsing) if is_known else None
        self.token_ids: list[int] = []
        self.has_tool_calls = False

    def passes(self, text: str, token_ids: list[int]) -> Passed | None:
        """Return the kind of ``text``, not the last of its choice, if the parser would pass it on unchanged.

        None otherwise: then :meth:`read` it.
        """
        passed = None if self._passed is None else self._passed.take(text, token_ids)
        if passed is not None and self._parsing.counts:
            self.token_ids.extend(token_ids)
        return passed

    @property
    def call(self) -> int:
        """The index of the call whose arguments were passed on last."""
        return 0 if self._passed is None else self._passed.call

    def read(self, text: str, token_ids: list[int], prompt: Any, *, finished: bool) -> Any:
        """Return the parser's next delta; None if it has none yet. Raises the parser's exceptions."""
        if self._passed is not None:
            self._passed.settle()
        delta = self._parse_delta(
            delta_text=text, delta_token_ids=token_ids, request=self._parsing.request, prompt_token_ids=prompt,
            finished=finished,
        )  # fmt: skip
        if self._parsing.counts:
            self.token_ids.extend(token_ids)
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
        return delta

    def end(self) -> None:
        if self._passed is not None:  # update the parser with the passed texts
            self._passed.settle()

    def finish_reason(self, reason: str) -> str:
        called = self.has_tool_calls and not self._parsing.is_named and reason == "stop"
        return "tool_calls" if called else reason

    @property
    def reasoning_tokens(self) -> int:
        """The number of reasoning tokens so far; 0 if they are not counted."""
        return self._parse.count_reasoning_tokens(tuple(self.token_ids)) if self.token_ids else 0
