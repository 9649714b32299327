"""What one request went through, as its answer tells it: an event for each verb that was called for it."""

from __future__ import annotations

import msgspec

# What is no verb in a trace, and takes no time: another way was taken, or the same one again, and why.
FALLBACK, RETRY = "fallback", "retry"


class TraceEvent(msgspec.Struct, omit_defaults=True):
    """One call of a verb. ``begin, end`` are token positions, counts are tokens, ``seconds`` runs to its end.

    For ``start_generate`` ``seconds`` is the time to its first output. A ``move`` is no verb: it comes behind those
    that were called for it, and has the ``number`` that it has among the moves of its front-door process, why it was
    made, what came of it, and for how many seconds the client had no token. Nor is a ``fallback`` or a ``retry``: it
    has the engine that failed, the error's ``code``, how many tokens there were (``end``), and the ``reason``, as in
    "disaggregated -> data_parallel: decode-0 does not answer: Connection refused".
    """

    verb: str
    engine: str = ""
    seconds: float = 0.0
    begin: int = 0
    end: int = 0
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


class VerbTrace(msgspec.Struct):
    """The program that served a request, and its events in the order in which they ended."""

    program: str = ""
    events: list[TraceEvent] = []

    def filled(self) -> TraceEvent | None:
        """How another engine has filled the last reservation; None if none has, or another way was taken since."""
        for event in reversed(self.events):
            if event.verb == "remote_send":
                return event
            if event.verb in ("prep_recv", FALLBACK, RETRY):
                return None
        return None
