"""Leases at the engine's edge: whose each is, for which tokens, how much has arrived, and when it ends by itself."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import suppress
from dataclasses import dataclass, field

from tercet.aio import TaskSet
from tercet.protocol import (
    BadRequest,
    Conflict,
    Content,
    EngineError,
    LeaseEnded,
    MultiModalFeature,
    TercetError,
    UnknownSequence,
    Usage,
    cache_key,
    digest_of_features,
    packed,
)
from tercet.transport import ExtendLease, GrantLease, LeaseFilled
from tercet.vllm_plugin.engine import agent_metrics, core_methods
from tercet.vllm_plugin.engine.adapters import Adapter, digest_of
from tercet.vllm_plugin.engine.agent_calls import AgentCalls
from tercet.vllm_plugin.engine.connector_messages import ReservedBlocks
from tercet.vllm_plugin.engine.core_methods import CoreCalls

RELEASE_SECONDS = 3.0
"""So long a release is waited for; it goes on beside."""
ADOPT_SECONDS = 1.0
"""So long a sequence waits for the end of its lease's writes; then it computes by itself."""


@dataclass
class EdgeLease:
    """One lease, which ends by itself ``ttl`` seconds after the last sign of life.

    ``filled`` is how far, and for which tokens, each rank that has reported says its KV is valid. ``closing`` is the
    lease's fence, once somebody has asked for it: done when no agent writes under it any more, with how far the KV is
    valid then. ``group_begins`` is from which token on each group of layers has blocks.
    """

    lease: str
    seq_id: str
    tokens: list[int]
    salt: str | None
    ttl: float
    timer: asyncio.TimerHandle
    adapter: Adapter | None = None
    features: tuple[MultiModalFeature, ...] = ()
    matched_len: int = 0
    group_begins: tuple[int, ...] = ()
    committed: int = 0
    filled: dict[int, Content] = field(default_factory=dict)
    granted: bool = False
    extending: bool = False
    closing: asyncio.Task[int] | None = None

    @property
    def key(self) -> str | None:
        """What beside its tokens KV must be of."""
        return cache_key(self.salt, digest_of(self.adapter), digest_of_features(self.features))


