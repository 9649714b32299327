"""Engines with room for another request."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tercet.scheduling.plugin import Booleans, Decision, Engines, Filter


class SaturationFilter(Filter, frozen=True):
    """Keeps engines with at most ``queue_depth_threshold`` waiting and ``kv_cache_util_threshold`` of the KV in use.

    An engine of which nothing recent is known counts as full, unless ``allows_unknown``.
    """

    strict: bool = False
    queue_depth_threshold: Annotated[int, Meta(ge=0)] = 5
    kv_cache_util_threshold: Annotated[float, Meta(gt=0, le=1)] = 0.8
    allows_unknown: bool = False

    def keep(self, decision: Decision, engines: Engines) -> Booleans:
        """Whether each has room."""
        queue, kv = engines.waiting, engines.kv_usage
        if self.allows_unknown:
            return ~((queue > self.queue_depth_threshold) | (kv > self.kv_cache_util_threshold))
        return (queue <= self.queue_depth_threshold) & (kv <= self.kv_cache_util_threshold)
