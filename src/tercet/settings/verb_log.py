"""The access log of an engine's processes: one line for each call of a verb, if the access log is on.

The line of a generation is written at its end: a token stream carries its output, long after the call was answered.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Annotated, Any

from tercet.protocol import Output, OutputStream, TercetError
from tercet.protocol.headers import REQUEST_ID_HEADER
from tercet.protocol.spans import current_span, process, span_context_of, span_of, working_in
from tercet.settings.declaration import Setting, Settings
from tercet.settings.decoding import decode_settings, from_environment
from tercet.settings.log_lines import FIELDS, REQUEST_ID, access_logger, lines_of_request, log_to_stderr, request_id
from tercet.settings.process_settings import LogLines

CALLED = "%(verb)s %(seq_id)s %(status)d in %(seconds).3f s, model %(model)s, %(prompt_tokens)d tokens"
GENERATED = (
    "%(verb)s %(seq_id)s %(status)d in %(seconds).3f s, model %(model)s, %(prompt_tokens)d + %(output_tokens)d tokens"
)


class EngineLog(Settings, frozen=True):
    """An engine's settings for its log. They are environment variables, since an engine's flags are vLLM's."""

    log_format: LogLines = "text"
    access_log: Annotated[bool, Setting("Log a line for each call of a verb.", default="off")] = False


def log_as_the_environment_says(level: str) -> None:
    """Write log lines to standard error; raise :class:`~tercet.protocol.BadRequest` for a wrong variable."""
    wanted = decode_settings(EngineLog, from_environment(EngineLog))
    log_to_stderr(level, wanted.log_format, wanted.access_log)


@contextmanager
def lines_of_call(headers: Mapping[str, str]) -> Generator[None]:
    """Add the call's ``x-request-id`` to log lines of the block, and its spans to the caller's distributed trace."""
    with lines_of_request(headers.get(REQUEST_ID_HEADER, "")), working_in(span_context_of(headers)):
        yield


@contextmanager
def logged_call(verb: str, call: Any, headers: Mapping[str, str], model: str) -> Generator[None]:
    """Log a call of a verb at the end of the block, with status 0 if the caller disconnected before."""
    began, status = time.monotonic(), 0
    told = {"tercet.verb": verb, "tercet.seq_id": call.seq_id, "gen_ai.request.model": model}
    with lines_of_call(headers), span_of(verb, {**told, "gen_ai.usage.input_tokens": len(call.prompt)}, "server"):
        try:
            yield
            status = int(HTTPStatus.OK)
        except TercetError as error:
            status = error.status
            raise
        finally:
            found = {"verb": verb, "seq_id": call.seq_id, "status": status, "seconds": _since(began), "model": model}
            _log(CALLED, {**found, "prompt_tokens": len(call.prompt)})


class LoggedGeneration:
    """A running generation and its log line, which names the request that the current task works for.

    It is an :class:`~tercet.protocol.stream.OutputObserver` that counts output tokens. ``place`` is the generation's
    span in a distributed trace, or None.
    """

    def __init__(self, seq_id: str, model: str, prompt_tokens: int) -> None:
        self.began = time.monotonic()
        told = {"tercet.verb": "start_generate", "tercet.seq_id": seq_id, "gen_ai.request.model": model}
        self._span = span_of("start_generate", {**told, "gen_ai.usage.input_tokens": prompt_tokens}, "server")
        self.place = self._span.begin() or current_span()
        self._found: dict[str, Any] = {"verb": "start_generate", "seq_id": seq_id, "model": model}
        self._found["prompt_tokens"] = prompt_tokens
        if named := request_id():
            self._found[REQUEST_ID] = named
        self._status = self._tokens = 0

    def over(self, status: int, output_tokens: int) -> None:
        """Write the line, with status 0 if the caller disconnected before the end."""
        self._span.attributes["gen_ai.usage.output_tokens"] = output_tokens
        self._span.end("" if status == HTTPStatus.OK else "cancelled" if not status else str(status))
        found = {**self._found, "status": status, "seconds": _since(self.began), "output_tokens": output_tokens}
        _log(GENERATED, found)

    def on_start(self, stream: OutputStream) -> None:
        """Do nothing: the constructor recorded the start."""

    def on_output(self, output: Output) -> None:
        """Count output tokens, and record success if the output is finished."""
        self._tokens += len(output.token_ids)
        if output.finished:
            self._status = int(HTTPStatus.OK)

    def on_end(self, error: BaseException | None) -> None:
        """Write the line, with the error's status if there was an error."""
        self.over(error.status if isinstance(error, TercetError) else self._status, self._tokens)


def is_access_logged() -> bool:
    """True if lines or trace spans are written for calls and generations."""
    return process.sink is not None or access_logger.isEnabledFor(logging.INFO)


def _since(began: float) -> float:
    return round(time.monotonic() - began, 4)


def _log(words: str, found: dict[str, Any]) -> None:
    access_logger.info(words, found, extra={FIELDS: found})
