"""Schemas of the custom resources that the chart makes, as far as their definitions go that it uses.

Written from the API references of Gateway API v1, of its inference extension (InferencePool v1, InferenceObjective
v1alpha2), of LeaderWorkerSet v1, of KEDA v2, of the Prometheus operator, of Istio and of GKE. Unknown fields are
refused, as an API server would drop them without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAME = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
TEXT = {"type": "string"}
LABELS = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}
DURATION = {"type": "string", "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"}


def record(required: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}


def several(item: Any, most: int, least: int = 1) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": least, "maxItems": most}


def resource(group: str, kind: str, spec: Any) -> dict[str, Any]:
    metadata = record(("name",), name=NAME, namespace=NAME, labels=LABELS, annotations={"type": "object"})
    own = {"apiVersion": {"const": group}, "kind": {"const": kind}, "metadata": metadata, "spec": spec}
    return record(("apiVersion", "kind", "metadata", "spec"), **own)


PATH_MATCH = record(type={"enum": ["Exact", "PathPrefix", "RegularExpression"]}, value=TEXT)
BACKEND = record(("name",), group=TEXT, kind=TEXT, name=NAME, namespace=NAME, port=PORT, weight={"type": "integer"})
PARENT = record(("name",), group=TEXT, kind=TEXT, name=NAME, namespace=NAME, sectionName=NAME, port=PORT)
TARGET = record(("group", "kind", "name"), group=TEXT, kind=TEXT, name=NAME)
TLS = record(("mode",), mode={"enum": ["SIMPLE"]}, insecureSkipVerify={"type": "boolean"})
RELABEL = record(
    sourceLabels={"type": "array", "items": TEXT}, regex=TEXT, targetLabel=TEXT, replacement=TEXT, action=TEXT
)
SCRAPE = record(
    port=TEXT, path=TEXT, interval=DURATION, scheme={"enum": ["http", "https"]},
    tlsConfig=record(insecureSkipVerify={"type": "boolean"}), relabelings={"type": "array", "items": RELABEL},
    metricRelabelings={"type": "array", "items": RELABEL},
)  # fmt: skip

INT_OR_SHARE = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": "^[0-9]+%$"}]}
COUNT = {"type": "integer", "minimum": 0}
POD = record(
    ("metadata", "spec"), metadata=record(labels=LABELS, annotations={"type": "object"}), spec={"type": "object"}
)
"""The tests check the rest as a pod of Kubernetes itself."""

SCHEMAS: Mapping[str, dict[str, Any]] = {
    "LeaderWorkerSet": resource(
        "leaderworkerset.x-k8s.io/v1",
        "LeaderWorkerSet",
        record(
            ("leaderWorkerTemplate",), replicas=COUNT, startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
            rolloutStrategy=record(
                ("type",), type={"enum": ["RollingUpdate"]},
                rollingUpdateConfiguration=record(partition=COUNT, maxUnavailable=INT_OR_SHARE, maxSurge=INT_OR_SHARE),
            ),
            networkConfig=record(("subdomainPolicy",), subdomainPolicy={"enum": ["Shared", "UniquePerReplica"]}),
            leaderWorkerTemplate=record(
                ("workerTemplate",), leaderTemplate=POD, workerTemplate=POD, size={"type": "integer", "minimum": 1},
                restartPolicy={"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
            ),
        ),
    ),
    "ScaledObject": resource(
        "keda.sh/v1alpha1",
        "ScaledObject",
        record(
            ("scaleTargetRef", "triggers"),
            scaleTargetRef=record(("name",), apiVersion=TEXT, kind=TEXT, name=NAME),
            pollingInterval=COUNT, cooldownPeriod=COUNT, minReplicaCount=COUNT, maxReplicaCount=COUNT,
            advanced=record(horizontalPodAutoscalerConfig=record(behavior={"type": "object"}, name=NAME)),
            triggers=several(
                record(
                    ("type", "metadata"), type=TEXT, metricType={"enum": ["AverageValue", "Value", "Utilization"]},
                    # All are texts; those of the scaler `prometheus` that the chart has.
                    metadata=record(
                        ("serverAddress", "query", "threshold"),
                        serverAddress=TEXT, query=TEXT, threshold=TEXT, ignoreNullValues={"enum": ["true", "false"]},
                    ),
                    authenticationRef=record(("name",), name=NAME, kind=TEXT),
                ),
                100,
            ),
        ),
    ),
    "InferencePool": resource(
        "inference.networking.k8s.io/v1",
        "InferencePool",
        record(
            ("selector", "targetPorts", "endpointPickerRef"),
            selector=record(("matchLabels",), matchLabels={**LABELS, "minProperties": 1}),
            targetPorts=several(record(("number",), number=PORT), 8),
            endpointPickerRef=record(
                ("name", "port"), group=TEXT, kind=TEXT, name=NAME, port=record(("number",), number=PORT),
                failureMode={"enum": ["FailOpen", "FailClose"]},
            ),
        ),
    ),
    "InferenceObjective": resource(
        "inference.networking.x-k8s.io/v1alpha2",
        "InferenceObjective",
        record(("poolRef",), priority={"type": "integer"}, poolRef=record(("name",), group=TEXT, kind=TEXT, name=NAME)),
    ),
    "HTTPRoute": resource(
        "gateway.networking.k8s.io/v1",
        "HTTPRoute",
        record(
            parentRefs=several(PARENT, 32),
            hostnames=several(TEXT, 16),
            rules=several(
                record(
                    matches=several(record(path=PATH_MATCH), 64),
                    backendRefs=several(BACKEND, 16),
                    timeouts=record(request=DURATION, backendRequest=DURATION),
                ),
                16,
            ),
        ),
    ),
    "DestinationRule": resource(
        "networking.istio.io/v1",
        "DestinationRule",
        record(
            ("host", "trafficPolicy"), host=NAME, trafficPolicy=record(tls=TLS),
        ),
    ),
    "HealthCheckPolicy": resource(
        "networking.gke.io/v1",
        "HealthCheckPolicy",
        record(
            ("targetRef",), targetRef=TARGET,
            default=record(
                checkIntervalSec={"type": "integer"}, timeoutSec={"type": "integer"},
                config=record(type={"enum": ["HTTP"]}, httpHealthCheck=record(requestPath=TEXT, port=PORT)),
            ),
        ),
    ),
    "GCPBackendPolicy": resource(
        "networking.gke.io/v1",
        "GCPBackendPolicy",
        record(("targetRef",), targetRef=TARGET, default=record(timeoutSec={"type": "integer", "minimum": 1})),
    ),
    "PodMonitor": resource(
        "monitoring.coreos.com/v1",
        "PodMonitor",
        record(
            ("selector", "podMetricsEndpoints"), selector=record(("matchLabels",), matchLabels=LABELS),
            podMetricsEndpoints=several(SCRAPE, 16),
        ),
    ),
}  # fmt: skip
