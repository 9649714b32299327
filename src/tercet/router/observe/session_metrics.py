"""The metrics of a router's sessions."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from tercet.decisions.sessions import Pause
from tercet.router.serve.sessions import MoveEnd, PinEnd, Ran
from tercet.wire import SECONDS


class SessionCounters:
    """Counters of the sessions of one router process; see :class:`~tercet.router.serve.sessions.SessionMetrics`."""

    def __init__(self) -> None:
        self._sessions = Gauge("tercet_sessions", "Sessions that the router remembers.", multiprocess_mode="livesum")
        self._kept = Gauge(
            "tercet_sessions_kept", "Contexts of sessions whose KV is pinned on engines.", multiprocess_mode="livesum"
        )
        self._turns = Counter(
            "tercet_session_turns",
            "Turns of sessions, by engine: the `first` turn of a session, on the engine that the session is `bound` "
            "to, or on an `other` one.",
            ["engine"],
        )
        self._pauses = Histogram(
            "tercet_session_pause_seconds", "Time from an answer to the next turn, by what the session waited for.",
            ["waited_for"], buckets=SECONDS,
        )  # fmt: skip
        self._moves = Counter(
            "tercet_session_moves", "Contexts that left a drained engine: `moved`, `absent` from its cache, `failed`.",
            ["outcome"],
        )  # fmt: skip
        self._bytes = Counter("tercet_session_moved_bytes", "KV sent by moves of contexts.")
        self._pins = Counter(
            "tercet_session_pins",
            "Pins of contexts that ended: `given_up` by the router, `refused` by the engine, `lost` with it.",
            ["end"],
        )

    def sizes(self, sessions: int, kept: int) -> None:
        self._sessions.set(sessions)
        self._kept.set(kept)

    def turn(self, ran: Ran) -> None:
        self._turns.labels(ran).inc()

    def paused(self, waited_for: Pause, seconds: float) -> None:
        self._pauses.labels(waited_for).observe(seconds)

    def moved(self, end: MoveEnd, sent: int) -> None:
        self._moves.labels(end).inc()
        self._bytes.inc(sent)

    def unpinned(self, end: PinEnd) -> None:
        self._pins.labels(end).inc()
