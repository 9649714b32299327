"""Engines that can be expected to answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tercet.scheduling.plugin import Booleans, Decision, Engines, Filter


class HealthFilter(Filter, frozen=True):
    """Keeps engines that answered last time; with ``max_age``, only those heard of in so many seconds."""

    strict: bool = False
    max_age: float | None = None

    def keep(self, decision: Decision, engines: Engines) -> Booleans | Sequence[bool]:
        """Whether each is well."""
        reachable = [engine.reachable for engine in engines]
        if self.max_age is None:
            return reachable
        return np.array(reachable, dtype=np.bool_) & (engines.age <= self.max_age)
