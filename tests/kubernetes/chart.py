"""The chart, rendered with some values, and what is in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "kubernetes" / "tercet"
Object = dict[str, Any]
GROUPS = {"prefill", "decode"}
"""Of engines, in the chart's own values; those of VALUES come beside them."""
DIGEST = "sha256:" + "0123456789abcdef" * 4
FETCH: Object = {
    "name": "fetch",
    "image": "registry.example.com/fetch:1",
    "args": ["--to", "/var/cache/tercet"],
    "volumeMounts": [{"name": "cache", "mountPath": "/var/cache/tercet"}],
}
"""A container of the user's own, before those of the chart."""

VALUES: Mapping[str, Object] = {
    "default": {},
    "gateway": {
        "gateway": {
            "enabled": True,
            "parentRefs": [{"name": "inference", "namespace": "gateways"}],
            "provider": "istio",
            "hostnames": ["models.example.com"],
            "objectives": {"chat": 10, "batch": -1},
            "prefillNetworks": ["10.244.0.0/16", "[fd00::]/8"],
            "from": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateways"}}}],
        },
        "epp": {"replicas": 2, "scheduling": "plugins: []\nschedulingProfiles: [{name: mine}]\n"},
        "router": {"enabled": False},
        "engineDefaults": {"autoscaling": {"enabled": True}},
    },
    "everything": {
        "model": "Qwen/Qwen3-0.6B",
        "servedModelName": "qwen",
        "image": {"pullSecrets": ["pull"], "engine": {"tag": "7"}},
        "modelCache": {"existingClaim": "models", "volume": {"hostPath": {"path": "/passed/over"}}},
        "hubToken": {"existingSecret": "hub"},
        "auth": {"existingSecret": "mine"},
        "engines": {
            "prefill": {"role": "prefill", "replicas": 3, "kind": "Deployment", "autoscaling": {"enabled": True}},
            "decode": {
                "role": "decode",
                "gpus": 2,
                "image": "tercet-cuda:1",
                "vllmArgs": ["--max-num-seqs", "64"],
                "resources": {"limits": {"rdma/hca": 1}},
                "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
                "volumes": [{"name": "fabric", "hostPath": {"path": "/dev/infiniband"}}],
                "volumeMounts": [{"name": "fabric", "mountPath": "/dev/infiniband"}],
                "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
                "nodeSelector": {"gpu": "h100"},
                "priorityClassName": "serving",
                "topologySpreadConstraints": [
                    {
                        "maxSkew": 1,
                        "topologyKey": "topology.kubernetes.io/zone",
                        "whenUnsatisfiable": "ScheduleAnyway",
                        "labelSelector": {"matchLabels": {"tercet/group": "decode"}},
                    }
                ],
            },
            "behind": {"role": "decode", "sidecar": {"enabled": True, "args": ["--connector", "tercet"]}},
            "spare": {"plugin": {"lease_ttl": 30}, "podLabels": {"zone": "a"}, "autoscaling": {"enabled": True}},
            "plain": {},
        },
        "router": {
            "replicas": 2,
            "workers": 4,
            "programArgs": {"pick": "scheduled"},
            "scheduling": "plugins: []\nschedulingProfiles: [{name: mine}]\n",
            "args": ["--max-in-flight-per-engine", "64"],
            "vllmArgs": ["--enable-auto-tool-choice"],
            "tls": {"existingSecret": "cert"},
            "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
            "autoscaling": {"enabled": True},
        },
        "gateway": {
            "enabled": True,
            "parentRefs": [{"name": "inference"}],
            "provider": "gke",
            "prefillNetworks": ["10.244.0.0/16"],
        },
        "epp": {
            "tls": {"existingSecret": "epp-cert"},
            "args": ["--fallbacks", "3", "--render-model", "/models/qwen"],
            "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
            "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
        },
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "networkPolicy": {
            "clients": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "apps"}}}],
            "betweenEngines": [{"port": 5600, "endPort": 5700}],
            "monitoring": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        },
    },
    "store": {
        "store": {"enabled": True, "replicas": 2, "disk": {"claim": "110Gi"}, "args": ["--transport", "tcp"]},
        "podMonitor": {"enabled": True},
    },
    "open": {
        "modelCache": {"volume": {"nfs": {"server": "10.0.0.9", "path": "/models"}}},
        "auth": {"engines": False},
        "networkPolicy": {"enabled": False},
        "gateway": {"enabled": True, "parentRefs": [{"name": "g"}]},
        "epp": {"tls": {"selfSigned": False}},
        "engineDisruption": {"enabled": False},
        "engineDefaults": {"kind": "StatefulSet", "strategy": {"type": "OnDelete"}},
    },
    "nodes": {
        "image": {
            "engine": {"digest": DIGEST},
            "router": {"tag": "7", "digest": DIGEST},
            "gateway": {"digest": DIGEST},
        },
        "engines": {
            "prefill": {"role": "prefill", "autoscaling": {"enabled": True}},
            "decode": {
                "role": "decode",
                "kind": "LeaderWorkerSet",
                "nodes": 2,
                "gpus": 8,
                "vllmArgs": ["--tensor-parallel-size", "8", "--pipeline-parallel-size=2"],
                "strategy": {
                    "type": "RollingUpdate",
                    "rollingUpdateConfiguration": {"maxSurge": 0, "maxUnavailable": 1},
                },
                "initContainers": [FETCH],
                "podAnnotations": {"leaderworkerset.sigs.k8s.io/exclusive-topology": "rack"},
                "autoscaling": {"enabled": True, "stepSeconds": "0.05"},
            },
            "more": {"role": "both", "autoscaling": {"enabled": True}},
        },
        "autoscaler": {
            "kind": "ScaledObject",
            "prometheus": "http://prometheus-operated.monitoring:9090",
            "authenticationRef": {"name": "prometheus"},
        },
        "router": {
            "route": {
                "enabled": True,
                "parentRefs": [{"name": "web", "namespace": "gateways"}],
                "hostnames": ["a.example.com"],
            },
            "autoscaling": {"enabled": True},
            "strategy": {"type": "Recreate"},
            "replicas": 2,
            "sharedState": True,
            "initContainers": [FETCH],
        },
        "podMonitor": {"enabled": True},
        "networkPolicy": {
            "clients": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateways"}}}]
        },
    },
}


