"""Which layers' KV a worker tells its agent of, and when in a step. Decides only.

Layer hooks run where a step runs layer by layer: eagerly, or as piecewise CUDA graphs. A full graph, which is what
decode-only steps run as, calls none of them; what it has computed is told when the step ends. So graphs of either kind
serve, and nothing here asks which one it was.
"""

from __future__ import annotations

from collections.abc import Sequence

# So much KV is told to the agent at a time, at least; what remains at the end of a step is told then.
NOTE_BYTES = 1024 * 1024


class StepLayers:
    """The planes of one rank during a step, each told once if the step pushes anything."""

    def __init__(self, num_planes: int) -> None:
        self._all = range(num_planes)
        self._plane_bytes = 0
        self._done: list[int] = []
        self._told: set[int] = set()

    def begin(self, plane_bytes: int) -> None:
        """A step begins that pushes so many bytes of each plane; none, and nothing is told."""
        self._plane_bytes = plane_bytes
        self._done, self._told = [], set()

    def saved(self, planes: Sequence[int]) -> tuple[int, ...]:
        """A layer's hook ran, for its ``planes``; which are worth telling now.

        They go together until they are worth an agent's while: waking it costs the cores that compute.
        """
        if not self._plane_bytes:
            return ()
        self._done += [plane for plane in planes if plane not in self._told and plane not in self._done]
        return self._tell() if len(self._done) * self._plane_bytes >= NOTE_BYTES else ()

    def ended(self) -> tuple[int, ...]:
        """The step is over; which are left to be told: those of hooks that did not run, too."""
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
