r"""Server-sent events (WHATWG HTML, 9.2), as machines without I/O: they take bytes and return events or their data.

A line ends with ``\n``, ``\r\n`` or ``\r``, an event with an empty line; lines that begin with a colon are comments.
Other characters, such as U+2028 in a text, do not end a line. An event that the end of the stream cuts off is dropped.

Servers say in many forms that a streamed answer has failed, after the status 200. :func:`fault_in` knows them;
:class:`AnswerReader` reads the answers of any server by it.

First, splitters of byte streams into items: frames with a length, lines, or events. The chunks may be cut anywhere. A
splitter takes bytes and returns complete items, and holds an incomplete item of bounded size.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterable, Iterator
from struct import Struct
from typing import Any, cast

import msgspec

from tercet.protocol.errors import LONGEST_MESSAGE, EngineError
from tercet.protocol.json_text import UNREADABLE

LENGTH = Struct(">I")


class ItemTooLong(Exception):
    """Error: the stream has an item that is longer than allowed."""


class BrokenFrame(Exception):
    """Error: the stream has other bytes at the place where a frame must begin."""


class Splitter(ABC):
    """Base of splitters. Items have at most ``longest`` bytes, delimiters not counted; the incomplete item is held."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self._held = bytearray()

    @property
    def held(self) -> int:
        """Number of bytes of the incomplete item."""
        return len(self._held)

    def split(self, data: bytes) -> list[bytes]:
        """Return the items that ``data`` completes. Raise :class:`ItemTooLong`."""
        seen, text = len(self._held), data
        if seen:
            self._held += data
            text = self._held
        found, begin = list[bytes](), 0
        while begin < len(text) and (end := self._end(text, begin, seen)) is not None:
            found.append(self._item(text, begin, end))
            begin = end
        if seen:
            del self._held[:begin]
        elif begin < len(data):
            self._held += data[begin:] if begin else data
        if self._held:
            self._check_held(self._held)
        return found

    def rest(self) -> bytes:
        """Return and drop the incomplete item, at the end of a stream."""
        rest = bytes(self._held)
        self._held.clear()
        return rest

    @abstractmethod
    def _end(self, text: bytes | bytearray, begin: int, seen: int) -> int | None:
        """Return the end of the item that begins at ``begin``; None if it is incomplete.

        The first ``seen`` bytes of the text contain no end of an item.
        """

    @abstractmethod
    def _item(self, text: bytes | bytearray, begin: int, end: int) -> bytes:
        """Return the part of ``[begin, end)`` that the caller gets."""

    @abstractmethod
    def _check_held(self, held: bytearray) -> None:
        """Raise an error if the incomplete item is already too long."""


class FrameSplitter(Splitter):
    """Splitter for frames: a header with the length of the body, then the body. It returns bodies.

    ``header`` packs ``magic``, if it is not empty, and the length. A frame that is too long is refused when its header
    has arrived; :class:`BrokenFrame` is raised for another magic.
    """

    def __init__(self, longest: int, header: Struct = LENGTH, magic: bytes = b"") -> None:
        super().__init__(longest)
        self._header = header
        self._magic = magic

    def split(self, data: bytes) -> list[bytes]:
        """Return the bodies of the frames that ``data`` completes."""
        # Mostly one whole frame; a router of 100 engines reads a thousand a second, also when it is idle.
        if not self._held and self._end(data, 0, 0) == len(data):
            # Without a copy into the buffer of incomplete items.
            return [data[self._header.size :]]
        return super().split(data)

    def _end(self, text: bytes | bytearray, begin: int, seen: int) -> int | None:
        body = begin + self._header.size
        if len(text) < body:
            return None
        *magic, length = self._header.unpack_from(text, begin)
        if self._magic and magic[0] != self._magic:
            raise BrokenFrame(f"the header begins with {magic[0]!r} instead of {self._magic!r}")
        # By the header alone: the body is not waited for, and not kept.
        if length > self.longest:
            raise ItemTooLong(f"a message of {length} bytes, which is more than {self.longest}")
        return body + length if len(text) >= body + length else None

    def _item(self, text: bytes | bytearray, begin: int, end: int) -> bytes:
        return bytes(text[begin + self._header.size : end])

    def _check_held(self, held: bytearray) -> None:
        """Do nothing: ``_end`` has checked the length."""


