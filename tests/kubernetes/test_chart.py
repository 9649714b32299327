"""What the chart makes is what Kubernetes takes, fits together, is safe by default, and starts what exists."""

from __future__ import annotations

import base64
import json
import re
import shlex
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import msgspec
import promql_parser
import pytest
import typer
import yaml
from scripts.reference.built import page

from tercet.cli.app import app
from tercet.cli.setting_flags import flags_given
from tercet.fleet.discovery import engines_of
from tercet.fleet.kubernetes_api import InferencePool, Pod
from tercet.protocol.names import AllowedPrefillers
from tercet.router.state.state_store import ConfigMapStore
from tercet.settings import RouterConfig, Settings, decode_settings
from tercet.vllm_plugin.start.plugin_settings import parse_settings
from tercet_gateway.gateway_settings import PickerConfig, SidecarConfig
from tests.unit.router.api_objects import ApiObjects

from .chart import (
    CHART,
    DIGEST,
    FETCH,
    GROUPS,
    VALUES,
    Object,
    chooses,
    containers,
    objects,
    of_kind,
    pods,
    ports_of,
    rendered,
    selects,
)
from .crds import SCHEMAS

pytestmark = pytest.mark.verifies("Helm chart (rendered)", vllm=False)

VERSIONS = ("1.28", "1.30", "1.32", "1.34", "1.37")
CASES = pytest.mark.parametrize("values", VALUES.values(), ids=VALUES.keys())


@CASES
@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_it(values: Object, version: str) -> None:
    import kubernetes_validate

    for each in objects(values):
        if each["kind"] in SCHEMAS:
            jsonschema.validate(each, SCHEMAS[each["kind"]])
            for pod in (template for name, template in pods([each]) if name.startswith("LeaderWorkerSet/")):
                kubernetes_validate.validate(
                    {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "p"}, "template": pod},
                    version,
                    strict=True,
                )
            if each["kind"] == "ScaledObject":
                scaler = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "s"}}
                target, behavior = (
                    each["spec"]["scaleTargetRef"],
                    each["spec"]["advanced"]["horizontalPodAutoscalerConfig"],
                )
                spec = {"scaleTargetRef": target, "maxReplicas": each["spec"]["maxReplicaCount"], **behavior}
                kubernetes_validate.validate({**scaler, "spec": spec}, version, strict=True)
        else:
            kubernetes_validate.validate(each, version, strict=True)


OWN: Object = {
    "env": [{"name": "HOME", "value": "/mine"}, {"name": "TERCET_SECRET", "value": "s"}, {"name": "NEW", "value": "n"}],
    "podLabels": {"helm.sh/chart": "mine", "new": "label"},
    "podAnnotations": {"tercet/settings": "mine"},
}
MOUNTED: Object = {
    "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}, {"name": "more", "emptyDir": {}}],
    "volumeMounts": [{"name": "more", "mountPath": "/tmp/"}, {"name": "more", "mountPath": "/more"}],
}


def test_a_users_items_replace_the_charts_of_the_same_name() -> None:
    gateway = {"enabled": True, "parentRefs": [{"name": "g"}]}
    both = {**OWN, **MOUNTED}
    values: Object = {"engineDefaults": both, "router": both, "epp": both}
    made = pods(objects({**values, "gateway": gateway}))
    found = {name: pod for name, pod in made if name.startswith("Deployment/")}
    assert len(found) == 4
    for name, pod in found.items():
        [container] = pod["spec"]["containers"]
        names = [each["name"] for each in container["env"]]
        assert len(names) == len(set(names)), name
        assert {"HOME", "TERCET_SECRET", "NEW"} <= set(names)
        assert all(each in container["env"] for each in OWN["env"])
        assert pod["metadata"]["labels"]["helm.sh/chart"] == "mine"
        assert pod["metadata"]["annotations"]["tercet/settings"] == "mine"
        volumes = [each["name"] for each in pod["spec"]["volumes"]]
        paths = [each["mountPath"].rstrip("/") for each in container["volumeMounts"]]
        assert (len(volumes), len(paths)) == (len(set(volumes)), len(set(paths)))
        assert all(each in pod["spec"]["volumes"] for each in MOUNTED["volumes"])
        assert all(each in container["volumeMounts"] for each in MOUNTED["volumeMounts"])


