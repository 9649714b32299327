"""Deltas of a choice whose text vLLM's parser of tools and reasoning reads, output by output.

Relies on a parser's ``parse_delta`` taking the text and the tokens of one output, and returning a ``DeltaMessage`` or
None; and on ``count_reasoning_tokens``.
"""

from __future__ import annotations

from typing import Any

from tercet.vllm_plugin.fast_path.passed_text import Passed, passed_text
from tercet.vllm_plugin.fast_path.stream_plan import Parsing


class ParsedDeltas:
    """The deltas of one choice. ``has_tool_calls``: True once a delta with a tool call was returned."""

    def __init__(self, parsing: Parsing) -> None:
        self._parsing = parsing
        self._parse = parsing.make()
        self._parse_delta = self._parse.parse_delta
        self._passed = passed_text(self._parse, parsing)
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
        """Update the parser with the passed texts, after the last output."""
        if self._passed is not None:
            self._passed.settle()

    def finish_reason(self, reason: str) -> str:
        """Return the finish reason of the choice if the model ended with ``reason``."""
        called = self.has_tool_calls and not self._parsing.is_named and reason == "stop"
        return "tool_calls" if called else reason

    @property
    def reasoning_tokens(self) -> int:
        """The number of reasoning tokens so far; 0 if they are not counted."""
        return self._parse.count_reasoning_tokens(tuple(self.token_ids)) if self.token_ids else 0
