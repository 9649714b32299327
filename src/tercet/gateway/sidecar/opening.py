"""The beginning of an engine's stream, held back until its outcome is known."""

from __future__ import annotations

from typing import Literal

from tercet.protocol.sse import EventSplitter, data_of, object_of

# The events of a response before the engine has computed anything, and its failure events.
_BEFORE = ("response.created", "response.queued", "response.in_progress")
_FAILED = ("error", "response.failed")


class Opening:
    """The beginning of a stream, held back until the engine has computed something, or has failed."""

    def __init__(self) -> None:
        self.held = b""
        self._events = EventSplitter()

    def came_to(self, chunk: bytes) -> Literal["nothing", "tokens", "failure"]:
        """Return the outcome so far, including this chunk."""
        self.held += chunk
        for event in self._events.split(chunk):
            if data_of(event) is None:
                continue
            said = object_of(event)
            if said.get("error") or said.get("type") in _FAILED:
                return "failure"
            if said.get("type") not in _BEFORE:
                return "tokens"
        return "nothing"
