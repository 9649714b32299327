"""What picks predicted of engines' prefix caches, against what the engines found there."""

from __future__ import annotations

from dataclasses import dataclass

from tercet.settings import log_events

NEAR = 64
"""Tokens: a difference up to this is that of two block sizes, or of the last block, which engines compute again."""

LEAST_PICKS = 16
KEPT = 1 - 1 / 64
"""Weight of an engine's history with each further pick: the last 64 picks or so decide."""

DRIFTS, AGREES = 0.25, 0.125
"""Shares of the predicted tokens that are missing: from the first on it is a drift, below the second it is over."""


@dataclass
class _Hits:
    """Tokens of an engine's latest picks: weighted sums. ``picks`` is their number, up to :data:`LEAST_PICKS`."""

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
    """Compares predictions with what engines found; a drift of an engine is logged when it begins and when it ends.

    Only what is missing counts: to find more than was predicted wastes nothing.
    """

    def __init__(self) -> None:
        self._engines: dict[str, _Hits] = {}

    def found(self, engine: str, predicted: int, cached: int) -> None:
        """A pick predicted ``predicted`` tokens of a prompt in the engine's cache; it found ``cached``."""
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
        """Engines whose caches have much less than picks predict."""
        return [name for name, hits in self._engines.items() if hits.drifts]

    def forget(self, engine: str) -> None:
        """An engine has left the fleet."""
        self._engines.pop(engine, None)
