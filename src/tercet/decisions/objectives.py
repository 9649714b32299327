"""Whether requests meet their objectives: one rule for routers, benchmarks and simulations. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tercet.settings.role_settings import Objectives

Floats = NDArray[np.float64]


def within(values: Floats, limit: float) -> NDArray[np.bool_]:
    """Which values are at most ``limit``; a latency that a request does not have (NaN) is within any limit."""
    return np.isnan(values) | (values <= limit)


def meets(objectives: Objectives, ttft: float | None, tpot: float | None) -> bool:
    """Whether a request that succeeded met its objectives, in seconds.

    None is a latency that it does not have: an answer of one token has no TPOT. One that failed meets no objective,
    and one that its client left counts nowhere.
    """
    return all(
        limit is None or value is None or value <= limit
        for value, limit in ((ttft, objectives.ttft), (tpot, objectives.tpot))
    )


class Attainment:
    """How many requests ended, and how many of them met the objectives."""

    def __init__(self, objectives: Objectives) -> None:
        self.objectives = objectives
        self.ended = self.met = 0

    def ended_with(self, ttft: float | None, tpot: float | None) -> bool:
        """Count a request that succeeded; returns whether it met the objectives."""
        met = meets(self.objectives, ttft, tpot)
        self.ended += 1
        self.met += met
        return met

    def failed(self) -> None:
        """Count a request that failed."""
        self.ended += 1
