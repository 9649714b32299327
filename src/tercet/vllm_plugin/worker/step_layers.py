"""Decisions which layers' KV a worker reports to its agent, and when in a step; without I/O.

Layer hooks run if a step runs layer by layer: eagerly, or as piecewise CUDA graphs. A full graph, which decode-only
steps use, calls none of them; its KV is reported when the step ends. So both kinds of graphs work, and no code here
checks which kind it was.
"""

from __future__ import annotations

from collections.abc import Sequence

# Fewest bytes of KV in one note to the agent; the remainder is reported at the end of a step.
NOTE_BYTES = 1024 * 1024


class StepLayers:
    """The planes of one rank during a step, each reported once if the step pushes anything."""

    def __init__(self, num_planes: int) -> None:
        self._all = range(num_planes)
        self._plane_bytes = 0
        self._done: list[int] = []
        self._told: set[int] = set()

    def begin(self, plane_bytes: int) -> None:
        """Begin a step that pushes ``plane_bytes`` of each plane; with 0, nothing is reported."""
        self._plane_bytes = plane_bytes
        self._done, self._told = [], set()

    def saved(self, planes: Sequence[int]) -> tuple[int, ...]:
        """Record that a layer's hook ran, for its ``planes``; return the planes to report now.

        Planes are reported together once they are large enough: waking the agent costs time of the cores that compute.
        """
        if not self._plane_bytes:
            return ()
        self._done += [plane for plane in planes if plane not in self._told and plane not in self._done]
        return self._tell() if len(self._done) * self._plane_bytes >= NOTE_BYTES else ()

    def ended(self) -> tuple[int, ...]:
        """End the step; return the planes still to report, including those whose hooks did not run."""
        if not self._plane_bytes:
            return ()
        seen = self._told.union(self._done)
        self._done += [plane for plane in self._all if plane not in seen]
        self._plane_bytes, found = 0, self._tell()
        return found

    def _tell(self) -> tuple[int, ...]:
        found, self._done = tuple(self._done), []
        self._told.update(found)
        return found
