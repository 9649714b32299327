r"""Server-sent events (WHATWG HTML, 9.2), as machines without I/O: they take bytes and return events or their data.

A line ends with ``\n``, ``\r\n`` or ``\r``, an event with an empty line; lines that begin with a colon are comments.
Other characters, such as U+2028 in a text, do not end a line. An event that the end of the stream cuts off is dropped.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterable
from typing import Any

import msgspec

from tercet.protocol.errors import EngineError
from tercet.protocol.json_text import UNREADABLE
from tercet.protocol.splitting import Splitter

EVENTS = "text/event-stream"
DONE = b"[DONE]"
# A maximum this large is needed: the log probabilities of a long prompt are one event.
LONGEST_EVENT = 64 * 1024 * 1024
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_EVENT_ENDS = re.compile(rb"\n\n|\n\r\n?|\r\r\n?")
_LINE_ENDS = b"\r\n"
_ONE_LINE = re.compile(rb"data: ?([^\r\n]*)(?:\n\n|\r\n\r\n)")


class EventTooLong(EngineError):
    """The stream has an event that is longer than allowed."""


class EventSplitter(Splitter):
    """Splitter for events.

    It returns each event with its end, to be passed on unchanged; raises :class:`EventTooLong`.
    """

    def __init__(self, longest: int = LONGEST_EVENT) -> None:
        super().__init__(longest)

    def _end(self, text: bytes | bytearray, begin: int, seen: int) -> int | None:
        found = _EVENT_ENDS.search(text, max(begin, seen - 1))
        return None if found is None else found.end()

    def _item(self, text: bytes | bytearray, begin: int, end: int) -> bytes:
        event = bytes(text[begin:end])
        self._require_short(event)
        return event

    def _check_held(self, held: bytearray) -> None:
        self._require_short(held)

    def _require_short(self, event: bytes | bytearray) -> None:
        # Line ends do not count: their number here depends on how the stream was cut into chunks.
        if len(event) > self.longest and len(event.strip(_LINE_ENDS)) > self.longest:
            raise EventTooLong(f"an event of more than {self.longest} bytes")


class EventReader:
    """Reader of the data of events. Events without data are left out; raises :class:`EventTooLong`."""

    def __init__(self, longest: int = LONGEST_EVENT) -> None:
        self._events = EventSplitter(longest)
        self._is_first = True

    def read(self, chunk: bytes) -> list[bytes]:
        """Return the data of the events that ``chunk`` completes."""
        events = self._events.split(chunk)
        if self._is_first and events:
            self._is_first = False
            events[0] = events[0].removeprefix(_BYTE_ORDER_MARK)
        return [data for data in map(data_of, events) if data is not None]


async def read_events(chunks: AsyncIterable[bytes], longest: int = LONGEST_EVENT) -> AsyncGenerator[bytes]:
    """Yield the data of each event; raises :class:`EventTooLong`."""
    reader = EventReader(longest)
    async for chunk in chunks:
        for data in reader.read(chunk):
            yield data


def data_of(event: bytes) -> bytes | None:
    """Return the ``data`` lines of an event, joined by newlines; None without such a line."""
    if found := _ONE_LINE.fullmatch(event):
        return found[1]
    said: list[bytes] = []
    for line in event.splitlines():
        field, _, value = line.partition(b":")
        if field == b"data":
            said.append(value.removeprefix(b" "))
    return b"\n".join(said) if said else None


def object_of(event: bytes) -> dict[str, Any]:
    """Return the JSON object of an event; empty if its data is not one, such as at the end of a stream."""
    try:
        return msgspec.json.decode(data_of(event) or b"", type=dict[str, Any])
    except UNREADABLE:
        return {}