def rendered(values: Object, name: str = "tercet") -> Mapping[str, str]:
    """Every template as text."""
    import helm_python

    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        return chart.render(values, name=name, namespace="models")


def objects(values: Object, name: str = "tercet") -> list[Object]:
    """What would be created, tests of Helm's included."""
    texts = (text for path, text in rendered(values, name).items() if not path.endswith(".txt"))
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


def of_kind(kind: str, among: list[Object]) -> dict[str, Object]:
    return {each["metadata"]["name"]: each for each in among if each["kind"] == kind}


def pods(among: list[Object]) -> Iterator[tuple[str, Object]]:
    """The pod templates, by what makes pods of them; and pods."""
    for each in among:
        if each["kind"] in ("Deployment", "StatefulSet"):
            yield f"{each['kind']}/{each['metadata']['name']}", each["spec"]["template"]
        elif each["kind"] == "LeaderWorkerSet":
            for which in ("leader", "worker"):
                template = each["spec"]["leaderWorkerTemplate"][f"{which}Template"]
                yield f"{each['kind']}/{each['metadata']['name']}/{which}", template
        elif each["kind"] == "Pod":
            yield f"Pod/{each['metadata']['name']}", each


def containers(among: list[Object]) -> Iterator[tuple[str, Object, Object]]:
    """Each of the chart's containers with its pod template."""
    for name, pod in pods(among):
        for each in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
            if each != FETCH:
                yield name, pod, each


def ports_of(pod: Object) -> dict[str, int]:
    """The ports of all containers of a pod, by their names."""
    spec = pod["spec"]
    every = (*spec.get("initContainers", ()), *spec["containers"])
    return {each["name"]: each["containerPort"] for container in every for each in container.get("ports", ())}


def selects(selector: Object, labels: Object) -> bool:
    return all(labels.get(key) == value for key, value in selector.items())


def chooses(selector: Object, labels: Object) -> bool:
    """As :func:`selects`, of a whole selector."""
    among = (labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", ()))
    return selects(selector.get("matchLabels", {}), labels) and all(among)