class LineSplitter(Splitter):
    r"""Splitter for lines that end with ``\n``. It returns them without it."""

    def _end(self, text: bytes | bytearray, begin: int, seen: int) -> int | None:
        return text.find(b"\n", max(begin, seen)) + 1 or None

    def _item(self, text: bytes | bytearray, begin: int, end: int) -> bytes:
        line = bytes(text[begin : end - 1])
        self._check_held(line)
        return line

    def _check_held(self, held: bytes | bytearray) -> None:
        if len(held) > self.longest:
            raise ItemTooLong(f"a line of more than {self.longest} bytes")


EVENTS = "text/event-stream"
DONE = b"[DONE]"
# A maximum this large is needed: the log probabilities of a long prompt are one event.
LONGEST_EVENT = 64 * 1024 * 1024
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_EVENT_ENDS = re.compile(rb"\n\n|\n\r\n?|\r\r\n?")
_LINE_ENDS = b"\r\n"
# An event without any of these is not an error.
_MARKS = (b"rror", b"ERROR", b".failed", b".incomplete", b"cancel", b'"detail"', b'"message"')
_ERROR_WORD = re.compile(rb"\W*error\b", re.IGNORECASE)
_FAILED_TYPES = frozenset({"error", "response.failed", "response.error", "response.cancelled"})
_LENGTH = "max_output_tokens"
# The last events of answers of the APIs without [DONE]: Responses, Anthropic's and Cohere's.
_ENDS = re.compile(rb'"type": ?"(?:response\.(?:completed|incomplete)|message_stop|message-end)"')
_ONE_LINE = re.compile(rb"data: ?([^\r\n]*)(?:\n\n|\r\n\r\n)")


class EventTooLong(EngineError):
    """The stream has an event that is longer than allowed."""


class AnswerFailed(EngineError):
    """The server ended a streamed answer with an error; the message is the server's, ``event`` what it wrote."""

    def __init__(self, message: str, event: bytes = b"") -> None:
        super().__init__(message)
        self.event = event


class EventSplitter(Splitter):
    """Splitter for events.

    It returns each event with its end, to be passed on unchanged; raises :class:`EventTooLong`.
    """

    def __init__(self, longest: int = LONGEST_EVENT) -> None:
        super().__init__(longest)

    def _end(self, text: bytes | bytearray, begin: int, seen: int) -> int | None:
        # One byte back: an end of two bytes may have been cut between them.
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
        return [data for data in map(data_of, self._split(chunk)) if data is not None]

    def _split(self, chunk: bytes) -> list[bytes]:
        events = self._events.split(chunk)
        # The standard allows a mark at the beginning of the stream only.
        if self._is_first and events:
            self._is_first = False
            events[0] = events[0].removeprefix(_BYTE_ORDER_MARK)
        return events


class AnswerReader(EventReader):
    """Reader of a streamed answer of OpenAI's APIs, Anthropic's or Cohere's.

    ``done`` is True after ``[DONE]``, ``ended`` also after the last event of an API without it.
    """

    def __init__(self, longest: int = LONGEST_EVENT) -> None:
        super().__init__(longest)
        self.done = self.ended = False

    def read(self, chunk: bytes) -> list[bytes]:
        """Return the data of the events before ``[DONE]`` that ``chunk`` completes.

        Raises :class:`EventTooLong`, and :class:`AnswerFailed` if one of the events says an error.
        """
        return [*self.events(chunk)]

    def events(self, chunk: bytes) -> Iterator[bytes]:
        """Yield what :meth:`read` returns, so that the events before an error are not lost."""
        for event in self._split(chunk):
            if self.done:
                return
            # Before the data is read: servers report errors in events of any form.
            if (fault := fault_in(event)) is not None:
                raise AnswerFailed(fault, event)
            data = data_of(event)
            if data == DONE:
                self.done = self.ended = True
            elif data is not None:
                self.ended = self.ended or _ENDS.search(data) is not None
                yield data

    def end(self) -> None:
        """Raise :class:`AnswerFailed` unless the answer has ended: its connection was closed too early."""
        if not self.ended:
            why = "the connection closed before the answer ended"
            raise AnswerFailed(self.fault_at_end() or why)

    def fault_at_end(self) -> str | None:
        """Return the error that a server wrote last, without the empty line that ends an event; None without one."""
        return fault_in(self._events.rest())


