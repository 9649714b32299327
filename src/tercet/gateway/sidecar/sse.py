"""Server-sent events on their way through: whole ones only, and a last one where the stream breaks off."""

from __future__ import annotations

import msgspec

from tercet.protocol import TercetError

RESPONSES = "/v1/responses"
_ENDS = b"\n\n", b"\r\n\r\n", b"\r\r"


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


def last_event(path: str, error: TercetError) -> bytes:
    """The end of a stream that broke off, as OpenAI's clients know errors in streams."""
    if path == RESPONSES:
        said = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return b"event: error\ndata: " + msgspec.json.encode(said) + b"\n\n"
    return b"data: " + msgspec.json.encode(error.to_wire()) + b"\n\ndata: [DONE]\n\n"
