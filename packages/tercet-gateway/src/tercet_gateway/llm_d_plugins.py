"""Every plugin type of llm-d: supported, ignored or refused, with the reason.

The tables follow llm-d-router v0.10 and llm-d-inference-scheduler before it, with the older types that they still
accept, and later types that published files use. A type in none of the tables is not llm-d's, or is newer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FLEET = "the fleet does this itself"
HEADERS = "the endpoint picker itself names the prefill engine"
REQUESTS = "requests of OpenAI's API are parsed; for others an engine is picked without their prompt"
TOKENS = "the prompt is tokenized according to --render-model"
TURNS = "requests of one priority take turns by their fairness id, and of one id first come, first served"
ENGINES = "the engines are those of --engine"

WITHOUT_GAPS = "counted in tokens, without gaps, and not rescaled: 0.1 is a tenth of the prompt"
SESSIONS = "sessions belong to engines by hashing: no cookie is sent, and no table is kept"
TIERS = "by labels only"
READ: Mapping[str, str] = {
    "active-request-scorer": "",
    "always-disagg-pd-decider": "",
    "by-label": "",
    "by-label-selector": "",
    "concurrency-detector": "where saturationDetector names it; in a profile by requests, as utilization-filter",
    "context-length-aware": "as context-length-scorer, and with enableFiltering as context-length-filter",
    "decode-filter": "by the engine's role, not by a label",
    "disagg-profile-handler": "no encode stage; the decode engine is picked first",
    "kv-cache-utilization-scorer": "",
    "label-selector-filter": "",
    "load-aware-scorer": "",
    "lora-affinity-scorer": "",
    "max-score-picker": "",
    "no-hit-lru-scorer": "",
    "pd-profile-handler": "as disagg-profile-handler; no primaryPort",
    "precise-prefix-cache-scorer": WITHOUT_GAPS,
    "prefill-filter": "by the engine's role, not by a label",
    "prefix-based-pd-decider": "",
    "prefix-cache-affinity-filter": WITHOUT_GAPS + "; tokens in flight are those that engines report",
    "prefix-cache-scorer": WITHOUT_GAPS + "; blocks have one size for all engines",
    "queue-scorer": "",
    "random-picker": "",
    "running-requests-size-scorer": "",
    "session-affinity-filter": SESSIONS,
    "session-affinity-scorer": SESSIONS,
    "single-profile-handler": "",
    "token-load-scorer": "tokens are those that engines report, not an estimate",
    "topology-affinity-filter": TIERS,
    "topology-affinity-scorer": TIERS,
    "utilization-detector": "where saturationDetector names it, and in a profile, as saturation-filter",
    "utilization-filter": "",
    "weighted-random-picker": "",
}
"""Supported types; the text says how they differ, or is empty."""

PASSED_OVER: Mapping[str, str] = {
    "agent-identity": "its headers name the flow of a request, if its fairness id does not",
    "anthropic-parser": REQUESTS,
    "approx-prefix-cache-producer": "its parameters go to the scorers and filters that use it",
    "core-metrics-extractor": FLEET,
    "disagg-headers-handler": HEADERS,
    "endpoint-notification-source": FLEET,
    "fcfs-ordering-policy": TURNS,
    "file-discovery": ENGINES,
    "global-strict-fairness-policy": TURNS,
    "inflight-load-producer": "requests in flight are those that engines report, and the latest picks",
    "k8s-notification-source": FLEET,
    "metrics-data-source": FLEET,
    "models-data-extractor": FLEET,
    "models-data-source": FLEET,
    "openai-parser": REQUESTS,
    "p2p-source-producer": "picks are the same; engines are not notified of another place to fetch KV from",
    "passthrough-parser": REQUESTS,
    "precise-prefix-cache-producer": "block sizes and hashes are those in engines' KV events",
    "prefill-header-handler": HEADERS,
    "request-attribute-reporter": "the endpoint picker does not see answers, and reports nothing about them",
    "round-robin-fairness-policy": TURNS,
    "served-model-filter": "an engine without the request's adapter is never picked",
    "session-id-producer": "session-affinity-scorer itself reads its header",
    "sglanghttp-parser": REQUESTS,
    "static-usage-limit-policy": "requests of all priorities are admitted while an engine has room",
    "token-producer": TOKENS,
    "tokenizer": TOKENS,
    "topology-extractor": "its labels go to the filter and the scorer that use it",
    "vertexai-parser": REQUESTS,
    "vllmhttp-parser": REQUESTS,
}

ENCODE = "there are no encode-only engines; leave the stage out"
LATENCY = "there is no predictor of latencies; the load that engines report, and the decider learned-cost, are similar"
LIMITS = "there is one limit for all priorities: an engine's room"
DEADLINES = "requests have no deadlines here"
PICTURES = "pictures are not distinguished"
CLUSTERS = "engines are picked, not clusters"
REVISIONS = "revisions are not separated: start one picker for each revision while both run"
LABELS = "write a plugin that uses engines' labels (docs/scheduling.md)"

RANKS = "each data parallel rank is an engine: list their ports with --engine"
FAIRNESS = "flows, by their fairness id, take turns with equal weights"
REFUSED: Mapping[str, str] = {
    "always-disagg-multimodal-decider": ENCODE,
    "burst-prefix-cache-producer": "requests do not wait for similar requests",
    "data-parallel-profile-handler": RANKS,
    "dcgm-data-source": LABELS,
    "dcgm-extractor": LABELS,
    "destination-endpoint-served-verifier": "it is a plugin for tests",
    "disaggregatedset-rollout-pod-extractor": REVISIONS,
    "disaggregatedset-rollout-screener": REVISIONS,
    "dp-rank-header-handler": RANKS,
    "edf-ordering-policy": DEADLINES,
    "encode-filter": ENCODE,
    "endpoint-attribute-filter": LABELS,
    "endpoint-attribute-scorer": LABELS,
    "header-based-testing-filter": "it is a plugin for tests",
    "header-label-affinity-scorer": LABELS,
    "header-profile-handler": "profiles are by role",
    "latency-scorer": LATENCY,
    "latency-slo-admitter": LATENCY,
    "local-syncer": "pickers see each other's requests in engines' reports",
    "lmetric-scorer": "prefixes and requests are scored apart, by prefix-cache-scorer and active-request-scorer",
    "mm-embeddings-cache-producer": PICTURES,
    "mm-embeddings-cache-scorer": PICTURES,
    "multicluster-approx-prefix-cache-producer": CLUSTERS,
    "multicluster-file-discovery": CLUSTERS,
    "multicluster-kv-cache-utilization-scorer": CLUSTERS,
    "multicluster-metrics-data-source": CLUSTERS,
    "multicluster-metrics-extractor": CLUSTERS,
    "multicluster-prefix-cache-scorer": CLUSTERS,
    "multicluster-queue-scorer": CLUSTERS,
    "multicluster-session-affinity-filter": CLUSTERS,
    "predicted-latency-producer": LATENCY,
    "priority-holdback-policy": LIMITS,
    "priority-then-time-eviction-order-policy": "running requests are not ended for others",
    "probabilistic-admitter": "a request that may be dropped is dropped when no engine has room, not by chance before",
    "program-aware-fairness": FAIRNESS,
    "sheddable-eviction-filter": "running requests are not ended for others",
    "slo-deadline-ordering-policy": DEADLINES,
    "slo-headroom-tier-filter": LATENCY,
    "soft-reflective-ceiling-policy": LIMITS,
    "thunder-agent": FAIRNESS,
    "vllmgrpc-parser": "engines are called by HTTP",
}

WAITING = "waiting is configured by --max-queued, --queue-timeout and --objective"
SECTIONS: Mapping[str, str] = {
    "data": FLEET,
    "dataLayer": FLEET,
    "featureGates": "the features that they switch are always on here, or not supported",
    "flowControl": WAITING,
    "parser": REQUESTS,
    "requestHandler": REQUESTS,
}

KV_EVENTS = "block sizes and hashes are those in engines' KV events"
DEPRECATED = "llm-d does not use it either"
PRODUCER = "the fleet keeps the data"
PARAMETERS: Mapping[tuple[str, str], str] = {
    ("active-request-scorer", "requestTimeout"): DEPRECATED,
    ("disagg-profile-handler", "stageOrder"): "the decode engine is picked first",
    ("no-hit-lru-scorer", "prefixMatchInfoProducerName"): "all prefix scorers of the profile count",
    ("no-hit-lru-scorer", "prefixPluginName"): "all prefix scorers of the profile count",
    ("no-hit-lru-scorer", "prefixPluginType"): "all prefix scorers of the profile count",
    ("precise-prefix-cache-scorer", "indexerConfig"): KV_EVENTS,
    ("precise-prefix-cache-scorer", "kvEventsConfig"): KV_EVENTS,
    ("precise-prefix-cache-scorer", "speculativeIndexing"): KV_EVENTS,
    ("precise-prefix-cache-scorer", "speculativeTTL"): KV_EVENTS,
    ("precise-prefix-cache-scorer", "tokenProcessorConfig"): KV_EVENTS,
    ("prefix-based-pd-decider", "prefixMatchInfoProducerName"): "matches of the decode profile's scorers count",
    **{
        (f"{kind}prefix-cache-affinity-filter", f"{data}ProducerName"): PRODUCER
        for kind in ("", "precise-")
        for data in ("inFlightLoad", "latencyPredictionInfo")
    },
    ("prefix-cache-scorer", "autoTune"): "blocks have the size blockSize",
    ("concurrencyDetector", "headroom"): "an engine has room while it is below the thresholds",
    ("concurrencyDetector", "inFlightLoadProducerName"): PRODUCER,
    ("saturationDetector", "headroom"): "an engine has room while it is below the thresholds",
    ("saturationDetector", "metricsStalenessThreshold"): "a report counts for 1 s",
    **dict.fromkeys(
        (("session-affinity-scorer", "profileName"), ("session-affinity-filter", "profileName")),
        "each profile has separate sessions",
    ),
    ("token-load-scorer", "inFlightLoadProducerName"): PRODUCER,
    ("active-request-scorer", "inFlightLoadProducerName"): PRODUCER,
    ("utilization-filter", "inFlightLoadProducerName"): PRODUCER,
    **{
        (kind, "maxNumOfEndpoints"): "--fallbacks sets the number of endpoints"
        for kind in ("max-score-picker", "random-picker", "weighted-random-picker")
    },
}
RENAMED: Mapping[tuple[str, str], str] = {("prefix-cache-scorer", "blockSizeTokens"): "blockSize"}
RENAMED_TYPES: Mapping[str, str] = {
    "label-selector-filter": "by-label-selector",
    "pd-profile-handler": "disagg-profile-handler",
}
# Parameters whose default in llm-d differs from the default here.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "prefill-filter": {"allowsBoth": False},
    "prefix-cache-affinity-filter": {"maxPrefixBlocksToMatch": 2048},
    "prefix-cache-scorer": {"maxPrefixBlocksToMatch": 2048},
}