def test_helm_finds_nothing_to_say() -> None:
    import helm_python

    said = helm_python.lint(CHART, strict=True)
    assert [each for each in said["messages"] if each["severity"] > 1] == []
    assert not said["errors"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"engine": {}}, "engine"),
        ({"engines": {"decode": {"role": "encode"}}}, "role"),
        ({"engines": {"decode": {"replica": 1}}}, "replica"),
        ({"engines": {"Decode": {}}}, "Decode"),
        ({"engines": {"prefill": None, "decode": None}}, "engines"),
        ({"ports": {"streams": 70000}}, "streams"),
        ({"router": {"replicas": "two"}}, "replicas"),
        ({"gateway": {"failureMode": "Maybe"}}, "failureMode"),
        ({"gateway": {"objectives": {"chat": "high"}}}, "chat"),
        ({"store": {"memory": "4 gigabytes"}}, "memory"),
    ],
)
def test_values_that_mean_nothing_are_refused(values: Object, said: str) -> None:
    import helm_python

    with pytest.raises(helm_python.HelmValuesError, match=said):
        rendered(values)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"gateway": {"enabled": True}}, "name the Gateway"),
        ({"router": {"enabled": False}}, "engines get no requests"),
        ({"engines": {"decode": {"sidecar": {"enabled": True}}}}, "prefillNetworks"),
        ({"engines": {"decode": {"nodes": 2}}}, "LeaderWorkerSet"),
        ({"engines": {"decode": {"kind": "LeaderWorkerSet"}}}, "more than 1"),
        ({"engines": {"decode": {"kind": "LeaderWorkerSet", "nodes": 2}}}, "tensor-parallel-size"),
        ({"autoscaler": {"kind": "ScaledObject"}, "router": {"autoscaling": {"enabled": True}}}, "prometheus"),
        ({"engines": {"decode": {"autoscaling": {"enabled": True, "kvUsage": ""}}}}, "no signal"),
        ({"router": {"route": {"enabled": True}}}, "name the Gateway"),
        ({"router": {"autoscaling": {"enabled": True, "minReplicas": 5}}}, "minReplicas, 5, is above .*maxReplicas, 4"),
        (
            {"engines": {"decode": {"autoscaling": {"enabled": True, "minReplicas": 3, "maxReplicas": 2}}}},
            "decode: autoscaling.minReplicas, 3, is above autoscaling.maxReplicas, 2",
        ),
        (
            {"router": {"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}},
            "router.env: A is given twice",
        ),
        ({"router": {"volumeMounts": [{"name": "x"}]}}, "router.volumeMounts: an item has no mountPath"),
        ({"router": {"podLabels": {"app.kubernetes.io/component": "x"}}}, "cannot be replaced"),
        ({"router": {"initContainers": [{"name": "router"}]}}, "is called router already"),
        ({"engineDefaults": {"initContainers": [FETCH, FETCH]}}, "is called fetch already"),
        ({"ports": {"kvEvents": 8000}}, "ports.kvEvents: 8000 is also ports.engine"),
        ({"ports": {"kvReplay": 9110}}, "is one of the ports from"),
        ({"ports": {"kvFirst": 9200}}, "is above ports.kvLast"),
        ({"router": {"port": 9200}}, "is also ports.streams"),
        (
            {"router": {"route": {"enabled": True, "parentRefs": [{"name": "g"}]}, "tls": {"existingSecret": "c"}}},
            "leave",
        ),
    ],
)
def test_values_that_do_not_go_together_are_refused(values: Object, said: str) -> None:
    import helm_python

    with pytest.raises(helm_python.HelmRenderError, match=said):
        rendered(values)


# ---- it fits together --------------------------------------------------------------------------------------------


