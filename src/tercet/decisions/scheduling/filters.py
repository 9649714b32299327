"""Filters: plugins that leave engines out, by role, label, load, or because others have the prefix or the session.

The affinity filters are written from the formulas of llm-d-router's ``prefix-cache-affinity-filter`` and
``session-affinity-filter``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta

from tercet.decisions.scheduling.plugin import Booleans, Decision, Engines, Filter, Floats, preference
from tercet.decisions.scheduling.scorers import (
    RANGE_LABEL,
    TIERS,
    Header,
    Label,
    Tier,
    TierLabels,
    is_in,
    length_of,
    prompt_tokens_of,
    range_of,
    routed_match,
    session_of,
    stored_shares,
)
from tercet.protocol.headers import OTHER_SESSION_HEADERS, SESSION_HEADER

Share = Annotated[float, Meta(ge=0, le=1)]


class PrefillFilter(Filter, frozen=True):
    """Filter that keeps engines of the role ``prefill``; with ``allows_both``, also those of the role ``both``."""

    lasting: ClassVar[bool] = True
    allows_both: bool = True

    def keep(self, decision: Decision, engines: Engines) -> Sequence[bool]:
        roles = ("prefill", "both") if self.allows_both else ("prefill",)
        return [engine.role in roles for engine in engines]


class DecodeFilter(Filter, frozen=True):
    """Filter that keeps engines of the roles ``decode`` and ``both``."""

    lasting: ClassVar[bool] = True

    def keep(self, decision: Decision, engines: Engines) -> Sequence[bool]:
        return [engine.role in ("decode", "both") for engine in engines]


class ByLabel(Filter, frozen=True):
    """Filter that keeps engines whose ``label`` has one of ``valid_values``.

    With ``allows_no_label``, it also keeps engines without the label.
    """

    lasting: ClassVar[bool] = True
    label: Annotated[str, Meta(min_length=1)]
    valid_values: frozenset[str] = frozenset()
    allows_no_label: bool = False

    def keep(self, decision: Decision, engines: Engines) -> Sequence[bool]:
        label, valid, without = self.label, self.valid_values, self.allows_no_label
        return [value in valid if (value := e.labels.get(label)) is not None else without for e in engines]


class LabelExpression(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A requirement on one label, as in Kubernetes."""

    key: Annotated[str, Meta(min_length=1)]
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: frozenset[str] = frozenset()

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Return True if the labels meet the requirement."""
        value = labels.get(self.key)
        if self.operator in ("In", "Exists"):
            return value is not None and (self.operator == "Exists" or value in self.values)
        return value is None or (self.operator == "NotIn" and value not in self.values)


class ByLabelSelector(Filter, frozen=True):
    """Filter that keeps engines with exactly the ``match_labels`` that also meet all ``match_expressions``."""

    lasting: ClassVar[bool] = True
    match_labels: Mapping[str, str] = {}
    match_expressions: tuple[LabelExpression, ...] = ()

    def keep(self, decision: Decision, engines: Engines) -> Sequence[bool]:
        wanted, rules = self.match_labels.items(), self.match_expressions
        return [wanted <= e.labels.items() and all(rule.holds(e.labels) for rule in rules) for e in engines]


class HealthFilter(Filter, frozen=True):
    """Filter that keeps engines that answered the last poll.

    With ``max_age``, it keeps only those of them whose last report is at most that number of seconds old.
    """

    strict: bool = False
    max_age: float | None = None

    def keep(self, decision: Decision, engines: Engines) -> Booleans | Sequence[bool]:
        reachable = [engine.reachable for engine in engines]
        if self.max_age is None:
            return reachable
        return np.array(reachable, dtype=np.bool_) & (engines.age <= self.max_age)


class SaturationFilter(Filter, frozen=True):
    """Filter that keeps engines with little work: few waiting requests, and a small share of KV in use.

    The limits are ``queue_depth_threshold`` and ``kv_cache_util_threshold``, both included. An engine without a recent
    report counts as full, unless ``allows_unknown``.
    """

    strict: bool = False
    queue_depth_threshold: Annotated[int, Meta(ge=0)] = 5
    kv_cache_util_threshold: Annotated[float, Meta(gt=0, le=1)] = 0.8
    allows_unknown: bool = False

    def keep(self, decision: Decision, engines: Engines) -> Booleans:
        queue, kv = engines.waiting, engines.kv_usage
        if self.allows_unknown:
            return ~((queue > self.queue_depth_threshold) | (kv > self.kv_cache_util_threshold))
        return (queue <= self.queue_depth_threshold) & (kv <= self.kv_cache_util_threshold)


class UtilizationCondition(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The limit of one resource that an engine may use."""

    metric: Literal["active-requests", "running-requests", "waiting-queue", "kv-cache-utilization"]
    max_value: Annotated[float, Meta(ge=0)]


