"""The fleet as policies see it: engines, their sequences, and their loads after the proposed moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tercet.decisions.migration.selection import SequenceView
from tercet.protocol import Revision, Role, may_exchange_kv
from tercet.protocol.revision import UNKNOWN_REVISION


@dataclass
class LoadedEngine:
    """One engine and the sequences that may be moved away from it.

    ``load`` is the share of its KV cache in use, 0 to 1, None if it has not reported any; ``waiting`` is the number of
    requests in its queue. ``draining`` engines are to be emptied, ``stale`` ones have shown no progress for longer than
    the settings allow. KV moves between engines whose ``revision`` allows it.
    """

    name: str
    role: Role
    load: float | None
    sequences: Sequence[SequenceView] = ()
    draining: bool = False
    reachable: bool = True
    stale: bool = False
    waiting: int = 0
    revision: Revision = UNKNOWN_REVISION
    arriving: float = field(default=0.0)

    @property
    def takes(self) -> bool:
        """True if sequences may be moved to this engine."""
        return self.reachable and not self.draining and not self.stale

    @property
    def believed(self) -> float:
        """The engine's load including the moves that will arrive; an engine without a report counts as idle."""
        return (self.load or 0.0) + self.arriving

    @property
    def demand(self) -> float:
        """The used share if the engine had space for its whole queue; it may exceed 1."""
        return self.believed + sum(each.share for each in self.queue)

    @property
    def free(self) -> float:
        """The share of the KV cache that would be free."""
        return max(0.0, 1.0 - self.believed)

    def can(self, role: Role) -> bool:
        """Return True if the engine may serve in the role."""
        return role == "both" or self.role in (role, "both")

    def fits(self, other: LoadedEngine) -> bool:
        """Return True if a sequence of one engine may continue on the other."""
        return may_exchange_kv(self.revision, other.revision)

    @property
    def queue(self) -> list[SequenceView]:
        """The engine's waiting sequences, in order of arrival."""
        if not self.waiting:
            return []
        return sorted((each for each in self.sequences if not each.running), key=lambda each: -each.age)[
            -self.waiting :
        ]


@dataclass(frozen=True)
class Wanted:
    """Proposal to move one sequence to another engine."""

    seq_id: str
    source: str
    destination: str
    reason: str


Policy = Callable[[Sequence[LoadedEngine]], Iterable[Wanted]]


def move(sequence: SequenceView, source: LoadedEngine, destination: LoadedEngine, reason: str) -> Wanted:
    """Propose a move, and change the loads of both engines to those after it."""
    source.arriving -= sequence.share
    destination.arriving += sequence.share
    return Wanted(sequence.seq_id, source.name, destination.name, reason)


def fitting(source: LoadedEngine, engines: Iterable[LoadedEngine]) -> list[LoadedEngine]:
    """Return the engines on which sequences of ``source`` may continue."""
    return [each for each in engines if each.fits(source)]


def groups_that_fit(engines: Iterable[LoadedEngine]) -> list[list[LoadedEngine]]:
    """Return the engines, in groups within which sequences may move."""
    groups = list[list[LoadedEngine]]()
    for engine in engines:
        group = next((group for group in groups if group[0].fits(engine)), None)
        if group is None:
            groups.append([engine])
        else:
            group.append(engine)
    return groups


def least_loaded(engines: Iterable[LoadedEngine], role: Role = "both") -> LoadedEngine | None:
    """Return the least loaded engine that accepts sequences and may serve in the role; None without one."""
    able = (each for each in engines if each.takes and each.can(role))
    return min(able, key=lambda each: each.believed, default=None)


def best_fit(engines: Iterable[LoadedEngine], share: float, ceiling: float) -> LoadedEngine | None:
    """Return the fullest engine with space for ``share`` below ``ceiling``; None without one."""
    able = (each for each in engines if each.takes and each.load is not None and each.believed + share <= ceiling)
    return max(able, key=lambda each: each.believed, default=None)
