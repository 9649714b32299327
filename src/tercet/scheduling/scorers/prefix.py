"""Scores from what engines have cached: the share of the prompt's blocks, from the first one on, without a gap."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from msgspec import Meta

from tercet.scheduling.plugin import Decision, Engines, Floats, Integers, Scorer


class PrefixCacheScorer(Scorer, frozen=True):
    """The share of the prompt that was routed to an engine before: a guess, from routing history alone.

    Prompts are cut into blocks of ``block_size`` tokens; only the first ``max_prefix_blocks_to_match`` count, and per
    engine the ``lru_capacity_per_server`` blocks routed to it most recently are remembered.
    """

    block_size: Annotated[int, Meta(ge=1)] = 64
    max_prefix_blocks_to_match: Annotated[int, Meta(ge=1)] = 256
    lru_capacity_per_server: Annotated[int, Meta(ge=1)] = 31_250

    def score(self, decision: Decision, engines: Engines) -> Floats:
        """By blocks routed there."""
        hashes = decision.hashes(self.block_size, self.max_prefix_blocks_to_match)
        if not hashes:
            return np.zeros(len(engines))
        matched = decision.knowledge.routed(self.block_size, self.lru_capacity_per_server).matched(hashes)
        decision.note_match(matched * self.block_size)
        return matched[engines.rows] / len(hashes)

    def picked(self, decision: Decision, row: int) -> None:
        """The prompt's blocks will be on the engine that was picked."""
        hashes = decision.hashes(self.block_size, self.max_prefix_blocks_to_match)
        if hashes:
            decision.knowledge.routed(self.block_size, self.lru_capacity_per_server).note(row, hashes)


class PrecisePrefixCacheScorer(Scorer, frozen=True):
    """The share of the prompt's full blocks that an engine says it holds, through its KV events."""

    def score(self, decision: Decision, engines: Engines) -> Floats:
        """By blocks held."""
        shares = np.zeros(len(engines))
        for block_size, index in decision.knowledge.stored.items():
            hashes = decision.hashes(block_size)
            if hashes:
                matched: Integers = index.matched(hashes)
                decision.note_match(matched * block_size)
                shares = np.maximum(shares, matched[engines.rows] / len(hashes))
        return shares
