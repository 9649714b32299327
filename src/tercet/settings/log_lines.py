"""Where Tercet's own log lines go, in processes that run other people's libraries as well."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
TIME = "%m-%d %H:%M:%S"
FIELDS = "tercet_fields"
"""The attribute of a log record that holds what ``text`` has in words, for ``json``."""
access_logger = logging.getLogger("tercet.access")


class JsonLines(logging.Formatter):
    """One JSON object for each line: ``time`` (ISO 8601, UTC), ``level``, ``logger``, ``message``, perhaps more.

    More are ``subject``, which is what a message says before its colon, ``exception``, and the fields that whoever
    wrote the line has given.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        message = record.getMessage()
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": at, "level": record.levelname.lower(), "logger": record.name}
        subject, colon, _ = message.partition(": ")
        if colon and subject.isidentifier():
            line["subject"] = subject
        line["message"] = message
        if record.exc_info is not None:
            line["exception"] = self.formatException(record.exc_info)
        line |= getattr(record, FIELDS, {})
        return msgspec.json.encode(line, enc_hook=str).decode()


def log_to_stderr(level: str, form: LogFormat = "text", access: bool = False) -> None:
    """Write Tercet's log lines from ``level`` on to standard error; the first who calls this decides.

    By a handler of their own: a library that vLLM imports sets the root logger, with its handlers, to errors alone.
    ``access``: those of requests as well, whatever the level.
    """
    logger = logging.getLogger("tercet")
    if logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter(FORMAT, TIME))
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
    access_logger.setLevel(logging.INFO if access else logging.CRITICAL)
