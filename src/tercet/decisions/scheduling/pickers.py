"""Pickers: they choose one engine, by the scores of a profile or, in plain picks, by turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from tercet.decisions.scheduling.plugin import Decision, Engines, Floats, Picker


class MaxScorePicker(Picker, frozen=True):
    """Picker of the engine with the highest score; among equals, one at random."""

    def pick(self, decision: Decision, engines: Engines, scores: Floats) -> int:
        best = (scores == scores[scores.argmax()]).nonzero()[0]
        return int(best[decision.random.randrange(len(best))])


class RandomPicker(Picker, frozen=True):
    """Picker of a random engine; scores do not count."""

    def pick(self, decision: Decision, engines: Engines, scores: Floats) -> int:
        return decision.random.randrange(len(engines))


class WeightedRandomPicker(Picker, frozen=True):
    """Picker of an engine with a probability in proportion to its score; of any if all scores are 0."""

    def pick(self, decision: Decision, engines: Engines, scores: Floats) -> int:
        sums = np.cumsum(scores)
        if not sums[-1]:
            return decision.random.randrange(len(engines))
        # "right": an engine with score 0 adds nothing to the sums and is never found. Rounding may reach the end.
        found = int(sums.searchsorted(decision.random.random() * float(sums[-1]), side="right"))
        return min(found, int(np.flatnonzero(scores)[-1]))


class PowerOfTwoPicker(Picker, frozen=True):
    """Picker of the higher score among two random engines; if the scores are equal, of the one with fewer sequences.

    Many routers with the same, slightly old, reports do not all pick the same engine.
    """

    def pick(self, decision: Decision, engines: Engines, scores: Floats) -> int:
        if len(engines) == 1:
            return 0
        first, second = decision.random.sample(range(len(engines)), 2)
        if scores[first] == scores[second]:
            return first if engines[first].in_flight <= engines[second].in_flight else second
        return first if scores[first] > scores[second] else second


TurnPicker = Callable[[Engines, int], int]
"""Function that returns the index of one of these engines; the number is the count of earlier picks among them."""


def round_robin(candidates: Engines, turn: int) -> int:
    """Return the index of the next candidate in turn."""
    return turn % len(candidates)


def least_loaded(candidates: Engines, turn: int) -> int:
    """Return the index of the candidate with the fewest sequences in flight; among equals, the next in turn."""
    equals = np.flatnonzero(candidates.in_flight == candidates.in_flight.min())
    return int(equals[turn % len(equals)])


PICKERS: Mapping[str, TurnPicker] = {"round_robin": round_robin, "least_loaded": least_loaded}
