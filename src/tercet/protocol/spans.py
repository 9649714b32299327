"""Spans of distributed traces, in Tercet's own words: where a call stands in a trace, and what a process did for it.

A caller's place travels by W3C Trace Context (``traceparent`` and ``tracestate``), and in a process with the task that
works for the call. Spans are made only where :data:`sink` takes them: nothing here knows OpenTelemetry, and without a
sink a caller's context is passed on unchanged.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar, Token
from typing import Any, Literal, NamedTuple, Protocol

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
# Version 00, and what later versions promise to begin with; ids of nothing but zeros are invalid.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
# Of W3C Trace Context: what a vendor must pass on at least.
LONGEST_STATE = 512
SAMPLED = 1

Kind = Literal["server", "client", "internal"]


class SpanContext(NamedTuple):
    """A span's place: ids in hexadecimal, whether its trace is sampled, and what others keep in ``tracestate``."""

    trace_id: str
    span_id: str
    sampled: bool = True
    state: str = ""

    @property
    def traceparent(self) -> str:
        """As the header has it."""
        return f"00-{self.trace_id}-{self.span_id}-0{int(self.sampled)}"

    def child(self) -> SpanContext:
        """The place of a new span below this one."""
        return SpanContext(self.trace_id, new_span_id(), self.sampled, self.state)

    def headers(self) -> dict[str, str]:
        """What a call carries that is made from here."""
        found = {TRACEPARENT: self.traceparent}
        if self.state:
            found[TRACESTATE] = self.state
        return found


# From the system's generator: processes that are forked from one parent must not make the same ids.
def new_span_id() -> str:
    """An id that no other span has."""
    return os.urandom(8).hex()


def new_trace_id() -> str:
    """An id that no other trace has."""
    return os.urandom(16).hex()


def span_context_of(headers: Mapping[str, str]) -> SpanContext | None:
    """The caller's place by the headers of its call (names in lower case); None if it says none, or no valid one."""
    given = headers.get(TRACEPARENT)
    return None if given is None else read_traceparent(given, headers.get(TRACESTATE, ""))


def read_traceparent(given: str, state: str = "") -> SpanContext | None:
    """The place that a ``traceparent`` names; None if it is not valid. A ``state`` that is too long is left out."""
    found = _TRACEPARENT.fullmatch(given.strip())
    if found is None or (given.startswith("00") and found[4]):
        return None
    return SpanContext(
        found[1], found[2], bool(int(found[3], 16) & SAMPLED), state if len(state) <= LONGEST_STATE else ""
    )


# ---- the place of what this process does ------------------------------------------------------------------------

_current: ContextVar[SpanContext | None] = ContextVar("tercet_span", default=None)


def current_span() -> SpanContext | None:
    """The place of what the current task does; None outside of any trace."""
    return _current.get()


class working_in:
    """While entered, and in tasks that are started meanwhile, work belongs to this place. To be left where entered.

    A class and not a generator: every call has one of these.
    """

    __slots__ = ("_place", "_token")

    def __init__(self, place: SpanContext | None) -> None:
        self._place = place
        self._token: Token[SpanContext | None] | None = None

    def __enter__(self) -> SpanContext | None:
        if self._place is not None:
            self._token = _current.set(self._place)
        return self._place

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            _current.reset(self._token)


# ---- what it has done --------------------------------------------------------------------------------------------


class Span(NamedTuple):
    """One piece of work that is over. Times are Unix times in nanoseconds.

    ``parent`` is a span's id, empty for the first of a trace. ``links`` are places in other calls that it belongs
    with. ``error`` is the code of the error that it ended in, with a ``reason``.
    """

    name: str
    place: SpanContext
    parent: str
    began_ns: int
    ended_ns: int
    kind: Kind = "internal"
    attributes: Mapping[str, Any] = {}
    links: Sequence[SpanContext] = ()
    error: str = ""
    reason: str = ""


class SpanSink(Protocol):
    """Takes the spans of this process."""

    def enters(self, caller: SpanContext | None, name: str, attributes: Mapping[str, Any]) -> SpanContext:
        """The place of new work, below its ``caller`` if it has one; whether it is sampled is decided here."""
        ...

    def take(self, spans: Iterable[Span]) -> None:
        """Export these spans later, from another thread. Those that are not sampled are dropped."""
        ...


class _SpansHere:
    """The sink of this process; None while no spans are wanted."""

    sink: SpanSink | None = None


process = _SpansHere()


class span_of:
    """Work of this process for the current place, as a span below it; a yielded None means that none is wanted.

    ``attributes`` may get more meanwhile. An exception at the exit is the span's error.
    """

    __slots__ = ("_began", "_caller", "_kind", "_name", "_token", "attributes", "place")

    def __init__(self, name: str, attributes: dict[str, Any], kind: Kind = "internal") -> None:
        self.attributes = attributes
        self._name = name
        self._kind: Kind = kind
        self.place: SpanContext | None = None
        self._token: Token[SpanContext | None] | None = None

    def __enter__(self) -> SpanContext | None:
        if process.sink is None:
            return None
        self._caller = _current.get()
        self.place = process.sink.enters(self._caller, self._name, self.attributes)
        self._began = time.time_ns()
        self._token = _current.set(self.place)
        return self.place

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if self._token is None:
            return
        _current.reset(self._token)
        self.end(getattr(error, "code", type(error).__name__) if error is not None else "", str(error or ""))

    def begin(self) -> SpanContext | None:
        """As entering does, for work that ends elsewhere: the current place stays as it is."""
        place, token = self.__enter__(), self._token
        if token is not None:
            _current.reset(token)
            self._token = None
        return place

    def end(self, error: str = "", reason: str = "") -> None:
        """The work is over."""
        sink, place = process.sink, self.place
        if sink is None or place is None or not place.sampled:
            return
        parent = "" if self._caller is None else self._caller.span_id
        sink.take(
            [
                Span(
                    self._name, place, parent, self._began, time.time_ns(), self._kind, self.attributes,
                    error=error, reason=reason,
                )
            ]
        )  # fmt: skip


def entered(caller: SpanContext | None, name: str, attributes: Mapping[str, Any]) -> SpanContext | None:
    """The place of work that a caller asks for: a new one where spans are wanted, else its caller's."""
    return caller if process.sink is None else process.sink.enters(caller, name, attributes)
