"""Leases at the engine's edge: their sequences and tokens, the KV that has arrived, and their timeouts."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import suppress
from dataclasses import dataclass, field

from tercet.aio import TaskSet
from tercet.engine import agent_metrics
from tercet.engine.agents import AgentCalls
from tercet.engine.interface import KeyedPrompt, ReservedBlocks, SchedulerHalf
from tercet.protocol import (
    BadRequest,
    Conflict,
    Content,
    EngineError,
    LeaseEnded,
    TercetError,
    UnknownSequence,
    Usage,
    packed,
)
from tercet.transport import ExtendLease, GrantLease, LeaseFilled

RELEASE_SECONDS = 3.0
"""Seconds for which a release is awaited; after that it continues in the background."""
ADOPT_SECONDS = 1.0
"""Seconds for which a sequence waits until no peer writes under its lease; after that it computes its KV itself."""


@dataclass
class EdgeLease:
    """One lease for a prompt, which ends by itself ``ttl`` seconds after the last activity.

    ``filled`` has, for each rank that has reported, the valid end and the content of its KV. ``closing`` is the lease's
    fence, once requested: it is done when no agent writes under the lease any more, and has the valid end of the KV.
    ``group_begins`` is the first token for which each group of layers has blocks.
    """

    lease: str
    seq_id: str
    prompt: KeyedPrompt
    ttl: float
    timer: asyncio.TimerHandle
    matched_len: int = 0
    group_begins: tuple[int, ...] = ()
    committed: int = 0
    filled: dict[int, Content] = field(default_factory=dict[int, Content])
    granted: bool = False
    extending: bool = False
    closing: asyncio.Task[int] | None = None


class LeaseTimers:
    """One of an engine's two ledgers of leases; the other one is the scheduler's ``Reservations``.

    Each ledger has the part on which only its process can act. Timers and sequence names are here, where calls arrive
    and time passes even if the engine does not step; blocks are there, since only the scheduler's thread may touch
    them. Agents are called from here: blocks are opened for writing after they are reserved, and are freed, or given to
    the request that adopts them, after all agents have confirmed that they do not write there any more. Until then they
    get no other owner.

    A lease that is forgotten here is either claimed, and then the request that adopts it has its blocks, or released.
    """

    def __init__(self, core: SchedulerHalf, agents: AgentCalls, tasks: TaskSet, reserve_wait: float) -> None:
        self._core = core
        self._agents = agents
        self._tasks = tasks
        self._reserve_wait = reserve_wait
        self._leases: dict[str, EdgeLease] = {}
        self._of_seq: dict[str, EdgeLease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def holds(self, seq_id: str) -> bool:
        return seq_id in self._of_seq

    def has(self, lease: str) -> bool:
        """True if the lease exists; only its authorised users know its name."""
        return lease in self._leases

    def adapters(self) -> list[str]:
        return [held.prompt.adapter.name for held in self._leases.values() if held.prompt.adapter is not None]

    async def reserve(self, seq_id: str, prompt: KeyedPrompt, ttl: float, notify: str) -> EdgeLease:
        """Reserve blocks for a prompt until ``ttl`` seconds after the last activity; open them on every rank.

        Agents report to ``notify``. Raises :class:`~tercet.protocol.NoSpace`, :class:`~tercet.protocol.LeaseEnded` if
        the lease has ended already, or :class:`~tercet.protocol.EngineError` if a rank does not open it; then no rank
        keeps it.
        """
        lease = uuid.uuid4().hex
        timer = asyncio.get_running_loop().call_later(ttl, self._expire, lease)
        held = EdgeLease(lease, seq_id, prompt, ttl, timer)
        self._leases[lease] = self._of_seq[seq_id] = held
        try:
            reserved = await self._reserved(held)
            held.matched_len, held.group_begins = reserved.matched_len, reserved.group_begins()
            if lease in self._leases:  # otherwise the lease has ended, and its blocks are being freed
                held.granted = True
                blocks, size, tokens = reserved.blocks, reserved.block_size, prompt.tokens
                await self._agents.grant(
                    GrantLease(lease, blocks, held.matched_len, len(tokens), size, packed(tokens), prompt.key, notify)
                )
        except BaseException as error:
            self._forget(lease)
            if held.granted or not isinstance(error, TercetError):  # how far the reservation got is unknown
                self.release_soon(held)
            raise
        if lease not in self._leases:
            raise LeaseEnded(f"{seq_id} was aborted, or its ttl ended, while blocks were being reserved", "seq_id")
        return held

    async def extend(self, lease: str, seq_id: str, prompt: KeyedPrompt) -> EdgeLease:
        """Reserve more blocks for a lease, and open them on every rank; ``prompt`` begins with the lease's tokens.

        Raises :class:`~tercet.protocol.UnknownSequence` or :class:`~tercet.protocol.LeaseEnded` if the lease has ended,
        :class:`~tercet.protocol.BadRequest` for other tokens, :class:`~tercet.protocol.NoSpace`, or
        :class:`~tercet.protocol.EngineError` if a rank does not open the blocks. Then the lease is unchanged; blocks
        that a rank has not opened stay pinned until it ends.
        """
        held = self._of_seq.get(seq_id)
        if held is None or held.lease != lease:
            raise UnknownSequence(f"lease {lease} is not held here for {seq_id}: released, expired or used", "lease")
        _require_continued(held, prompt)
        if not held.granted or held.extending:
            raise Conflict(f"lease {lease} is being opened or extended already", "lease")
        self._renew(held)
        held.extending = True
        try:
            reserved = await self._core.extend(lease, prompt)
            if held.lease in self._leases:  # otherwise the lease has ended: these blocks are freed with the others
                blocks, begin, size, tokens = reserved.blocks, held.matched_len, reserved.block_size, prompt.tokens
                await self._agents.grant(
                    ExtendLease(lease, blocks, begin, len(tokens), size, packed(tokens), prompt.key)
                )
        finally:
            held.extending = False
        held.group_begins = reserved.group_begins()
        if held.lease not in self._leases:
            raise LeaseEnded(f"{seq_id} was aborted, or its lease ended, while it was being extended", "seq_id")
        held.prompt = prompt
        return held

    async def _reserved(self, held: EdgeLease) -> ReservedBlocks:
        def give_up() -> None:
            self._tasks.spawn(self._core.give_up(held.lease))

        giving_up = asyncio.get_running_loop().call_later(self._reserve_wait, give_up)
        try:
            return await self._core.reserve(held.lease, held.prompt)
        finally:
            giving_up.cancel()

    def claim(self, seq_id: str, prompt: KeyedPrompt) -> EdgeLease | None:
        """Take the sequence's lease, if it has one, away from its timer: a request of ``prompt`` will adopt it.

        The lease's fence is then in progress: see :meth:`closed`. Returns None without a lease. Raises
        :class:`~tercet.protocol.BadRequest` if the prompt does not begin with the reserved tokens, or if salt, adapter
        or images differ.
        """
        held = self._of_seq.get(seq_id)
        if held is None:
            return None
        _require_continued(held, prompt)
        self._forget(held.lease)
        self._closing(held)
        return held

    async def closed(self, held: EdgeLease, given_up: asyncio.Future[None]) -> bool:
        """Wait until no peer writes under a claimed lease; return False at the timeout or if ``given_up`` is first.

        In that case its blocks are freed later, and the claiming request continues without them.
        """
        fence = self._closing(held)
        try:
            await asyncio.wait({fence, given_up}, timeout=ADOPT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            self.release_soon(held)
            raise
        if not fence.done() or given_up.done():
            self.release_soon(held)
            return False
        return True

    async def abort(self, seq_id: str) -> bool:
        """End the sequence's lease; return whether it had one."""
        held = self._of_seq.get(seq_id)
        if held is None:
            return False
        agent_metrics.leases_aborted.inc()
        await self.release(held.lease)
        return True

    async def release(self, lease: str) -> int:
        """End a lease; return the number of tokens whose KV is valid.

        Raises ``UnknownSequence`` if it has ended already, and ``EngineError`` if its blocks are freed later.
        """
        held = self._forget(lease)
        if held is None:
            raise UnknownSequence(f"lease {lease} is not held here: released, expired or already used", "lease")
        releasing = self.release_soon(held)
        await asyncio.wait({releasing}, timeout=RELEASE_SECONDS)
        if not releasing.done():
            raise EngineError(
                f"lease {lease} has ended, but its blocks are freed only when every KV agent has answered"
            )
        return releasing.result()

    def release_soon(self, held: EdgeLease) -> asyncio.Task[int]:
        """End the lease in a background task.

        Nothing happens if a request has adopted it, or if it was never reserved.
        """
        return self._tasks.spawn(self._release(held))

    def note(self, filled: LeaseFilled) -> None:
        """Record a rank's report on received KV, which counts as activity.

        When all ranks have reported, the KV is committed.
        """
        held = self._leases.get(filled.lease)
        if held is None:
            return  # the lease has ended
        self._renew(held)
        held.filled[filled.rank] = filled.valid
        valid = min(held.filled.values(), key=lambda valid: valid.end)
        if len(held.filled) == len(self._agents) and valid.end > held.committed:
            held.committed = valid.end
            self._tasks.spawn(self._core.commit(filled.lease, valid))

    def _renew(self, held: EdgeLease) -> None:
        held.timer.cancel()
        held.timer = asyncio.get_running_loop().call_later(held.ttl, self._expire, held.lease)

    def end_soon(self, lease: str) -> None:
        """End a lease in the background, if it is held here and not claimed."""
        held = self._forget(lease)
        if held is not None:
            self.release_soon(held)

    def _expire(self, lease: str) -> None:
        agent_metrics.leases_expired.inc()
        self.end_soon(lease)

    def _closing(self, held: EdgeLease) -> asyncio.Task[int]:
        # The command is sent once: a second answer would not contain the valid end.
        if held.closing is None:
            held.closing = self._tasks.spawn(self._agents.revoke(held.lease))
        return held.closing

    async def _release(self, held: EdgeLease) -> int:
        valid_end = max(held.matched_len, await self._closing(held))
        with suppress(UnknownSequence):
            valid_end = await self._core.release(held.lease, valid_end)
        return valid_end

    def _forget(self, lease: str) -> EdgeLease | None:
        held = self._leases.pop(lease, None)
        if held is not None:
            held.timer.cancel()
            del self._of_seq[held.seq_id]
        return held


def _require_continued(held: EdgeLease, prompt: KeyedPrompt) -> None:
    """Raise ``BadRequest`` for a prompt that does not begin with the lease's prompt."""
    field = prompt.difference(held.prompt)
    if field:
        differ = "differ from those" if field == "mm_features" else "differs from that"
        raise BadRequest(f"{field}: {differ} of prep_recv for this sequence", field)
    reserved, tokens = held.prompt.tokens, prompt.tokens
    if tokens[: len(reserved)] != reserved:
        pairs = enumerate(reserved)
        at = next((at for at, token in pairs if at >= len(tokens) or tokens[at] != token), 0)
        raise BadRequest(f"prompt: differs from the prompt of prep_recv, first at position {at}", "prompt")


def usage_of(total: int, num_cached: int, claimed: EdgeLease | None) -> Usage:
    """Return the cached, received and computed tokens of ``total``; vLLM counts ``num_cached`` as cached."""
    # vLLM also counts tokens from a connector as cached; those that prep_recv matched were here before.
    local = min(num_cached, claimed.matched_len) if claimed is not None else num_cached
    return Usage(cached=local, received=num_cached - local, computed=total - num_cached)
