"""Plugins for the distance between an engine that prefills and its partner, the picked decode engine.

The distance follows from labels, from the nearest tier to the farthest, as in llm-d-router's
``topology-affinity-filter`` and ``-scorer``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tercet.decisions.scheduling.plugin import Decision, Engines, Filter, Scorer
from tercet.protocol import EngineView

Tier = Literal["host", "rack", "zone", "region"]
TIERS: Sequence[Tier] = ("host", "rack", "zone", "region")
SCORES = {"host": 1.0, "rack": 0.2, "zone": 0.05, "region": 0.02}
Label = Annotated[str, Meta(min_length=1)]


class TierLabels(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The label of each tier."""

    host: Label = "kubernetes.io/hostname"
    rack: Label = "topology.kubernetes.io/rack"
    zone: Label = "topology.kubernetes.io/zone"
    region: Label = "topology.kubernetes.io/region"

    def nearest_common(self, one: EngineView, other: EngineView) -> Tier | None:
        """Return the nearest tier whose label is equal on both; None without one."""
        for tier in TIERS:
            label = getattr(self, tier)
            value = one.labels.get(label)
            if value and value == other.labels.get(label):
                return tier
        return None


class TopologyAffinityFilter(Filter, frozen=True):
    """Filter that keeps engines at least as near as ``min_affinity``; all if no engine is, or without a partner."""

    min_affinity: Tier = "host"
    labels: TierLabels = TierLabels()

    def keep(self, decision: Decision, engines: Engines) -> Sequence[bool]:
        if decision.partner is None:
            return [True] * len(engines)
        near = TIERS[: TIERS.index(self.min_affinity) + 1]
        keep = [self.labels.nearest_common(decision.partner, engine) in near for engine in engines]
        return keep if any(keep) else [True] * len(engines)


class TopologyAffinityScorer(Scorer, frozen=True):
    """Score of 1 on the partner's host, 0.2 in its rack, 0.05 in its zone, 0.02 in its region, else 0."""

    labels: TierLabels = TierLabels()

    def score(self, decision: Decision, engines: Engines) -> Sequence[float]:
        if decision.partner is None:
            return [0.0] * len(engines)
        return [SCORES.get(self.labels.nearest_common(decision.partner, engine) or "", 0.0) for engine in engines]
