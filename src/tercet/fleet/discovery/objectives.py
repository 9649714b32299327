"""The InferenceObjectives of a pool: names that requests use, and their priorities."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tercet.fleet.discovery.api_access import ApiAccess
from tercet.fleet.discovery.api_objects import InferenceObjective, PoolReference
from tercet.fleet.discovery.watching import WAITS, Waits, Watch

OBJECTIVES = "/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/{}/inferenceobjectives"


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
