"""Scorers: they rate each engine for a request, from 0 to 1.

An engine without a recent report gets the middle of a load scorer's range. The last ones read engines' labels: how near
an engine is to its partner, by the nearest tier that both share, as in llm-d-router's ``topology-affinity-scorer``; and
for which prompt lengths it is meant, a label such as ``0-8192`` (tokens, both ends included), as in llm-d-router's
``context-length-aware``. The formulas are from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Annotated, ClassVar, Literal, Protocol

import msgspec
import numpy as np
from msgspec import Meta

from tercet.decisions.scheduling.plugin import (
    DEVICE,
    TIER_WEIGHTS,
    Decision,
    Engines,
    Floats,
    Integers,
    Scorer,
    preference,
)
from tercet.protocol import EngineView, Request
from tercet.protocol.headers import OTHER_SESSION_HEADERS, SESSION_HEADER
from tercet.protocol.names import owned_name

UNKNOWN = 0.5
# An engine with at most this multiple of its share of the sequences still gets sessions that prefer it.
MAX_LOAD = 1.25
Header = Annotated[str, Meta(min_length=1, pattern=r"^[a-z0-9-]+\Z")]


class QueueScorer(Scorer, frozen=True):
    """Score of 1 for the shortest queue among the candidates, 0 for the longest, in proportion between.

    All get 1 if the queues are equal.
    """

    def score(self, decision: Decision, engines: Engines) -> Floats:
        return _fewest_first(engines.waiting)


class RunningRequestsSizeScorer(Scorer, frozen=True):
    """Score of 1 for the smallest batch among the candidates, 0 for the largest, in proportion between.

    All get 1 if the batches are equal.
    """

    def score(self, decision: Decision, engines: Engines) -> Floats:
        return _fewest_first(engines.running)


class KVCacheUtilizationScorer(Scorer, frozen=True):
    """Score equal to the free share of the KV cache."""

    def score(self, decision: Decision, engines: Engines) -> Floats:
        return 1.0 - _known_or(UNKNOWN, engines.kv_usage)


class LoadAwareScorer(Scorer, frozen=True):
    """Score of 0.5 for an empty queue, falling to 0 at ``threshold`` waiting requests."""

    threshold: Annotated[int, Meta(ge=1)] = 128

    def score(self, decision: Decision, engines: Engines) -> Floats:
        share = np.minimum(engines.waiting / self.threshold, 1.0)
        return 0.5 * (1.0 - _known_or(UNKNOWN, share))


def _known_or(otherwise: float, values: Floats) -> Floats:
    return np.where(np.isnan(values), otherwise, values)


def _fewest_first(counts: Floats) -> Floats:
    known = ~np.isnan(counts)
    if not known.any():
        return np.full(len(counts), UNKNOWN)
    least, most = counts[known].min(), counts[known].max()
    if least == most:
        return np.where(known, 1.0, UNKNOWN)
    return np.where(known, (most - counts) / (most - least), UNKNOWN)


class ActiveRequestScorer(Scorer, frozen=True):
    """Score of 0 for the candidate with the most sequences, up to ``max_busy_score`` for fewer, in proportion.

    An engine with at most ``idle_threshold`` of them gets 1.
    """

    idle_threshold: Annotated[int, Meta(ge=0)] = 0
    max_busy_score: Annotated[float, Meta(ge=0, le=1)] = 1.0

    def score(self, decision: Decision, engines: Engines) -> Floats:
        # This router's own count: it is exact, and newer than any report.
        counts = engines.in_flight
        most = np.maximum.reduce(counts)
        if most <= self.idle_threshold:
            return np.ones(len(engines))
        scores = counts / most
        np.subtract(1.0, scores, out=scores)
        scores *= self.max_busy_score
        return np.maximum(scores, counts <= self.idle_threshold, out=scores)  # True is 1, the highest score


class TokenLoadScorer(Scorer, frozen=True):
    """Score of 1 for an engine without work, falling to 0 at ``queue_threshold_tokens`` tokens of work.

    An engine's work is the larger of the reported tokens and the prompts that this router runs there.
    """

    queue_threshold_tokens: Annotated[int, Meta(ge=1)] = 4_194_304

    def score(self, decision: Decision, engines: Engines) -> Floats:
        return 1.0 - prompt_tokens_of(engines) / self.queue_threshold_tokens


def prompt_tokens_of(engines: Engines) -> Floats:
    """Return the tokens that each engine has to process.

    This is the larger of the tokens that it reported and the prompt tokens that this router runs there.
    """
    return np.fmax(engines.tokens, engines.in_flight_tokens)


class MatchScorer(Scorer, frozen=True):
    """Score equal to the share of the prompt that an engine has; ``match_length_weight`` adds the length of the match.

    Length counts by its square, as in attention: 1 from ``match_length_scale_tokens`` tokens on.
    """

    match_length_weight: Annotated[float, Meta(ge=0, le=1)] = 0.0
    match_length_scale_tokens: Annotated[int, Meta(ge=1)] = 8192

    def weighed(self, blocks: Integers | Floats, of: int, block_size: int) -> Floats:
        """Return the score of ``blocks`` out of ``of`` blocks."""
        share: Floats = blocks / of
        if not self.match_length_weight:
            return share
        # A tenth of a prompt of 100,000 tokens saves more than nine tenths of one of 1,000.
        length = np.minimum(blocks * (block_size / self.match_length_scale_tokens), 1.0) ** 2
        return self.match_length_weight * length + (1 - self.match_length_weight) * share


class PrefixCacheScorer(MatchScorer, frozen=True):
    """Score equal to the share of the prompt that was routed to an engine before: an estimate from routing history.

    Prompts are cut into blocks of ``block_size`` tokens; only the first ``max_prefix_blocks_to_match`` count, and per
    engine the ``lru_capacity_per_server`` blocks routed to it most recently are remembered.
    """

    block_size: Annotated[int, Meta(ge=1)] = 64
    max_prefix_blocks_to_match: Annotated[int, Meta(ge=1)] = 256
    lru_capacity_per_server: Annotated[int, Meta(ge=1)] = 31_250

    def score(self, decision: Decision, engines: Engines) -> Floats:
        matched, of = routed_match(self, decision)
        return self.weighed(matched[engines.rows], of, self.block_size) if of else np.zeros(len(engines))

    def picked(self, decision: Decision, row: int) -> None:
        # Noted at the pick and not at the answer: requests of one session that follow closely find it.
        hashes = decision.hashes(self.block_size, self.max_prefix_blocks_to_match)
        if hashes:
            decision.knowledge.routed(self.block_size, self.lru_capacity_per_server).note(row, hashes)


class RoutedHistory(Protocol):
    """Parameters of a plugin's history of routed prompts."""

    @property
    def block_size(self) -> int: ...

    @property
    def max_prefix_blocks_to_match(self) -> int: ...

    @property
    def lru_capacity_per_server(self) -> int: ...


