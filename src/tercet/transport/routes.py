"""Routes of KV between the ranks of two engines that split a model over their ranks differently."""

from __future__ import annotations

from typing import NamedTuple

from tercet.protocol import KVLayout
from tercet.transport.head_slices import HeadSlice, shared
from tercet.transport.layer_runs import PlaneRun, runs


class RankRoute(NamedTuple):
    """The KV that one sending rank has for one receiving rank: a ``head_slice`` of each block of some ``planes``.

    Empty ``planes`` stand for all planes, with equal numbers.
    """

    receiver: int
    head_slice: HeadSlice
    planes: tuple[PlaneRun, ...] = ()


def routes(source: KVLayout, target: KVLayout, rank: int) -> list[RankRoute]:
    """Return the destinations of rank ``rank``'s blocks; empty if other ranks hold the same heads and send them.

    The layouts must have passed :meth:`~tercet.protocol.KVLayout.require_mappable`.
    """
    stage, rank = divmod(rank, source.tp_size)
    found: list[RankRoute] = []
    for receiver in range(target.num_ranks):
        their_stage, their_rank = divmod(receiver, target.tp_size)
        planes = runs(source, target, stage, their_stage)
        head_slice = shared(source, target, rank, their_rank)
        if planes is not None and head_slice is not None:
            found.append(RankRoute(receiver, head_slice, planes))
    return found
