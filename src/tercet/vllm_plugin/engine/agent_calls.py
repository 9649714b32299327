"""What the verbs ask of the agents, from the API server's process: nobody else waits for an agent.

An agent may be slow, stopped or mistaken. A grant or a push that it does not take soon has failed. The end of a lease
or a send is a fence, and a fence holds only once every agent has answered: it is waited for as long as that takes,
beside whoever asked, and meanwhile the blocks stay where they are. It cannot leak: an agent that is stopped answers
when it goes on, and one that is gone takes its engine with it, blocks and all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Protocol

from tercet.protocol import EngineError, TercetError
from tercet.transport import CancelSend, ExtendLease, GrantLease, PushCached, RevokeLease
from tercet.vllm_plugin.engine import agent_metrics

logger = logging.getLogger(__name__)
ANSWER_SECONDS = 3.0
"""So long an agent has to take a grant or a push."""
RETRY_SECONDS = 1.0
LOGGED_SECONDS = 5.0

Asked = GrantLease | ExtendLease | PushCached | RevokeLease | CancelSend


class AgentChannel(Protocol):
    """One agent. Commands are carried out in the order of the calls, whether or not somebody awaits the answer."""

    def call(self, command: Asked) -> asyncio.Future[Any]:
        """Post a command; the answer, or :class:`~tercet.protocol.EngineError`, is the future's."""
        ...


class AgentCalls:
    """All agents of an engine, by rank."""

    def __init__(self, agents: Sequence[AgentChannel]) -> None:
        self._agents = agents

    def __len__(self) -> int:
        return len(self._agents)

    async def grant(self, grant: GrantLease | ExtendLease) -> None:
        """Open a lease on every rank, or more of it.

        Raises :class:`~tercet.protocol.EngineError` if one does not do it: whoever asked must then revoke it on all.
        """
        await self._now([grant] * len(self._agents))

    async def push(self, pushes: Sequence[PushCached]) -> None:
        """Have ``pushes[rank]`` pushed; raises as :meth:`grant` does, and whoever asked must then cancel the send."""
        await self._now(pushes)

    async def revoke(self, lease: str) -> int:
        """Refuse a lease from now on; returns once no rank writes under it, with how far its KV is valid on all.

        Takes as long as it takes.
        """
        return min(await self._fence(RevokeLease(lease)))

    async def cancel(self, send_id: str) -> None:
        """Stop a send; returns once no rank reads its blocks. Takes as long as it takes."""
        await self._fence(CancelSend(send_id))

    async def _now(self, commands: Sequence[Asked]) -> None:
        # All are posted before anything is awaited, so that a later fence comes after them on every rank.
        asked = [agent.call(command) for agent, command in zip(self._agents, commands, strict=True)]
        await asyncio.wait(asked, timeout=ANSWER_SECONDS)
        for rank, answer in enumerate(asked):
            if not answer.done():
                raise EngineError(f"KV agent {rank} did not answer on its control channel within {ANSWER_SECONDS:g} s")
            if (error := answer.exception()) is not None:
                raise EngineError(f"KV agent {rank}: {error}") from error

    async def _fence(self, command: RevokeLease | CancelSend) -> list[Any]:
        late = asyncio.get_running_loop().call_later(LOGGED_SECONDS, self._say_late, command)
        with agent_metrics.fences_open.track_inprogress():
            try:
                return await asyncio.gather(*(self._until_done(rank, command) for rank in range(len(self._agents))))
            finally:
                late.cancel()

    async def _until_done(self, rank: int, command: RevokeLease | CancelSend) -> Any:
        while True:
            try:
                return await self._agents[rank].call(command)
            except TercetError as error:  # done it has not, so it is asked again
                logger.warning("KV agent %d: %s: %s", rank, type(command).__name__, error.message)
            await asyncio.sleep(RETRY_SECONDS)

    def _say_late(self, command: RevokeLease | CancelSend) -> None:
        logger.warning("a KV agent has not answered for %.0f s; its blocks wait for it: %s", LOGGED_SECONDS, command)
