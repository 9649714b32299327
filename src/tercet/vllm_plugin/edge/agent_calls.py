"""Calls from the verbs to the agents, in the API server's process: the only code that waits for an agent.

An agent may be slow, stopped or faulty. A grant or a push that it does not confirm in time has failed. The end of a
lease or a send is a fence, which holds only once every agent has answered. The answer is awaited in the background
without a timeout; until it arrives, the blocks stay pinned. Nothing can leak: a stopped agent answers when it
continues, and a dead agent ends its engine with all blocks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Protocol

from tercet.protocol import EngineError, TercetError
from tercet.transport import CancelSend, ExtendLease, GrantLease, PushCached, RevokeLease
from tercet.vllm_plugin.edge import agent_metrics

logger = logging.getLogger(__name__)
ANSWER_SECONDS = 3.0
"""Timeout of an agent's answer to a grant or a push, in seconds."""
RETRY_SECONDS = 1.0
LOGGED_SECONDS = 5.0

Asked = GrantLease | ExtendLease | PushCached | RevokeLease | CancelSend


class AgentChannel(Protocol):
    """The channel to one agent. Commands run in the order of the calls, even if the answer is not awaited."""

    def call(self, command: Asked) -> asyncio.Future[Any]:
        """Send a command; the future gets the answer, or :class:`~tercet.protocol.EngineError`."""
        ...


class AgentCalls:
    """All agents of an engine, by rank."""

    def __init__(self, agents: Sequence[AgentChannel]) -> None:
        self._agents = agents

    def __len__(self) -> int:
        return len(self._agents)

    async def grant(self, grant: GrantLease | ExtendLease) -> None:
        """Open or extend a lease on every rank.

        Raises :class:`~tercet.protocol.EngineError` if one rank fails: then the caller must revoke the lease on all
        ranks.
        """
        await self._now([grant] * len(self._agents))

    async def push(self, pushes: Sequence[PushCached]) -> None:
        """Push ``pushes[rank]`` on each rank. Raises as :meth:`grant` does; then the caller must cancel the send."""
        await self._now(pushes)

    async def revoke(self, lease: str) -> int:
        """Refuse a lease from now on; once no rank writes under it, return how many tokens' KV is valid on all ranks.

        There is no timeout.
        """
        return min(await self._fence(RevokeLease(lease)))

    async def cancel(self, send_id: str) -> None:
        """Stop a send; return once no rank reads its blocks. There is no timeout."""
        await self._fence(CancelSend(send_id))

    async def _now(self, commands: Sequence[Asked]) -> None:
        # All commands are sent before any answer is awaited, so that a later fence comes after them on every rank.
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
            except TercetError as error:  # the command did not run, so it is repeated
                logger.warning("KV agent %d: %s: %s", rank, type(command).__name__, error.message)
            await asyncio.sleep(RETRY_SECONDS)

    def _say_late(self, command: RevokeLease | CancelSend) -> None:
        logger.warning("a KV agent has not answered for %.0f s; its blocks stay pinned: %s", LOGGED_SECONDS, command)
