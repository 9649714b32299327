"""Base class for the events of Messages and of Responses: a choice is a sequence of blocks, or of items."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tercet.vllm_plugin.fast_path.delta_json import is_told
from tercet.vllm_plugin.fast_path.sse_chunks import NULL, Extras, framed


class ItemEvents:
    """The events of one choice. One item is open at a time; events have no log probabilities or other extra fields."""

    nothing = b""

    def __init__(self) -> None:
        # Events of the first parts of a delta, if a later part could not be written.
        self.unsent: list[bytes] = []

    def said(self, text: str) -> bytes:
        """Return the events for more of the answer's text."""
        raise NotImplementedError

    def thought(self, text: str) -> bytes:
        """Return the events for more reasoning."""
        raise NotImplementedError

    def arguments(self, call: int, text: str) -> bytes:
        """Return the events for more arguments of the call with index ``call``."""
        raise NotImplementedError

    def text(self, text: str) -> bytes:
        """Return the events for more text, framed."""
        return self.only(self.said(text))

    def thinking(self, text: str) -> bytes:
        """Return the events for more reasoning, framed."""
        return self.only(self.thought(text))

    def more_arguments(self, call: int, text: str) -> bytes:
        """Return the events for more arguments of a call, framed."""
        return self.only(self.arguments(call, text))

    def only(self, said: bytes, _logprobs: bytes = NULL) -> bytes:
        """Return ``said``, framed; empty if there is nothing to send."""
        return framed(said) if said else b""

    def more(self, said: bytes, _extras: Extras) -> bytes:
        """Return ``said``: these formats have no extra fields."""
        return said

    def _tell(self, part: Any, events: list[bytes]) -> None:
        """Append the events for ``part`` of a delta to ``events``."""
        raise NotImplementedError

    def _told(self, delta: Any, parts: Iterable[Any]) -> bytes:
        """Return the events of a delta's ``parts``; raises vLLM's exception if the delta cannot be written."""
        events = self.unsent = list[bytes]()
        for part in parts:
            if not is_told(self._tell, part, events):
                delta.model_dump_json()
        self.unsent = []
        return b"".join(events)
