"""Scaling by the API server of Kubernetes: more first, then fewer, and nothing while somebody else does it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest
from aiohttp import web

from tercet.cluster.scaling import kubernetes
from tercet.cluster.scaling.decide import Counts, ScaleCall
from tercet.cluster.scaling.kubernetes import KubernetesFleet
from tercet.fleet.kubernetes_api import ApiAccess
from tercet.protocol import BadRequest, Conflict, EngineError, EngineUnreachable

Object = dict[str, Any]
LWS = "/apis/leaderworkerset.x-k8s.io/v1/namespaces/llm/leaderworkersets"
APPS = "/apis/apps/v1/namespaces/llm"


class Cluster:
    """Objects of three kinds; each look takes one of them a pod nearer to what is wanted."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.patched: list[tuple[str, int]] = []
        self.overwritten_by = 0
        self.knows_lws = True
        self.api = ApiAccess("", "llm")

    def put(self, collection: str, name: str, role: str, replicas: int) -> None:
        labels = {"metadata": {"labels": {"tercet/role": role}}}
        spec: Object = {"replicas": replicas}
        spec |= {"leaderWorkerTemplate": {"workerTemplate": labels}} if collection == LWS else {"template": labels}
        self.objects[f"{collection}/{name}"] = {
            "metadata": {"name": name, "generation": 1}, "spec": spec,
            "status": {"replicas": replicas, "readyReplicas": replicas, "observedGeneration": 1},
        }  # fmt: skip

    @property
    def fleet(self) -> KubernetesFleet:
        return KubernetesFleet(self.api)

    async def answer(self, request: web.Request) -> web.Response:
        if request.headers.get("authorization") != "Bearer t":
            return web.json_response({"message": "who are you?"}, status=403)
        if request.method == "PATCH":
            path = request.path.removesuffix("/scale")
            count = (await request.json())["spec"]["replicas"]
            self.patched.append((path.rpartition("/")[2], count))
            self.objects[path]["spec"]["replicas"] = count
            self.objects[path]["metadata"]["generation"] += 1
            return web.json_response({})
        assert request.query["labelSelector"] == "tercet/group"
        if request.path == LWS and not self.knows_lws:
            return web.json_response({"message": "the server could not find it"}, status=404)
        found = [each for path, each in self.objects.items() if path.rpartition("/")[0] == request.path]
        answer = web.json_response({"items": found})
        for each in found:
            self._step(each)
        return answer

    def _step(self, each: Object) -> None:
        wanted, status = each["spec"]["replicas"], each["status"]
        status["observedGeneration"] = each["metadata"]["generation"]
        if status["replicas"] != wanted:
            if self.overwritten_by:
                each["spec"]["replicas"] = self.overwritten_by
            status["replicas"] += 1 if status["replicas"] < wanted else -1
            status["readyReplicas"] = status["replicas"]


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Cluster]:
    monkeypatch.setattr(kubernetes, "LOOK_SECONDS", 0.001)
    made = Cluster()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.put(f"{APPS}/deployments", "t-prefill", "prefill", 1)
    made.put(f"{APPS}/statefulsets", "t-decode", "decode", 4)
    made.put(LWS, "t-both", "both", 1)
    made.put(f"{APPS}/deployments", "t-router", "", 1)
    made.api = ApiAccess(f"http://127.0.0.1:{runner.addresses[0][1]}", "llm", lambda: "t")
    yield made
    await runner.cleanup()


async def test_more_first_and_fewer_once_those_are_ready(cluster: Cluster) -> None:
    said: list[str] = []
    counts = await cluster.fleet.scale(ScaleCall(prefill=3, decode=2, both=2), said.append)
    assert counts == Counts(3, 2, 2)
    assert cluster.patched == [("t-prefill", 3), ("t-both", 2), ("t-decode", 2)]
    first = next(index for index, line in enumerate(said) if line.startswith("t-decode"))
    assert any(line == "t-prefill  prefill  3 of 3 ready" for line in said[:first])
    assert "t-decode  decode  3 of 2 ready, 1 leaving" in said


async def test_a_cluster_without_leader_worker_sets(cluster: Cluster) -> None:
    cluster.knows_lws = False
    assert [str(each) for each in await cluster.fleet.workloads()] == [
        "t-prefill  prefill  1 of 1 ready", "t-decode  decode  4 of 4 ready",
    ]  # fmt: skip
    with pytest.raises(BadRequest, match="no workload in llm runs both engines"):
        await cluster.fleet.scale(ScaleCall(both=1), print)
    assert not cluster.patched


async def test_one_that_is_being_scaled_is_left_alone(cluster: Cluster) -> None:
    await cluster.fleet.scale(ScaleCall(decode=1), print, wait=False)
    with pytest.raises(Conflict, match="another scaling runs: t-decode"):
        await cluster.fleet.scale(ScaleCall(prefill=2), print)
    assert cluster.patched == [("t-decode", 1)]


async def test_something_else_that_scales_is_seen(cluster: Cluster) -> None:
    cluster.overwritten_by = 7
    with pytest.raises(Conflict, match="another process scales t-prefill to 7"):
        await cluster.fleet.scale(ScaleCall(prefill=3), print)


async def test_what_is_refused_says_why(cluster: Cluster) -> None:
    other = cluster.api
    stranger = KubernetesFleet(ApiAccess(other.url, "llm", lambda: "x"))
    with pytest.raises(EngineError, match=r"HTTP 403; its Role must allow get .*: who are you\?"):
        await stranger.workloads()
    with pytest.raises(EngineError, match="the namespace empty has no workload"):
        await KubernetesFleet(other, "empty").workloads()
    with pytest.raises(EngineUnreachable, match="does not answer"):
        await KubernetesFleet(ApiAccess("http://127.0.0.1:1", "llm")).workloads()
    cluster.put(f"{APPS}/deployments", "t-prefill-2", "prefill", 1)
    with pytest.raises(BadRequest, match="t-prefill and t-prefill-2 both run prefill engines"):
        await cluster.fleet.scale(ScaleCall(prefill=2), print)


async def test_a_token_that_is_not_one_line_is_refused(cluster: Cluster) -> None:
    with pytest.raises(BadRequest, match=r"kubeconfig: .* cannot be called"):
        await KubernetesFleet(ApiAccess(cluster.api.url, "llm", lambda: "a\nb")).workloads()
