"""The destinations of a send: the receiver's ranks to which each rank of this engine sends."""

from __future__ import annotations

from tercet.protocol import KVAddrInfo, KVLayout
from tercet.transport import SendDestination, routes


def destinations_of(info: KVAddrInfo, layout: KVLayout, num_ranks: int) -> list[list[SendDestination]]:
    """Return, for each rank of this engine, the receiver's ranks with common heads and layers."""
    ranks = sorted(info.ranks, key=lambda rank: rank.rank)
    return [
        [
            SendDestination(ranks[route.receiver].addresses, route.head_slice, route.planes)
            for route in routes(layout, info.layout, rank)
        ]
        for rank in range(num_ranks)
    ]
