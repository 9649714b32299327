"""Decisions, without I/O, about the restart of an engine or a router that has ended."""

from __future__ import annotations

from dataclasses import dataclass

# Seconds: the pause before the first restart, the longest pause, and the serving time after which restarts are reset.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
LIVED_SECONDS = 60.0


@dataclass
class Restarts:
    """One process's restarts, limited to ``limit``. Times are seconds of one clock.

    The pause doubles each time. After it has served for :data:`LIVED_SECONDS`, the count starts again at 0.
    """

    limit: int
    used: int = 0
    _ready_at: float | None = None

    def ready(self, now: float) -> None:
        """Record that the process serves."""
        self._ready_at = now

    def ended(self, now: float) -> float | None:
        """Record that the process has ended; return the seconds until its restart, or None for no restart."""
        ready_at, self._ready_at = self._ready_at, None
        if ready_at is not None and now - ready_at >= LIVED_SECONDS:
            self.used = 0
        if self.used >= self.limit:
            return None
        self.used += 1
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (self.used - 1))
