"""The layers that each rank sends, if two engines split a model's layers into different pipeline stages.

A stage holds adjacent layers of the model, and so a run of adjacent layers of each group. In a rank's region the planes
of a group lie together. So the common part of two stages is one run of planes in each group.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from tercet.protocol import KVLayout


class PlaneRun(NamedTuple):
    """A run of ``length`` planes: from ``source`` on in the sender's region, from ``target`` on in the receiver's."""

    source: int
    target: int
    length: int

    def within(self, planes: range) -> PlaneRun | None:
        """Return the part of this run that lies in ``planes`` of the sender, or None."""
        first, stop = max(planes.start, self.source), min(planes.stop, self.source + self.length)
        return PlaneRun(first, first - self.source + self.target, stop - first) if first < stop else None


def runs(source: KVLayout, target: KVLayout, stage: int, receiver: int) -> tuple[PlaneRun, ...] | None:
    """Return the part that stage ``stage`` of the source sends to stage ``receiver`` of the target, or None.

    The result is empty if both have one stage: all planes, with equal numbers. The layouts must have passed
    :meth:`~tercet.protocol.KVLayout.require_mappable`.
    """
    if not source.stages and not target.stages:
        return ()
    total = tuple(map(sum, zip(*(source.stages or target.stages), strict=True)))
    here, there = source.stages or (total,), target.stages or (total,)
    found: list[PlaneRun] = []
    for group in range(len(total)):
        ours, theirs = _held(here, stage, group), _held(there, receiver, group)
        common = range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
        if common:
            first, second = sum(here[stage][:group]), sum(there[receiver][:group])
            found.append(PlaneRun(first + common.start - ours.start, second + common.start - theirs.start, len(common)))
    return tuple(found) or None


def _held(stages: Sequence[Sequence[int]], stage: int, group: int) -> range:
    """Return the planes of a group that a stage holds, numbered in the whole model."""
    ends = [0, *itertools.accumulate(each[group] for each in stages)]
    return range(ends[stage], ends[stage + 1])
