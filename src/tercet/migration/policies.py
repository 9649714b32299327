"""Which sequences should be where: policies propose moves from what is known of the fleet, and do nothing themselves.

A policy is a function of the engines, with what runs on each, to proposals, the most urgent first. What it has proposed
counts as done for what it proposes next: loads are those that the fleet would have then. ``load`` is the share of an
engine's KV cache in use, 0 to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tercet.migration.selection import Selection, SequenceView
from tercet.protocol import Role


@dataclass
class LoadedEngine:
    """One engine and what this process runs there. ``load`` is None if it has not reported any."""

    name: str
    role: Role
    load: float | None
    sequences: Sequence[SequenceView] = ()
    draining: bool = False
    reachable: bool = True
    arriving: float = field(default=0.0)

    @property
    def takes(self) -> bool:
        """Whether anything may be moved there."""
        return self.reachable and not self.draining

    @property
    def believed(self) -> float:
        """Its load with what is to arrive; an engine that has said nothing counts as idle."""
        return (self.load or 0.0) + self.arriving


@dataclass(frozen=True)
class Wanted:
    """One sequence should be on another engine."""

    seq_id: str
    source: str
    destination: str
    reason: str


Policy = Callable[[Sequence[LoadedEngine]], Iterable[Wanted]]


def drain(engines: Sequence[LoadedEngine]) -> Iterator[Wanted]:
    """Whatever is on an engine that is being drained goes to the least loaded one that decodes, or any if none does."""
    for source in engines:
        if source.draining:
            for sequence in source.sequences:
                destination = _least_loaded(engines, "decode") or _least_loaded(engines, "both")
                if destination is not None:
                    yield _move(sequence, source, destination, "drain")


def prefill_to_decode(engines: Sequence[LoadedEngine]) -> Iterator[Wanted]:
    """What has its first token on an engine whose role is prefill goes to the least loaded one that decodes.

    Together with a program that sends requests to prefill engines only, this is prefill-decode disaggregation as
    Llumnix has it: a rule for dispatching and a rule for moving. While no engine decodes, sequences stay.
    """
    for source in engines:
        if source.role == "prefill" and not source.draining:
            for sequence in source.sequences:
                destination = _least_loaded(engines, "decode") if sequence.running else None
                if destination is not None:
                    yield _move(sequence, source, destination, "prefill_to_decode")


def balance(
    engines: Sequence[LoadedEngine], roles: Sequence[Role], threshold: float, selection: Selection, reason: str
) -> Iterator[Wanted]:
    """From the most loaded engine of these roles to the least loaded one, while their loads differ by more than that.

    A sequence is moved only if the two are closer to each other afterwards.
    """
    able = [engine for engine in engines if engine.role in roles and engine.takes and engine.load is not None]
    if len(able) < 2:
        return
    source, destination = max(able, key=lambda each: each.believed), min(able, key=lambda each: each.believed)
    for sequence in selection.of(source.sequences):
        gap = source.believed - destination.believed
        if gap <= threshold:
            return
        if abs(gap - 2 * sequence.share) < gap:
            yield _move(sequence, source, destination, reason)


def _least_loaded(engines: Sequence[LoadedEngine], role: Role) -> LoadedEngine | None:
    able = [each for each in engines if each.takes and (role == "both" or each.role in (role, "both"))]
    return min(able, key=lambda each: each.believed, default=None)


def _move(sequence: SequenceView, source: LoadedEngine, destination: LoadedEngine, reason: str) -> Wanted:
    source.arriving -= sequence.share
    destination.arriving += sequence.share
    return Wanted(sequence.seq_id, source.name, destination.name, reason)