class UtilizationFilter(Filter, frozen=True):
    """Filter that keeps engines that meet all ``conditions``, and engines without a recent report.

    If none is left, it keeps all of them with ``fallback_on_empty``; without, the pick fails.
    """

    conditions: Annotated[tuple[UtilizationCondition, ...], Meta(min_length=1)]
    fallback_on_empty: bool = False

    def keep(self, decision: Decision, engines: Engines) -> Booleans:
        keep = np.ones(len(engines), dtype=np.bool_)
        for condition in self.conditions:
            keep &= ~(_measured(condition.metric, engines) > condition.max_value)
        return keep if keep.any() or not self.fallback_on_empty else ~keep


def _measured(metric: str, engines: Engines) -> Floats:
    if metric == "active-requests":
        return engines.in_flight
    if metric == "running-requests":
        return engines.running
    return engines.waiting if metric == "waiting-queue" else engines.kv_usage


# ---- affinity --------------------------------------------------------------------------------------------------------


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
        if explores or sticky.all():
            return everyone
        # How many prompt tokens the least busy engine with the prompt is behind the least busy one without it.
        tokens = prompt_tokens_of(engines)
        behind = float(tokens[sticky].min() - tokens[~sticky].min())
        longest = self.max_ttft_penalty_ms / 1000 * self.peak_prefill_throughput
        costs_too_much = any(0 < limit < behind for limit in (longest, self.max_tokens_in_flight_penalty))
        return everyone if costs_too_much else sticky


class PrefixCacheAffinityFilter(AffinityFilter, frozen=True):
    """Filter by the prompts that were routed to engines before, as ``prefix-cache-scorer`` counts them."""

    block_size: Annotated[int, Meta(ge=1)] = 64
    max_prefix_blocks_to_match: Annotated[int, Meta(ge=1)] = 256
    lru_capacity_per_server: Annotated[int, Meta(ge=1)] = 31_250

    def shares(self, decision: Decision, engines: Engines) -> Floats:
        matched, of = routed_match(self, decision)
        return matched[engines.rows] / max(1, of)

    def picked(self, decision: Decision, row: int) -> None:
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
        session = session_of(decision.request, (self.header, *OTHER_SESSION_HEADERS), self.by_user)
        if not session:
            return np.ones(len(engines), dtype=np.bool_)
        weights = preference(session, engines.keys)
        return np.arange(len(engines)) == weights.argmax()


# ---- engines' labels, as the scorers of the same names read them -----------------------------------------------------


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


class ContextLengthFilter(Filter, frozen=True):
    """Filter that keeps engines whose range contains the prompt's length, and engines without the label."""

    label: Label = RANGE_LABEL

    def keep(self, decision: Decision, engines: Engines) -> Sequence[bool]:
        length, label = length_of(decision), self.label
        texts = [engine.labels.get(label) for engine in engines]
        return [text is None or is_in(range_of(text), length) for text in texts]
