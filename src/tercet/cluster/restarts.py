"""Whether and when an engine that has ended is started anew. Decides without I/O."""

from __future__ import annotations

from dataclasses import dataclass

# Seconds until the first start anew, until any at most, and for how long an engine serves before it counts as well.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
LIVED_SECONDS = 60.0


@dataclass
class Restarts:
    """One engine's starts anew, of which it gets ``limit``. Times are seconds of one clock.

    Each waits twice as long as the one before. All are given back to an engine that has served for
    :data:`LIVED_SECONDS`.
    """

    limit: int
    used: int = 0
    _ready_at: float | None = None

    def ready(self, now: float) -> None:
        """The engine serves."""
        self._ready_at = now

    def ended(self, now: float) -> float | None:
        """The engine has ended: in how many seconds to start it anew; None if that is not done any more."""
        ready_at, self._ready_at = self._ready_at, None
        if ready_at is not None and now - ready_at >= LIVED_SECONDS:
            self.used = 0
        if self.used >= self.limit:
            return None
        self.used += 1
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (self.used - 1))
