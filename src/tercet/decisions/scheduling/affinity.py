"""Filters that keep a request on the engines that have its prefix or its session.

Written from the formulas of llm-d-router's ``prefix-cache-affinity-filter`` and ``session-affinity-filter``.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from tercet.decisions.scheduling.hashing import preference
from tercet.decisions.scheduling.plugin import Booleans, Decision, Engines, Filter, Floats
from tercet.decisions.scheduling.scorers import Header, prompt_tokens_of, routed_match, session_of, stored_shares
from tercet.protocol.headers import SESSION_HEADER

Share = Annotated[float, Meta(ge=0, le=1)]


class AffinityFilter(Filter, frozen=True):
    """Base of filters that keep the engines with at least ``affinity_threshold`` of the prompt, or all if none has it.

    All are also kept by chance (``exploration_probability``), and if affinity would cost too much: if the least busy
    engine that has the prompt is behind the least busy one without it by more than ``max_ttft_penalty_ms`` at
    ``peak_prefill_throughput`` (tokens per second), or by more than ``max_tokens_in_flight_penalty``. 0 means no limit.
    """

    affinity_threshold: Annotated[float, Meta(le=1)] = 0.8
    exploration_probability: Share = 0.0
    max_ttft_penalty_ms: Annotated[float, Meta(ge=0)] = msgspec.field(default=18_000.0, name="maxTTFTPenaltyMs")
    peak_prefill_throughput: Annotated[float, Meta(gt=0)] = 15_928.0
    max_tokens_in_flight_penalty: Annotated[int, Meta(ge=0)] = 0

    def shares(self, decision: Decision, engines: Engines) -> Floats:
        """Return the share of the prompt that each engine has."""
        raise NotImplementedError(f"{type(self).__name__} has no shares()")

    def keep(self, decision: Decision, engines: Engines) -> Booleans:
        everyone = np.ones(len(engines), dtype=np.bool_)
        sticky = self.shares(decision, engines) >= self.affinity_threshold
        if len(engines) == 1 or self.affinity_threshold <= 0 or not sticky.any():
            return everyone
        explores = self.exploration_probability > 0 and decision.random.random() < self.exploration_probability
        return everyone if explores or self._costs_too_much(sticky, engines) else sticky

    def _costs_too_much(self, sticky: Booleans, engines: Engines) -> bool:
        if sticky.all():
            return False
        tokens = prompt_tokens_of(engines)
        behind = float(tokens[sticky].min() - tokens[~sticky].min())
        longest = self.max_ttft_penalty_ms / 1000 * self.peak_prefill_throughput
        return any(0 < limit < behind for limit in (longest, self.max_tokens_in_flight_penalty))


class PrefixCacheAffinityFilter(AffinityFilter, frozen=True):
    """Filter by the prompts that were routed to engines before, as ``prefix-cache-scorer`` counts them."""

    block_size: Annotated[int, Meta(ge=1)] = 64
    max_prefix_blocks_to_match: Annotated[int, Meta(ge=1)] = 256
    lru_capacity_per_server: Annotated[int, Meta(ge=1)] = 31_250

    def shares(self, decision: Decision, engines: Engines) -> Floats:
        matched, of = routed_match(self, decision)
        return matched[engines.rows] / max(1, of)

    def picked(self, decision: Decision, row: int) -> None:
        """Record that the prompt's blocks will be on the picked engine."""
        hashes = decision.hashes(self.block_size, self.max_prefix_blocks_to_match)
        if hashes:
            decision.knowledge.routed(self.block_size, self.lru_capacity_per_server).note(row, hashes)


class PrecisePrefixCacheAffinityFilter(AffinityFilter, frozen=True):
    """Filter by the blocks that engines report to hold, through their KV events."""

    def shares(self, decision: Decision, engines: Engines) -> Floats:
        return stored_shares(decision, engines, lambda blocks, of, block_size: blocks / of)


class SessionAffinityFilter(Filter, frozen=True):
    """Filter that keeps the engine to which the request's session belongs; all engines without a session.

    ``header`` (lower case), ``by_user`` and the engine of a session are those of ``session-affinity-scorer``, except
    that busy engines are not skipped.
    """

    header: Header = SESSION_HEADER
    by_user: bool = True

    def keep(self, decision: Decision, engines: Engines) -> Booleans:
        session = session_of(decision.request, self.header, self.by_user)
        if not session:
            return np.ones(len(engines), dtype=np.bool_)
        weights = preference(session, engines.keys)
        return np.arange(len(engines)) == weights.argmax()
