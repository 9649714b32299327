"""Scores from what this front door has under way itself: never stale, but blind to other front doors."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from msgspec import Meta

from tercet.scheduling.plugin import Decision, Engines, Floats, Scorer


class ActiveRequestScorer(Scorer, frozen=True):
    """1 for an engine on which nothing runs, 0 for the candidate with the most sequences, in proportion between."""

    def score(self, decision: Decision, engines: Engines) -> Floats:
        """By sequences under way."""
        most = engines.in_flight.max()
        return 1.0 - engines.in_flight / most if most else np.ones(len(engines))


class TokenLoadScorer(Scorer, frozen=True):
    """1 for an engine without work, falling to 0 at ``queue_threshold_tokens`` tokens of it.

    An engine's work is what it reported, or the prompts that this front door runs there, whichever is more.
    """

    queue_threshold_tokens: Annotated[int, Meta(ge=1)] = 4_194_304

    def score(self, decision: Decision, engines: Engines) -> Floats:
        """By tokens under way."""
        return 1.0 - np.fmax(engines.tokens, engines.in_flight_tokens) / self.queue_threshold_tokens
