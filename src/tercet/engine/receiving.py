"""The verb ``prep_recv``: the receiving half of a KV transfer reserves blocks under a lease, and extends the lease."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from tercet.engine.edge import Edge
from tercet.engine.interface import digest_of
from tercet.engine.lease_timers import EdgeLease
from tercet.protocol import BadRequest, Conflict, KVAddrInfo, RankAddress, Request, Reservation
from tercet.protocol.types import resolve_end
from tercet.protocol.wire import PrepRecvAnswer, PrepRecvCall


async def prep_recv(edge: Edge, call: PrepRecvCall) -> PrepRecvAnswer:
    """Match the prompt's prefix and reserve blocks for the rest; or extend a lease."""
    tokens = await edge.reader.tokens(call.prompt)
    end = resolve_end(len(tokens), call.end)
    if end == 0:
        raise BadRequest(f"end: {call.end} leaves nothing of a prompt of {len(tokens)} tokens", "end")
    prompt = (await edge.reader.keyed(call, tokens)).first(end)
    if call.lease is not None:
        held = await edge.leases.extend(call.lease, call.seq_id, prompt)
        there = held.committed // edge.layout.block_size * edge.layout.block_size
        return _answer(edge, held, max(held.matched_len, there))
    if edge.work.generates(call.seq_id) or edge.leases.holds(call.seq_id):
        raise Conflict(f"seq_id: {call.seq_id} is in use on this engine; abort it or choose another", "seq_id")
    longest = edge.description.lease_ttl
    held = await edge.leases.reserve(call.seq_id, prompt, min(call.ttl or longest, longest), edge.reports.address)
    return _answer(edge, held, held.matched_len)


def _answer(edge: Edge, held: EdgeLease, matched_len: int) -> PrepRecvAnswer:
    ranks = tuple(RankAddress(rank, tuple(each)) for rank, each in enumerate(edge.description.transports))
    begin, end = held.matched_len, len(held.prompt.tokens)
    begins = held.group_begins if edge.layout.groups else ()
    digest = digest_of(held.prompt.adapter)
    info = KVAddrInfo(
        held.lease, edge.name, begin, end, "tcp", ranks, edge.layout, group_begins=begins, adapter=digest
    )  # fmt: skip
    return PrepRecvAnswer(kv_addr_info=info.proved(edge.secret), matched_len=matched_len, ttl=held.ttl)


@asynccontextmanager
async def reserved(edge: Edge, request: Request, end: int | None) -> AsyncGenerator[Reservation]:
    """Reserve as :func:`prep_recv` does; the lease ends with the context unless it is adopted."""
    call = PrepRecvCall(
        prompt=list(request.prompt),
        seq_id=request.seq_id,
        end=end,
        cache_salt=request.cache_salt,
        adapter=request.adapter,
        adapter_digest=request.adapter_digest,
    )
    answer = await prep_recv(edge, call)
    reservation = Reservation(answer.kv_addr_info, answer.matched_len)
    try:
        yield reservation
    finally:
        edge.leases.end_soon(reservation.lease)
