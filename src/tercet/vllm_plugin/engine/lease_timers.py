"""Leases at the engine's edge: whose each is, for which tokens, how much has arrived, and when it ends by itself."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import suppress
from dataclasses import dataclass, field

from tercet.aio import TaskSet
from tercet.protocol import BadRequest, LeaseEnded, TercetError, UnknownSequence
from tercet.transport import LeaseFilled
from tercet.vllm_plugin.engine import agent_metrics
from tercet.vllm_plugin.engine.core_calls import CoreCalls


@dataclass
class EdgeLease:
    """One lease. ``filled`` is how far each rank that has reported says its KV is valid."""

    lease: str
    seq_id: str
    tokens: list[int]
    timer: asyncio.TimerHandle
    matched_len: int = 0
    filled: dict[int, int] = field(default_factory=dict)


class LeaseTimers:
    """One of an engine's two ledgers of leases; the other one is the scheduler's ``Reservations``.

    Each has what only its process can act on: timers and sequence names are here, where calls arrive and time passes
    whether or not the engine steps; blocks are there, since only the scheduler's thread may touch them. A lease that is
    forgotten here is either claimed, and then the request that adopts it has its blocks, or released there.
    """

    def __init__(self, core: CoreCalls, tasks: TaskSet) -> None:
        self._core = core
        self._tasks = tasks
        self._leases: dict[str, EdgeLease] = {}
        self._of_seq: dict[str, EdgeLease] = {}

    def holds(self, seq_id: str) -> bool:
        """Whether the sequence has a lease."""
        return seq_id in self._of_seq

    async def reserve(
        self, seq_id: str, tokens: list[int], cache_salt: str | None, ttl: float, notify: str
    ) -> EdgeLease:  # fmt: skip
        """Reserve blocks for ``tokens`` until ``ttl`` seconds from now; agents report to ``notify``.

        Raises :class:`~tercet.protocol.NoSpace`, or :class:`~tercet.protocol.LeaseEnded` if it is over already.
        """
        lease = uuid.uuid4().hex
        timer = asyncio.get_running_loop().call_later(ttl, self._expire, lease)
        held = self._leases[lease] = self._of_seq[seq_id] = EdgeLease(lease, seq_id, tokens, timer)
        try:
            held.matched_len = await self._core.reserve(lease, tokens, cache_salt, notify)
        except BaseException as error:
            self._forget(lease)
            if not isinstance(error, TercetError):  # nobody knows whether the core has reserved
                self.release_soon(lease)
            raise
        if lease not in self._leases:
            raise LeaseEnded(f"{seq_id} was aborted, or its ttl ended, while blocks were being reserved", "seq_id")
        return held

    def claim(self, seq_id: str, tokens: list[int]) -> EdgeLease | None:
        """Take the sequence's lease, if it has one, away from its timer: a request of ``tokens`` shall adopt it.

        Raises :class:`~tercet.protocol.BadRequest` if they do not begin with what was reserved.
        """
        held = self._of_seq.get(seq_id)
        if held is None:
            return None
        if tokens[: len(held.tokens)] != held.tokens:
            pairs = enumerate(held.tokens)
            differs = next((at for at, token in pairs if at >= len(tokens) or tokens[at] != token), 0)
            raise BadRequest(f"prompt: differs from what prep_recv reserved, first at position {differs}", "prompt")
        self._forget(held.lease)
        return held

    async def abort(self, seq_id: str) -> bool:
        """End the sequence's lease; whether there was one."""
        held = self._of_seq.get(seq_id)
        if held is None:
            return False
        agent_metrics.leases_aborted.inc()
        await self.release(held.lease)
        return True

    async def release(self, lease: str) -> int:
        """End a lease; returns how far its KV was valid. Raises ``UnknownSequence`` if it is over already."""
        self._forget(lease)
        valid_end = await asyncio.shield(self._tasks.spawn(self._release(lease)))
        if valid_end is None:
            raise UnknownSequence(f"lease {lease} is not held here: released, expired or already used", "lease")
        return valid_end

    def release_soon(self, lease: str) -> None:
        """End a lease beside the caller, if it is not over already."""
        self._tasks.spawn(self._release(lease))

    def note(self, filled: LeaseFilled, ranks: int) -> None:
        """A rank says that a sender has finished; once all ``ranks`` have, what arrived becomes prefix cache."""
        held = self._leases.get(filled.lease)
        if held is None:
            return  # the lease is over
        held.filled[filled.rank] = filled.valid_end
        if len(held.filled) == ranks:
            self._tasks.spawn(self._core.commit(filled.lease, min(held.filled.values())))

    def _expire(self, lease: str) -> None:
        agent_metrics.leases_expired.inc()
        self._forget(lease)
        self.release_soon(lease)

    async def _release(self, lease: str) -> int | None:
        with suppress(UnknownSequence):
            return await self._core.release(lease)
        return None

    def _forget(self, lease: str) -> None:
        held = self._leases.pop(lease, None)
        if held is not None:
            held.timer.cancel()
            del self._of_seq[held.seq_id]
