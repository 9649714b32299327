"""What is done when to make a fleet as large as it is wanted, and scaling by the API server of Kubernetes: more first,
then fewer, and nothing while somebody else does it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from tercet.cluster.scaling import kubernetes
from tercet.cluster.scaling.decide import (
    Counts,
    Do,
    Drain,
    Flip,
    Present,
    ScaleCall,
    Scaling,
    Start,
    Stop,
    names_after,
    parse_counts,
)
from tercet.cluster.scaling.kubernetes import KubernetesFleet
from tercet.fleet.kubernetes_api import ApiAccess
from tercet.protocol import BadRequest, Conflict, EngineError, EngineUnreachable, Role


def present(*names: str, busy: str = "") -> list[Present]:
    roles: dict[str, Role] = {"prefill": "prefill", "decode": "decode", "engine": "both"}
    return [Present(name, roles[name.rpartition("-")[0]], 3 if name == busy else 0) for name in names]


def test_out_starts_all_at_once_and_drains_nothing() -> None:
    scaling = Scaling(present("prefill-0", "decode-0"), Counts(2, 3))
    assert scaling.begin() == [Start("prefill-1", "prefill"), Start("decode-1", "decode"), Start("decode-2", "decode")]
    assert scaling.state == "under_way"
    assert scaling.ready("prefill-1") == scaling.ready("decode-2") == []
    assert scaling.present == Counts(2, 2)
    assert scaling.ready("decode-1") == []
    assert (scaling.state, scaling.present) == ("done", Counts(2, 3))


def test_in_drains_the_idle_ones_and_stops_each_once_it_is_empty() -> None:
    here = present("prefill-0", "decode-0", "decode-1", "decode-2", busy="decode-2")
    scaling = Scaling(here, Counts(1, 1))
    assert scaling.begin() == [Drain("decode-1"), Drain("decode-0")]
    assert scaling.drained("decode-0") == [Stop("decode-0")]
    assert scaling.gone("decode-0") == []
    assert scaling.state == "under_way"
    assert scaling.drained("decode-1") == [Stop("decode-1")]
    assert scaling.gone("decode-1") == []
    assert (scaling.state, scaling.present) == ("done", Counts(1, 1))
    assert [each.name for each in scaling.engines] == ["prefill-0", "decode-2"]


def test_roles_change_before_anything_starts_or_ends() -> None:
    scaling = Scaling(present("prefill-0", "prefill-1", "decode-0", busy="prefill-0"), Counts(1, 2))
    assert scaling.begin() == [Flip("prefill-1", "decode")]
    assert scaling.flipped("prefill-1", "decode") == []
    assert (scaling.state, scaling.present) == ("done", Counts(1, 2))


def test_nothing_drains_before_what_starts_serves() -> None:
    scaling = Scaling(present("engine-0", "engine-1", "engine-2"), Counts(1, 0, 1))
    assert scaling.begin() == [Flip("engine-2", "prefill")]
    assert scaling.flipped("engine-2", "prefill") == [Drain("engine-1")]


def test_a_failed_start_drains_nothing_and_says_why() -> None:
    scaling = Scaling(present("prefill-0", "decode-0", "engine-0"), Counts(1, 3, 0))
    first = scaling.begin()
    assert first == [Flip("engine-0", "decode"), Start("decode-1", "decode")]
    scaling.flipped("engine-0", "decode")
    assert scaling.failed("decode-1", "no room") == []
    assert (scaling.state, scaling.present, scaling.why) == ("failed", Counts(1, 2), "decode-1: no room")


def test_an_engine_that_cannot_be_drained_serves_on() -> None:
    scaling = Scaling(present("prefill-0", "decode-0", "decode-1"), Counts(1, 1))
    assert scaling.begin() == [Drain("decode-1")]
    assert scaling.failed("decode-1", "the router does not answer") == []
    assert (scaling.state, scaling.present) == ("failed", Counts(1, 2))


def test_nothing_to_do_is_done() -> None:
    scaling = Scaling(present("prefill-0", "decode-0"), Counts(1, 1))
    assert scaling.begin() == []
    assert scaling.state == "done"


def test_names_are_not_used_again() -> None:
    assert names_after(["decode-0", "decode-4", "mine", "prefill-9"], "decode", 2) == ["decode-5", "decode-6"]
    assert names_after([], "both", 1) == ["engine-0"]


COUNTS = st.builds(Counts, st.integers(0, 4), st.integers(0, 4), st.integers(0, 4))


@given(COUNTS, COUNTS, st.randoms(use_true_random=False))
def test_every_order_of_events_ends_as_wanted_and_never_below(before: Counts, wanted: Counts, random: object) -> None:
    names = {"prefill": before.prefill, "decode": before.decode, "engine": before.both}
    here = present(*(f"{name}-{index}" for name, count in names.items() for index in range(count)))
    scaling = Scaling(here, wanted)
    least = min(len(here), wanted.prefill + wanted.decode + wanted.both)
    todo: list[Do] = scaling.begin()
    while todo:
        order = todo.pop(random.randrange(len(todo)))  # type: ignore[attr-defined]
        todo += _happens(scaling, order)
        serving = [each for each in scaling.engines if each.phase == "serving"]
        assert len(serving) >= least
    assert scaling.state == "done"
    assert scaling.present == wanted


def _happens(scaling: Scaling, order: Do) -> Sequence[Do]:
    match order:
        case Flip(name, role):
            return scaling.flipped(name, role)
        case Start(name, _):
            return scaling.ready(name)
        case Drain(name):
            return scaling.drained(name)
        case Stop(name):
            return scaling.gone(name)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["prefill"], "is not ROLE=NUMBER"),
        (["prefill=-1"], "is not ROLE=NUMBER"),
        (["encode=1"], "is not ROLE=NUMBER"),
        (["prefill=1", "prefill=2"], "is given twice"),
    ],
)
def test_counts_that_are_none(given: list[str], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        parse_counts(given)


def test_counts_leave_other_roles_as_they_are() -> None:
    assert ScaleCall(**parse_counts(["decode=5"])).counts(Counts(2, 1)) == Counts(2, 5)
    assert ScaleCall(prefill=0, decode=0).counts(Counts(1, 1, 2)) == Counts(0, 0, 2)
    for call in (ScaleCall(prefill=0), ScaleCall(decode=0), ScaleCall(prefill=0, decode=0)):
        with pytest.raises(BadRequest, match="at least one engine"):
            call.counts(Counts(1, 1))
    with pytest.raises(BadRequest, match="is empty; give numbers"):
        ScaleCall().counts(Counts(1, 1))


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
