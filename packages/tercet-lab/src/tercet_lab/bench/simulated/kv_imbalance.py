"""The imbalance of KV usage between the engines of a fleet, over time."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence

import msgspec
import numpy as np

from tercet_lab.sim import SimEngine

SAMPLE_SECONDS, OFTEN = 0.1, 100


class KVImbalance(msgspec.Struct, frozen=True, kw_only=True):
    """The KV usage of the fullest engine minus the mean over all engines, both as shares of a KV cache (0 to 1).

    ``mean`` and ``p95`` are over samples every :data:`SAMPLE_SECONDS` seconds from the first arrival to the last one:
    the drain at the end is not a load to balance. With more than :data:`OFTEN` engines, samples are less frequent, so
    that they cost no more. ``usage`` is the mean KV usage of all engines over the same time.
    """

    mean: float
    p95: float
    usage: float

    def flat(self) -> dict[str, float]:
        """Return the values by name, for a report."""
        return {"mean_kv_imbalance": self.mean, "p95_kv_imbalance": self.p95, "mean_kv_usage": self.usage}


class ImbalanceSamples:
    """The sampling of all engines at regular intervals, until ``over`` is set."""

    def __init__(self, engines: Sequence[SimEngine]) -> None:
        self._engines = engines
        self._imbalances = array("d")
        self._usages = array("d")
        self.over = False

    async def take(self) -> None:
        """Take samples until cancelled, or until ``over`` is set."""
        interval = SAMPLE_SECONDS * max(1.0, len(self._engines) / OFTEN)
        while not self.over:
            usages = [engine.kv_usage for engine in self._engines]
            mean = sum(usages) / len(usages)
            self._imbalances.append(max(usages) - mean)
            self._usages.append(mean)
            await asyncio.sleep(interval)

    def summary(self) -> KVImbalance | None:
        """Return the result, or None without samples."""
        if not self._imbalances:
            return None
        found = np.array(self._imbalances)
        return KVImbalance(
            mean=float(found.mean()), p95=float(np.percentile(found, 95)), usage=float(np.mean(self._usages))
        )
