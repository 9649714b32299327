"""What the events of Messages and of Responses have in common: a choice is a sequence of blocks, or of items."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tercet.vllm_plugin.fast_path.delta_json import is_told
from tercet.vllm_plugin.fast_path.sse_chunks import NULL, Extras, framed


class ItemEvents:
    """The events of one choice, of which one item is open at a time; nothing stands next to what it says."""

    nothing = b""

    def __init__(self) -> None:
        # Events of a delta of which a later part has failed.
        self.unsent: list[bytes] = []

    def said(self, text: str) -> bytes:
        """More of the answer's text."""
        raise NotImplementedError

    def thought(self, text: str) -> bytes:
        """More reasoning."""
        raise NotImplementedError

    def arguments(self, call: int, text: str) -> bytes:
        """More arguments of a call."""
        raise NotImplementedError

    def text(self, text: str) -> bytes:
        """More text, framed."""
        return self.only(self.said(text))

    def thinking(self, text: str) -> bytes:
        """More reasoning, framed."""
        return self.only(self.thought(text))

    def more_arguments(self, call: int, text: str) -> bytes:
        """More arguments of a call, framed."""
        return self.only(self.arguments(call, text))

    def only(self, said: bytes, _logprobs: bytes = NULL) -> bytes:
        """What was said, framed."""
        return framed(said) if said else b""

    def more(self, said: bytes, _extras: Extras) -> bytes:
        """There is nothing next to it."""
        return said

    def _tell(self, part: Any, events: list[bytes]) -> None:
        """Add the events of a part of a delta."""
        raise NotImplementedError

    def _told(self, delta: Any, parts: Iterable[Any]) -> bytes:
        """The events of a parser's delta, part by part; raises what vLLM raises if it cannot be written."""
        events = self.unsent = list[bytes]()
        for part in parts:
            if not is_told(self._tell, part, events):
                delta.model_dump_json()
        self.unsent = []
        return b"".join(events)
