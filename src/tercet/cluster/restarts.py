"""Decides without I/O whether and when an engine that has ended is restarted."""

from __future__ import annotations

from dataclasses import dataclass

# Seconds until the first restart, the longest pause, and the time of serving after which an engine counts as well.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
LIVED_SECONDS = 60.0


@dataclass
class Restarts:
    """One engine's restarts, limited to ``limit``. Times are seconds of one clock.

    The pause doubles each time. An engine that has served for :data:`LIVED_SECONDS` gets all restarts back.
    """

    limit: int
    used: int = 0
    _ready_at: float | None = None

    def ready(self, now: float) -> None:
        """Record that the engine serves."""
        self._ready_at = now

    def ended(self, now: float) -> float | None:
        """Record that the engine has ended; returns the seconds until its restart, or None without one."""
        ready_at, self._ready_at = self._ready_at, None
        if ready_at is not None and now - ready_at >= LIVED_SECONDS:
            self.used = 0
        if self.used >= self.limit:
            return None
        self.used += 1
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (self.used - 1))