async def read_events(chunks: AsyncIterable[bytes], longest: int = LONGEST_EVENT) -> AsyncGenerator[bytes]:
    """Yield the data of each event; raises :class:`EventTooLong`."""
    reader = EventReader(longest)
    async for chunk in chunks:
        for data in reader.read(chunk):
            yield data


async def read_answer(chunks: AsyncIterable[bytes], longest: int = LONGEST_EVENT) -> AsyncGenerator[bytes]:
    """Yield the data of each event of a streamed answer before ``[DONE]``.

    Raises :class:`EventTooLong`, and :class:`AnswerFailed` if the server says an error or ends the answer too early.
    """
    reader = AnswerReader(longest)
    async for chunk in chunks:
        for data in reader.events(chunk):
            yield data
    reader.end()


def fault_in(event: bytes) -> str | None:
    """Return the message of an event that says an error, in any form that servers use; None for other events.

    Known are an event with the name ``error``, a comment or a field ``error``, JSON without ``data:``, and the error
    objects of OpenAI's APIs, Anthropic, Cohere, vLLM and FastAPI, also as text or in a choice.
    """
    if not any(mark in event for mark in _MARKS):  # most events, which are not read twice
        return None
    name, data, failure = "", list[bytes](), None
    for line in event.removeprefix(_BYTE_ORDER_MARK).splitlines():
        field, _, value = line.partition(b":")
        if field == b"event":
            name = value.decode(errors="replace").strip()
        elif field == b"data":
            data.append(value.removeprefix(b" "))
        elif field.strip().lower() == b"error":
            failure = _fault_of(_value_of(value), is_error=True)
        elif not field:
            comment = value.strip()
            failure = failure or (_text(comment) if _ERROR_WORD.match(comment) else None)
        elif line.lstrip().startswith(b"{"):
            failure = failure or _fault_of(_value_of(line), is_error=False)
    is_error = name in _FAILED_TYPES or name.startswith("error")
    if not data:
        return failure or (f"the server sent the event {name!r}" if is_error else None)
    return failure or _fault_of(_value_of(b"\n".join(data)), is_error)


def _fault_of(value: Any, is_error: bool) -> str | None:
    """Return the message of an event's value if it is an error, or if ``is_error`` says so."""
    if isinstance(value, str):  # text that begins as an object is broken JSON, which its reader refuses
        failed = is_error or (not value.startswith("{") and _ERROR_WORD.match(value.encode()) is not None)
        return (value or "error") if failed else None
    if not isinstance(value, dict):
        return f"the server sent the error {value!r:.200}" if is_error else None
    said = cast("dict[str, Any]", value)
    if isinstance(choices := said.get("choices"), list):
        objects = [cast("dict[str, Any]", each) for each in cast("list[Any]", choices) if isinstance(each, dict)]
        said = {"error": said.get("error") or next((each["error"] for each in objects if each.get("error")), None)}
    kind, inner = said.get("type"), said.get("response", said.get("delta"))
    nested = cast("dict[str, Any]", inner) if isinstance(inner, dict) else {}
    if kind == "response.incomplete":  # an answer of the asked length is not whole either, but no failure
        why = _message_in(nested.get("incomplete_details")) or "incomplete"
        return None if why == _LENGTH else f"the response is incomplete: {why}"
    failed = (
        is_error
        or kind in _FAILED_TYPES
        or said.get("object") == "error"
        or str(nested.get("finish_reason")).upper() == "ERROR"
        or ("message" in said and ("code" in said or "status" in said))
        or ("detail" in said and "type" not in said and "object" not in said)
    )
    error = said.get("error") or nested.get("error")
    if not failed and not said.get("error"):
        return None
    return _message_in(error) or _message_in(said) or _text(msgspec.json.encode(value))


def _message_in(value: Any) -> str | None:
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        value = next((fields[name] for name in ("message", "detail", "reason", "code") if fields.get(name)), None)
        value = value if isinstance(value, str) or value is None else _text(msgspec.json.encode(value))
    return value[:LONGEST_MESSAGE] if isinstance(value, str) and value else None


def _value_of(text: bytes) -> Any:
    """Return the JSON value of a text, also if it is JSON in a JSON string; the text if it is not JSON."""
    try:
        value = msgspec.json.decode(text)
    except UNREADABLE:
        return _text(text.strip())
    return _value_of(value.encode()) if isinstance(value, str) and value.lstrip().startswith("{") else value


def _text(said: bytes) -> str:
    return said.decode(errors="replace")[:LONGEST_MESSAGE]


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
