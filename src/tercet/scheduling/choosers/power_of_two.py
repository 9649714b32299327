"""The better one of two."""

from __future__ import annotations

from tercet.scheduling.plugin import Decision, Engines, Floats, Picker


class PowerOfTwoPicker(Picker, frozen=True):
    """Of two engines drawn at random, the one with the higher score; if equal, the one with fewer sequences.

    Many front doors that see the same, slightly old, reports do not all run to the same engine.
    """

    def pick(self, decision: Decision, engines: Engines, scores: Floats) -> int:
        """One of two."""
        if len(engines) == 1:
            return 0
        first, second = decision.random.sample(range(len(engines)), 2)
        if scores[first] == scores[second]:
            return first if engines[first].in_flight <= engines[second].in_flight else second
        return first if scores[first] > scores[second] else second
