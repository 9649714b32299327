"""Policies that make space: a few well-filled engines, or space on one engine for a request that fits on none.

Each policy plans all of its moves first, and proposes none if they do not reach its goal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tercet.decisions.migration.loaded_engines import LoadedEngine, Wanted, best_fit, move
from tercet.decisions.migration.selection import Selection, SequenceView

FULL = 1.0
Placed = tuple[SequenceView, LoadedEngine]


def mitigate(engines: Sequence[LoadedEngine], ceiling: float, selection: Selection) -> Iterator[Wanted]:
    """Yield moves away from each engine above ``ceiling`` until it is below.

    Each sequence moves to the fullest engine that may serve in the same role and stays below ``ceiling``.
    """
    for source in engines:
        for sequence in selection.of(source.sequences, source.believed - ceiling):
            if not source.takes or source.believed <= ceiling:
                break
            destination = best_fit(_others(source, engines), sequence.share, ceiling)
            if destination is not None:
                yield move(sequence, source, destination, "binpack_mitigation")


def consolidate(engines: Sequence[LoadedEngine], ceiling: float) -> Iterator[Wanted]:
    """Yield moves that empty the least loaded engine with work, if other engines with work have space for all of it.

    Each sequence, the largest first, moves to the fullest engine that may serve in the same role and stays below
    ``ceiling``.
    """
    busy = [each for each in engines if each.takes and each.load is not None and each.believed > 0]
    for source in sorted(busy, key=lambda each: each.believed):
        others = [each for each in _others(source, busy) if each.believed >= source.believed]
        largest_first = sorted(source.sequences, key=lambda each: -each.share)
        placed = _place(largest_first, others, ceiling)
        if largest_first and len(placed) == len(largest_first):
            yield from _moved(placed, source, "binpack_consolidation")
            return


def defragment(engines: Sequence[LoadedEngine]) -> Iterator[Wanted]:
    """Yield moves that make space for a waiting request that fits on no engine, although the fleet has the space.

    The first request in an engine's queue moves to the fullest engine without a queue that has space for it. Without
    such an engine, the engine with the most space moves running sequences away, the shortest first, each to the fullest
    other engine that it fits into, until the space is enough; the next round then moves the request there. Until then
    the space is reserved: no space is made for a second request.
    """
    fitting_nowhere = list[tuple[SequenceView, list[LoadedEngine]]]()
    for source in engines:
        head = next(iter(source.queue), None)
        if head is None or not source.takes or source.load is None or head.share <= source.free:
            continue
        others = [each for each in _others(source, engines) if not each.waiting]
        destination = best_fit(others, head.share, FULL)
        if destination is not None:
            yield move(head, source, destination, "defragment")
        else:
            fitting_nowhere.append((head, [source, *others]))
    for head, able in fitting_nowhere:
        if making := list(_make_room(head.share, able)):
            yield from making
            return


def _make_room(share: float, engines: Sequence[LoadedEngine]) -> Iterator[Wanted]:
    """Yield moves after which one of these engines has space for ``share``; none if no moves achieve that."""
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


def _others(source: LoadedEngine, engines: Iterable[LoadedEngine]) -> list[LoadedEngine]:
    return [each for each in engines if each is not source and each.can(source.role) and each.fits(source)]


def _place(sequences: Iterable[SequenceView], engines: Sequence[LoadedEngine], ceiling: float) -> list[Placed]:
    """Return destinations for the sequences, up to the first that fits nowhere; loads are restored."""
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
