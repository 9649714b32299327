"""Engines that are being drained are emptied: what this process runs there goes on at other engines."""

from __future__ import annotations

import asyncio
import logging
import time

from tercet.aio import TaskSet
from tercet.fleet import EngineFleet, Member, RunningSequence, RunningSequences
from tercet.protocol import TercetError
from tercet.router.moves import Moves

logger = logging.getLogger("tercet.router")
LOOK_SECONDS = 0.1
# A sequence that could not be moved is tried again then, with whoever is the least loaded by that time.
AGAIN_SECONDS = 2.0
REASON = "drain"


class Emptying:
    """Moves what engines generate that are drained, a few at a time, as limits allow. What cannot be moved finishes."""

    def __init__(self, fleet: EngineFleet, sequences: RunningSequences, moves: Moves) -> None:
        self._fleet = fleet
        self._sequences = sequences
        self._moves = moves
        self._tasks = TaskSet()
        self._not_before: dict[RunningSequence, float] = {}

    async def run(self) -> None:
        """Look until cancelled."""
        try:
            while True:
                await self.look()
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            await self._tasks.close()

    async def look(self) -> None:
        """Begin the moves that may begin now."""
        now = time.monotonic()
        self._not_before = {sequence: at for sequence, at in self._not_before.items() if at > now}
        for member in self._fleet.members:
            if member.draining:
                await self._empty(member)

    async def _empty(self, member: Member) -> None:
        for sequence in self._sequences.on(member.name):
            if sequence in self._not_before or self._moves.is_moving(sequence) or not sequence.is_generated:
                continue
            destination = self._destination(sequence)
            if destination is None or self._moves.refusal(sequence, destination) is not None:
                return
            self._tasks.spawn(self._move(sequence, destination), f"move of {sequence.request.seq_id}")
            await asyncio.sleep(0)  # it begins, and counts for the limits

    def _destination(self, sequence: RunningSequence) -> str | None:
        """Who takes it: the least loaded engine that decodes, or any if none does; None if nobody can be picked."""
        role = "decode" if self._fleet.offers("decode") else "both"
        try:
            with self._fleet.pick(role, by="least_loaded", request=sequence.request) as engine:
                return engine.name
        except TercetError:
            return None

    async def _move(self, sequence: RunningSequence, destination: str) -> None:
        self._not_before[sequence] = time.monotonic() + AGAIN_SECONDS
        try:
            await self._moves.move(sequence, destination, REASON)
        except TercetError as error:
            if not sequence.ended:
                logger.warning("moves: %s stays where it is for now: %s", sequence.request.seq_id, error.message)
