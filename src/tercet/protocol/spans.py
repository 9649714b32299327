"""Spans of distributed traces, independent of OpenTelemetry: the place of a call in a trace, and the work done for it.

A caller's place travels by W3C Trace Context (``traceparent`` and ``tracestate``), and within a process with the task
that works for the call. Spans are made only if the process has a sink: nothing here knows OpenTelemetry, and without a
sink a caller's context is passed on unchanged.

An answer has its own trace (:class:`VerbTrace`): one event for each verb that was called for its request.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar, Token
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

# Why not OpenTelemetry's own API: the spans of a request are made from its trace when it is over, with ids that engines
# got before, which that API cannot do, and they cost less CPU here (ADR 19).
TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
# Version 00, and the beginning that later versions promise to keep; an id of zeros only is invalid.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
# Maximum characters of ``tracestate`` that are passed on; W3C Trace Context requires at least this number.
LONGEST_STATE = 512
SAMPLED = 1

Kind = Literal["server", "client", "internal"]


class SpanContext(NamedTuple):
    """The place of a span: its ids in hexadecimal, and ``sampled``, which is True if its trace is recorded.

    ``state`` is the ``tracestate`` of other vendors.
    """

    trace_id: str
    span_id: str
    sampled: bool = True
    state: str = ""

    @property
    def traceparent(self) -> str:
        """Value of the header ``traceparent``."""
        return f"00-{self.trace_id}-{self.span_id}-0{int(self.sampled)}"

    def child(self) -> SpanContext:
        """Return the place of a new span below this one."""
        return SpanContext(self.trace_id, new_span_id(), self.sampled, self.state)

    def headers(self) -> dict[str, str]:
        """Return the trace headers of a call that is made from this place."""
        found = {TRACEPARENT: self.traceparent}
        if self.state:
            found[TRACESTATE] = self.state
        return found


# Random bytes of the system, not of Python's generator: forked processes must not make the same ids.
def new_span_id() -> str:
    """Return a new unique span id."""
    return os.urandom(8).hex()


def span_context_of(headers: Mapping[str, str]) -> SpanContext | None:
    """Return the caller's place from the headers of its call (names in lower case); None without a valid one."""
    given = headers.get(TRACEPARENT)
    return None if given is None else read_traceparent(given, headers.get(TRACESTATE, ""))


def read_traceparent(given: str, state: str = "") -> SpanContext | None:
    """Return the place that a ``traceparent`` names; None if it is not valid.

    A ``state`` that is too long is dropped.
    """
    found = _TRACEPARENT.fullmatch(given.strip())
    # Later versions may append fields, version 00 has none.
    if found is None or (given.startswith("00") and found[4]):
        return None
    return SpanContext(
        found[1], found[2], bool(int(found[3], 16) & SAMPLED), state if len(state) <= LONGEST_STATE else ""
    )


# ---- the place of this process's work ---------------------------------------------------------------------------

_current: ContextVar[SpanContext | None] = ContextVar("tercet_span", default=None)


def current_span() -> SpanContext | None:
    """Return the place of the current task's work; None outside of a trace."""
    return _current.get()


class working_in:
    """Context in which work, and tasks started meanwhile, belong to ``span``. Leave it in the task that entered it.

    A class and not a generator, which would be slower: every call uses one.
    """

    __slots__ = ("_span", "_token")

    def __init__(self, span: SpanContext | None) -> None:
        self._span = span
        self._token: Token[SpanContext | None] | None = None

    def __enter__(self) -> SpanContext | None:
        if self._span is not None:
            self._token = _current.set(self._span)
        return self._span

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            _current.reset(self._token)


# ---- finished work -----------------------------------------------------------------------------------------------


class Span(NamedTuple):
    """One finished piece of work."""

    name: str
    context: SpanContext
    # A span's id, empty for the first span of a trace.
    parent: str
    # Unix times in nanoseconds.
    began_ns: int
    ended_ns: int
    kind: Kind = "internal"
    attributes: Mapping[str, Any] = {}
    # Spans of other calls to which this one is related.
    links: Sequence[SpanContext] = ()
    # The code of the error with which the work ended, and its message; both empty without one.
    error: str = ""
    reason: str = ""


class SpanSink(Protocol):
    """The receiver of the spans of this process."""

    def enters(self, caller: SpanContext | None, name: str, attributes: Mapping[str, Any]) -> SpanContext:
        """Return the span of new work, below its ``caller`` if that is not None, and decide whether it is sampled."""
        ...

    def take(self, spans: Iterable[Span]) -> None:
        """Export these spans later, from another thread. Spans that are not sampled are dropped."""
        ...


class _SpansHere:
    """The sink of this process; None if spans are not exported."""

    sink: SpanSink | None = None


process = _SpansHere()


