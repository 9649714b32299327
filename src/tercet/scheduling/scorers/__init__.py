"""Scorers: how good each engine is for this request, from 0 to 1."""

from tercet.scheduling.scorers.load import (
    KVCacheUtilizationScorer,
    LoadAwareScorer,
    QueueScorer,
    RunningRequestsSizeScorer,
)
from tercet.scheduling.scorers.no_hit_lru import NoHitLRUScorer
from tercet.scheduling.scorers.own_counts import ActiveRequestScorer, TokenLoadScorer
from tercet.scheduling.scorers.prefix import PrecisePrefixCacheScorer, PrefixCacheScorer
from tercet.scheduling.scorers.session import SessionAffinityScorer

__all__ = [
    "ActiveRequestScorer",
    "KVCacheUtilizationScorer",
    "LoadAwareScorer",
    "NoHitLRUScorer",
    "PrecisePrefixCacheScorer",
    "PrefixCacheScorer",
    "QueueScorer",
    "RunningRequestsSizeScorer",
    "SessionAffinityScorer",
    "TokenLoadScorer",
]
