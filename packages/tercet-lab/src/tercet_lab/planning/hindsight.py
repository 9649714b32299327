"""The best sequence of fleets for a known trace, from runs of fixed fleets: a bound of what a planner can reach."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tercet.decisions.planning import FleetPlan

ROUNDS = 50
"""Most improvements of the ratio; each is at least as good as the one before, and five are usually enough."""


@dataclass(frozen=True)
class KnownBest:
    """The best sequence: the fleet of each interval, the requests that meet the objectives, and the engine-hours."""

    fleets: tuple[FleetPlan, ...]
    met: float
    engine_hours: float

    @property
    def per_hour(self) -> float:
        """Requests within the objectives per engine-hour."""
        return self.met / self.engine_hours if self.engine_hours else 0.0

    @property
    def changes(self) -> int:
        """Number of intervals whose fleet differs from the one before."""
        return sum(before != after for before, after in itertools.pairwise(self.fleets))


def best_sequence(met: Mapping[FleetPlan, Sequence[float]], interval_s: float, start_s: float) -> KnownBest:
    """Return the sequence that serves the most requests within the objectives per engine-hour.

    ``met`` has for each fleet the number of requests that came in each interval and met the objectives, in a run of
    that fleet alone: the queues and caches that a change leaves behind are not counted. An engine that is started costs
    ``start_s`` seconds more, and serves at once. ``interval_s`` is the length of an interval in seconds.
    """
    plans, counts = list(met), np.array([met[plan] for plan in met], dtype=float)
    engines = np.array([plan.engines for plan in plans], dtype=float)
    started = np.maximum(engines[None, :] - engines[:, None], 0.0) * start_s / 3600  # from a row's to a column's
    hours, price, found = engines * interval_s / 3600, 0.0, KnownBest((), 0.0, 0.0)
    for _ in range(ROUNDS):
        path = _best_path(counts - price * hours[:, None], price * started)
        cost = sum(hours[each] for each in path) + sum(started[pair] for pair in itertools.pairwise(path))
        served = sum(counts[each, when] for when, each in enumerate(path))
        found = KnownBest(tuple(plans[each] for each in path), float(served), float(cost))
        if found.per_hour <= price * (1 + 1e-9):
            break
        price = found.per_hour
    return found


def _best_path(values: np.ndarray, losses: np.ndarray) -> list[int]:
    """Return a row for each column, so that the sum of values less the losses of changes between rows is largest."""
    total, origins = values[:, 0], list[np.ndarray]()
    for column in values.T[1:]:
        reached = total[:, None] - losses
        origins.append(reached.argmax(axis=0))
        total = reached.max(axis=0) + column
    path = [int(total.argmax())]
    for origin in reversed(origins):
        path.append(int(origin[path[-1]]))
    return path[::-1]
