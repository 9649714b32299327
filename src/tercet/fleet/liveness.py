"""Detection of stuck engines: an engine is alive if it makes progress; an open connection is not enough.

An engine reports for how many seconds its processes have made no progress (``EngineLoad.stalled_s``). An engine that
sends nothing counts as one without progress.
"""

from __future__ import annotations

from typing import NamedTuple

STUCK_AFTER_S = 5.0


class Stuck(NamedTuple):
    """A stuck engine, and the reason."""

    engine: str
    why: str


class Liveness:
    """State machine, without I/O, that decides which engines are stuck. Times are seconds of one monotonic clock.

    An engine is stuck when it has made no progress for ``stuck_after_s``, which must be longer than its longest step.
    Time in which :meth:`look` was not called does not count, because this process itself was stopped.
    """

    def __init__(self, stuck_after_s: float) -> None:
        self.stuck_after_s = stuck_after_s
        self._progressed_at: dict[str, float] = {}
        self._heard_at: dict[str, float] = {}
        self._stuck: set[str] = set()
        self._hung_up: set[str] = set()
        self._looked_at: float | None = None

    def heard(self, engine: str, now: float, stalled_s: float = 0.0) -> None:
        """Record a report: the engine's last progress was ``stalled_s`` seconds ago."""
        self._heard_at[engine] = now
        self._hung_up.discard(engine)
        progressed_at = self._progressed_at.get(engine, now)
        self._progressed_at[engine] = max(progressed_at, now - stalled_s)
        if now - self._progressed_at[engine] <= self.stuck_after_s:
            self._stuck.discard(engine)

    def hung_up(self, engine: str) -> None:
        """Record that the engine closed its connection: earlier reports no longer show that it is alive."""
        self._hung_up.add(engine)

    def forget(self, engine: str) -> None:
        """Drop the record of an engine that was removed or restarted."""
        self._heard_at.pop(engine, None)
        self._progressed_at.pop(engine, None)
        self._stuck.discard(engine)
        self._hung_up.discard(engine)

    @property
    def stuck(self) -> list[Stuck]:
        """Engines that were found stuck and have made no progress since."""
        now = self._looked_at or 0.0
        return [Stuck(engine, self._why(engine, now)) for engine in sorted(self._stuck)]

    def is_stuck(self, engine: str) -> bool:
        """True if an engine was found stuck and has made no progress since."""
        return engine in self._stuck

    def progressed_since(self, engine: str, then: float) -> bool:
        """True if the engine's last known progress is not before the time ``then``, or if none is known."""
        return self._progressed_at.get(engine, then) >= then

    def stalled_s(self, engine: str) -> float:
        """Return the seconds without progress of an engine at the last check; 0 before the first check."""
        if self._looked_at is None:
            return 0.0
        return max(0.0, self._looked_at - self._progressed_at.get(engine, self._looked_at))

    def heard_within(self, engine: str, seconds: float, now: float) -> bool:
        """True if the engine has sent anything in the last ``seconds`` and not closed its connection since."""
        return engine not in self._hung_up and now - self._heard_at.get(engine, -float("inf")) <= seconds

    def look(self, now: float, interval: float) -> list[Stuck]:
        """Check all engines, ``interval`` seconds after the last check; return those that are stuck only since then."""
        slept = 0.0 if self._looked_at is None else now - self._looked_at - interval
        self._looked_at = now
        if slept > interval:
            for times in (self._progressed_at, self._heard_at):
                times.update({engine: at + slept for engine, at in times.items()})
        standing = [engine for engine, at in self._progressed_at.items() if now - at > self.stuck_after_s]
        new = [Stuck(engine, self._why(engine, now)) for engine in standing if engine not in self._stuck]
        self._stuck.update(standing)
        return new

    def _why(self, engine: str, now: float) -> str:
        silence = now - self._heard_at[engine]
        if silence > self.stuck_after_s / 2:
            return f"the engine has sent no message for {silence:.1f} s"
        return f"the engine answers, but has made no progress for {now - self._progressed_at[engine]:.1f} s"
