"""The rescheduler, which polls the fleet at intervals and begins the moves that policies propose, within limits.

Sequences come from one of two sources: :class:`OwnSequences` are those of this router process, which moves them;
:class:`~.reported_sequences.ReportedSequences` are those that engines report, for all routers of a fleet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Protocol

from tercet.aio import TaskSet, repeat
from tercet.decisions.migration import (
    CountedMove,
    MovesUnderWay,
    Policy,
    Rescheduling,
    SequenceView,
    Wanted,
    drain,
    failover,
    policies_of,
)
from tercet.fleet import EngineFleet, RunningSequence, RunningSequences
from tercet.fleet.policy_views import is_stale, loaded_engines
from tercet.router.serve.moves import Moves
from tercet.settings import RescheduleSettings

Views = Mapping[str, Sequence[SequenceView]]
"""The sequences that may be moved, by engine."""


class SequenceSource(Protocol):
    """The sequences that a rescheduler may move, and the way to move them."""

    @property
    def policies(self) -> Sequence[Policy]:
        """Policies that always apply, with any settings."""
        ...

    @property
    def under_way(self) -> MovesUnderWay:
        """The moves that have begun and not ended."""
        ...

    async def views(self, may_move: Callable[[str], bool], now: float) -> Views:
        """Return the sequences that may be moved and whose id ``may_move`` accepts; ``now`` is in seconds."""
        ...

    def refusal(self, wanted: Wanted) -> str | None:
        """Return the reason why a move may not begin now; None if it may."""
        ...

    def move(self, wanted: Wanted) -> Coroutine[Any, Any, object]:
        """Make a move, which counts for the limits from its first step on."""
        ...

    def held_back(self, moves: int) -> None:
        """Take the number of proposed moves that limits do not allow yet."""
        ...


class Rescheduler:
    """The mover of sequences of ``source``, by decisions of :class:`~tercet.decisions.migration.Rescheduling`.

    The constructor raises :class:`~tercet.protocol.BadRequest` if the settings name an unknown policy.
    """

    def __init__(self, fleet: EngineFleet, source: SequenceSource, settings: RescheduleSettings) -> None:
        self._fleet = fleet
        self._source = source
        self._settings = settings
        self._rescheduling = Rescheduling((*source.policies, *policies_of(settings)))
        self._tasks = TaskSet()

    async def run(self) -> None:
        """Make a round (:meth:`look`) at each interval, until cancelled."""
        try:
            await repeat(self.look, self._settings.interval_s, "rescheduler")
        finally:
            await self._tasks.close()

    async def look(self) -> None:
        """Begin the moves that may begin now; a move that exceeds a limit is proposed again in the next round."""
        now, held_back = self._fleet.costs.clock(), 0
        self._rescheduling.begins(now)
        views: Views = await self._source.views(self._may_move, now) if self._has_work else {}
        movable = {each.seq_id for found in views.values() for each in found}
        members = {member.name for member in self._fleet.members}
        for wanted in self._wanted(views) if movable else ():
            if wanted.seq_id not in movable or wanted.destination not in members - {wanted.source}:
                continue
            if self._source.refusal(wanted) is not None:
                held_back += 1
                continue
            self._rescheduling.moved(wanted.seq_id, now)
            self._tasks.spawn(self._source.move(wanted), f"move of {wanted.seq_id}")
            await asyncio.sleep(0)  # so that the move begins and counts for the limits
        self._source.held_back(held_back)

    @property
    def _has_work(self) -> bool:
        """True if policies may propose moves; policies that always apply only empty engines."""
        stale_after_s = self._settings.stale_after_s
        return bool(self._settings.policies) or any(
            member.leaving or is_stale(self._fleet, member, stale_after_s) for member in self._fleet.members
        )

    def _may_move(self, seq_id: str) -> bool:
        return not self._rescheduling.leaves_alone(seq_id)

    def _wanted(self, views: Views) -> Iterable[Wanted]:
        under_way: list[CountedMove] = self._source.under_way.everywhere()
        return self._rescheduling.wanted(loaded_engines(self._fleet, views, under_way, self._settings.stale_after_s))


class OwnSequences:
    """The sequences of this process, which ``moves`` executes.

    Engines that are leaving, or have made no progress for ``stale_after_s``, are emptied with any settings.
    """

    policies = (drain, failover)

    def __init__(self, fleet: EngineFleet, sequences: RunningSequences, moves: Moves) -> None:
        self._fleet = fleet
        self._sequences = sequences
        self._moves = moves
        self._movable: dict[str, RunningSequence] = {}

    @property
    def under_way(self) -> MovesUnderWay:
        """The moves of this process that have begun and not ended."""
        return self._moves.under_way

    async def views(self, may_move: Callable[[str], bool], now: float) -> Views:
        """Return the sequences that engines generate and that are not being moved; see :class:`SequenceSource`."""
        members = {member.name: member for member in self._fleet.members}
        on: dict[str, list[SequenceView]] = {name: [] for name in members}
        self._movable = {}
        for sequence in self._sequences:
            seq_id, member = sequence.request.seq_id, members.get(sequence.engine)
            if not sequence.is_generated or member is None or self._moves.is_moving(sequence) or not may_move(seq_id):
                continue
            self._movable[seq_id] = sequence
            tokens = sequence.known_tokens
            view = SequenceView(seq_id, tokens, member.share(tokens), sequence.answered, now - sequence.began)
            on[member.name].append(view)
        return on

    def refusal(self, wanted: Wanted) -> str | None:
        """Return the limit that a move would exceed now, or None; see :class:`SequenceSource`."""
        return self._moves.refusal(self._movable[wanted.seq_id], wanted.destination)

    def move(self, wanted: Wanted) -> Coroutine[Any, Any, object]:
        """Move a sequence of this process; see :class:`SequenceSource`."""
        return self._moves.follow(self._movable[wanted.seq_id], wanted.destination, wanted.reason)

    def held_back(self, moves: int) -> None:
        """Set the metric of moves that limits do not allow yet."""
        self._moves.metrics.held_back(moves)
