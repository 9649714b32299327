"""Comparison of the cached tokens that picks predict with those that engines find in their prefix caches."""

from __future__ import annotations

from dataclasses import dataclass

from tercet.settings import log_events

NEAR = 64
"""Difference in tokens that is ignored: block sizes may differ, and engines compute a prompt's last block again."""

LEAST_PICKS = 16
KEPT = 1 - 1 / 64
"""Factor for an engine's history at each further pick: about the last 64 picks decide."""

DRIFTS, AGREES = 0.25, 0.125
"""Missing shares of the predicted tokens: a drift begins at the first share, and ends below the second."""


@dataclass
class _Hits:
    """Weighted sums of tokens of an engine's latest picks; ``picks`` is their number, up to :data:`LEAST_PICKS`."""

    picks: int = 0
    predicted: float = 0.0
    missing: float = 0.0
    drifts: bool = False

    @property
    def share(self) -> float:
        return self.missing / self.predicted if self.predicted else 0.0

    @property
    def reason(self) -> str:
        return f"{self.share:.0%} of the predicted tokens of its latest picks were missing"


class PrefixHits:
    """Predicted and found tokens of each engine; a drift is logged when it begins and when it ends.

    Only missing tokens count: more tokens than predicted cost nothing.
    """

    def __init__(self) -> None:
        self._engines: dict[str, _Hits] = {}

    def found(self, engine: str, predicted: int, cached: int) -> None:
        """Record that a pick predicted ``predicted`` tokens of a prompt in the engine's cache, which had ``cached``."""
        if not predicted:
            return
        hits = self._engines.setdefault(engine, _Hits())
        hits.picks = min(hits.picks + 1, LEAST_PICKS)
        short = predicted - cached
        hits.predicted = KEPT * hits.predicted + predicted
        hits.missing = KEPT * hits.missing + (short if short > NEAR else 0)
        if hits.drifts:
            if hits.share < AGREES:
                hits.drifts = False
                log_events.PREFIX_AGREES.tell(engine=engine, reason=hits.reason)
        elif hits.picks == LEAST_PICKS and hits.share >= DRIFTS:
            hits.drifts = True
            log_events.PREFIX_DRIFT.tell(engine=engine, reason=hits.reason)

    @property
    def drifting(self) -> list[str]:
        """Engines whose caches have far fewer tokens than picks predict."""
        return [name for name, hits in self._engines.items() if hits.drifts]

    def forget(self, engine: str) -> None:
        """Drop the record of an engine that has left the fleet."""
        self._engines.pop(engine, None)
