"""Server-sent events as bytes that are passed on: they are split by lines, whatever text they contain."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from tercet.protocol.json_text import UNREADABLE

EVENTS = "text/event-stream"
DATA = b"data:"
DONE = b"[DONE]"
_ENDS = b"\n\n", b"\r\n\r\n", b"\r\r"
_WHOLE = re.compile(rb".*?(?:\n\n|\r\n\r\n|\r\r)", re.DOTALL)


class WholeEvents:
    """Passes events on once they are whole, so that a stream that breaks off ends between two of them."""

    def __init__(self) -> None:
        self._rest = b""

    def passed(self, chunk: bytes) -> bytes:
        """Return the events that are complete now."""
        text = self._rest + chunk if self._rest else chunk
        end = max(text.rfind(mark) + len(mark) if mark in text else 0 for mark in _ENDS)
        self._rest = text[end:]
        return text[:end]

    def rest(self) -> bytes:
        """Return the rest after the stream has ended by itself."""
        rest, self._rest = self._rest, b""
        return rest


def events_of(whole: bytes) -> Iterator[bytes]:
    """Yield the events in a result of :meth:`WholeEvents.passed`, each with its end; then what follows the last one."""
    end = 0
    for found in _WHOLE.finditer(whole):
        end = found.end()
        yield found[0]
    if end < len(whole):
        yield whole[end:]


def data_of(event: bytes) -> bytes:
    """Return the ``data`` lines of an event, joined by newlines as the standard requires."""
    said: list[bytes] = []
    for line in event.splitlines():
        if line.startswith(DATA):
            text = line[len(DATA) :]
            said.append(text[1:] if text.startswith(b" ") else text)
    return b"\n".join(said)


def object_of(event: bytes) -> dict[str, Any]:
    """Return the JSON object of an event; empty if it has none, such as the end of a stream."""
    try:
        return msgspec.json.decode(data_of(event), type=dict[str, Any])
    except UNREADABLE:
        return {}
