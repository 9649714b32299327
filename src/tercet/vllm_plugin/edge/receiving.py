"""The receiving half of a KV transfer: it reserves blocks under a lease, and extends the lease."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from tercet.protocol import BadRequest, Conflict, KVAddrInfo, RankAddress, Request, Reservation
from tercet.protocol.types import resolve_end
from tercet.protocol.wire import PrepRecvAnswer, PrepRecvCall
from tercet.vllm_plugin.core.core_methods import EngineDescription
from tercet.vllm_plugin.edge.adapters import digest_of
from tercet.vllm_plugin.edge.call_reader import CallReader
from tercet.vllm_plugin.edge.lease_timers import EdgeLease, LeaseTimers
from tercet.vllm_plugin.edge.sequence_work import SequenceWork


class ReceivingVerb:
    """The verb ``prep_recv`` of the engine ``name``; agents report received KV to the address ``notify``.

    ``secret`` is the fleet's, or empty.
    """

    def __init__(
        self, name: str, secret: str, description: EngineDescription, reader: CallReader,
        leases: LeaseTimers, work: SequenceWork, notify: str,
    ) -> None:  # fmt: skip
        self._name = name
        self._secret = secret
        self._about = description
        self._layout = description.layout
        self._reader = reader
        self._leases = leases
        self._work = work
        self._notify = notify

    async def prep_recv(self, call: PrepRecvCall) -> PrepRecvAnswer:
        """Match the prompt's prefix and reserve blocks for the rest; or extend a lease."""
        tokens = await self._reader.tokens(call.prompt)
        end = resolve_end(len(tokens), call.end)
        if end == 0:
            raise BadRequest(f"end: {call.end} leaves nothing of a prompt of {len(tokens)} tokens", "end")
        prompt = (await self._reader.keyed(call, tokens)).first(end)
        if call.lease is not None:
            held = await self._leases.extend(call.lease, call.seq_id, prompt)
            there = held.committed // self._layout.block_size * self._layout.block_size
            return self._reserved(held, max(held.matched_len, there))
        if self._work.generates(call.seq_id) or self._leases.holds(call.seq_id):
            raise Conflict(f"seq_id: {call.seq_id} is in use on this engine; abort it or choose another", "seq_id")
        ttl = min(call.ttl or self._about.lease_ttl, self._about.lease_ttl)
        held = await self._leases.reserve(call.seq_id, prompt, ttl, self._notify)
        return self._reserved(held, held.matched_len)

    def _reserved(self, held: EdgeLease, matched_len: int) -> PrepRecvAnswer:
        ranks = tuple(RankAddress(rank, tuple(addresses)) for rank, addresses in enumerate(self._about.transports))
        begin, end = held.matched_len, len(held.prompt.tokens)
        begins = held.group_begins if self._layout.groups else ()
        digest = digest_of(held.prompt.adapter)
        info = KVAddrInfo(
            held.lease, self._name, begin, end, "tcp", ranks, self._layout, group_begins=begins, adapter=digest
        )  # fmt: skip
        info = info.proved(self._secret)
        return PrepRecvAnswer(kv_addr_info=info, matched_len=matched_len, ttl=held.ttl)

    @asynccontextmanager
    async def reserved(self, request: Request, end: int | None) -> AsyncGenerator[Reservation]:
        """Reserve as :meth:`prep_recv` does; the lease ends with the context unless it is adopted."""
        call = PrepRecvCall(
            prompt=list(request.prompt),
            seq_id=request.seq_id,
            end=end,
            cache_salt=request.cache_salt,
            adapter=request.adapter,
            adapter_digest=request.adapter_digest,
        )
        answer = await self.prep_recv(call)
        reservation = Reservation(answer.kv_addr_info, answer.matched_len)
        try:
            yield reservation
        finally:
            self._leases.end_soon(reservation.lease)
