"""Proposals of moves by other processes, which the engine that generates a sequence passes on.

Only the process that runs a sequence can move it, and only the engine that generates the sequence knows that process,
since it has the process's token stream.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol, runtime_checkable

from tercet.aio import TaskSet
from tercet.fleet import EngineFleet, RunningSequences
from tercet.protocol import Conflict, MoveProposal, TercetError, UnknownSequence
from tercet.router.serve.moves import Moves
from tercet.settings.log_events import MOVE

logger = logging.getLogger("tercet.router")
ANSWER_SECONDS = 5.0


@runtime_checkable
class PassesOn(Protocol):
    """An engine that passes proposals on; see :class:`~tercet.wire.client.HttpEngine` for the method."""

    async def propose_move(self, seq_id: str, destination: str, reason: str) -> None: ...


class Proposals:
    """The proposals that engines pass on to this process; ``moves`` executes them within the limits."""

    def __init__(self, sequences: RunningSequences, moves: Moves) -> None:
        self._sequences = sequences
        self._moves = moves
        self._tasks = TaskSet()

    def heard(self, engine: str, proposal: MoveProposal) -> None:
        """Start the proposed move of a sequence of ``engine``; drop it if the sequence has left that engine."""
        sequence = self._sequences.generated(engine, proposal.seq_id)
        if sequence is None:
            MOVE.tell(
                seq_id=proposal.seq_id, engine=engine, to=proposal.destination, reason=proposal.reason,
                outcome="dropped", code=UnknownSequence.code,
                result=f"{engine} no longer generates this sequence for this process",
            )  # fmt: skip
            return
        work = self._moves.follow(sequence, proposal.destination, proposal.reason)
        self._tasks.spawn(work, f"move of {proposal.seq_id}")


async def pass_on(fleet: EngineFleet, seq_id: str, destination: str, reason: str) -> None:
    """Pass a proposal to the engine that generates a sequence, which passes it on to the process that runs it.

    Raises :class:`~tercet.protocol.UnknownEngine` for the destination, :class:`~tercet.protocol.Conflict` if the
    sequence's tokens do not go to a router, and :class:`~tercet.protocol.UnknownSequence` if no engine has it.
    """
    fleet.member(destination)
    engines = [member.engine for member in fleet.members]
    asked = {
        asyncio.ensure_future(engine.propose_move(seq_id, destination, reason))
        for engine in engines
        if isinstance(engine, PassesOn)
    }
    refusal: TercetError = UnknownSequence(f"seq_id: no sequence {seq_id!r} runs in this process or fleet", "seq_id")
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            for answer in asyncio.as_completed(asked):
                try:
                    return await answer
                except Conflict as error:
                    refusal = error
                except TercetError as error:
                    logger.debug("moves: an engine did not pass on the proposal for %s: %s", seq_id, error.message)
    except TimeoutError:  # an engine that does not answer may have the sequence, or not
        logger.warning("moves: %s: not every engine answered the proposal within %g s", seq_id, ANSWER_SECONDS)
    finally:
        for task in asked:
            task.cancel()
    raise refusal
