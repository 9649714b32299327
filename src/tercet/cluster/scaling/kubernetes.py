"""Scaling of the engines of a namespace by the scale subresource of their workloads; Kubernetes runs the pods.

The router notices at once that a pod will end: the pod gets no new requests, its sequences move, and its ``preStop``
hook waits for that. The order is that of other fleets: first add pods, and remove pods when the new ones are ready.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import aiohttp
import msgspec

from tercet.cluster.scaling.decide import SELECTOR, Counts, ScaleCall
from tercet.fleet.kubernetes_api import ApiAccess, ApiObject, Metadata
from tercet.protocol import BadRequest, Conflict, EngineError, EngineUnreachable, Role
from tercet.protocol.wire import UNREADABLE
from tercet.wire.callers import bearer
from tercet.wire.client.bounded_answers import reason_of

KINDS = (
    "/apis/apps/v1/namespaces/{}/deployments",
    "/apis/apps/v1/namespaces/{}/statefulsets",
    "/apis/leaderworkerset.x-k8s.io/v1/namespaces/{}/leaderworkersets",
)
ROLE_LABEL = "tercet/role"
ANSWER = aiohttp.ClientTimeout(total=30.0)
LOOK_SECONDS = 1.0
READY_SECONDS = 3600.0
NOT_FOUND, NOT_ALLOWED = 404, 403


class _Template(msgspec.Struct, frozen=True):
    metadata: Metadata = Metadata()


class _Group(msgspec.Struct, frozen=True, rename="camel"):
    leader_template: _Template | None = None
    worker_template: _Template | None = None


class _Spec(msgspec.Struct, frozen=True, rename="camel"):
    replicas: int = 1
    template: _Template | None = None
    leader_worker_template: _Group | None = None


class _Status(msgspec.Struct, frozen=True, rename="camel"):
    replicas: int = 0
    ready_replicas: int = 0
    observed_generation: int | None = None


class _Object(ApiObject, frozen=True):
    spec: _Spec = _Spec()
    status: _Status = _Status()


class _List(msgspec.Struct, frozen=True):
    items: list[_Object] | None = None


@dataclass(frozen=True)
class EngineSet:
    """A workload that runs the engines of a role, at the API's ``path``: its wanted, present and ready replicas."""

    path: str
    name: str
    role: Role
    wanted: int
    present: int
    ready: int
    is_seen: bool = True

    @property
    def settled(self) -> bool:
        """True if the wanted number of replicas is present and ready."""
        return self.is_seen and self.wanted == self.present == self.ready

    def __str__(self) -> str:
        return f"{self.name}  {self.role}  {self.ready} of {self.wanted} ready" + (
            f", {self.present - self.wanted} leaving" if self.present > self.wanted else ""
        )


def workload_of(collection: str, found: _Object) -> EngineSet | None:
    """Return a workload that runs engines, by the label of its pods; None for other objects."""
    spec, group = found.spec, found.spec.leader_worker_template
    template = spec.template
    if group is not None:
        template = group.leader_template or group.worker_template
    role = ((template or _Template()).metadata.labels or {}).get(ROLE_LABEL)
    if role not in ("prefill", "decode", "both"):
        return None
    # A status of before the last change says that all replicas are ready, and means the old number.
    seen = found.status.observed_generation
    is_seen = seen is None or seen >= found.metadata.generation
    path = f"{collection}/{found.metadata.name}"
    name, status = found.metadata.name, found.status
    return EngineSet(path, name, role, spec.replicas, status.replicas, status.ready_replicas, is_seen)


