"""Server-sent events on their way through: whole ones only, and a last one where the stream breaks off."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tercet.protocol import TercetError
from tercet.protocol.openai_routes import RESPONSES
from tercet.protocol.wire import UNREADABLE

_ENDS = b"\n\n", b"\r\n\r\n", b"\r\r"
# Of a response, what an engine says before it has computed anything; and how it says that it has failed.
_BEFORE = ("response.created", "response.queued", "response.in_progress")
_FAILED = ("error", "response.failed")


class WholeEvents:
    """Passes events on once they are whole, so that a stream that breaks off ends between two of them."""

    def __init__(self) -> None:
        self._rest = b""

    def passed(self, chunk: bytes) -> bytes:
        """What can go on now."""
        text = self._rest + chunk if self._rest else chunk
        end = max(text.rfind(mark) + len(mark) if mark in text else 0 for mark in _ENDS)
        self._rest = text[end:]
        return text[:end]

    def rest(self) -> bytes:
        """What is left when the stream has ended by itself."""
        rest, self._rest = self._rest, b""
        return rest


class Opening:
    """The begin of a stream, held back until the engine has computed something, or has failed to."""

    def __init__(self) -> None:
        self.held = b""
        self._events = WholeEvents()

    def came_to(self, chunk: bytes) -> Literal["nothing", "tokens", "failure"]:
        """What the engine has come to, now that it has said this too."""
        self.held += chunk
        for line in self._events.passed(chunk).splitlines():
            if not line.startswith(b"data:"):
                continue
            said = _event(line.removeprefix(b"data:"))
            if said.get("error") or said.get("type") in _FAILED:
                return "failure"
            if said.get("type") not in _BEFORE:
                return "tokens"
        return "nothing"


def _event(data: bytes) -> dict[str, Any]:
    """What one says; nothing for what is no JSON object, such as the end of a stream."""
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except UNREADABLE:
        return {}


def last_event(path: str, error: TercetError) -> bytes:
    """The end of a stream that broke off, as OpenAI's clients know errors in streams."""
    if path == RESPONSES:
        said = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return b"event: error\ndata: " + msgspec.json.encode(said) + b"\n\n"
    return b"data: " + msgspec.json.encode(error.to_wire()) + b"\n\ndata: [DONE]\n\n"
