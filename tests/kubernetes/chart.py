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
        "rescheduler": {"enabled": True, "args": ["--max-moves", "2"], "env": [{"name": "A", "value": "b"}]},
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
    "open": {
        "modelCache": {"volume": {"nfs": {"server": "10.0.0.9", "path": "/models"}}},
        "auth": {"engines": False},
        "networkPolicy": {"enabled": False},
        "gateway": {"enabled": True, "parentRefs": [{"name": "g"}]},
        "epp": {"tls": {"selfSigned": False}},
        "engineDefaults": {"podDisruptionBudget": {"enabled": False}},
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
        elif each["kind"] == "Pod":
            yield f"Pod/{each['metadata']['name']}", each


def containers(among: list[Object]) -> Iterator[tuple[str, Object, Object]]:
    """Each container with its pod template."""
    for name, pod in pods(among):
        for each in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
            yield name, pod, each


def ports_of(pod: Object) -> dict[str, int]:
    """The ports of all containers of a pod, by their names."""
    spec = pod["spec"]
    every = (*spec.get("initContainers", ()), *spec["containers"])
    return {each["name"]: each["containerPort"] for container in every for each in container.get("ports", ())}


def selects(selector: Object, labels: Object) -> bool:
    return all(labels.get(key) == value for key, value in selector.items())