class KubernetesFleet:
    """The engines of one namespace. Every method raises :class:`~tercet.protocol.TercetError`."""

    def __init__(self, api: ApiAccess, namespace: str = "", selector: str = SELECTOR) -> None:
        self._api = api
        self._namespace = namespace or api.namespace
        self._selector = selector

    async def workloads(self) -> list[EngineSet]:
        """Return the workloads that run engines. Raises :class:`~tercet.protocol.EngineError` if there are none."""
        found: list[EngineSet] = []
        for kind in KINDS:
            collection = kind.format(self._namespace)
            content = await self._ask("GET", collection, {"labelSelector": self._selector})
            if content is None:  # the cluster has no such kind of workload
                continue
            try:
                items = msgspec.json.decode(content, type=_List).items or []
            except UNREADABLE as error:
                raise EngineUnreachable(f"the answer is not that of a Kubernetes API server: {error}") from error
            found += [each for item in items if (each := workload_of(collection, item)) is not None]
        if not found:
            raise EngineError(
                f"the namespace {self._namespace} has no workload with the label {self._selector} whose pods have the "
                f"label {ROLE_LABEL}; give another --namespace or --selector"
            )
        return found

    async def scale(self, call: ScaleCall, say: Callable[[str], object], wait: bool = True) -> Counts:
        """Scale the fleet to the wanted size; return the number of ready engines of each role.

        Raises :class:`~tercet.protocol.Conflict` while another scaling runs.
        """
        # One workload for each role: with two, nothing says which of them should grow.
        before, by_role = await self.workloads(), dict[Role, EngineSet]()
        for each in before:
            if (other := by_role.setdefault(each.role, each)) is not each:
                why = f"{other.name} and {each.name} both run {each.role} engines; use --selector"
                raise BadRequest(f"COUNTS: {why}", "COUNTS")
        present = {role: workload.wanted for role, workload in by_role.items()}
        wanted = call.counts(Counts.of(each.role for each in before for _ in range(each.wanted)))
        as_roles = wanted.as_roles().items()
        changes: dict[Role, int] = {role: count for role, count in as_roles if count != present.get(role, 0)}
        for role in changes:
            if role not in by_role:
                raise BadRequest(f"COUNTS: no workload in {self._namespace} runs {role} engines", "COUNTS")
        # Two scalings at once would undo each other's counts.
        if moving := [each for each in before if not each.settled]:
            raise Conflict(f"COUNTS: another scaling runs: {moving[0]}; wait until it ends", "COUNTS")
        out: list[Role] = [role for role, count in changes.items() if count > by_role[role].wanted]
        fewer: list[Role] = [role for role in changes if role not in out]
        stages = [stage for stage in (out, fewer) if stage]
        # More engines first, and fewer only when these serve: the fleet never has less room than before and after.
        for stage in stages:
            for role in stage:
                body = msgspec.json.encode({"spec": {"replicas": changes[role]}})
                await self._ask("PATCH", f"{by_role[role].path}/scale", {}, body)
            if wait or stage is not stages[-1]:
                await self._until_settled({by_role[role].path: changes[role] for role in stage}, say)
        after = await self.workloads()
        return Counts.of(each.role for each in after for _ in range(each.ready))

    async def _until_settled(self, paths: Mapping[str, int], say: Callable[[str], object]) -> None:
        said: dict[str, str] = {}
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            found = {each.path: each for each in await self.workloads() if each.path in paths}
            for path, each in found.items():
                if said.get(path) != str(each):
                    said[path] = str(each)
                    say(str(each))
            if other := [each for path, each in found.items() if each.wanted != paths[path]]:
                raise Conflict(f"COUNTS: another process scales {other[0].name} to {other[0].wanted}", "COUNTS")
            if found.keys() == paths.keys() and all(each.settled for each in found.values()):
                return
            await asyncio.sleep(LOOK_SECONDS)
        late = "; ".join(said.values())
        raise EngineError(f"the fleet does not have the wanted size after {READY_SECONDS:.0f} s: {late}")

    async def _ask(self, method: str, path: str, query: Mapping[str, str], body: bytes | None = None) -> bytes | None:
        """Return the API server's answer; None for a kind of object that it does not know."""
        try:
            token, tls = await asyncio.to_thread(self._api.token), await asyncio.to_thread(self._api.tls)
            headers = {"accept": "application/json", "content-type": "application/merge-patch+json", **bearer(token)}
            async with (
                aiohttp.ClientSession(timeout=ANSWER) as session,
                session.request(
                    method, self._api.url + path, params=query, data=body, headers=headers, ssl=tls or True
                ) as response,
            ):
                status, content = response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineUnreachable(f"the API server at {self._api.url} does not answer: {reason_of(error)}") from error
        except ValueError as error:  # a token that is not text of one line
            raise BadRequest(f"kubeconfig: {self._api.url} cannot be called: {error}", "kubeconfig") from error
        if status == NOT_FOUND and method == "GET":
            return None
        if status >= 400:
            hint = f"; its Role must allow {method.lower()} of {path}" if status == NOT_ALLOWED else ""
            raise EngineError(f"the API server refuses {method} {path}: HTTP {status}{hint}: {_message(content)}")
        return content


def _message(content: bytes) -> str:
    try:
        return str(msgspec.json.decode(content)["message"])[:300]
    except (*UNREADABLE, KeyError, TypeError):
        return content[:300].decode(errors="replace")
