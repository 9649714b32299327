"""Policies that make room: few engines well filled, or one engine with room for what does not fit anywhere.

Each proposes only what ends well as far as can be foreseen: all of its moves are laid out first, and none is made if
they do not reach what they are for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tercet.migration.loaded_engines import LoadedEngine, Wanted, best_fit, move
from tercet.migration.selection import Selection, SequenceView

FULL = 1.0
Placed = tuple[SequenceView, LoadedEngine]


def mitigate(engines: Sequence[LoadedEngine], ceiling: float, selection: Selection) -> Iterator[Wanted]:
    """An engine above ``ceiling`` gives sequences away until it is not.

    Each goes to the fullest engine that may serve in the same role and stays below.
    """
    for source in engines:
        for sequence in selection.of(source.sequences, source.believed - ceiling):
            if not source.takes or source.believed <= ceiling:
                break
            destination = best_fit(_beside(source, engines), sequence.share, ceiling)
            if destination is not None:
                yield move(sequence, source, destination, "binpack_mitigation")


def consolidate(engines: Sequence[LoadedEngine], ceiling: float) -> Iterator[Wanted]:
    """The least loaded engine that runs anything is emptied, if others that run something have room for all of it.

    Each sequence, the largest first, goes to the fullest engine that may serve in the same role and stays below
    ``ceiling``.
    """
    busy = [each for each in engines if each.takes and each.load is not None and each.believed > 0]
    for source in sorted(busy, key=lambda each: each.believed):
        others = [each for each in _beside(source, busy) if each.believed >= source.believed]
        largest_first = sorted(source.sequences, key=lambda each: -each.share)
        placed = _place(largest_first, others, ceiling)
        if largest_first and len(placed) == len(largest_first):
            yield from _moved(placed, source, "binpack_consolidation")
            return


def defragment(engines: Sequence[LoadedEngine]) -> Iterator[Wanted]:
    """Makes a place for a request that waits since it fits nowhere, though the fleet as a whole has the room.

    The first in an engine's queue goes to the fullest engine without a queue that has room for it. Where none has, the
    engine with the most room gives running sequences away, the shortest first, each to the fullest other one that
    it fits into, until there is enough; the request goes there when the next look finds the room. Until then that room
    is spoken for: none is made for a second one.
    """
    fitting_nowhere = list[tuple[SequenceView, list[LoadedEngine]]]()
    for source in engines:
        head = next(iter(source.queue), None)
        if head is None or not source.takes or source.load is None or head.share <= source.free:
            continue
        beside = [each for each in _beside(source, engines) if not each.waiting]
        destination = best_fit(beside, head.share, FULL)
        if destination is not None:
            yield move(head, source, destination, "defragment")
        else:
            fitting_nowhere.append((head, [source, *beside]))
    for head, able in fitting_nowhere:
        if making := list(_make_room(head.share, able)):
            yield from making
            return


def _make_room(share: float, engines: Sequence[LoadedEngine]) -> Iterator[Wanted]:
    """Moves after which one of these engines has so much room; none if there are no such moves."""
    able = [each for each in engines if each.load is not None]
    target = max(able, key=lambda each: each.free)
    needed, leaving = share - target.free, list[SequenceView]()
    for sequence in Selection("SR", "block_ratio", FULL).of(target.sequences):
        if needed <= 0:
            break
        leaving.append(sequence)
        needed -= sequence.share
    placed = _place(leaving, [each for each in able if each is not target], FULL)
    if needed <= 0 and len(placed) == len(leaving):
        yield from _moved(placed, target, "defragment")


def _beside(source: LoadedEngine, engines: Iterable[LoadedEngine]) -> list[LoadedEngine]:
    return [each for each in engines if each is not source and each.can(source.role)]


def _place(sequences: Iterable[SequenceView], engines: Sequence[LoadedEngine], ceiling: float) -> list[Placed]:
    """Where each could go, up to the first that fits nowhere; the engines are afterwards as they were."""
    placed: list[Placed] = []
    for sequence in sequences:
        destination = best_fit(engines, sequence.share, ceiling)
        if destination is None:
            break
        destination.arriving += sequence.share
        placed.append((sequence, destination))
    for sequence, destination in placed:
        destination.arriving -= sequence.share
    return placed


def _moved(placed: Iterable[Placed], source: LoadedEngine, reason: str) -> Iterator[Wanted]:
    for sequence, destination in placed:
        yield move(sequence, source, destination, reason)