class span_of:
    """Context that records work for the current context as a span below it.

    It yields the span's context, or None without a sink.

    The caller may add to ``attributes`` until the end. An exception that leaves the context is the span's error.
    """

    __slots__ = ("_began", "_caller", "_kind", "_name", "_token", "attributes", "context")

    def __init__(self, name: str, attributes: dict[str, Any], kind: Kind = "internal") -> None:
        self.attributes = attributes
        self._name = name
        self._kind: Kind = kind
        self.context: SpanContext | None = None
        self._token: Token[SpanContext | None] | None = None

    def __enter__(self) -> SpanContext | None:
        if process.sink is None:
            return None
        self._caller = _current.get()
        self.context = process.sink.enters(self._caller, self._name, self.attributes)
        self._began = time.time_ns()
        self._token = _current.set(self.context)
        return self.context

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if self._token is None:
            return
        _current.reset(self._token)
        self.end(getattr(error, "code", type(error).__name__) if error is not None else "", str(error or ""))

    def begin(self) -> SpanContext | None:
        """Begin the span for work that ends elsewhere, by :meth:`end`; the current context stays as it is."""
        context, token = self.__enter__(), self._token
        if token is not None:
            _current.reset(token)
            self._token = None
        return context

    def end(self, error: str = "", reason: str = "") -> None:
        """Export the span: its work has ended, with the error code ``error`` if that is not empty."""
        sink, context = process.sink, self.context
        # The sink may have been closed since the span began.
        if sink is None or context is None or not context.sampled:
            return
        parent = "" if self._caller is None else self._caller.span_id
        sink.take(
            [
                Span(
                    self._name, context, parent, self._began, time.time_ns(), self._kind, self.attributes,
                    error=error, reason=reason,
                )
            ]
        )  # fmt: skip


def entered(caller: SpanContext | None, name: str, attributes: Mapping[str, Any]) -> SpanContext | None:
    """Return the place of work that ``caller`` requests: a new one if spans are exported, else the caller's."""
    return caller if process.sink is None else process.sink.enters(caller, name, attributes)


# Events that are not verbs and take no time: a fallback to another program, or a retry, with its reason.
FALLBACK, RETRY = "fallback", "retry"
_NO_VERBS = frozenset({FALLBACK, RETRY, "move"})


class TraceEvent(msgspec.Struct, omit_defaults=True):
    """One call of a verb, or a ``move``, ``fallback`` or ``retry``, which are none.

    A ``move`` follows the verbs that were called for it. A ``fallback`` or ``retry`` has the engine that failed, the
    error's ``code``, the number of tokens so far (``end``), and the ``reason``, as in "disaggregated -> data_parallel:
    decode-0 does not answer: Connection refused".
    """

    verb: str
    engine: str = ""
    seconds: float = 0.0  # the duration; of a start_generate, the time to its first output
    begin: int = 0  # token positions [begin, end)
    end: int = 0
    # Prompt tokens that the pick expected in the engine's cache, in its first event; `cached` is what it found.
    predicted: int | None = None
    cached: int = 0
    received: int = 0
    computed: int = 0
    bytes: int = 0
    chunks: int = 0
    transport: str = ""
    to: str = ""
    cached_only: bool = False  # a send that computes nothing; `predicted` is where it was expected to end
    # Of a move: its number in its router process, why it was made, how it ended, and how long the client got no token.
    number: int = 0
    reason: str = ""
    outcome: str = ""
    code: str = ""
    pause: float | None = None
    at: float = 0.0  # when the call began, in seconds from the beginning of its sequence
    total: float = 0.0  # of a start_generate: for how long its engine generated, once that has ended
    span: str = ""  # its ids in a distributed trace, or empty
    parent: str = ""


class LeaseReport(msgspec.Struct, frozen=True):
    """The life of one lease across the three ledgers of its engine, as the engine's API server heard of it.

    ``lease`` are the first characters of its id, which whole would allow to release it. ``at`` is the Unix time of the
    first step; a step is (seconds since then, ledger, state, cause). ``engine`` is added by a router.
    """

    lease: str
    seq_id: str
    at: float
    steps: list[tuple[float, str, str, str]]
    engine: str = ""


class PickEvent(msgspec.Struct, omit_defaults=True):
    """One pick: its time (``at``), the role, the picker or profile (``by``), and the engine.

    ``scores`` are the totals of the best engines, in falling order. ``parts`` are the weighted scores of the picked
    engine by scorer. Both are empty for picks by round robin. ``predicted`` is the number of prompt tokens that the
    pick expected in the engine's cache; ``tiers`` has them by tier, if some are on a lower one.
    """

    at: float
    role: str
    by: str
    engine: str
    scores: dict[str, float] = {}
    parts: dict[str, float] = {}
    predicted: int | None = None
    tiers: dict[str, int] = {}
    candidates: int = 0


class VerbTrace(msgspec.Struct):
    """The program that served a request, and its events in the order in which they ended."""

    program: str = ""
    events: list[TraceEvent] = []

    @property
    def slowest_engine(self) -> str:
        """The engine that took most of the time to the first token; empty if no verb was called."""
        slowest, longest = "", -1.0
        for event in self.events:
            if event.verb not in _NO_VERBS and event.seconds > longest:
                slowest, longest = event.engine, event.seconds
            # What comes after the first token is not part of the time to it.
            if event.verb == "start_generate":
                break
        return slowest

    def filled(self) -> TraceEvent | None:
        """Return the send that filled the last reservation; None without one, or after a fallback."""
        for event in reversed(self.events):
            if event.verb == "remote_send":
                return event
            # The latest reservation was filled by no send.
            if event.verb in ("prep_recv", FALLBACK, RETRY):
                return None
        return None
