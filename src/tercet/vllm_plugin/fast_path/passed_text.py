"""Texts that vLLM's parser would pass on as they are: told without calling it.

Between markers a parser passes reasoning, content and the arguments of a call on. Where no marker is open, and a text
has no character with which one begins, the parser's answer is that text. What the parser keeps of it is set before it
reads again.

Relies on ``DelegatingParser.parse_delta`` reading in phases by its ``_stream_state``; on ``StreamingParserEngine.feed``
passing on what has neither the first character of a marker nor a special token; and on ``Hermes2ProToolParser``
reading the whole text again for each output, with ``_sent_content_idx``, ``streamed_args_for_tool`` and
``prev_tool_call_arr`` for what it has said.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Any, Protocol

from vllm.parser.abstract_parser import DelegatingParser
from vllm.parser.engine.adapters import ParserEngineReasoningAdapter, ParserEngineToolAdapter
from vllm.parser.engine.events import EventType
from vllm.parser.engine.parser_engine import ParserEngine
from vllm.parser.engine.parser_engine_config import ParserState
from vllm.parser.engine.streaming_parser_engine import StreamingParserEngine
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

from tercet.vllm_plugin.fast_path.parser_parts import TOOL_PARSER_CALLS
from tercet.vllm_plugin.fast_path.stream_plan import Parsing

# Texts that are counted at once, in vLLM's metric of what its parsers of tools have read.
COUNTED_AT_ONCE = 64
# vLLM's own; a parser with another one reads each text.
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


class Passed(Enum):
    """What a text is that is passed on."""

    CONTENT = auto()
    REASONING = auto()
    ARGUMENTS = auto()


class PassingPhase(Protocol):
    """What a parser passes on as long as it reads nothing; ``is_counted``: vLLM's metric counts its reading of tools.

    Until it settles, all that is passed on is of one kind.
    """

    @property
    def is_counted(self) -> bool: ...

    def take(self, text: str, token_ids: Sequence[int]) -> Passed | None:
        """What the text is, if it is passed on."""
        ...

    def settle(self) -> None:
        """Have the parser know what was passed on; it has its text already."""
        ...


class NoText:
    """Nothing is passed on."""

    is_counted = False

    def take(self, text: str, token_ids: Sequence[int]) -> Passed | None:
        """It is not."""
        del text, token_ids

    def settle(self) -> None:
        """It knows nothing."""


class AllText:
    """What is passed on where no calls are looked for."""

    is_counted = False

    def __init__(self, *, even_empty: bool) -> None:
        self._even_empty = even_empty

    def take(self, text: str, token_ids: Sequence[int]) -> Passed | None:
        """It is content."""
        del token_ids
        return Passed.CONTENT if text or self._even_empty else None

    def settle(self) -> None:
        """It knows nothing."""


NO_TEXT, ANY_TEXT = NoText(), AllText(even_empty=True)


class EngineText:
    """What a parser engine of vLLM's passes on in one of its states."""

    def __init__(self, engine: Any, state: ParserState) -> None:
        self._engine = engine
        self._state = state
        self._reader = engine._engine
        self._first_characters = self._reader._lexer._literal_first_chars
        self._special = self._reader._resolved_token_ids.keys()
        self.is_counted = state is not ParserState.REASONING
        self._passed = Passed.CONTENT if self.is_counted else Passed.REASONING
        # Whether it passes texts on as it has read up to here; None if that is not known.
        self._passes: bool | None = None

    def take(self, text: str, token_ids: Sequence[int]) -> Passed | None:
        """What the text is, if it is passed on."""
        if self._passes is None:
            self._passes = self._has_no_marker_open()
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
        """It knows all, and will read."""
        self._passes = None

    def _has_no_marker_open(self) -> bool:
        engine, reader = self._engine, self._reader
        if reader.state is not self._state or reader._lexer.buffer or reader._scanner._deferred_terminals:
            return False
        if engine._deferred_content or not engine._streaming_initialized:
            return False
        return self._passed is Passed.REASONING or engine._content_has_nonws


