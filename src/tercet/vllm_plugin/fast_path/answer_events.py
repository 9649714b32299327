"""Interface of an API's format for the fast path: events, as bytes, for an answer and for each of its choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tercet.vllm_plugin.fast_path.sse_chunks import NULL, Extras


class ChoiceEvents(Protocol):
    """The events of one choice. A *said* part is the variable part of an event; ``nothing`` is the empty one."""

    nothing: bytes

    def text(self, text: str) -> bytes:
        """Return an event with ``text`` only, framed for HTTP/1.1's chunked encoding; empty if there is no event."""
        ...

    def thinking(self, text: str) -> bytes:
        """Return an event with reasoning ``text`` only, framed; empty if there is no event."""
        ...

    def more_arguments(self, call: int, text: str) -> bytes:
        """Return an event with more arguments of the call with index ``call`` only, framed; empty if there is none."""
        ...

    def said(self, text: str) -> bytes:
        """Return the said part for ``text``."""
        ...

    def thought(self, text: str) -> bytes:
        """Return the said part for reasoning ``text``."""
        ...

    def arguments(self, call: int, text: str) -> bytes:
        """Return the said part for more arguments of the call with index ``call``."""
        ...

    def delta(self, delta: Any) -> bytes:
        """Return the said part for a parser's delta; raises vLLM's exception if the delta cannot be written."""
        ...

    def only(self, said: bytes, logprobs: bytes = NULL, /) -> bytes:
        """Return an event with ``said`` and at most log probabilities, framed; empty if there is no event."""
        ...

    def more(self, said: bytes, extras: Extras, /) -> bytes:
        """Return an event with ``said`` and the other fields that the client asked for, not framed."""
        ...

    def last(
        self, said: bytes, finish_reason: str, stop_reason: int | str | None, fingerprint: str | None, extras: Extras, /
    ) -> bytes:
        """Return the last event of the choice, not framed."""
        ...


class Told(Protocol):
    """The token counts of one choice, for the usage at the end of an answer."""

    @property
    def num_tokens(self) -> int:
        """The number of output tokens."""
        ...

    @property
    def reasoning_tokens(self) -> int:
        """The number of output tokens that were reasoning."""
        ...

    @property
    def token_ids(self) -> list[int]:
        """The output tokens; empty if reasoning tokens are not counted."""
        ...


class AnswerEvents(Protocol):
    """The events of one answer. ``keeps_alive``: True if a silent stream gets comments."""

    keeps_alive: bool

    def choice(self, index: int, /) -> ChoiceEvents:
        """Return the events of the choice with this index."""
        ...

    def begin(self) -> bytes:
        """Return the events before any output."""
        ...

    def result(self, result: Any) -> bytes:
        """Return the events that come before the event of ``result``, a result of vLLM's output processor."""
        ...

    async def end(self, choices: Sequence[Told]) -> bytes:
        """Return the events after all choices."""
        ...

    def failed(self, error: Exception) -> bytes:
        """Return the events at the end of an answer that failed with ``error``."""
        ...