def routed_match(history: RoutedHistory, decision: Decision) -> tuple[Integers, int]:
    """Return by row the number of the prompt's first blocks that were routed before; and the number that counts."""
    hashes = decision.hashes(history.block_size, history.max_prefix_blocks_to_match)
    index = decision.knowledge.routed(history.block_size, history.lru_capacity_per_server)
    matched: Integers = index.matched(hashes)
    if hashes:
        decision.note_match(matched * history.block_size)
    return matched, len(hashes)


class PrecisePrefixCacheScorer(MatchScorer, frozen=True):
    """Score equal to the share of the prompt's full blocks that an engine reports to hold, through its KV events.

    A block on a lower tier counts by :data:`~tercet.decisions.scheduling.plugin.TIER_WEIGHTS`.
    """

    def score(self, decision: Decision, engines: Engines) -> Floats:
        return stored_shares(decision, engines, self.weighed)


def stored_shares(
    decision: Decision, engines: Engines, weighed: Callable[[Floats, int, int], Floats]
) -> Floats:  # fmt: skip
    """Return the best of ``weighed(blocks held, blocks, block size)``, over the block sizes that engines use."""
    shares = np.zeros(len(engines))
    for block_size in decision.knowledge.start_kv_events():
        hashes = decision.hashes(block_size)
        if hashes:
            tiers = decision.knowledge.matched_by_tier(block_size, hashes)
            blocks, worth = tiers[DEVICE], np.float64(1.0) * tiers[DEVICE]
            for tier in tiers.keys() - {DEVICE}:
                blocks = blocks + tiers[tier]
                worth = worth + TIER_WEIGHTS[tier] * tiers[tier]
            if len(tiers) > 1:
                decision.tiers = {tier: found * block_size for tier, found in tiers.items()}
            decision.note_match(blocks * block_size)
            shares = np.maximum(shares, weighed(worth[engines.rows], len(hashes), block_size))
    return shares


class NoHitLRUScorer(Scorer, frozen=True):
    """Score for new prompts, which no engine has cached: 1 for the engine whose last new prompt is the oldest.

    The engine that got a new prompt last gets 0; engines that never got one come first. For a prompt that some engine
    has, all get 0.5. The prefix scorers of the same profile find the cached tokens; without them, every prompt is new.
    ``lru_size`` engines are remembered.
    """

    runs_last: ClassVar[bool] = True
    lru_size: Annotated[int, Meta(ge=1)] = 1024

    def score(self, decision: Decision, engines: Engines) -> Floats:
        if not _is_cold(decision):
            return np.full(len(engines), 0.5)
        if len(engines) == 1:
            return np.ones(1)
        turns = decision.knowledge.cold_turns(engines.rows, self.lru_size)
        scores = np.empty(len(engines))
        # Ranks instead of times: the distance between turns says nothing about load.
        scores[np.argsort(turns, kind="stable")] = np.linspace(1.0, 0.0, len(engines))
        return scores

    def picked(self, decision: Decision, row: int) -> None:
        """Record that the picked engine was the last one to get a new prompt, if the prompt is new."""
        if _is_cold(decision):
            decision.knowledge.note_cold(row)


def _is_cold(decision: Decision) -> bool:
    return decision.matched is None or not decision.matched.any()


