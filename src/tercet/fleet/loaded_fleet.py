"""The view of a fleet that move policies use: engines with their reports, and the sequences that may be moved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tercet.decisions.migration import CountedMove, LoadedEngine, SequenceView
from tercet.fleet.engine_fleet import EngineFleet
from tercet.fleet.members import Member


def is_stale(fleet: EngineFleet, member: Member, stale_after_s: float) -> bool:
    """True if a reachable engine has made no progress for ``stale_after_s`` seconds.

    A lost engine is not stale: its sequences have left it.
    """
    return member.reachable and fleet.liveness.stalled_s(member.name) > stale_after_s


def counted_move(fleet: EngineFleet, source: str, destination: str, tokens: int) -> CountedMove:
    """Return a move of ``tokens`` in the form that limits count.

    Raises :class:`~tercet.protocol.UnknownEngine` for an unknown destination.
    """
    last = fleet.knowledge.loads.last(destination)
    usage = last[0].kv_usage if last is not None else None
    return CountedMove(source, destination, tokens, fleet.member(destination).share(tokens), usage)


def loaded_engines(
    fleet: EngineFleet,
    sequences: Mapping[str, Sequence[SequenceView]],
    moves: Iterable[CountedMove],
    stale_after_s: float,
) -> list[LoadedEngine]:
    """Return all engines, each with its ``sequences`` and with its load after all ``moves`` have ended."""
    members = {member.name: member for member in fleet.members}
    engines = {name: _engine(fleet, member, sequences.get(name, ()), stale_after_s) for name, member in members.items()}
    for move in moves:
        for name, sign in ((move.source, -1), (move.destination, 1)):
            if name in engines:
                engines[name].arriving += sign * members[name].share(move.tokens)
    return list(engines.values())


def _engine(
    fleet: EngineFleet, member: Member, sequences: Sequence[SequenceView], stale_after_s: float
) -> LoadedEngine:
    last = fleet.knowledge.loads.last(member.name)
    load, waiting = (last[0].kv_usage, last[0].waiting) if last is not None else (None, 0)
    stale = is_stale(fleet, member, stale_after_s)
    return LoadedEngine(
        member.name, member.role, load, sequences, member.leaving, member.reachable, stale, waiting, member.revision
    )
