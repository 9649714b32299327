"""The trace of one request, as its answer contains it: one event for each verb that was called for it."""

from __future__ import annotations

import msgspec

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
