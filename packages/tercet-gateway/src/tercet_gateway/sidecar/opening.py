"""The beginning of an engine's stream, held back until its outcome is known."""

from __future__ import annotations

from typing import Literal

from tercet.protocol.sse import EventSplitter, data_of, fault_in, object_of

# The events of a response before the engine has computed anything.
_BEFORE = ("response.created", "response.queued", "response.in_progress")


class Opening:
    """The beginning of a stream, held back until the engine has computed something, or has failed."""

    def __init__(self) -> None:
        self.held = b""
        self._events = EventSplitter()

    def came_to(self, chunk: bytes) -> Literal["nothing", "tokens", "failure"]:
        """Return the outcome so far, including this chunk."""
        self.held += chunk
        for event in self._events.split(chunk):
            if fault_in(event) is not None:
                return "failure"
            if data_of(event) is not None and object_of(event).get("type") not in _BEFORE:
                return "tokens"
        return "nothing"
