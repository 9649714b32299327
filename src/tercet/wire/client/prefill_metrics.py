"""Metrics of prefills on other engines, for a decode engine or its sidecar."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

from tercet.wire.metric_buckets import SECONDS

PULLED, CACHED, LOCAL = "remote", "cached", "local"

prefills = Counter(
    "tercet_prefills",
    "Requests that named engines to prefill: `remote`: one of them prefilled; `cached`: this engine had the KV; "
    "`local`: this engine prefills, since none of them could; the code is that of the last error.",
    ["outcome", "code"],
)
failures = Counter("tercet_prefill_failures", "Named engines that did not prefill, by error.", ["code"])
seconds = Histogram(
    "tercet_prefill_seconds",
    "Seconds that requests waited for other engines to prefill, with any result.",
    buckets=SECONDS,
)
ALL = (prefills, failures, seconds)
