"""Engines by chance."""

from __future__ import annotations

import numpy as np

from tercet.scheduling.plugin import Decision, Engines, Floats, Picker


class RandomPicker(Picker, frozen=True):
    """Any engine, whatever its score."""

    def pick(self, decision: Decision, engines: Engines, scores: Floats) -> int:
        """One of those that filters left."""
        return decision.random.randrange(len(engines))


class WeightedRandomPicker(Picker, frozen=True):
    """An engine with a probability in proportion to its score; any, if all scores are 0."""

    def pick(self, decision: Decision, engines: Engines, scores: Floats) -> int:
        """One, by its share of the sum of scores."""
        sums = np.cumsum(scores)
        if not sums[-1]:
            return decision.random.randrange(len(engines))
        # "right": an engine with score 0 adds nothing to the sums and so is never found. Rounding may reach the end.
        found = int(sums.searchsorted(decision.random.random() * float(sums[-1]), side="right"))
        return min(found, int(np.flatnonzero(scores)[-1]))
