"""Discovery of engines in pods, selected by labels or by an InferencePool."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from pathlib import Path

from tercet.aio import TaskSet
from tercet.fleet.discovery.api_access import ApiAccess, from_kubeconfig, in_cluster
from tercet.fleet.discovery.api_objects import EarlierInferencePool, InferencePool, Pod
from tercet.fleet.discovery.found import FoundEngine
from tercet.fleet.discovery.pods import engines_of
from tercet.fleet.discovery.watching import WAITS, Waits, Watch
from tercet.protocol import BadRequest
from tercet.settings import DiscoverySettings, log_events
from tercet.settings.discovery_settings import EARLIER_POOL_GROUP, POOL_GROUP

logger = logging.getLogger("tercet.fleet.discovery")
POOLS = f"/apis/{POOL_GROUP}/v1/namespaces/{{}}/inferencepools"
EARLIER_POOLS = f"/apis/{EARLIER_POOL_GROUP}/v1alpha2/namespaces/{{}}/inferencepools"
PODS = "/api/v1/namespaces/{}/pods"
PORT = 8000
Wanted = tuple[str, Sequence[int]]
"""A label selector for pods, and the ports of their engines."""


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
        told, waits = self._pool_changed, self._waits
        if self._settings.pool_group == EARLIER_POOL_GROUP:
            path = EARLIER_POOLS.format(self._namespace)
            return Watch(self._api, path, EarlierInferencePool, query, told, waits)
        return Watch(self._api, POOLS.format(self._namespace), InferencePool, query, told, waits)

    def _pool_changed(self, pools: Sequence[InferencePool] | Sequence[EarlierInferencePool]) -> None:
        if not pools:
            log_events.POOL_MISSING.tell(
                pool=f"{self._namespace}/{self._settings.pool_name}", reason="it does not exist"
            )
            self._want(None)
            return
        labels, ports = pools[0].pods
        selector = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
        # An empty selector would match every pod of the namespace.
        self._want((selector, self._ports(ports)) if selector else None)

    def _ports(self, of_pool: Sequence[int]) -> Sequence[int]:
        return tuple(self._settings.endpoint_target_ports or of_pool or (PORT,))

    def _want(self, wanted: Wanted | None) -> None:
        if wanted is not None and wanted == self._wanted:
            return
        if self._pods is not None:
            self._pods.cancel()
            self._pods = None
        self._wanted = wanted
        if wanted is None:
            self._tell(())
            return
        selector, ports = wanted
        query, path = {"labelSelector": selector}, PODS.format(self._namespace)
        watch = Watch(self._api, path, Pod, query, partial(self._pods_changed, ports), self._waits)
        self._pods = self._tasks.keep(watch.run, "watch on pods")

    def _pods_changed(self, ports: Sequence[int], pods: Sequence[Pod]) -> None:
        self._tell([each for pod in pods for each in self._engines_of(pod, ports)])

    def _engines_of(self, pod: Pod, ports: Sequence[int]) -> Sequence[FoundEngine]:
        try:
            return engines_of(pod, ports, self._settings.endpoint_scheme)
        except BadRequest as error:
            if (pod.metadata.uid, error.message) not in self._refused:
                self._refused.add((pod.metadata.uid, error.message))
                logger.warning("the pod %s is not an engine: %s", pod.metadata.name, error.message)
            return ()

    def _tell(self, engines: Sequence[FoundEngine]) -> None:
        self._engines = engines
        self._changed.set()
