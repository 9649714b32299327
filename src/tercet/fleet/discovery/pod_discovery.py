"""Discovery of engines in pods, selected by labels or by an InferencePool, and the priorities of its objectives."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from tercet import logs
from tercet.aio import TaskSet
from tercet.fleet.discovery.found import Discovery, FoundEngine
from tercet.fleet.discovery.kubernetes_api import (
    ApiAccess,
    EarlierInferencePool,
    InferenceObjective,
    InferencePool,
    Pod,
    PoolReference,
    from_kubeconfig,
    in_cluster,
)
from tercet.fleet.discovery.roster import RosterFile
from tercet.fleet.discovery.watching import WAITS, Waits, Watch
from tercet.protocol import BadRequest, Role
from tercet.protocol.names import bracketed
from tercet.settings import DiscoverySettings, EngineAddress
from tercet.settings.engine_addresses import EARLIER_POOL_GROUP, POOL_GROUP

ROLE, LLM_D_ROLE, PORT, DRAIN = "tercet/role", "llm-d.ai/role", "tercet/port", "tercet/drain"
"""Labels or annotations of a pod. A label overrides an annotation, and Tercet's names override llm-d's."""
ROLES: Mapping[str, Role] = {
    "prefill": "prefill",
    "encode-prefill": "prefill",
    "decode": "decode",
    "both": "both",
    "prefill-decode": "both",
    "encode-prefill-decode": "both",
}
_PORT = re.compile("[0-9]{1,5}")
OVER = ("Succeeded", "Failed")
logger = logging.getLogger("tercet.fleet.discovery")
POOLS = f"/apis/{POOL_GROUP}/v1/namespaces/{{}}/inferencepools"
EARLIER_POOLS = f"/apis/{EARLIER_POOL_GROUP}/v1alpha2/namespaces/{{}}/inferencepools"
PODS = "/api/v1/namespaces/{}/pods"
DEFAULT_PORT = 8000
Wanted = tuple[str, Sequence[int]]
"""A label selector for pods, and the ports of their engines."""
OBJECTIVES = "/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/{}/inferenceobjectives"


def engines_of(pod: Pod, ports: Sequence[int], scheme: str = "http") -> Sequence[FoundEngine]:
    """Return a pod's engines, one for each of ``ports``; none before the pod has an address or after it has ended.

    Raises :class:`~tercet.protocol.BadRequest` for a pod with invalid labels or annotations.
    """
    if not pod.status.pod_ip or pod.status.phase in OVER:
        return ()
    marks = {**(pod.metadata.annotations or {}), **(pod.metadata.labels or {})}
    role, own, withheld = role_of(marks), _ports(marks) or ports, why_withheld(pod, marks)
    serves = _is_ready(pod) and pod.metadata.deletion_timestamp is None
    host, name = bracketed(pod.status.pod_ip), pod.metadata.name
    names = [name] if len(own) == 1 else [f"{name}-rank-{index}" for index in range(len(own))]
    addresses = (
        EngineAddress(each, f"{scheme}://{host}:{port}", role, pod.metadata.labels or {})
        for each, port in zip(names, own, strict=True)
    )
    return [FoundEngine(address, pod.metadata.uid, serves, withheld) for address in addresses]


def role_of(marks: Mapping[str, str]) -> Role:
    """Return the role in a pod's labels, or ``both``; raise :class:`~tercet.protocol.BadRequest` if it is unknown."""
    for label in (ROLE, LLM_D_ROLE):
        if label in marks:
            role = ROLES.get(marks[label])
            if role is None:
                raise BadRequest(
                    f"{label}: {marks[label]!r} is not a role that generates; choose one of {', '.join(ROLES)}"
                )
            return role
    return "both"


def why_withheld(pod: Pod, marks: Mapping[str, str]) -> str:
    """Return the reason why the pod gets no new requests; empty if it gets them."""
    if pod.metadata.deletion_timestamp is not None:
        return "its pod is being deleted"
    if not _is_ready(pod):
        return "its pod is not ready"
    return f"its pod is marked {DRAIN}" if marks.get(DRAIN) == "true" else ""


def _is_ready(pod: Pod) -> bool:
    return any(each.type == "Ready" and each.status == "True" for each in pod.status.conditions or ())


def _ports(marks: Mapping[str, str]) -> Sequence[int]:
    """Return the ports in a pod's labels, one or several separated by commas; empty if it names none."""
    text = marks.get(PORT)
    if text is None:
        return ()
    found = text.replace(" ", "").split(",")
    if not all(_PORT.fullmatch(each) and 0 < int(each) < 65536 for each in found):
        raise BadRequest(f"{PORT}: {text!r} is not a port")
    return [int(each) for each in found]


def access_of(settings: DiscoverySettings) -> ApiAccess:
    """Return the API server that ``settings`` name; raise :class:`~tercet.protocol.BadRequest` without one."""
    if settings.kubeconfig is None:
        return in_cluster()
    return from_kubeconfig(Path(settings.kubeconfig).expanduser())


