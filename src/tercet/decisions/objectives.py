"""Check of requests against their objectives: one rule for routers, benchmarks and simulations. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tercet.protocol import Request
from tercet.settings.fleet_settings import DEFAULT_CLASS, ObjectiveClass, Objectives

Floats = NDArray[np.float64]


def within(values: Floats, limit: float) -> NDArray[np.bool_]:
    """Return True for each value of at most ``limit``; a missing latency (NaN) is within any limit."""
    return np.isnan(values) | (values <= limit)


def meets(objectives: Objectives | ObjectiveClass, ttft: float | None, tpot: float | None) -> bool:
    """Return True if a request that succeeded met its objectives; latencies are in seconds.

    None is a latency that the request lacks: an answer of one token has no TPOT. A request that failed meets no
    objective; one that its client left is not counted.
    """
    return all(
        limit is None or value is None or value <= limit
        for value, limit in ((ttft, objectives.ttft), (tpot, objectives.tpot))
    )


class Attainment:
    """Counts of a class's requests: those that ended, and those of them that met the objectives."""

    def __init__(self, objectives: Objectives | ObjectiveClass, name: str = DEFAULT_CLASS) -> None:
        self.objectives = objectives
        self.name = name
        self.ended = self.met = 0

    def ended_with(self, ttft: float | None, tpot: float | None) -> bool:
        """Count a request that succeeded; return True if it met the objectives."""
        met = meets(self.objectives, ttft, tpot)
        self.ended += 1
        self.met += met
        return met

    def failed(self) -> None:
        self.ended += 1


class Attainments:
    """The attainment of each class of requests; ``default`` is that of requests without a class."""

    def __init__(self, objectives: Objectives) -> None:
        self.objectives = objectives
        self.default = Attainment(objectives)
        self._classes = {each.name: Attainment(each, each.name) for each in objectives.classes}

    def of(self, request: Request) -> Attainment | None:
        """Return the attainment in which a request counts, by its headers; None if it has no objectives."""
        if request.background:  # it waits until others leave it a step
            return None
        found = self.objectives.class_of(request.headers)
        if found is not None:
            return self._classes[found.name]
        return self.default if self.objectives.any else None

    def counts(self) -> dict[str, tuple[int, int]]:
        """Return by class the number of requests that ended, and of those that met the objectives."""
        return {each.name: (each.ended, each.met) for each in (self.default, *self._classes.values())}