class HermesText:
    """What the parser of Hermes' format passes on: content before the first call, and arguments of the open call.

    ``state`` has the text that the parser has read. ``passes_arguments``: its deltas are not changed afterwards.
    """

    is_counted = True

    def __init__(self, parser: Any, state: Any, *, passes_arguments: bool) -> None:
        self._parser = parser
        self._passes_arguments = passes_arguments
        self._state = state
        self._is_known = self._is_content = False
        self._call: int | None = None
        self._arguments: list[str] = []

    def take(self, text: str, token_ids: Sequence[int]) -> Passed | None:
        """What the text is, if it is passed on."""
        del token_ids
        if not text or "<" in text:
            return None
        if not self._is_known:
            self._look()
        if self._is_content:
            self._parser._sent_content_idx += len(text)
            return Passed.CONTENT
        # With another last character, the parser's JSON cannot be whole, and it holds nothing back.
        if self._call is None or text[-1] == "}" or text[-1].isspace():
            return None
        self._arguments.append(text)
        return Passed.ARGUMENTS

    def settle(self) -> None:
        """Have the parser know which arguments were passed on."""
        self._is_known = False
        if self._arguments and self._call is not None:
            sent = self._parser.streamed_args_for_tool[self._call] + "".join(self._arguments)
            self._parser.streamed_args_for_tool[self._call] = sent
            self._parser.prev_tool_call_arr[self._call]["arguments"] = sent
            self._arguments.clear()

    @property
    def call(self) -> int | None:
        """The open call, all of whose arguments so far were sent."""
        return self._call

    def _look(self) -> None:
        """Find out where the parser is, which has read all so far."""
        text, parser = self._state.previous_text, self._parser
        has_call = parser.tool_call_start_token in text
        self._is_known = True
        self._is_content = not has_call and parser._sent_content_idx == len(text)
        self._call = self._open_call(text) if has_call and self._passes_arguments else None

    def _open_call(self, text: str) -> int | None:
        parser = self._parser
        regions, calls = parser._extract_tool_call_jsons(text), parser.prev_tool_call_arr
        found, is_whole = regions[-1]
        if is_whole or len(calls) != len(regions) or "name" not in calls[-1] or not found.startswith("{"):
            return None
        sent = parser.streamed_args_for_tool[-1]
        holds_back = not text.endswith(found) or "<" in text[-len(parser.tool_call_end_token) :]
        if holds_back or not sent or parser._extract_tool_args(found, False) != sent:
            return None
        return len(regions) - 1


class PassedText:
    """What the parser of one choice passes on, in each of its phases."""

    def __init__(self, parser: Any, parsing: Parsing) -> None:
        self._state = parser._stream_state
        self._request = parsing.request
        self._reasoning = _reasoning_text(parser._reasoning_parser)
        self._has_tools = parser._tool_parser is not None
        self._tools = _tool_text(parser._tool_parser, self._state, parsing) if self._has_tools else None
        # What passes texts on until the parser reads again; None if that is not known.
        self._phase: PassingPhase | None = None
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._uncounted = 0
        self._calls_tool = False

    def take(self, text: str, token_ids: Sequence[int]) -> Passed | None:
        """What the next text is, if it is passed on; otherwise the parser is to read it."""
        phase = self._phase
        if phase is None:
            phase = self._phase = self._present_phase()
        passed = phase.take(text, token_ids)
        if passed is not None:
            self._texts.append(text)
            self._token_ids += token_ids
            if phase.is_counted:
                self._uncounted += 1
                self._calls_tool = passed is Passed.ARGUMENTS
                if self._uncounted == COUNTED_AT_ONCE:
                    self._count()
        return passed

    def _present_phase(self) -> PassingPhase:
        state = self._state
        if not state.prompt_reasoning_checked:
            return NO_TEXT
        if not state.reasoning_ended:
            return self._reasoning or NO_TEXT
        if not self._has_tools:
            return ANY_TEXT
        if self._tools is None or not state.tool_call_text_started:
            return NO_TEXT
        return self._tools

    def _count(self) -> None:
        if self._uncounted:
            TOOL_PARSER_CALLS.count(self._uncounted, self._calls_tool, True, self._request)
            self._uncounted = 0

    def settle(self) -> None:
        """Have the parser know what was passed on, before it reads."""
        if self._phase is not None:
            self._phase.settle()
            self._phase = None
        self._count()
        if not self._texts:
            return
        if not self._state.engine_based:
            self._state.previous_text += "".join(self._texts)
            self._state.previous_token_ids = self._state.previous_token_ids + self._token_ids
        self._texts, self._token_ids = [], []

    @property
    def call(self) -> int:
        """The call whose arguments were passed on last."""
        found = self._tools.call if isinstance(self._tools, HermesText) else None
        return 0 if found is None else found


def passed_text(parser: Any, parsing: Parsing) -> PassedText | None:
    """What ``parser`` passes on; None if it is not one that is known here, or its deltas are changed afterwards."""
    if type(parser).parse_delta is not READ or parsing.hides_reasoning:
        return None
    return PassedText(parser, parsing)


def _reasoning_text(parser: Any) -> EngineText | None:
    if not isinstance(parser, ParserEngineReasoningAdapter) or not _is_own(parser, OF_REASONING):
        return None
    return _engine_text(parser._parser_engine, ParserState.REASONING, EventType.REASONING_CHUNK)


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


def _is_own(found: Any, names: dict[str, Any]) -> bool:
    """Whether an object's functions of these names are vLLM's common ones."""
    return all(getattr(type(found), name, None) is function for name, function in names.items())