@CASES
def test_names_are_of_things_that_exist(values: Object) -> None:
    made = objects(values)
    existing = {(each["kind"], each["metadata"]["name"]) for each in made}
    given = {("Secret", name) for name in ("mine", "hub", "cert", "epp-cert", "pull")}
    templates = dict(pods(made))
    for name, pod in templates.items():
        if name.startswith("Pod/"):
            continue
        assert ("ServiceAccount", pod["spec"]["serviceAccountName"]) in existing
        for volume in pod["spec"]["volumes"]:
            if "secret" in volume:
                assert ("Secret", volume["secret"]["secretName"]) in existing | given
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in existing
        every = (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"])
        mounted = {each["name"] for container in every for each in container["volumeMounts"]}
        owner = of_kind("StatefulSet", made).get(name.removeprefix("StatefulSet/"), {"spec": {}})
        claimed = {each["metadata"]["name"] for each in owner["spec"].get("volumeClaimTemplates", ())}
        assert mounted == {each["name"] for each in pod["spec"]["volumes"]} | claimed
    for _, _, container in containers(made):
        for each in container["env"]:
            if "secretKeyRef" in each.get("valueFrom", {}):
                assert ("Secret", each["valueFrom"]["secretKeyRef"]["name"]) in existing | given
    for service in of_kind("Service", made).values():
        chosen = [pod for pod in templates.values() if selects(service["spec"]["selector"], pod["metadata"]["labels"])]
        assert chosen
        for port in service["spec"]["ports"]:
            for pod in chosen:
                assert port["targetPort"] in {*ports_of(pod), *ports_of(pod).values()}
    for each in made:
        if each["kind"] in ("PodDisruptionBudget", "NetworkPolicy"):
            selector = each["spec"].get("podSelector", each["spec"].get("selector"))
            assert any(chooses(selector, pod["metadata"]["labels"]) for pod in templates.values())
        if each["kind"] in ("HorizontalPodAutoscaler", "ScaledObject"):
            target = each["spec"]["scaleTargetRef"]
            assert (target["kind"], target["name"]) in existing
            scaled = of_kind(target["kind"], made)[target["name"]]
            assert "replicas" not in scaled["spec"], "or an upgrade would undo what was scaled"
    for each in (*of_kind("Deployment", made).values(), *of_kind("StatefulSet", made).values()):
        assert selects(each["spec"]["selector"]["matchLabels"], each["spec"]["template"]["metadata"]["labels"])


@CASES
def test_no_selector_is_of_two(values: Object) -> None:
    made = objects(values)
    owners = (*of_kind("Deployment", made).values(), *of_kind("StatefulSet", made).values())
    assert owners
    for each in owners:
        mine = [
            other["metadata"]["name"]
            for other in owners
            if selects(each["spec"]["selector"]["matchLabels"], other["spec"]["template"]["metadata"]["labels"])
        ]
        assert mine == [each["metadata"]["name"]]


@CASES
def test_engines_are_found_as_they_listen(values: Object) -> None:
    """What the router and the picker look for is what the engines' pods are."""
    made = objects(values)
    wanted = [
        arg.removeprefix("--endpoint-selector=")
        for _, _, container in containers(made)
        for arg in container["args"]
        if arg.startswith("--endpoint-selector=")
    ]
    stores = values.get("store", {}).get("replicas", 0) > 0
    for one in wanted:
        assert (" in (engine,store)" in one) is stores
    selectors = [
        dict(each.split("=") for each in one.replace(" in (engine,store)", "=engine").split(",")) for one in wanted
    ]
    for pool in of_kind("InferencePool", made).values():
        found = msgspec.convert(pool, InferencePool)
        selectors.append(found.spec.selector.match_labels)
        assert [each.number for each in found.spec.target_ports] == [8000]
    assert selectors
    engines = 0
    for name, pod in pods(made):
        component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        assert all(selects(each, pod["metadata"]["labels"]) is (component == "engine") for each in selectors), name
        if component in ("engine", "store"):
            engines += component == "engine"
            seen = {**pod, "metadata": {**pod["metadata"], "name": "e-0"}}
            seen["status"] = {"podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
            (engine,) = engines_of(msgspec.convert(seen, Pod), (1,))
            assert engine.address.url == f"http://10.0.0.1:{ports_of(pod)['http']}"
            assert engine.address.role == pod["metadata"]["labels"]["tercet/role"]
    assert engines == len(GROUPS | values.get("engines", {}).keys())


@CASES
def test_policies_let_through_what_must_come_and_nothing_else(values: Object) -> None:
    made = objects(values)
    policies = of_kind("NetworkPolicy", made).values()
    templates = {name: pod for name, pod in pods(made) if not name.startswith("Pod/")}
    if not values.get("networkPolicy", {}).get("enabled", True):
        assert not policies
        return
    for name, pod in templates.items():
        labels = pod["metadata"]["labels"]
        mine = [each for each in policies if selects(each["spec"]["podSelector"]["matchLabels"], labels)]
        assert len(mine) == 1, name
        assert all("from" in rule or name.endswith("router") for rule in mine[0]["spec"]["ingress"])
        # Where engines connect: every stream port of it is open to them.
        args = dict(arg.split("=", 1) for arg in pod["spec"]["containers"][0]["args"] if "=" in arg)
        if "--stream-port" in args:
            first = int(args["--stream-port"])
            last = first + int(args.get("--workers", "1")) - 1
            opened = [port for rule in mine[0]["spec"]["ingress"] for port in rule["ports"] if port["port"] == first]
            assert [port.get("endPort", first) for port in opened] == [last], name


# ---- it is safe --------------------------------------------------------------------------------------------------


@CASES
def test_pods_may_do_little(values: Object) -> None:
    made = objects(values)
    for name, pod, container in containers(made):
        spec, own = pod["spec"], container["securityContext"]
        assert spec["securityContext"]["runAsNonRoot"], name
        assert own["readOnlyRootFilesystem"], name
        assert own["allowPrivilegeEscalation"] is False, name
        assert own["capabilities"]["drop"] == ["ALL"], name
        more = own["capabilities"].get("add", [])
        assert more == (["IPC_LOCK"] if name == "Deployment/tercet-decode" and "hubToken" in values else []), name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys(), name
        assert spec["enableServiceLinks"] is False, name
        component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        asks = component in ("router", "epp")
        assert spec["automountServiceAccountToken"] is asks, name
    role = of_kind("Role", made)["tercet-discovery"]
    verbs = ["get", "list", "watch"]
    assert role["rules"][0] == {"apiGroups": [""], "resources": ["pods"], "verbs": verbs}
    assert all(rule["verbs"] == verbs for rule in role["rules"])
    # A pool is one object; objectives are any number of them, with names of their own.
    unnamed = [rule["resources"] for rule in role["rules"][1:] if not rule.get("resourceNames")]
    assert unnamed in ([], [["inferenceobjectives"]])
    assert not of_kind("ClusterRole", made)


def rights_of(account: str, made: list[Object]) -> list[Object]:
    """The rules of all Roles that are bound to a service account."""
    bound = [
        binding["roleRef"]["name"]
        for binding in of_kind("RoleBinding", made).values()
        if account in [each["name"] for each in binding["subjects"]]
    ]
    return [rule for name in bound for rule in of_kind("Role", made)[name]["rules"]]


def test_routers_that_share_a_state_may_do_what_they_do_and_no_more() -> None:
    made = objects(VALUES["nodes"])
    pod = of_kind("Deployment", made)["tercet-router"]["spec"]["template"]["spec"]
    (flag,) = [each for each in pod["containers"][0]["args"] if each.startswith("--state-configmap=")]
    api = ApiObjects()
    store = ConfigMapStore(api.ask, "models", flag.partition("=")[2])
    turn = store.turn("roles")
    for _ in range(2):
        assert store.store(b"{}", store.load().mark)
    assert turn.take()
    turn.release()
    rules = rights_of(pod["serviceAccountName"], made)
    needed = {tuple(each) for each in (rule_for(method, path) for method, path in api.calls)}
    for group, resource, verb, name in needed:
        rule = [
            each
            for each in rules
            if each["apiGroups"] == [group] and resource in each["resources"] and verb in each["verbs"]
        ]
        assert any(name in each.get("resourceNames", [name]) for each in rule), (resource, verb, name)
    written = [each for each in rules if each["resources"] != ["pods"]]
    assert {verb for each in written if "resourceNames" not in each for verb in each["verbs"]} == {"create"}
    assert rights_of("tercet-discovery", made) == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    ]
    assert "--state-configmap" not in json.dumps(objects({}))


def rule_for(method: str, path: str) -> tuple[str, str, str, str]:
    """Group, resource, verb and name that a call needs."""
    group = path.split("/")[2] if path.startswith("/apis/") else ""
    resource, _, name = path.partition("/namespaces/models/")[2].partition("/")
    return group, resource, {"GET": "get", "POST": "create", "PATCH": "patch"}[method], name


@CASES
def test_secrets_are_in_no_argument(values: Object) -> None:
    made = objects(values)
    secrets = {
        base64.b64decode(value).decode() for each in of_kind("Secret", made).values() for value in each["data"].values()
    }
    assert secrets or values.get("auth", {}).get("existingSecret")
    for _, _, container in containers(made):
        said = json.dumps([container["args"], [each.get("value") for each in container["env"]]])
        assert not [secret for secret in secrets if secret in said]
        named = {each["name"] for each in container["env"]}
        assert "TERCET_SECRET" in named or container["name"] == "status"


def test_engines_on_devices_go_where_devices_are() -> None:
    pod = of_kind("Deployment", objects(VALUES["everything"]))["tercet-decode"]["spec"]["template"]["spec"]
    (engine,) = pod["containers"]
    assert engine["image"] == "tercet-cuda:1"
    assert engine["resources"]["limits"] == {"nvidia.com/gpu": 2, "rdma/hca": 1}
    assert (pod["nodeSelector"], pod["priorityClassName"]) == ({"gpu": "h100"}, "serving")
    assert pod["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert pod["topologySpreadConstraints"][0]["topologyKey"] == "topology.kubernetes.io/zone"
    assert pod["imagePullSecrets"] == [{"name": "pull"}]
    env = {each["name"]: each for each in engine["env"]}
    assert env["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}
    assert env["HF_HOME"]["value"].startswith("/var/cache/tercet")


def test_helm_test_reaches_the_router_whoever_its_clients_are() -> None:
    made = objects(VALUES["everything"])
    (labels,) = (each["metadata"]["labels"] for each in made if each["kind"] == "Pod")
    rule = of_kind("NetworkPolicy", made)["tercet-router"]["spec"]["ingress"][0]
    assert any(selects(each["podSelector"]["matchLabels"], labels) for each in rule["from"] if "podSelector" in each)


def test_a_gateway_of_istio_speaks_tls_to_the_picker() -> None:
    made = objects(VALUES["gateway"])
    (rule,) = of_kind("DestinationRule", made).values()
    assert rule["spec"]["host"].split(".")[:2] == [
        of_kind("InferencePool", made)["tercet"]["spec"]["endpointPickerRef"]["name"], "models",
    ]  # fmt: skip
    plain = {**VALUES["gateway"], "epp": {"tls": {"selfSigned": False}}}
    assert not of_kind("DestinationRule", objects(plain)), "nor TLS to one that speaks none"


# ---- it stays up -------------------------------------------------------------------------------------------------


def test_no_update_and_no_drain_takes_both_roles() -> None:
    """With the chart's own values: an update changes all groups at once, a drain of nodes takes any pods."""
    made = objects({})
    engines = {
        name: each for name, each in of_kind("Deployment", made).items() if "tercet/group" in each["metadata"]["labels"]
    }
    assert {each["spec"]["template"]["metadata"]["labels"]["tercet/role"] for each in engines.values()} == GROUPS
    for each in engines.values():
        update = each["spec"]["strategy"]["rollingUpdate"]
        assert each["spec"]["replicas"] - update["maxUnavailable"] >= 1
        assert update["maxSurge"] >= 1
        assert each["spec"]["progressDeadlineSeconds"] > 1800, "an engine may take as long to load"
    budgets = [each["spec"] for each in of_kind("PodDisruptionBudget", made).values()]
    (over,) = [
        each for each in budgets if any(chooses(each["selector"], pod_labels(engine)) for engine in engines.values())
    ]
    assert all(chooses(over["selector"], pod_labels(each)) for each in engines.values()), "roles are counted together"
    assert over["maxUnavailable"] < sum(each["spec"]["replicas"] for each in engines.values())


def pod_labels(owner: Object) -> Object:
    return owner["spec"]["template"]["metadata"]["labels"]


@CASES
def test_no_pod_has_two_budgets(values: Object) -> None:
    """Or none of them could be evicted."""
    made = objects(values)
    budgets = of_kind("PodDisruptionBudget", made).values()
    for name, pod in pods(made):
        assert sum(chooses(each["spec"]["selector"], pod["metadata"]["labels"]) for each in budgets) <= 1, name


def test_engines_of_all_roles_are_apart_where_there_are_machines() -> None:
    for name, pod in pods(objects({})):
        component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        if component == "engine":
            (term,) = pod["spec"]["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
            assert chooses(term["podAffinityTerm"]["labelSelector"], pod["metadata"]["labels"]), name
    own = {"engineDefaults": {"affinity": {"nodeAffinity": {}}}}
    assert all("podAntiAffinity" not in pod["spec"].get("affinity", {}) for _, pod in pods(objects(own)))


def test_the_notes_warn_of_engines_that_all_go_at_once() -> None:
    alone = {"engineDefaults": {"kind": "StatefulSet"}}
    two = {"engineDefaults": {"kind": "StatefulSet"}, "engines": {"decode": {"replicas": 2}}}
    found = [NOTES_WARNING in rendered(each)["tercet/templates/NOTES.txt"] for each in ({}, alone, two)]
    assert found == [False, True, False]


NOTES_WARNING = "replaces the only engine of every group at once"


def test_strategies_images_and_first_containers_are_the_users() -> None:
    made = objects(VALUES["nodes"])
    router = of_kind("Deployment", made)["tercet-router"]["spec"]
    assert router["strategy"] == {"type": "Recreate"}
    assert router["template"]["spec"]["initContainers"] == [FETCH]
    assert {each["image"].partition("@")[2] for _, _, each in containers(made)} == {DIGEST}
    open_values = of_kind("StatefulSet", objects(VALUES["open"]))["tercet-decode"]["spec"]
    assert open_values["updateStrategy"] == {"type": "OnDelete"}


def test_a_first_container_comes_before_a_sidecar() -> None:
    values = {**VALUES["gateway"], "engines": {"decode": {"sidecar": {"enabled": True}, "initContainers": [FETCH]}}}
    pod = of_kind("Deployment", objects(values))["tercet-decode"]["spec"]["template"]["spec"]
    assert [each["name"] for each in pod["initContainers"]] == ["fetch", "sidecar"]


# ---- engines on several nodes ------------------------------------------------------------------------------------


def test_an_engine_on_several_nodes_is_one_engine() -> None:
    made = objects(VALUES["nodes"])
    spec = of_kind("LeaderWorkerSet", made)["tercet-decode"]["spec"]["leaderWorkerTemplate"]
    leader, worker = spec["leaderTemplate"], spec["workerTemplate"]
    flags = [each["spec"]["containers"][0]["args"] for each in (leader, worker)]
    for args in flags:
        assert f"--nnodes={spec['size']}" in args
        assert "--node-rank=$(LWS_WORKER_INDEX)" in args
        assert "--master-addr=$(LWS_LEADER_ADDRESS)" in args
    assert [each for each in flags[1] if each not in flags[0]] == ["--headless"]
    assert {"name": "VLLM_HOST_IP", "value": "$(POD_IP)"} in worker["spec"]["containers"][0]["env"]
    assert "ports" not in worker["spec"]["containers"][0]
    assert [each["spec"]["containers"][0]["resources"]["limits"] for each in (leader, worker)] == [
        {"nvidia.com/gpu": 8}
    ] * 2
    assert "tercet/role" not in worker["metadata"]["labels"], "or it would be taken for an engine"


def test_a_node_stays_while_its_engine_empties() -> None:
    spec = of_kind("LeaderWorkerSet", objects(VALUES["nodes"]))["tercet-decode"]["spec"]["leaderWorkerTemplate"]
    leader, worker = (spec[f"{each}Template"]["spec"] for each in ("leader", "worker"))
    waits = int(worker["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    config = next(each for each in leader["containers"][0]["args"] if each.startswith("--kv-transfer-config="))
    drains = json.loads(config.partition("=")[2])["kv_connector_extra_config"]["stop_grace"]
    assert waits >= int(leader["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1]) + drains


def test_nodes_of_an_engine_reach_each_other_at_any_port_and_others_do_not() -> None:
    policies = of_kind("NetworkPolicy", objects(VALUES["nodes"]))
    own = {"app.kubernetes.io/name": "tercet", "app.kubernetes.io/instance": "tercet"}

    def who_may_use_any_port(name: str) -> list[str]:
        open_to_all_ports = [rule["from"] for rule in policies[name]["spec"]["ingress"] if "ports" not in rule]
        peers = [peer["podSelector"]["matchLabels"] for peers in open_to_all_ports for peer in peers]
        assert all(selects(own, each) for each in peers)
        return [each["app.kubernetes.io/component"] for each in peers]

    assert who_may_use_any_port("tercet-engines") == ["engine-node"]
    assert who_may_use_any_port("tercet-engine-nodes") == ["engine", "engine-node"]


# ---- who may come in ---------------------------------------------------------------------------------------------


def scrapers(values: Object) -> dict[str, list[Object]]:
    """Of each policy, the peers that are admitted beside those of the release."""
    found: dict[str, list[Object]] = {}
    for name, policy in of_kind("NetworkPolicy", objects(values)).items():
        rules = [
            rule
            for rule in policy["spec"]["ingress"]
            if {"port": 8000} in rule.get("ports", ())
            or {"port": "metrics"} in rule.get("ports", ())
            or {"port": "openai"} in rule.get("ports", ())
        ]
        found[name] = [peer for rule in rules for peer in rule.get("from", ()) if "namespaceSelector" in peer]
    return found


def test_the_prometheus_of_a_pod_monitor_comes_in() -> None:
    of_operator = {"app.kubernetes.io/name": "prometheus", "operator.prometheus.io/name": "k8s"}
    on, off = scrapers({"podMonitor": {"enabled": True}}), scrapers({})
    (peer,) = on["tercet-engines"]
    assert peer["namespaceSelector"] == {}
    assert chooses(peer["podSelector"], of_operator)
    assert not chooses(peer["podSelector"], {"app.kubernetes.io/name": "anything"})
    assert off["tercet-engines"] == []
    behind = scrapers({**VALUES["gateway"], "podMonitor": {"enabled": True}})
    assert peer in behind["tercet-epp"]
    assert peer in scrapers(VALUES["nodes"])["tercet-router"], "though its clients are named"
    named = scrapers(VALUES["everything"])
    assert named["tercet-engines"][-1:] == VALUES["everything"]["networkPolicy"]["monitoring"], (
        "whom the user names, alone"
    )


def test_a_gateway_reaches_the_routers_without_a_pool() -> None:
    made = objects(VALUES["nodes"])
    (route,) = of_kind("HTTPRoute", made).values()
    (rule,) = route["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    service = of_kind("Service", made)[backend["name"]]
    assert backend["port"] in [each["port"] for each in service["spec"]["ports"]]
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/v1"}}], "administration stays inside"
    assert rule["timeouts"] == {"request": "0s"}
    assert not of_kind("InferencePool", made)


# ---- it scales ---------------------------------------------------------------------------------------------------


def metrics_of(values: Object) -> dict[str, Object]:
    """Of each autoscaler, its metrics by name."""
    scalers = of_kind("HorizontalPodAutoscaler", objects(values))
    found: dict[str, Object] = {}
    for name, scaler in scalers.items():
        sources = [each["external" if each["type"] == "External" else "pods"] for each in scaler["spec"]["metrics"]]
        found[name] = {each["metric"]["name"]: each for each in sources}
    return found


def adapter_rules() -> dict[str, Object]:
    """Of prometheus-adapter, by the metric that Kubernetes asks for."""
    rules = yaml.safe_load((CHART.parent / "prometheus-adapter.yaml").read_text())["rules"]
    every = [*rules["custom"], *rules["external"]]
    return {each.get("name", {}).get("as", each["seriesQuery"].partition("{")[0]): each for each in every}


def names_in(query: str) -> set[str]:
    return set(re.findall(r"\b(?:tercet|vllm):?\w+", query))


@pytest.mark.parametrize("values", [VALUES["gateway"], VALUES["everything"]], ids=["gateway", "everything"])
def test_autoscalers_go_by_metrics_that_there_are(values: Object) -> None:
    """Of whoever is there to say them: pickers, routers, or engines; and the adapter's rules pass them on."""
    scalers, rules = metrics_of(values), adapter_rules()
    assert scalers
    sections = {text.splitlines()[0]: text for text in page("metrics.md").split("\n## ")}
    said_by = "Of a router" if values.get("router", {}).get("enabled", True) else "Of an endpoint picker"
    for metrics in scalers.values():
        assert metrics.keys() <= rules.keys()
        for name in metrics:
            asked = names_in(rules[name]["metricsQuery"].replace("<<.Series>>", name))
            ours = {each for each in asked if each.startswith("tercet_")}
            assert all(f"`{each}`" in sections[said_by] for each in ours)
            assert asked - ours <= {f"vllm:request_queue_time_seconds_{part}" for part in ("sum", "count")}


def test_prefill_goes_by_waiting_and_decode_by_kv_and_steps() -> None:
    everything = {"engines": {"more": {}}, "engineDefaults": {"autoscaling": {"enabled": True, "stepSeconds": "0.1"}}}
    prefill = {"vllm_request_queue_time_seconds", "tercet_engine_waiting"}
    decode = {"tercet_engine_kv_usage_ratio", "tercet_engine_step_seconds"}
    found = {name: metrics.keys() for name, metrics in metrics_of(everything).items()}
    assert found == {"tercet-prefill": prefill, "tercet-decode": decode, "tercet-more": prefill | decode}


def test_keda_asks_what_the_adapter_asks() -> None:
    values = VALUES["nodes"]
    by_hpa = metrics_of({**values, "autoscaler": {}})
    rules = adapter_rules()
    scaled = of_kind("ScaledObject", objects(values))
    assert scaled.keys() == by_hpa.keys() == {"tercet-prefill", "tercet-decode", "tercet-more", "tercet-router"}
    for name, each in scaled.items():
        triggers = each["spec"]["triggers"]
        assert len(triggers) == len(by_hpa[name])
        for trigger, (metric, same) in zip(triggers, by_hpa[name].items(), strict=True):
            kind = trigger["metricType"]
            assert (kind, trigger["metadata"]["threshold"]) == (
                same["target"]["type"], same["target"]["value" if kind == "Value" else "averageValue"],
            )  # fmt: skip
            query = trigger["metadata"]["query"]
            assert 'namespace="models"' in query
            assert kind == "AverageValue" or f'engine_group="{name}"' in query
            asked = rules[metric]["metricsQuery"].replace("<<.Series>>", metric)
            asked = asked.replace("<<.LabelMatchers>>", "").replace(" by (<<.GroupBy>>)", "")
            assert re.sub(r"\{[^}]*\}", "{}", query) == asked
            assert query.count("{") == query.count("namespace="), "or it would see other fleets"


def test_queries_are_promql() -> None:
    for each in of_kind("ScaledObject", objects(VALUES["nodes"])).values():
        for trigger in each["spec"]["triggers"]:
            assert promql_parser.parse(trigger["metadata"]["query"])


def test_scaled_objects_keep_what_they_have_without_data() -> None:
    for each in of_kind("ScaledObject", objects(VALUES["nodes"])).values():
        assert each["spec"]["minReplicaCount"] >= 1
        assert {trigger["metadata"]["ignoreNullValues"] for trigger in each["spec"]["triggers"]} == {"false"}


def test_sidecars_say_their_own_metrics_where_there_are_some() -> None:
    def scraped(values: Object) -> list[Object]:
        (monitor,) = of_kind("PodMonitor", objects(values)).values()
        return [each for each in monitor["spec"]["podMetricsEndpoints"] if each["path"] == "/sidecar/metrics"]

    (found,) = scraped(VALUES["everything"])
    assert found["relabelings"][0]["regex"] == "sidecar", "or engines without one would be asked for them"
    assert not scraped({"podMonitor": {"enabled": True}})


def test_each_groups_autoscaler_sees_the_engines_of_its_group() -> None:
    made = objects(VALUES["everything"])
    (monitor,) = of_kind("PodMonitor", made).values()
    scraped = [each for each in monitor["spec"]["podMetricsEndpoints"] if each["path"] == "/metrics"]
    relabel = {json.dumps(each["metricRelabelings"]) for each in scraped}
    ((rule,),) = (json.loads(each) for each in relabel)
    assert (rule["sourceLabels"], rule["targetLabel"], rule["replacement"]) == (["engine"], "engine_group", "$1")
    # vLLM's own metrics have an engine's number, which is no group; its pod has one.
    assert re.fullmatch(rule["regex"], "0") is None
    (own,) = [each["relabelings"] for each in scraped if each["port"] == "http"]
    assert own == [{**rule, "sourceLabels": ["__meta_kubernetes_pod_name"]}]
    for name, metrics in metrics_of(VALUES["everything"]).items():
        if name.endswith("router"):
            continue
        is_deployment = name in of_kind("Deployment", made)
        for pod in (f"{name}-5d4f8c7b9-x2wqz", f"{name}-x-24567") if is_deployment else (f"{name}-0", f"{name}-12"):
            # Prometheus matches whole values.
            found = re.fullmatch(rule["regex"], pod)
            assert found is not None
            for each in metrics.values():
                assert each["metric"]["selector"]["matchLabels"] == {"engine_group": found[1]}


def test_keys_are_long_and_of_each_installation() -> None:
    one, two = (of_kind("Secret", objects({}))["tercet-keys"]["data"] for _ in range(2))
    assert one.keys() == {"fleet-secret", "api-key", "admin-key"}
    assert all(len(base64.b64decode(value)) >= 32 for value in one.values())
    assert {*one.values()}.isdisjoint(two.values())


@CASES
def test_pods_have_the_time_that_they_need_to_stop(values: Object) -> None:
    for name, pod, container in containers(objects(values)):
        grace = pod["spec"].get("terminationGracePeriodSeconds", 30)
        hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        args = dict(arg.split("=", 1) for arg in container["args"] if "=" in arg)
        stops = float(args.get("--shutdown-timeout", 0))
        if "--kv-transfer-config" in args and "--headless" not in container["args"]:
            config = json.loads(args["--kv-transfer-config"])
            stops = parse_settings({**config["kv_connector_extra_config"], "host": "10.0.0.1"}).stop_grace
        assert hook[0] == "sleep", name
        assert grace >= int(hook[1]) + stops + 10, name


@CASES
def test_every_server_is_watched(values: Object) -> None:
    for name, _, container in containers(objects(values)):
        if container["name"] in ("status", "sidecar"):  # a sidecar's start waits for nobody
            continue
        if "--headless" in container["args"]:
            continue
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            told = container[probe]
            port = told["httpGet"]["port"] if "httpGet" in told else told["grpc"]["port"]
            assert port in ports or port in ports.values(), name
        is_tls = any(each["name"] == "tls" for each in container["volumeMounts"])
        if "httpGet" in container["livenessProbe"]:
            assert container["livenessProbe"]["httpGet"].get("scheme", "HTTP") == ("HTTPS" if is_tls else "HTTP")
        else:
            assert container["livenessProbe"]["grpc"]["port"] != ports["grpc"], "kubelets speak no TLS to it"


# ---- it starts what exists ---------------------------------------------------------------------------------------

KINDS: dict[str, tuple[type[Settings], str]] = {
    "router": (RouterConfig, "router-args"),
    "epp": (PickerConfig, ""),
    "sidecar": (SidecarConfig, ""),
}


@CASES
def test_commands_take_their_arguments(values: Object) -> None:
    group: Any = typer.main.get_command(app)
    seen = set[str]()
    for name, pod, container in containers(objects(values)):
        command, *args = container["args"]
        args = [each.replace("$(POD_IP)", "10.0.0.1").replace("$(POD_NAME)", "e-0") for each in args]
        params: dict[str, Any] = group.commands[command].make_context(command, args).params
        seen.add(command)
        if command in KINDS:
            kind, rest = KINDS[command]
            params.pop("config", None)
            config = decode_settings(kind, flags_given(kind, params, rest))
            assert isinstance(config, SidecarConfig) or config.discovery.is_wanted, name  # type: ignore[attr-defined]
            if isinstance(config, SidecarConfig):
                engine = pod["spec"]["containers"][0]
                assert f"--port={urlsplit(config.engine).port}" in engine["args"]
                assert config.allowed_prefillers().named("10.244.3.4:8000")
        if command == "store":
            first, last = (int(each) for each in params["kv_port"].split("-"))
            assert (first, last, params["kv_events_port"]) == (9100, 9163, 5557), name
            assert urlsplit(params["mirror"][0]).hostname in of_kind("Service", objects(values))
        if command == "engine" and "--headless" in params["vllm_args"]:
            assert not params["prefill_hosts"]
        elif command == "engine":
            allowed = AllowedPrefillers(params["prefill_hosts"] or "", "--prefill-hosts")
            alone = not pod["spec"].get("initContainers") and pod["metadata"]["labels"]["tercet/role"] != "prefill"
            assert bool(allowed) is (alone and bool(values.get("gateway", {}).get("prefillNetworks"))), name
            flags = dict(each.split("=", 1) for each in params["vllm_args"] if "=" in each)
            events = json.loads(flags["--kv-events-config"])
            ports = {str(each["containerPort"]) for each in container["ports"]}
            assert {events[each].rpartition(":")[2] for each in ("endpoint", "replay_endpoint")} <= ports
            assert events["enable_kv_cache_events"]
    assert {"engine"} < seen


def test_what_the_notes_say_names_what_there_is() -> None:
    for values in VALUES.values():
        text = rendered(values)["tercet/templates/NOTES.txt"]
        made = {each["metadata"]["name"] for each in objects(values)} | {"mine"}
        for line in text.splitlines():
            if line.strip().startswith(("kubectl", "export")) and "port-forward" in line:
                service = next(each for each in shlex.split(line) if each.startswith("service/"))
                assert service.removeprefix("service/") in made
            if "get secret" in line:
                assert line.partition("get secret ")[2].split()[0] in made


@pytest.mark.parametrize("name", ["tercet", "my-release", "a" * 53])
def test_names_are_short_enough(name: str) -> None:
    for each in objects(VALUES["everything"] if len(name) < 30 else {}, name):
        assert len(each["metadata"]["name"]) <= 63
        labels = each.get("spec", {}).get("template", each)["metadata"]["labels"]
        assert all(len(value) <= 63 for value in labels.values())
