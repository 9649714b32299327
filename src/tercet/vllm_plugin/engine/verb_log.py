"""The log of an engine's processes, with a line for each call of a verb if the access log is wanted.

A generation's line is written when it is over: its answer goes by a token stream, long after its call was answered.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Annotated, Any

from tercet.protocol import TercetError
from tercet.protocol.headers import REQUEST_ID_HEADER
from tercet.settings import Setting, Settings, decode_settings, from_environment
from tercet.settings.log_lines import FIELDS, access_logger, lines_of_request, log_to_stderr
from tercet.settings.process_settings import LogLines

CALLED = "%(verb)s %(seq_id)s %(status)d in %(seconds).3f s, %(prompt_tokens)d tokens"
GENERATED = "%(verb)s %(seq_id)s %(status)d in %(seconds).3f s, %(prompt_tokens)d + %(output_tokens)d tokens"


class EngineLog(Settings, frozen=True):
    """An engine's settings for its log, from environment variables: its flags are vLLM's."""

    log_format: LogLines = "text"
    access_log: Annotated[bool, Setting("A line for each call of a verb.", default="off")] = False


def log_as_the_environment_says(level: str) -> None:
    """Write log lines to standard error; raises :class:`~tercet.protocol.BadRequest` for a wrong variable."""
    wanted = decode_settings(EngineLog, from_environment(EngineLog))
    log_to_stderr(level, wanted.log_format, wanted.access_log)


@contextmanager
def logged_call(verb: str, call: Any, headers: Any) -> Generator[None]:
    """Log a verb's call at the end of the block: with status 0 if its caller has left before."""
    began, status = time.monotonic(), 0
    with lines_of_request(headers.get(REQUEST_ID_HEADER, "")):
        try:
            yield
            status = int(HTTPStatus.OK)
        except TercetError as error:
            status = error.status
            raise
        finally:
            found = {"verb": verb, "seq_id": call.seq_id, "status": status, "seconds": _since(began)}
            _log(CALLED, {**found, "prompt_tokens": len(call.prompt)})


def log_generation(seq_id: str, began: float, status: int, prompt_tokens: int, output_tokens: int) -> None:
    """Log a generation that is over: with status 0 if its caller left before its end."""
    found = {"verb": "start_generate", "seq_id": seq_id, "status": status, "seconds": _since(began)}
    _log(GENERATED, {**found, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens})


def _since(began: float) -> float:
    return round(time.monotonic() - began, 4)


def _log(words: str, found: dict[str, Any]) -> None:
    access_logger.info(words, found, extra={FIELDS: found})