class LoraAffinityScorer(Scorer, frozen=True):
    """Score of 1 for an engine that runs the request's LoRA adapter, 0.8 for one with space for another in its batch.

    An engine without space, where requests for the adapter already wait, gets 0.6. Others get 0, also if they serve no
    adapters or have no recent report. The base model counts as an adapter that no engine runs.
    """

    def score(self, decision: Decision, engines: Engines) -> Floats:
        wanted = None if decision.request is None else decision.request.adapter
        scores = np.zeros(len(engines), dtype=np.float64)
        for place, load in enumerate(engines.adapter_loads):
            if load is None:
                continue
            if wanted in load.running:
                scores[place] = 1.0
            elif len({*load.running, *load.waiting}) < load.max:
                scores[place] = 0.8
            elif wanted in load.waiting:
                scores[place] = 0.6
        return scores


class SessionAffinityScorer(Scorer, frozen=True):
    """Score of 1 for the engine to which the request's session belongs, 0 for the others; 0 for all without a session.

    ``header`` (lower case) names the session; without it the headers of Dynamo's and vLLM's clients do, then the body's
    ``session_id``, and with ``by_user`` its ``user``. It belongs to an engine by consistent hashing: no table is kept,
    routers agree, and only the sessions of an engine that leaves move. An engine that has more than ``max_load`` times
    its share of this router's sequences is skipped; its sessions go to the next engine of their preference.
    """

    header: Header = SESSION_HEADER
    by_user: bool = True
    max_load: Annotated[float, Meta(gt=1)] = MAX_LOAD

    def score(self, decision: Decision, engines: Engines) -> Floats:
        scores = np.zeros(len(engines))
        session = session_of(decision.request, (self.header, *OTHER_SESSION_HEADERS), self.by_user)
        if session:
            scores[home_of(session, engines, self.max_load)] = 1.0
        return scores


def home_of(session: str, engines: Engines, max_load: float = MAX_LOAD) -> int:
    """Return the index of the engine that the session prefers, of those with at most ``max_load`` times their share."""
    weights = preference(session, engines.keys)
    # One more than its share is always allowed: otherwise with few sequences any engine would exceed it.
    bound = np.ceil(max_load * (engines.in_flight.sum() + 1) / len(engines))
    # At least one engine is below the bound, which is above the mean.
    weights[engines.in_flight >= bound] = 0
    return int(weights.argmax())


def session_of(request: Request | None, headers: Sequence[str], by_user: bool = False) -> str | None:
    """Return the name of the request's session among those of all clients, by its ``headers`` or its body; or None."""
    if request is None:
        return None
    named = filter(None, map(request.headers.get, headers))
    found = next(named, None) or request.session or (request.user if by_user else None)
    return owned_name(found, request.headers) if found else None


# ---- engines' labels -------------------------------------------------------------------------------------------------

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


class TopologyAffinityScorer(Scorer, frozen=True):
    """Score of 1 on the partner's host, 0.2 in its rack, 0.05 in its zone, 0.02 in its region, else 0."""

    labels: TierLabels = TierLabels()

    def score(self, decision: Decision, engines: Engines) -> Sequence[float]:
        if decision.partner is None:
            return [0.0] * len(engines)
        return [SCORES.get(self.labels.nearest_common(decision.partner, engine) or "", 0.0) for engine in engines]


class ContextLengthScorer(Scorer, frozen=True):
    """Score of 0.3 to 1 in an engine's range, higher for a narrow range with space above; lower outside, by distance.

    The score is 0.5 without the label, and 0 for a label that is not a range.
    """

    label: Label = RANGE_LABEL

    def score(self, decision: Decision, engines: Engines) -> Sequence[float]:
        length, label = length_of(decision), self.label
        texts = [engine.labels.get(label) for engine in engines]
        scores: list[float] = []
        for text in texts:
            if text is None or (lengths := range_of(text)) is None:
                scores.append(WITHOUT_LABEL if text is None else 0.0)
                continue
            least, most = lengths
            width = most - least
            if not is_in(lengths, length):
                outside = length - most if length > most else least - length
                scores.append(BEST_OUTSIDE / (1 + outside / 1000))
            elif width == 0:
                scores.append(1.0)
            else:
                narrow, room = 1 / (1 + width / 10_000), (most - length) / width
                scores.append(BEST_OUTSIDE + (1 - BEST_OUTSIDE) * (0.7 * narrow + 0.3 * room))
        return scores


def length_of(decision: Decision) -> int:
    """Return the tokens of the decision's prompt; 0 without a request."""
    return 0 if decision.request is None else decision.request.num_tokens


@lru_cache(maxsize=1024)
def range_of(text: str) -> tuple[int, int] | None:
    """Return the lengths of a label's value, both included; None if it is not a range."""
    first, _, last = text.partition("-")
    try:
        least, most = int(first), int(last)
    except ValueError:
        return None
    return (least, most) if 0 <= least <= most else None


def is_in(lengths: tuple[int, int] | None, length: int) -> bool:
    """Return True if the length is in the range; no length is in None."""
    return lengths is not None and lengths[0] <= length <= lengths[1]
