"""Filters: plugins that leave engines out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta

from tercet.decisions.scheduling.plugin import Booleans, Decision, Engines, Filter, Floats


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
