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
import pytest
import typer
import yaml

from tercet.cli.app import app
from tercet.cli.setting_flags import flags_given
from tercet.fleet.discovery.api_objects import InferencePool, Pod
from tercet.fleet.discovery.pods import engines_of
from tercet.protocol.prefill_hosts import AllowedPrefillers
from tercet.settings import PickerConfig, ReschedulerConfig, RouterConfig, Settings, SidecarConfig, decode_settings
from tercet.vllm_plugin.start.plugin_settings import parse_settings

from .chart import CHART, GROUPS, ROOT, VALUES, Object, containers, objects, of_kind, pods, ports_of, rendered, selects
from .crds import SCHEMAS

VERSIONS = ("1.28", "1.30", "1.32", "1.34", "1.37")
CASES = pytest.mark.parametrize("values", VALUES.values(), ids=VALUES.keys())


@CASES
@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_it(values: Object, version: str) -> None:
    import kubernetes_validate

    for each in objects(values):
        if each["kind"] in SCHEMAS:
            jsonschema.validate(each, SCHEMAS[each["kind"]])
        else:
            kubernetes_validate.validate(each, version, strict=True)


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
        ({"router": {"enabled": False}}, "nobody sends"),
        ({"engines": {"decode": {"sidecar": {"enabled": True}}}}, "prefillNetworks"),
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
        assert mounted == {each["name"] for each in pod["spec"]["volumes"]}
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
            selector = each["spec"].get("podSelector", each["spec"].get("selector"))["matchLabels"]
            assert any(selects(selector, pod["metadata"]["labels"]) for pod in templates.values())
        if each["kind"] == "HorizontalPodAutoscaler":
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
    selectors = [dict(each.split("=") for each in one.split(",")) for one in wanted]
    for pool in of_kind("InferencePool", made).values():
        found = msgspec.convert(pool, InferencePool)
        selectors.append(found.spec.selector.match_labels)
        assert [each.number for each in found.spec.target_ports] == [8000]
    assert selectors
    engines = 0
    for name, pod in pods(made):
        is_engine = pod["metadata"]["labels"]["app.kubernetes.io/component"] == "engine"
        assert all(selects(each, pod["metadata"]["labels"]) is is_engine for each in selectors), name
        if is_engine:
            engines += 1
            seen = {**pod, "metadata": {**pod["metadata"], "name": "e-0"}}
            seen["status"] = {"podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
            (engine,) = engines_of(msgspec.convert(seen, Pod), (1,))
            assert engine.address.url == f"http://10.0.0.1:{ports_of(pod)['http']}"
            assert engine.address.role == pod["metadata"]["labels"]["llm-d.ai/role"]
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
        assert more == (["IPC_LOCK"] if name == "StatefulSet/tercet-decode" and "hubToken" in values else []), name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys(), name
        assert spec["enableServiceLinks"] is False, name
        component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        asks = component in ("router", "epp", "rescheduler")
        assert spec["automountServiceAccountToken"] is asks, name
    (role,) = of_kind("Role", made).values()
    verbs = ["get", "list", "watch"]
    assert role["rules"][0] == {"apiGroups": [""], "resources": ["pods"], "verbs": verbs}
    assert all(rule["verbs"] == verbs for rule in role["rules"])
    # A pool is one object; objectives are any number of them, with names of their own.
    unnamed = [rule["resources"] for rule in role["rules"][1:] if not rule.get("resourceNames")]
    assert unnamed in ([], [["inferenceobjectives"]])
    assert not of_kind("ClusterRole", made)


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
    pod = of_kind("StatefulSet", objects(VALUES["everything"]))["tercet-decode"]["spec"]["template"]["spec"]
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


# ---- it scales ---------------------------------------------------------------------------------------------------


def metrics_of(values: Object) -> dict[str, Object]:
    """Of each autoscaler, its metrics by name."""
    scalers = of_kind("HorizontalPodAutoscaler", objects(values))
    found: dict[str, Object] = {}
    for name, scaler in scalers.items():
        sources = [each["external" if each["type"] == "External" else "pods"] for each in scaler["spec"]["metrics"]]
        found[name] = {each["metric"]["name"]: each for each in sources}
    return found


@pytest.mark.parametrize("values", [VALUES["gateway"], VALUES["everything"]], ids=["gateway", "everything"])
def test_autoscalers_go_by_metrics_that_there_are(values: Object) -> None:
    """Of whoever is there to say them: pickers, or routers; and the adapter's rules pass them on."""
    scalers = metrics_of(values)
    assert scalers
    rules = yaml.safe_load((CHART.parent / "prometheus-adapter.yaml").read_text())["rules"]
    passed_on = {rule["seriesQuery"].partition("{")[0] for kind in ("custom", "external") for rule in rules[kind]}
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    sections = {text.splitlines()[0]: text for text in page.split("\n## ")}
    said_by = "Of a router" if values.get("router", {}).get("enabled", True) else "Of an endpoint picker"
    for metrics in scalers.values():
        assert metrics.keys() <= passed_on
        assert all(f"`{name}`" in sections[said_by] for name in metrics)


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
        if "--kv-transfer-config" in args:
            config = json.loads(args["--kv-transfer-config"])
            stops = parse_settings({**config["kv_connector_extra_config"], "host": "10.0.0.1"}).stop_grace
        assert hook[0] == "sleep", name
        assert grace >= int(hook[1]) + stops + 10, name


@CASES
def test_every_server_is_watched(values: Object) -> None:
    for name, _, container in containers(objects(values)):
        if container["name"] in ("rescheduler", "status", "sidecar"):  # a sidecar's start waits for nobody
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
    "rescheduler": (ReschedulerConfig, ""),
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
        if command == "engine":
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
