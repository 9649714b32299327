"""The rescheduler: looks at the fleet again and again, and has what policies propose moved, as far as limits let it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from tercet.aio import TaskSet, repeat
from tercet.decisions.migration import LoadedEngine, Rescheduling, SequenceView, drain, failover, policies_of
from tercet.fleet import EngineFleet, RunningSequence, RunningSequences
from tercet.fleet.loaded_fleet import is_stale, loaded_engines
from tercet.router.moves import Moves
from tercet.settings import RescheduleSettings


class Rescheduler:
    """Moves the sequences of this process as :class:`~tercet.decisions.migration.Rescheduling` decides.

    Engines that are to be emptied, or have shown no progress for a while, are emptied whatever the settings say.
    Raises :class:`~tercet.protocol.BadRequest` if the settings name an unknown policy.
    """

    def __init__(
        self, fleet: EngineFleet, sequences: RunningSequences, moves: Moves, settings: RescheduleSettings
    ) -> None:
        self._fleet = fleet
        self._sequences = sequences
        self._moves = moves
        self._settings = settings
        self._rescheduling = Rescheduling((drain, failover, *policies_of(settings)))
        self._tasks = TaskSet()

    async def run(self) -> None:
        """Look until cancelled."""
        try:
            await repeat(self.look, self._settings.interval_s)
        finally:
            await self._tasks.close()

    async def look(self) -> None:
        """Begin the moves that may begin now; what is over a limit is proposed again next time."""
        now = self._fleet.costs.clock()
        self._rescheduling.begins(now)
        movable, members = self._movable(), {member.name for member in self._fleet.members}
        held_back = 0
        for wanted in self._rescheduling.wanted(self._engines(movable, now)) if movable else ():
            sequence = movable.get(wanted.seq_id)
            if sequence is None or wanted.destination not in members or wanted.destination == sequence.engine:
                continue
            if self._moves.refusal(sequence, wanted.destination) is not None:
                held_back += 1
                continue
            self._rescheduling.moved(wanted.seq_id, now)
            move = self._moves.follow(sequence, wanted.destination, wanted.reason)
            self._tasks.spawn(move, f"move of {wanted.seq_id}")
            await asyncio.sleep(0)  # it begins, and counts for the limits
        self._moves.metrics.held_back(held_back)

    def _movable(self) -> Mapping[str, RunningSequence]:
        """By its id, each sequence that policies may propose to move; none while they have nothing to decide."""
        fleet, stale_after_s = self._fleet, self._settings.stale_after_s
        if not self._settings.policies and not any(
            member.leaving or is_stale(fleet, member, stale_after_s) for member in fleet.members
        ):
            return {}
        return {
            sequence.request.seq_id: sequence
            for sequence in self._sequences
            if sequence.is_generated
            and not self._rescheduling.leaves_alone(sequence.request.seq_id)
            and not self._moves.is_moving(sequence)
        }

    def _engines(self, movable: Mapping[str, RunningSequence], now: float) -> list[LoadedEngine]:
        members = {member.name: member for member in self._fleet.members}
        on: dict[str, list[SequenceView]] = {name: [] for name in members}
        for seq_id, sequence in movable.items():
            member = members.get(sequence.engine)
            if member is not None:
                tokens = sequence.known_tokens
                view = SequenceView(seq_id, tokens, member.share(tokens), sequence.answered, now - sequence.began)
                on[member.name].append(view)
        return loaded_engines(self._fleet, on, self._moves.under_way.everywhere(), self._settings.stale_after_s)
