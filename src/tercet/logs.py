"""Tercet's log: its lines and their bounds, the events of a fleet, and the access log of an engine's verbs.

Each event is one line with its reason: its name, then a sentence; ``--log-format json`` adds the event's fields. The
common fields are ``engine``, ``program``, ``seq_id``, ``code`` (of the error that caused the event) and ``reason`` (a
sentence). Events that change the fleet have the level WARNING or ERROR; most events of one request have the level INFO.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated, Any

import msgspec

from tercet.protocol import Output, OutputStream, TercetError
from tercet.protocol.headers import REQUEST_ID_HEADER
from tercet.protocol.names import kept_name
from tercet.protocol.spans import current_span, process, span_context_of, span_of, working_in
from tercet.settings.declaration import Setting, Settings, decode_settings, from_environment
from tercet.settings.process_settings import LogFormat, LogLines

FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
TIME = "%m-%d %H:%M:%S"
FIELDS = "tercet_fields"
"""Attribute of a log record: a mapping of fields, which ``json`` lines have in addition to the message."""
access_logger = logging.getLogger("tercet.access")
EVENTS = "tercet.events"
"""Name of the logger of events."""
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
            found, half = logging.Formatter().formatException(record.exc_info), LONGEST_TRACEBACK // 2
            # The ends say where it began and what failed; recursion fills the middle.
            record.exc_text = found if len(found) <= 2 * half else f"{found[:half]}\n...\n{found[-half:]}"
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


class TextLines(logging.Formatter):
    """Formatter of text: one line for each record, which ends with the request's id, then its traceback if it has one.

    Control characters are written as escapes: a name that a client or an engine chose must not look like another line.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        named, span = _request_of(record), current_span()
        about = [f"x-request-id {named}"] if named else []
        about += [f"trace {span.trace_id}"] if span is not None else []
        text = super().formatMessage(record)
        return _in_one_line(f"{text} [{', '.join(about)}]" if about else text)


class JsonLines(logging.Formatter):
    """Formatter of JSON: each line has ``time`` (ISO 8601, UTC), ``level``, ``logger``, ``process`` and ``message``.

    Further keys: ``exception`` if there was one, ``request_id`` if the line is about a request, ``trace_id`` and
    ``span_id`` if the request is part of a distributed trace, and the fields that the caller of the logger gave. Events
    have the field ``event`` and the fields of their sentences below.
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
        if (span := current_span()) is not None:
            line |= {"trace_id": span.trace_id, "span_id": span.span_id}
        try:
            return msgspec.json.encode(line, enc_hook=str).decode()
        # Text that is not Unicode, such as a file's name in another encoding.
        except (UnicodeEncodeError, OverflowError):
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


logger = logging.getLogger(EVENTS)
# Without another handler, as in simulations, events are dropped and do not go to standard error.
logger.addHandler(logging.NullHandler())


# Seconds after which a long step is said to be under way, and between two such lines.
SLOW_SECONDS, STILL_SECONDS = 2.0, 10.0


@contextmanager
def saying_while(step: str, say: Callable[[str], object]) -> Generator[None]:
    """Say that ``step`` is under way if the block takes longer than ``SLOW_SECONDS``, and again while it goes on.

    A thread says it, since an import holds the event loop.
    """
    ended, began = threading.Event(), time.monotonic()

    def repeat() -> None:
        pause = SLOW_SECONDS
        while not ended.wait(pause):
            say(f"{step} ({time.monotonic() - began:.0f} s)")
            pause = STILL_SECONDS

    thread = threading.Thread(target=repeat, name="saying", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@dataclass(frozen=True)
class LogEvent:
    """A kind of event; ``words`` is the format string of its sentence, with the event's fields."""

    name: str
    level: int
    words: str

    def tell(self, cause: BaseException | None = None, /, **fields: object) -> None:
        """Log one event of this kind; ``cause`` is an exception whose traceback is logged too."""
        if logger.isEnabledFor(self.level):
            said = {FIELDS: {"event": self.name, **fields}}
            logger.log(self.level, "%s: %s", self.name, self.words.format_map(fields), extra=said, exc_info=cause)


INFO, WARNING, ERROR = logging.INFO, logging.WARNING, logging.ERROR

# ---- engines ---------------------------------------------------------------------------------------------------