class LeaseTimers:
    """One of an engine's two ledgers of leases; the other one is the scheduler's ``Reservations``.

    Each has what only its process can act on: timers and sequence names are here, where calls arrive and time passes
    whether or not the engine steps; blocks are there, since only the scheduler's thread may touch them. Agents are told
    from here: blocks are opened for writing after they are reserved, and are given back, or to the request that adopts
    them, after all agents have answered that nobody writes there any more. Until then nobody else gets them.

    A lease that is forgotten here is either claimed, and then the request that adopts it has its blocks, or released.
    """

    def __init__(self, core: CoreCalls, agents: AgentCalls, tasks: TaskSet, reserve_wait: float) -> None:
        self._core = core
        self._agents = agents
        self._tasks = tasks
        self._reserve_wait = reserve_wait
        self._leases: dict[str, EdgeLease] = {}
        self._of_seq: dict[str, EdgeLease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def holds(self, seq_id: str) -> bool:
        """Whether the sequence has a lease."""
        return seq_id in self._of_seq

    def has(self, lease: str) -> bool:
        """Whether there is this lease, whose name only they know who may reserve."""
        return lease in self._leases

    def adapters(self) -> list[str]:
        """The names of those adapters that leases are for."""
        return [held.adapter.name for held in self._leases.values() if held.adapter is not None]

    async def reserve(
        self,
        seq_id: str,
        tokens: list[int],
        cache_salt: str | None,
        ttl: float,
        notify: str,
        adapter: Adapter | None = None,
        features: tuple[MultiModalFeature, ...] = (),
    ) -> EdgeLease:
        """Reserve blocks for ``tokens`` until ``ttl`` seconds after the last sign of life; open them on every rank.

        Agents report to ``notify``. Raises :class:`~tercet.protocol.NoSpace`, :class:`~tercet.protocol.LeaseEnded` if
        it is over already, or :class:`~tercet.protocol.EngineError` if a rank does not open it; then none keeps it.
        """
        lease = uuid.uuid4().hex
        timer = asyncio.get_running_loop().call_later(ttl, self._expire, lease)
        held = EdgeLease(lease, seq_id, tokens, cache_salt, ttl, timer, adapter, features)
        self._leases[lease] = self._of_seq[seq_id] = held
        try:
            reserved = await self._reserved(held)
            held.matched_len, held.group_begins = reserved.matched_len, reserved.group_begins()
            if lease in self._leases:  # else it is over, and its blocks are on their way back
                held.granted = True
                blocks, size, end = reserved.blocks, reserved.block_size, len(tokens)
                await self._agents.grant(
                    GrantLease(lease, blocks, held.matched_len, end, size, packed(tokens), held.key, notify)
                )
        except BaseException as error:
            self._forget(lease)
            if held.granted or not isinstance(error, TercetError):  # nobody knows how far it came
                self.release_soon(held)
            raise
        if lease not in self._leases:
            raise LeaseEnded(f"{seq_id} was aborted, or its ttl ended, while blocks were being reserved", "seq_id")
        return held

    async def extend(
        self,
        lease: str,
        seq_id: str,
        tokens: list[int],
        cache_salt: str | None,
        adapter: Adapter | None = None,
        features: tuple[MultiModalFeature, ...] = (),
    ) -> EdgeLease:
        """Reserve more blocks for a lease, whose first tokens ``tokens`` begin with, and open them on every rank.

        Raises :class:`~tercet.protocol.UnknownSequence` or :class:`~tercet.protocol.LeaseEnded` if it is over,
        :class:`~tercet.protocol.BadRequest` for other tokens, :class:`~tercet.protocol.NoSpace`, or
        :class:`~tercet.protocol.EngineError` if a rank does not open them. The lease is as it was then; what a rank has
        not opened stays pinned until it ends.
        """
        held = self._of_seq.get(seq_id)
        if held is None or held.lease != lease:
            raise UnknownSequence(f"lease {lease} is not held here for {seq_id}: released, expired or used", "lease")
        _require_key(held, cache_salt, adapter, features)
        _require_beginning(held, tokens)
        if not held.granted or held.extending:
            raise Conflict(f"lease {lease} is being opened already", "lease")
        self._renew(held)
        held.extending = True
        try:
            reserved = await self._core.call(core_methods.extend, lease, tokens, cache_salt, adapter, features)
            if held.lease in self._leases:  # else it is over: these blocks go back with the others
                blocks, begin, end, size = reserved.blocks, held.matched_len, len(tokens), reserved.block_size
                await self._agents.grant(ExtendLease(lease, blocks, begin, end, size, packed(tokens), held.key))
        finally:
            held.extending = False
        held.group_begins = reserved.group_begins()
        if held.lease not in self._leases:
            raise LeaseEnded(f"{seq_id} was aborted, or its lease ended, while it was being extended", "seq_id")
        held.tokens = tokens
        return held

    async def _reserved(self, held: EdgeLease) -> ReservedBlocks:
        def give_up() -> None:
            self._tasks.spawn(self._core.call(core_methods.give_up, held.lease))

        giving_up = asyncio.get_running_loop().call_later(self._reserve_wait, give_up)
        try:
            return await self._core.call(
                core_methods.reserve, held.lease, held.tokens, held.salt, held.adapter, held.features
            )
        finally:
            giving_up.cancel()

    def claim(
        self,
        seq_id: str,
        tokens: list[int],
        cache_salt: str | None,
        adapter: Adapter | None = None,
        features: tuple[MultiModalFeature, ...] = (),
    ) -> EdgeLease | None:
        """Take the sequence's lease, if it has one, away from its timer: a request of ``tokens`` shall adopt it.

        Its fence is on its way: see :meth:`closed`. Raises :class:`~tercet.protocol.BadRequest` if they do not begin
        with what was reserved, or salt, adapter or images are others.
        """
        held = self._of_seq.get(seq_id)
        if held is None:
            return None
        _require_beginning(held, tokens)
        _require_key(held, cache_salt, adapter, features)
        self._forget(held.lease)
        self._closing(held)
        return held

    async def closed(self, held: EdgeLease, given_up: asyncio.Future[None]) -> bool:
        """Wait until nobody writes under a claimed lease: whether that came before ``given_up``, and soon enough.

        If not, its blocks go back when it does, and who claimed it must do without.
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
        """End the sequence's lease; whether there was one."""
        held = self._of_seq.get(seq_id)
        if held is None:
            return False
        agent_metrics.leases_aborted.inc()
        await self.release(held.lease)
        return True

    async def release(self, lease: str) -> int:
        """End a lease; returns how far its KV was valid.

        Raises ``UnknownSequence`` if it is over already, and ``EngineError`` if its blocks come back later only.
        """
        held = self._forget(lease)
        if held is None:
            raise UnknownSequence(f"lease {lease} is not held here: released, expired or already used", "lease")
        releasing = self.release_soon(held)
        await asyncio.wait({releasing}, timeout=RELEASE_SECONDS)
        if not releasing.done():
            raise EngineError(f"lease {lease} is over, but its blocks come back only when every KV agent has answered")
        return releasing.result()

    def release_soon(self, held: EdgeLease) -> asyncio.Task[int]:
        """End a lease beside the caller; one that was adopted, or never reserved, has nothing left to end."""
        return self._tasks.spawn(self._release(held))

    def note(self, filled: LeaseFilled) -> None:
        """A rank says how far KV has come: a sign of life. Once all ranks have, it becomes prefix cache."""
        held = self._leases.get(filled.lease)
        if held is None:
            return  # the lease is over
        self._renew(held)
        held.filled[filled.rank] = filled.valid
        valid = min(held.filled.values(), key=lambda valid: valid.end)
        if len(held.filled) == len(self._agents) and valid.end > held.committed:
            held.committed = valid.end
            self._tasks.spawn(self._core.call(core_methods.commit, filled.lease, valid))

    def _renew(self, held: EdgeLease) -> None:
        held.timer.cancel()
        held.timer = asyncio.get_running_loop().call_later(held.ttl, self._expire, held.lease)

    def end_soon(self, lease: str) -> None:
        """End a lease beside the caller, if it is held here and nobody has claimed it."""
        held = self._forget(lease)
        if held is not None:
            self.release_soon(held)

    def _expire(self, lease: str) -> None:
        agent_metrics.leases_expired.inc()
        self.end_soon(lease)

    def _closing(self, held: EdgeLease) -> asyncio.Task[int]:
        # Asked once, whoever needs it: the second answer would not say what is valid.
        if held.closing is None:
            held.closing = self._tasks.spawn(self._agents.revoke(held.lease))
        return held.closing

    async def _release(self, held: EdgeLease) -> int:
        valid_end = max(held.matched_len, await self._closing(held))
        with suppress(UnknownSequence):
            valid_end = await self._core.call(core_methods.release, held.lease, valid_end)
        return valid_end

    def _forget(self, lease: str) -> EdgeLease | None:
        held = self._leases.pop(lease, None)
        if held is not None:
            held.timer.cancel()
            del self._of_seq[held.seq_id]
        return held


def _require_beginning(held: EdgeLease, tokens: list[int]) -> None:
    if tokens[: len(held.tokens)] != held.tokens:
        pairs = enumerate(held.tokens)
        differs = next((at for at, token in pairs if at >= len(tokens) or tokens[at] != token), 0)
        raise BadRequest(f"prompt: differs from what prep_recv reserved, first at position {differs}", "prompt")


def _require_key(
    held: EdgeLease, cache_salt: str | None, adapter: Adapter | None, features: tuple[MultiModalFeature, ...]
) -> None:
    if digest_of_features(features) != digest_of_features(held.features):
        raise BadRequest("mm_features: differ from what prep_recv was given for this sequence", "mm_features")
    if adapter != held.adapter:
        raise BadRequest("adapter: differs from what prep_recv was given for this sequence", "adapter")
    if (cache_salt or None) != (held.salt or None):
        raise BadRequest("cache_salt: differs from what prep_recv was given for this sequence", "cache_salt")


def usage_of(total: int, num_cached: int, claimed: EdgeLease | None) -> Usage:
    """What was found, received and computed of ``total`` tokens, of which vLLM calls ``num_cached`` cached."""
    # vLLM counts what a connector provided as cached too; what prep_recv matched was here before.
    local = min(num_cached, claimed.matched_len) if claimed is not None else num_cached
    return Usage(cached=local, received=num_cached - local, computed=total - num_cached)
