"""InferenceObjectives of a pool: the priorities that the picker of the pool gives to requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from tercet.fleet.kubernetes_api import WAITS, ApiAccess, ApiObject, Waits, Watch

OBJECTIVES = "/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/{}/inferenceobjectives"


class PoolReference(msgspec.Struct, frozen=True):
    """The pool that an object refers to, in the object's namespace."""

    name: str = ""
    kind: str = "InferencePool"
    group: str = "inference.networking.k8s.io"


class ObjectiveSpec(msgspec.Struct, frozen=True, rename="camel"):
    """Priority of requests that name an objective; higher is more important."""

    priority: int | None = None
    pool_ref: PoolReference = PoolReference()


class InferenceObjective(ApiObject, frozen=True):
    """``inference.networking.x-k8s.io/v1alpha2`` InferenceObjective."""

    spec: ObjectiveSpec = ObjectiveSpec()


async def follow_objectives(
    api: ApiAccess, namespace: str, pool: PoolReference, on_change: Callable[[Mapping[str, int]], object],
    waits: Waits = WAITS,
) -> None:  # fmt: skip
    """Call ``on_change`` with the priorities of the ``pool``'s objectives, by name, at each change, until cancelled.

    While the API server does not answer, the last known priorities stay valid.
    """
    path = OBJECTIVES.format(namespace)
    watch = Watch(api, path, InferenceObjective, {}, lambda found: on_change(priorities_of(found, pool)), waits)
    await watch.run()


def priorities_of(found: Sequence[InferenceObjective], pool: PoolReference) -> dict[str, int]:
    """Return the priorities of the pool's objectives, by name; 0 for an objective without a priority.

    Objectives that are being deleted are left out. A pool of the same name in another API group is another pool.
    """
    return {
        each.metadata.name: each.spec.priority or 0
        for each in found
        if each.spec.pool_ref == pool and each.metadata.deletion_timestamp is None
    }
