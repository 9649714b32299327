"""NIXL and Mooncake called directly, for comparison with the same libraries behind our transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tercet.bench.transfer.cases import Case
from tercet.bench.transfer.peer import Peer
from tercet.bench.transfer.ways import Way
from tercet.transport import KVRegion


def direct_ways(
    case: Case, source: KVRegion, peer: Peer, backends: Sequence[str]
) -> list[tuple[str, Callable[[], Way]]]:
    """The libraries among ``backends``, each as a way of its own."""
    return []
