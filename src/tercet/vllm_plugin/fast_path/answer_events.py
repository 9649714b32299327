"""What the fast path asks of an API: its events, as bytes, for an answer and for each of its choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tercet.vllm_plugin.fast_path.sse_chunks import NULL, Extras


class ChoiceEvents(Protocol):
    """The events of one choice. ``nothing`` is what one says that says nothing; also what has no event is empty."""

    nothing: bytes

    def text(self, text: str) -> bytes:
        """More text and nothing else, framed for HTTP/1.1's chunked encoding; empty without an event."""
        ...

    def thinking(self, text: str) -> bytes:
        """More reasoning and nothing else, framed; empty without an event."""
        ...

    def more_arguments(self, call: int, text: str) -> bytes:
        """More arguments of the call of this index and nothing else, framed; empty without an event."""
        ...

    def said(self, text: str) -> bytes:
        """A text as what the choice says."""
        ...

    def thought(self, text: str) -> bytes:
        """Reasoning as what the choice says."""
        ...

    def arguments(self, call: int, text: str) -> bytes:
        """More arguments of the call of this index as what the choice says."""
        ...

    def delta(self, delta: Any) -> bytes:
        """A parser's delta as what the choice says; raises what vLLM raises if it cannot be written."""
        ...

    def only(self, said: bytes, logprobs: bytes = NULL, /) -> bytes:
        """What the choice says, with its log probabilities at most, framed; empty without an event."""
        ...

    def more(self, said: bytes, extras: Extras, /) -> bytes:
        """What the choice says, and what its client asked for next to it."""
        ...

    def last(
        self, said: bytes, finish_reason: str, stop_reason: int | str | None, fingerprint: str | None, extras: Extras, /
    ) -> bytes:
        """What the choice says at its end."""
        ...


class Told(Protocol):
    """One choice's tokens, as counts at the end of an answer have them."""

    @property
    def num_tokens(self) -> int:
        """How many there were."""
        ...

    @property
    def reasoning_tokens(self) -> int:
        """How many of them were reasoning."""
        ...

    @property
    def token_ids(self) -> list[int]:
        """The tokens, where reasoning is counted."""
        ...


class AnswerEvents(Protocol):
    """The events of one answer. ``keeps_alive``: its stream has comments while it is silent."""

    keeps_alive: bool

    def choice(self, index: int, /) -> ChoiceEvents:
        """Those of one choice."""
        ...

    def begin(self) -> bytes:
        """The events before any output."""
        ...

    def result(self, result: Any) -> bytes:
        """The events before those of a result of vLLM's output processor."""
        ...

    async def end(self, choices: Sequence[Told]) -> bytes:
        """The events after all choices."""
        ...

    def failed(self, error: Exception) -> bytes:
        """The events at the end of an answer that has failed."""
        ...