class PodDiscovery:
    """The engines of a namespace's pods, for one reader of :meth:`changes` at a time."""

    def __init__(self, settings: DiscoverySettings, api: ApiAccess, waits: Waits = WAITS) -> None:
        self._settings = settings
        self._api = api
        self._waits = waits
        self._namespace = settings.pool_namespace or api.namespace
        self._pods: asyncio.Task[None] | None = None
        self._wanted: Wanted | None = None
        self._tasks = TaskSet()
        self._engines: Sequence[FoundEngine] = ()
        self._changed = asyncio.Event()
        self._refused = set[tuple[str, str]]()

    @property
    def source(self) -> str:
        """Description of the source of engines, for messages."""
        if self._settings.pool_name is not None:
            return f"the pods of the InferencePool {self._namespace}/{self._settings.pool_name}"
        return f"the pods of {self._namespace} with {self._settings.endpoint_selector}"

    async def changes(self) -> AsyncGenerator[Sequence[FoundEngine]]:
        """Yield the engines once the pods are known, and again at each change; of fast changes only the newest.

        The caller must close the generator (``aclosing``), which ends its watches: garbage collection is too late.
        """
        self._pods = self._wanted = None  # an earlier reader's watches have ended
        if self._settings.pool_name is not None:
            self._tasks.keep(self._pool_watch().run, "watch on the pool")
        else:
            self._want((self._settings.endpoint_selector or "", self._ports(())))
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                yield self._engines
        finally:
            await self._tasks.close()

    def _pool_watch(self) -> Watch[InferencePool] | Watch[EarlierInferencePool]:
        # With this selector, a Role may allow one pool by its name.
        query = {"fieldSelector": f"metadata.name={self._settings.pool_name}"}
        changed, waits = self._pool_changed, self._waits
        if self._settings.pool_group == EARLIER_POOL_GROUP:
            path = EARLIER_POOLS.format(self._namespace)
            return Watch(self._api, path, EarlierInferencePool, query, changed, waits)
        return Watch(self._api, POOLS.format(self._namespace), InferencePool, query, changed, waits)

    def _pool_changed(self, pools: Sequence[InferencePool] | Sequence[EarlierInferencePool]) -> None:
        if not pools:
            logs.POOL_MISSING.tell(pool=f"{self._namespace}/{self._settings.pool_name}", reason="it does not exist")
            self._want(None)
            return
        labels, ports = pools[0].pods
        selector = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
        # An empty selector would match every pod of the namespace.
        self._want((selector, self._ports(ports)) if selector else None)

    def _ports(self, of_pool: Sequence[int]) -> Sequence[int]:
        return tuple(self._settings.endpoint_target_ports or of_pool or (DEFAULT_PORT,))

    def _want(self, wanted: Wanted | None) -> None:
        if wanted is not None and wanted == self._wanted:
            return
        if self._pods is not None:
            self._pods.cancel()
            self._pods = None
        self._wanted = wanted
        if wanted is None:
            self._publish(())
            return
        selector, ports = wanted
        query, path = {"labelSelector": selector}, PODS.format(self._namespace)
        watch = Watch(self._api, path, Pod, query, partial(self._pods_changed, ports), self._waits)
        self._pods = self._tasks.keep(watch.run, "watch on pods")

    def _pods_changed(self, ports: Sequence[int], pods: Sequence[Pod]) -> None:
        self._publish([each for pod in pods for each in self._engines_of(pod, ports)])

    def _engines_of(self, pod: Pod, ports: Sequence[int]) -> Sequence[FoundEngine]:
        try:
            return engines_of(pod, ports, self._settings.endpoint_scheme)
        except BadRequest as error:
            if (pod.metadata.uid, error.message) not in self._refused:
                self._refused.add((pod.metadata.uid, error.message))
                logger.warning("the pod %s is not an engine: %s", pod.metadata.name, error.message)
            return ()

    def _publish(self, engines: Sequence[FoundEngine]) -> None:
        self._engines = engines
        self._changed.set()


async def follow_objectives(
    api: ApiAccess,
    namespace: str,
    pool: PoolReference,
    tell: Callable[[Mapping[str, int]], object],
    waits: Waits = WAITS,
) -> None:
    """Call ``tell`` with the priorities of all objectives of the ``pool``, by name, at each change, until cancelled.

    While the API server does not answer, the last known priorities stay valid.
    """

    def changed(found: Sequence[InferenceObjective]) -> None:
        tell(priorities_of(found, pool))

    await Watch(api, OBJECTIVES.format(namespace), InferenceObjective, {}, changed, waits).run()


def priorities_of(found: Sequence[InferenceObjective], pool: PoolReference) -> dict[str, int]:
    """Return the priorities of the pool's objectives, by name; 0 for an objective without a priority.

    Objectives that are being deleted are left out. A pool of the same name in another API group is another pool.
    """
    return {
        each.metadata.name: each.spec.priority or 0
        for each in found
        if each.spec.pool_ref == pool and each.metadata.deletion_timestamp is None
    }


def discovery_of(settings: DiscoverySettings) -> Discovery:
    """Return the discovery that is set; raise :class:`~tercet.protocol.BadRequest` for pods without an API server."""
    if settings.roster is not None:
        return RosterFile(Path(settings.roster).expanduser())
    return PodDiscovery(settings, access_of(settings))
