"""Plugins that read engines' labels: how near an engine is to its partner, and for which prompt lengths it is meant.

The distance between an engine that prefills and its partner, the picked decode engine, follows from the nearest tier
that both share, as in llm-d-router's ``topology-affinity-filter`` and ``-scorer``. The lengths are a label such as
``0-8192`` (tokens, both ends included); llm-d-router has one plugin ``context-length-aware`` for both, and the formulas
are from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tercet.decisions.scheduling.plugin import Decision, Engines, Filter, Scorer
from tercet.protocol import EngineView

Tier = Literal["host", "rack", "zone", "region"]
TIERS: Sequence[Tier] = ("host", "rack", "zone", "region")
SCORES = {"host": 1.0, "rack": 0.2, "zone": 0.05, "region": 0.02}
Label = Annotated[str, Meta(min_length=1)]
RANGE_LABEL = "llm-d.ai/context-length-range"
BEST_OUTSIDE = 0.3
"""Limit between scores: those outside of an engine's range are below it, those inside are above."""
WITHOUT_LABEL = 0.5


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


class ContextLengthFilter(Filter, frozen=True):
    """Filter that keeps engines whose range contains the prompt's length, and engines without the label."""

    label: Label = RANGE_LABEL

    def keep(self, decision: Decision, engines: Engines) -> Sequence[bool]:
        length, label = _length_of(decision), self.label
        texts = [engine.labels.get(label) for engine in engines]
        return [text is None or _has(_range_of(text), length) for text in texts]


class ContextLengthScorer(Scorer, frozen=True):
    """Score of 0.3 to 1 in an engine's range, higher for a narrow range with space above; lower outside, by distance.

    The score is 0.5 without the label, and 0 for a label that is not a range.
    """

    label: Label = RANGE_LABEL

    def score(self, decision: Decision, engines: Engines) -> Sequence[float]:
        length, label = _length_of(decision), self.label
        texts = [engine.labels.get(label) for engine in engines]
        return [WITHOUT_LABEL if text is None else _fit(_range_of(text), length) for text in texts]


def _length_of(decision: Decision) -> int:
    return 0 if decision.request is None else decision.request.num_tokens


@lru_cache(maxsize=1024)
def _range_of(text: str) -> tuple[int, int] | None:
    """Return the lengths of a label's value, both included; None if it is not a range."""
    first, _, last = text.partition("-")
    try:
        least, most = int(first), int(last)
    except ValueError:
        return None
    return (least, most) if 0 <= least <= most else None


def _has(lengths: tuple[int, int] | None, length: int) -> bool:
    return lengths is not None and lengths[0] <= length <= lengths[1]


def _fit(lengths: tuple[int, int] | None, length: int) -> float:
    if lengths is None:
        return 0.0
    least, most = lengths
    width = most - least
    if not _has(lengths, length):
        outside = length - most if length > most else least - length
        return BEST_OUTSIDE / (1 + outside / 1000)
    if width == 0:
        return 1.0
    narrow, room = 1 / (1 + width / 10_000), (most - length) / width
    return BEST_OUTSIDE + (1 - BEST_OUTSIDE) * (0.7 * narrow + 0.3 * room)