ENGINE_ADDED = LogEvent("engine_added", WARNING, "{engine} ({url}) has the role {role}: {reason}")
ENGINE_REMOVED = LogEvent("engine_removed", WARNING, "{engine} gets no new requests, running ones continue: {reason}")
ENGINE_ROLE = LogEvent("engine_role", WARNING, "{engine} changes its role from {before} to {role}: {reason}")
ENGINE_DRAINED = LogEvent("engine_drained", WARNING, "{engine} is drained and not picked: {reason}")
ENGINE_UNDRAINED = LogEvent("engine_undrained", WARNING, "{engine} may be picked again: {reason}")
ENGINE_STOPPING = LogEvent("engine_stopping", WARNING, "{engine} is drained and not picked: {reason}")
ENGINE_PAUSED = LogEvent(
    "engine_paused", WARNING, "{engine} is not picked, requests that wait for it continue on other engines: {reason}"
)
ENGINE_RESTARTED = LogEvent("engine_restarted", WARNING, "{engine} restarted, its sequences and KV are lost: {reason}")
ENGINE_LOST = LogEvent("engine_lost", ERROR, "{engine} is not picked until it answers again: {reason}")
ENGINE_REFUSED = LogEvent("engine_refused", ERROR, "{engine} is not picked: {reason}")
ENGINE_BACK = LogEvent("engine_back", WARNING, "{engine} is picked again: {reason}")
ENGINE_WARM = LogEvent("engine_warm", INFO, "{engine} is picked from now on, it has got {contexts} contexts: {reason}")
CONTEXTS_KEPT = LogEvent("contexts_kept", INFO, "{engine} leaves, {contexts} of its contexts went to {to}: {reason}")
STREAM_FALLBACK = LogEvent(
    "stream_fallback", WARNING, "{engine} sends server-sent events instead of a token stream: {reason}"
)
STREAM_BACK = LogEvent("stream_back", WARNING, "{engine} sends a token stream again: {reason}")
ADAPTER_DIFFERS = LogEvent("adapter_differs", ERROR, "{engine} is not picked for {adapter}: {reason}")
ADAPTER_LOADED = LogEvent("adapter_loaded", WARNING, "{adapter} ({path}): {reason}")
ADAPTER_MISSING = LogEvent("adapter_missing", ERROR, "{engine} is not picked for {adapter}: {reason}")
ADAPTER_UNLOADED = LogEvent(
    "adapter_unloaded", WARNING, "{adapter} gets no new requests, running ones continue: {reason}"
)
ROLE_FALLBACK = LogEvent(
    "role_fallback", WARNING, "no engine with the role {role} can be picked, other engines take its requests: {reason}"
)
ROLE_BACK = LogEvent("role_back", WARNING, "engines of the role {role} are picked again: {reason}")

PREFIX_DRIFT = LogEvent("prefix_drift", WARNING, "{engine}: its prefix cache differs from what picks predict: {reason}")
PREFIX_AGREES = LogEvent(
    "prefix_agrees", WARNING, "{engine}: its prefix cache agrees with what picks predict again: {reason}"
)

# ---- discovery of engines -------------------------------------------------------------------------------------------

DISCOVERY_LOST = LogEvent(
    "discovery_lost", ERROR, "discovery fails, the list of engines stays unchanged, {path}: {reason}"
)
DISCOVERY_BACK = LogEvent("discovery_back", WARNING, "discovery works again, {path}: {reason}")
POOL_MISSING = LogEvent("pool_missing", ERROR, "no pod of {pool} is an engine: {reason}")

# ---- programs, scheduling and the shared state ------------------------------------------------------------

PROGRAM_CHANGED = LogEvent("program_changed", WARNING, "version {version} uses the program {program}: {reason}")
PROGRAM_RETURNED = LogEvent(
    "program_returned", ERROR, "version {version} is replaced by version {to_version}, program {program}: {reason}"
)
PROGRAM_FAILED = LogEvent("program_failed", ERROR, "{program} ({seq_id}): {reason}")
PROGRAM_NOT_KEPT = LogEvent("program_not_kept", WARNING, "version {version} cannot be restored: {reason}")
SCHEDULING_CHANGED = LogEvent("scheduling_changed", WARNING, "{file}: {reason}")
RELOAD_REFUSED = LogEvent("reload_refused", ERROR, "{file} changed and its new content is not used: {reason}")
STATE_REFUSED = LogEvent("state_refused", ERROR, "version {version} stays in use: {reason}")
STATE_BEHIND = LogEvent("state_behind", ERROR, "version {version} is not in use in every process: {reason}")

# ---- requests --------------------------------------------------------------------------------------------------

FALLBACK = LogEvent("fallback", INFO, "{seq_id}: program {program} -> {to} after {tokens} tokens: {reason}")
RETRY = LogEvent("retry", INFO, "{seq_id}: retry of program {program} after {tokens} tokens: {reason}")
PREFILL_FAILED = LogEvent("prefill_failed", INFO, "{seq_id}: {engine} did not prefill: {reason}")
REQUEST_FAILED = LogEvent("request_failed", WARNING, "{seq_id}: {code}: {reason}")
MOVE = LogEvent("move", INFO, "{seq_id}: {engine} -> {to} ({reason}): {outcome}: {result}")
SESSION_MOVE = LogEvent("session_move", INFO, "{session}: {engine} -> {to}: {outcome}: {reason}")

# ---- this router -------------------------------------------------------------------------------------------

ROUTER_READY = LogEvent("router_ready", INFO, "the router serves {model} at {address}, program {program}")
WORKER_ENDED = LogEvent("worker_ended", ERROR, "worker {worker}: {reason}")
SHUTTING_DOWN = LogEvent("shutting_down", WARNING, "the router stops, {requests} requests are still running: {reason}")


# ---- access log of an engine: a line for each call of a verb --------------------------------------------------------

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
    attributes = {"tercet.verb": verb, "tercet.seq_id": call.seq_id, "gen_ai.request.model": model}
    with lines_of_call(headers), span_of(verb, {**attributes, "gen_ai.usage.input_tokens": len(call.prompt)}, "server"):
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

    The line is written at the end: a token stream carries the output long after the call was answered. It is an
    :class:`~tercet.protocol.stream.OutputObserver` that counts output tokens. ``span`` is the generation's
    span in a distributed trace, or None.
    """

    def __init__(self, seq_id: str, model: str, prompt_tokens: int) -> None:
        self.began = time.monotonic()
        attributes = {"tercet.verb": "start_generate", "tercet.seq_id": seq_id, "gen_ai.request.model": model}
        self._span = span_of("start_generate", {**attributes, "gen_ai.usage.input_tokens": prompt_tokens}, "server")
        self.span = self._span.begin() or current_span()
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
