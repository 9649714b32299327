"""The best engine."""

from __future__ import annotations

import numpy as np

from tercet.scheduling.plugin import Decision, Engines, Floats, Picker


class MaxScorePicker(Picker, frozen=True):
    """The engine with the highest score; among equals, one at random."""

    def pick(self, decision: Decision, engines: Engines, scores: Floats) -> int:
        """The highest."""
        best = np.flatnonzero(scores == scores.max())
        return int(best[decision.random.randrange(len(best))])
