"""Policies: rules for the engine of each sequence. They propose moves from the fleet's state, and change nothing.

A policy is a function from engines, with their sequences, to proposals, the most urgent first. Its earlier proposals
count as done for its next ones: loads are those that the fleet would have then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from tercet.decisions.migration.loaded_engines import (
    LoadedEngine,
    Wanted,
    fitting,
    groups_that_fit,
    least_loaded,
    move,
)
from tercet.decisions.migration.selection import Selection, SequenceView
from tercet.protocol import Role


def drain(engines: Sequence[LoadedEngine]) -> Iterator[Wanted]:
    """Yield moves of every sequence away from an engine that is to be emptied: see :func:`refuge`."""
    for source in engines:
        if source.draining:
            yield from _emptied(source, engines, "drain")


def failover(engines: Sequence[LoadedEngine]) -> Iterator[Wanted]:
    """Yield moves of every sequence away from an engine without progress, before the engine is removed.

    Its KV is readable as long as its memory is. Llumnix calls this pre-stop migration of stale instances.
    """
    for source in engines:
        if source.stale and not source.draining:
            yield from _emptied(source, engines, "failover")


def refuge(engines: Sequence[LoadedEngine], source: LoadedEngine, sequence: SequenceView) -> LoadedEngine | None:
    """Return the least loaded engine for the sequence's next work, or of any role if no engine has that role.

    A running sequence needs decoding; a waiting one waits again, at an engine with its engine's role. None if no engine
    may exchange KV with ``source``.
    """
    able = fitting(source, engines)
    return least_loaded(able, "decode" if sequence.running else source.role) or least_loaded(able)


def prefill_to_decode(engines: Sequence[LoadedEngine]) -> Iterator[Wanted]:
    """Yield moves of sequences with a first token from prefill engines to the least loaded decode engine.

    Together with a program that sends requests to prefill engines only, this is prefill-decode disaggregation as in
    Llumnix: one rule for dispatching and one for moving. While no engine decodes, sequences stay.
    """
    for source in engines:
        if source.role == "prefill" and source.takes:
            for sequence in source.sequences:
                destination = least_loaded(fitting(source, engines), "decode") if sequence.running else None
                if destination is not None:
                    yield move(sequence, source, destination, "prefill_to_decode")


def balance(
    engines: Sequence[LoadedEngine], roles: Sequence[Role], threshold: float, selection: Selection, reason: str
) -> Iterator[Wanted]:
    """Yield moves from the most to the least loaded engine of these roles, from the second to the last but one, etc.

    Each pair moves sequences while its demands differ by more than ``threshold``. A sequence is moved only if that
    brings the demands closer together, and only if the destination has space. Groups of engines that exchange no KV
    with each other are balanced separately.
    """
    able = [engine for engine in engines if engine.role in roles and engine.takes and engine.load is not None]
    for group in groups_that_fit(able):
        yield from _balanced(group, threshold, selection, reason)


def _balanced(
    able: list[LoadedEngine], threshold: float, selection: Selection, reason: str
) -> Iterator[Wanted]:  # fmt: skip
    able.sort(key=lambda each: each.demand)
    for destination, source in islice(zip(able, reversed(able), strict=True), len(able) // 2):
        gap = source.demand - destination.demand
        if gap <= threshold:
            return
        for sequence in selection.of(source.sequences, gap / 2):
            gap = source.demand - destination.demand
            if gap <= threshold:
                break
            if abs(gap - 2 * sequence.share) < gap and sequence.share <= destination.free:
                yield move(sequence, source, destination, reason)


def _emptied(source: LoadedEngine, engines: Sequence[LoadedEngine], reason: str) -> Iterator[Wanted]:
    for sequence in source.sequences:
        destination = refuge(engines, source, sequence)
        if destination is not None:
            yield move(sequence, source, destination, reason)
