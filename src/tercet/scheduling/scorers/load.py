"""Scores from what engines report. An engine of which nothing recent is known gets the middle of a scorer's range."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from msgspec import Meta

from tercet.scheduling.plugin import Decision, Engines, Floats, Scorer

UNKNOWN = 0.5


class QueueScorer(Scorer, frozen=True):
    """1 for the shortest queue among the candidates, 0 for the longest, in proportion between; 1 if all are equal."""

    def score(self, decision: Decision, engines: Engines) -> Floats:
        """By waiting requests."""
        return _fewest_first(engines.waiting)


class RunningRequestsSizeScorer(Scorer, frozen=True):
    """1 for the smallest batch among the candidates, 0 for the largest, in proportion between; 1 if all are equal."""

    def score(self, decision: Decision, engines: Engines) -> Floats:
        """By running requests."""
        return _fewest_first(engines.running)


class KVCacheUtilizationScorer(Scorer, frozen=True):
    """The share of the KV cache that is free."""

    def score(self, decision: Decision, engines: Engines) -> Floats:
        """By KV in use."""
        return 1.0 - _known_or(UNKNOWN, engines.kv_usage)


class LoadAwareScorer(Scorer, frozen=True):
    """0.5 for an empty queue, falling to 0 at ``threshold`` waiting requests."""

    threshold: Annotated[int, Meta(ge=1)] = 128

    def score(self, decision: Decision, engines: Engines) -> Floats:
        """By waiting requests."""
        share = np.minimum(engines.waiting / self.threshold, 1.0)
        return 0.5 * (1.0 - _known_or(UNKNOWN, share))


def _known_or(otherwise: float, values: Floats) -> Floats:
    return np.where(np.isnan(values), otherwise, values)


def _fewest_first(counts: Floats) -> Floats:
    known = ~np.isnan(counts)
    if not known.any():
        return np.full(len(counts), UNKNOWN)
    least, most = counts[known].min(), counts[known].max()
    if least == most:
        return np.where(known, 1.0, UNKNOWN)
    return np.where(known, (most - counts) / (most - least), UNKNOWN)
