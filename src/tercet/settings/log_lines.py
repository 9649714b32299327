"""Tercet's log lines: their format, bounds and handler, in processes that also run other libraries."""

from __future__ import annotations

import json
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from tercet.protocol.names import kept_name
from tercet.protocol.spans import current_span

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
TIME = "%m-%d %H:%M:%S"
FIELDS = "tercet_fields"
"""Attribute of a log record: a mapping of fields, which ``json`` lines have in addition to the message."""
access_logger = logging.getLogger("tercet.access")
EVENTS = "tercet.events"
"""Name of the logger of :mod:`tercet.settings.log_events`."""
REQUEST_ID = "request_id"
"""Field of a line: the ``x-request-id`` of the request that the line is about."""
_request_id: ContextVar[str] = ContextVar("tercet_request_id", default="")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_SERIOUS_EVENT = re.compile(rf"(?:WARNING|ERROR) \S+ \S+ \[{re.escape(EVENTS)}\] (.*)")


def request_id() -> str:
    """Return the ``x-request-id`` of the request that the current task works for; empty if there is none."""
    return _request_id.get()


@contextmanager
def lines_of_request(found: str) -> Generator[None]:
    """Add the ``x-request-id`` ``found`` to lines of the block, and of tasks that the block starts."""
    token = _request_id.set(kept_name(found))
    try:
        yield
    finally:
        _request_id.reset(token)


def request_renamed(found: str) -> str:
    """Set the ``x-request-id`` of lines of the current task and of the tasks that it starts; return its logged form."""
    _request_id.set(kept_name(found))
    return request_id()


LONGEST_LINE = 8192
"""Most characters of a message, which may quote text of clients and engines."""
LONGEST_TRACEBACK = 32 * 1024
"""Most characters of a traceback, whose last lines may quote text of clients and engines."""
MOST_LINES, WITHIN_SECONDS = 100, 10.0
"""Limit of lines of one place in the code; further lines are dropped and counted."""


class LineBounds(logging.Filter):
    """Filter that shortens long messages, and drops lines of a place in the code that writes too many of them.

    A client that provokes a line therefore does not decide how much is logged. The next line of the place says how many
    lines were dropped. Lines of requests and events are neither dropped nor counted: operators ask for them, and each
    has other content.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._began = 0.0
        self._written: Counter[tuple[str, int]] = Counter()
        self._dropped: Counter[tuple[str, int]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if the record is to be written; shorten its message and traceback to their limits."""
        place = record.pathname, record.lineno
        if record.name not in (EVENTS, access_logger.name) and not self._has_room(place):
            return False
        message, dropped = record.getMessage(), self._dropped.pop(place, 0)
        if len(message) > LONGEST_LINE:
            record.msg, record.args = f"{message[:LONGEST_LINE]}... ({len(message)} characters)", ()
        if dropped:
            record.msg, record.args = f"{record.getMessage()} (and {dropped} more of this kind before)", ()
        if record.exc_info and not record.exc_text:
            traceback = logging.Formatter().formatException(record.exc_info)
            record.exc_text = _ends_of(traceback, LONGEST_TRACEBACK)
        return True

    def _has_room(self, place: tuple[str, int]) -> bool:
        if self._clock() - self._began >= WITHIN_SECONDS:
            self._began = self._clock()
            self._written.clear()
        self._written[place] += 1
        if self._written[place] <= MOST_LINES:
            return True
        self._dropped[place] += 1
        return False


def _ends_of(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]}\n...\n{text[-most // 2 :]}"


class TextLines(logging.Formatter):
    """Formatter of text: one line for each record, which ends with the request's id, then its traceback if it has one.

    Control characters are written as escapes: a name that a client or an engine chose must not look like another line.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        named, place = _request_of(record), current_span()
        about = [f"x-request-id {named}"] if named else []
        about += [f"trace {place.trace_id}"] if place is not None else []
        text = super().formatMessage(record)
        return _in_one_line(f"{text} [{', '.join(about)}]" if about else text)


class JsonLines(logging.Formatter):
    """Formatter of JSON: each line has ``time`` (ISO 8601, UTC), ``level``, ``logger``, ``process`` and ``message``.

    Further keys: ``exception`` if there was one, ``request_id`` if the line is about a request, ``trace_id`` and
    ``span_id`` if the request is part of a distributed trace, and the fields that the caller of the logger gave. Events
    have the field ``event`` and the fields that :mod:`tercet.settings.log_events` lists.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        message = record.getMessage()
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": at, "level": record.levelname.lower(), "logger": record.name}
        line |= {"process": record.process, "message": message}
        if record.exc_info is not None:
            line["exception"] = record.exc_text or self.formatException(record.exc_info)
        line |= getattr(record, FIELDS, {})
        if named := _request_of(record):
            line[REQUEST_ID] = named
        if (place := current_span()) is not None:
            line |= {"trace_id": place.trace_id, "span_id": place.span_id}
        try:
            return msgspec.json.encode(line, enc_hook=str).decode()
        except (
            UnicodeEncodeError,
            OverflowError,
        ):  # text that is not Unicode, such as a file's name in another encoding
            return json.dumps(line, default=str)


def _request_of(record: logging.LogRecord) -> str:
    return getattr(record, FIELDS, {}).get(REQUEST_ID) or request_id()


def _in_one_line(text: str) -> str:
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def serious_event(line: str) -> str | None:
    """Return the message of a log line, text or JSON, if it is an event of level WARNING or ERROR; otherwise None."""
    if line.startswith("{"):
        try:
            found = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.MsgspecError:
            return None
        is_one = found.get("logger") == EVENTS and found.get("level") in ("warning", "error")
        return _in_one_line(str(found.get("message"))) if is_one else None
    matched = _SERIOUS_EVENT.match(line)
    return matched[1] if matched is not None else None


def log_to_stderr(level: str, form: LogFormat = "text", access: bool = False) -> None:
    """Write Tercet's log lines of ``level`` and above to standard error; a second call has no effect.

    The lines have their own handler: a library that vLLM imports sets the root logger and its handlers to errors only.
    ``access``: write the lines of requests too, at every level.
    """
    logger = logging.getLogger("tercet")
    if logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else TextLines(FORMAT, TIME))
    handler.addFilter(LineBounds())
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
    access_logger.setLevel(logging.INFO if access else logging.CRITICAL)
