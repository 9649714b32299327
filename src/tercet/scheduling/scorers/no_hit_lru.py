"""Spread of prompts that nobody has cached."""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from msgspec import Meta

from tercet.scheduling.plugin import Decision, Engines, Floats, Scorer


class NoHitLRUScorer(Scorer, frozen=True):
    """For a prompt that no engine has cached: 1 for the engine that took such a prompt the longest ago, 0 for the last.

    Engines that never did come first. For a prompt that some engine has, all get 0.5. Whether one has is for the
    prefix scorers of the same profile to say; without any, every prompt is new. ``lru_size`` engines are remembered.
    """

    runs_last: ClassVar[bool] = True
    lru_size: Annotated[int, Meta(ge=1)] = 1024

    def score(self, decision: Decision, engines: Engines) -> Floats:
        """By the last time with a new prompt."""
        if not _is_cold(decision):
            return np.full(len(engines), 0.5)
        if len(engines) == 1:
            return np.ones(1)
        turns = decision.knowledge.cold_turns(engines.rows, self.lru_size)
        scores = np.empty(len(engines))
        scores[np.argsort(turns, kind="stable")] = np.linspace(1.0, 0.0, len(engines))
        return scores

    def picked(self, decision: Decision, row: int) -> None:
        """The engine that was picked is the last one to take a new prompt, if it is one."""
        if _is_cold(decision):
            decision.knowledge.note_cold(row)


def _is_cold(decision: Decision) -> bool:
    return decision.matched is None or not decision.matched.any()
