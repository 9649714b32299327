"""Server-sent events as bytes on their way through: framed by lines, whatever the text in them says."""

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
        """What can go on now."""
        text = self._rest + chunk if self._rest else chunk
        end = max(text.rfind(mark) + len(mark) if mark in text else 0 for mark in _ENDS)
        self._rest = text[end:]
        return text[:end]

    def rest(self) -> bytes:
        """What is left when the stream has ended by itself."""
        rest, self._rest = self._rest, b""
        return rest


def events_of(whole: bytes) -> Iterator[bytes]:
    """The events in what :meth:`WholeEvents.passed` gave, each with its end; and what follows the last one."""
    end = 0
    for found in _WHOLE.finditer(whole):
        end = found.end()
        yield found[0]
    if end < len(whole):
        yield whole[end:]


def data_of(event: bytes) -> bytes:
    """What the ``data`` lines of an event say, joined by newlines, as the standard has it."""
    said: list[bytes] = []
    for line in event.splitlines():
        if line.startswith(DATA):
            text = line[len(DATA) :]
            said.append(text[1:] if text.startswith(b" ") else text)
    return b"\n".join(said)


def object_of(event: bytes) -> dict[str, Any]:
    """The JSON object of an event; empty where it is something else, such as the end of a stream."""
    try:
        return msgspec.json.decode(data_of(event), type=dict[str, Any])
    except UNREADABLE:
        return {}
