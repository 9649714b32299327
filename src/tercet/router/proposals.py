"""Moves that are proposed by others: what an engine passes on to the process that runs the sequence, and the way there.

Only the process that runs a sequence can move it, and only one peer knows which one that is: the engine that generates
the sequence: it has that process's token stream.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol, runtime_checkable

from tercet.aio import TaskSet
from tercet.fleet import EngineFleet, RunningSequences
from tercet.protocol import Conflict, MoveProposal, TercetError, UnknownSequence
from tercet.router.moves import Moves
from tercet.settings.log_events import MOVE

logger = logging.getLogger("tercet.router")
ANSWER_SECONDS = 5.0


@runtime_checkable
class PassesOn(Protocol):
    """An engine that knows for whom it generates: :class:`~tercet.wire.client.HttpEngine` says what its method does."""

    async def propose_move(self, seq_id: str, destination: str, reason: str) -> None: ...


class Proposals:
    """What engines pass on to this process, carried out by ``moves`` as far as limits let it."""

    def __init__(self, sequences: RunningSequences, moves: Moves) -> None:
        self._sequences = sequences
        self._moves = moves
        self._tasks = TaskSet()

    def heard(self, engine: str, proposal: MoveProposal) -> None:
        """An engine would have one of its sequences moved; one that has left it meanwhile is none of its any more."""
        sequence = self._sequences.generated(engine, proposal.seq_id)
        if sequence is None:
            MOVE.tell(
                seq_id=proposal.seq_id, engine=engine, to=proposal.destination, reason=proposal.reason,
                outcome="dropped", code=UnknownSequence.code,
                result=f"{engine} does not generate it for this process any more",
            )  # fmt: skip
            return
        work = self._moves.follow(sequence, proposal.destination, proposal.reason)
        self._tasks.spawn(work, f"move of {proposal.seq_id}")


async def pass_on(fleet: EngineFleet, seq_id: str, destination: str, reason: str) -> None:
    """Have the engine that generates a sequence pass a proposal on to the process that runs it.

    Raises :class:`~tercet.protocol.UnknownEngine` for the destination, :class:`~tercet.protocol.Conflict` if its tokens
    go to no router, and :class:`~tercet.protocol.UnknownSequence` if no engine of the fleet has it.
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
                    logger.debug("moves: %s is not passed on: %s", seq_id, error.message)
    except TimeoutError:  # an engine that does not answer may have it, or not
        logger.warning("moves: %s: not every engine has said within %g s whether it has it", seq_id, ANSWER_SECONDS)
    finally:
        for task in asked:
            task.cancel()
    raise refusal
