"""The trace of one request, as its answer contains it: one event for each verb that was called for it."""

from __future__ import annotations

import msgspec

# Events that are not verbs and take no time: a fallback to another program, or a retry, with its reason.
FALLBACK, RETRY = "fallback", "retry"
_NO_VERBS = frozenset({FALLBACK, RETRY, "move"})


class TraceEvent(msgspec.Struct, omit_defaults=True):
    """One call of a verb. ``[begin, end)`` are token positions, counts are tokens, ``seconds`` is the duration.

    For ``start_generate``, ``seconds`` is the time to its first output. A ``move`` event is not a verb. It follows the
    verbs that were called for it, and has its ``number`` among the moves of its router process, its reason, its
    result, and the seconds for which the client received no token. A ``fallback`` or ``retry`` event has the engine
    that failed, the error's ``code``, the number of tokens so far (``end``), and the ``reason``, as in "disaggregated
    -> data_parallel: decode-0 does not answer: Connection refused".

    ``predicted`` is the number of prompt tokens that the pick expected in the engine's cache, in the engine's first
    event; ``cached`` of the same event is the number that the engine found.

    ``at`` is the time at which the call began, in seconds from the beginning of its sequence. ``total`` of a
    ``start_generate`` is the time in seconds for which its engine generated, once that has ended. ``span`` and
    ``parent`` are its ids in a distributed trace, or empty.
    """

    verb: str
    engine: str = ""
    seconds: float = 0.0
    begin: int = 0
    end: int = 0
    predicted: int | None = None
    cached: int = 0
    received: int = 0
    computed: int = 0
    bytes: int = 0
    chunks: int = 0
    transport: str = ""
    to: str = ""
    number: int = 0
    reason: str = ""
    outcome: str = ""
    code: str = ""
    pause: float | None = None
    at: float = 0.0
    total: float = 0.0
    span: str = ""
    parent: str = ""


class PickEvent(msgspec.Struct, omit_defaults=True):
    """One pick: its time (``at``), the role, the picker or profile (``by``), and the engine.

    ``scores`` are the totals of the best engines, in falling order. ``parts`` are the weighted scores of the picked
    engine by scorer. Both are empty for picks by round robin. ``predicted`` is the number of prompt tokens that the
    pick expected in the engine's cache.
    """

    at: float
    role: str
    by: str
    engine: str
    scores: dict[str, float] = {}
    parts: dict[str, float] = {}
    predicted: int | None = None
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
            if event.verb == "start_generate":
                break
        return slowest

    def filled(self) -> TraceEvent | None:
        """Return the send that filled the last reservation; None without one, or after a fallback."""
        for event in reversed(self.events):
            if event.verb == "remote_send":
                return event
            if event.verb in ("prep_recv", FALLBACK, RETRY):
                return None
        return None
