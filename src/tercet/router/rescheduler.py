"""The rescheduler: looks at the fleet again and again, and has what policies propose moved, as far as limits let it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from functools import partial

from tercet.aio import TaskSet
from tercet.fleet import EngineFleet, Member, RunningSequence, RunningSequences
from tercet.migration import LoadedEngine, Policy, Selection, SequenceView, Wanted, balance, drain, prefill_to_decode
from tercet.protocol import TercetError
from tercet.router.moves import Moves
from tercet.settings import RescheduleSettings

logger = logging.getLogger("tercet.router")
# A sequence is left alone for so long after a move of it has begun: what an engine reports is older than the move, and
# what failed would fail again.
AGAIN_SECONDS = 2.0


class Rescheduler:
    """Moves the sequences of this process by policies. Engines that are being drained are emptied by any setting."""

    def __init__(
        self, fleet: EngineFleet, sequences: RunningSequences, moves: Moves, settings: RescheduleSettings
    ) -> None:
        self._fleet = fleet
        self._sequences = sequences
        self._moves = moves
        self._interval = settings.interval_s
        self._policies = policies_of(settings)
        self._tasks = TaskSet()
        self._not_before: dict[RunningSequence, float] = {}

    async def run(self) -> None:
        """Look until cancelled."""
        try:
            while True:
                await self.look()
                await asyncio.sleep(self._interval)
        finally:
            await self._tasks.close()

    async def look(self) -> None:
        """Begin the moves that may begin now; what is over a limit is proposed again next time."""
        now = self._fleet.costs.clock()
        self._not_before = {sequence: at for sequence, at in self._not_before.items() if at > now}
        if not len(self._sequences) or (not self._policies and not any(each.draining for each in self._fleet.members)):
            return
        movable = {
            sequence.request.seq_id: sequence
            for sequence in self._sequences
            if sequence.is_generated and sequence not in self._not_before and not self._moves.is_moving(sequence)
        }
        for wanted in self._wanted(movable, now):
            sequence = movable.pop(wanted.seq_id, None)
            if sequence is not None and self._moves.refusal(sequence, wanted.destination) is None:
                self._not_before[sequence] = now + AGAIN_SECONDS
                self._tasks.spawn(self._move(sequence, wanted), f"move of {wanted.seq_id}")
                await asyncio.sleep(0)  # it begins, and counts for the limits

    def _wanted(self, movable: dict[str, RunningSequence], now: float) -> Iterator[Wanted]:
        engines = self._engines(movable, now)
        for policy in (drain, *self._policies):
            yield from policy(engines)

    def _engines(self, movable: dict[str, RunningSequence], now: float) -> list[LoadedEngine]:
        capacity = {member.name: member.kv_tokens for member in self._fleet.members}
        on: dict[str, list[SequenceView]] = {name: [] for name in capacity}
        for seq_id, sequence in movable.items():
            if sequence.engine in on:
                tokens = sequence.request.num_tokens + len(sequence.tokens)
                share = _share(tokens, capacity[sequence.engine])
                view = SequenceView(seq_id, tokens, share, sequence.answered, now - sequence.began)
                on[sequence.engine].append(view)
        engines = {member.name: self._engine(member, on[member.name]) for member in self._fleet.members}
        for move in self._moves.under_way:
            for name, sign in ((move.source, -1), (move.destination, 1)):
                if name in engines:
                    engines[name].arriving += sign * _share(move.tokens, capacity[name])
        return list(engines.values())

    def _engine(self, member: Member, sequences: Sequence[SequenceView]) -> LoadedEngine:
        last = self._fleet.knowledge.loads.last(member.name)
        load = last[0].kv_usage if last is not None else None
        return LoadedEngine(member.name, member.role, load, sequences, member.draining, member.reachable)

    async def _move(self, sequence: RunningSequence, wanted: Wanted) -> None:
        try:
            await self._moves.move(sequence, wanted.destination, wanted.reason)
        except TercetError as error:
            if not sequence.ended:
                logger.warning("moves: %s stays where it is for now: %s", wanted.seq_id, error.message)


def policies_of(settings: RescheduleSettings) -> tuple[Policy, ...]:
    """What the settings name, in their order."""
    selection = Selection(settings.order, settings.measure, settings.value)
    known: dict[str, Policy] = {
        "prefill_to_decode": prefill_to_decode,
        "decode_load": partial(
            balance, roles=("decode",), threshold=settings.threshold, selection=selection, reason="decode_load"
        ),
        "neutral_load": partial(
            balance, roles=("both",), threshold=settings.threshold, selection=selection, reason="neutral_load"
        ),
    }
    return tuple(known[name] for name in settings.policies)


def _share(tokens: int, capacity: int) -> float:
    """The part of a KV cache of ``capacity`` tokens that so many take; 0 while the engine has not said what it has."""
    return tokens / capacity if capacity else 0.0
