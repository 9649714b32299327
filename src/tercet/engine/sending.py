"""The verb ``remote_send``: the sending half of a KV transfer finds the KV or computes it, and the agents push it."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any

from tercet.engine import agent_metrics
from tercet.engine.agents import SendInFlight
from tercet.engine.calls import check_adapter, check_send
from tercet.engine.edge import Edge
from tercet.engine.interface import KeyedPrompt, SendParams, digest_of
from tercet.protocol import KVAddrInfo, KVLayout, Output, Sent, UnknownSequence, Usage, resolve_range
from tercet.protocol.content import whole_features
from tercet.protocol.spans import current_span
from tercet.protocol.wire import RemoteSendCall
from tercet.transport import Push, PushCached, SendComplete, SendDestination, routes

logger = logging.getLogger(__name__)
BYPASS_SECONDS = 1.0
"""Seconds without progress after which the core is bypassed, if KV is available without it."""


async def remote_send(edge: Edge, call: RemoteSendCall) -> Sent:
    """Get the KV and push it; return when every rank has acknowledged it."""
    started = time.monotonic()
    tokens = await edge.reader.tokens(call.prompt)
    begin, end = resolve_range(len(tokens), call.begin, call.end)
    call.kv_addr_info.require_proof(edge.secret)
    check_send(call, begin, end, len(tokens), edge.layout)
    prompt = await edge.reader.keyed(call, tokens)
    check_adapter(call, digest_of(prompt.adapter))
    with edge.reports.sending() as sending:
        params = _params(edge, call, prompt, begin, end, sending.send_id)
        try:
            async with edge.work.sending(call.seq_id, params.send_id):
                first, cached = await _push(edge, call, prompt, params, sending)
                done = await sending.wait()
        finally:
            # Unpinning concerns only the engine, so the answer does not wait for it.
            edge.tasks.spawn(_end_send(edge, sending.send_id))
    usage = Usage(cached=cached, computed=end - cached)
    return Sent(begin, end, done.bytes, done.chunks, time.monotonic() - started, usage, first, done.transport)


def _params(edge: Edge, call: RemoteSendCall, prompt: KeyedPrompt, begin: int, end: int, send_id: str) -> SendParams:
    info = call.kv_addr_info
    return SendParams(
        send_id=send_id,
        lease=info.lease,
        content=prompt.content(end),
        base=info.begin,
        begin=begin,
        end=end,
        destinations=destinations_of(info, edge.layout, len(edge.description.transports)),
        notify=edge.reports.address,
        group_begins=info.group_begins,
        traceparent=place.traceparent if (place := current_span()) is not None and place.sampled else "",
    )


def destinations_of(info: KVAddrInfo, layout: KVLayout, num_ranks: int) -> list[list[SendDestination]]:
    """Return, for each rank of this engine, the receiver's ranks with common heads and layers."""
    ranks = sorted(info.ranks, key=lambda rank: rank.rank)
    return [
        [
            SendDestination(ranks[route.receiver].addresses, route.head_slice, route.planes)
            for route in routes(layout, info.layout, rank)
        ]
        for rank in range(num_ranks)
    ]


async def _push(
    edge: Edge, call: RemoteSendCall, prompt: KeyedPrompt, params: SendParams, sending: SendInFlight
) -> tuple[Output | None, int]:  # fmt: skip
    """Make the engine compute and push; return the first token, if requested, and the number of cached tokens."""
    cached, word = (None, None) if call.sample else await _cached(edge, prompt.first(params.end), params)
    if cached is not None:
        end = SendComplete(params.send_id, params.begin, params.end)
        pushes = tuple(cached)
        await edge.agents.push([PushCached(opening, pushes, end, word) for opening in params.openings()])
        return None, params.end
    sampling = call.sampling_params if call.sample else dict[str, Any]()
    computed = prompt.first(whole_features(prompt.features, params.end))
    request = edge.generation.request(computed, sampling, params, call.priority, call.mm_features)
    computing = asyncio.ensure_future(request.first())
    try:
        # A refusal by the receiver ends the work at once, since the result would not be used.
        await asyncio.wait({computing, sending.failed}, return_when=asyncio.FIRST_COMPLETED)
        if not computing.done():
            agent_metrics.sends_aborted.inc()
            computing.cancel()
            await asyncio.wait({computing})
            await sending.wait()
        output = computing.result()
    finally:
        computing.cancel()
    return (output if call.sample else None), min(request.num_cached, params.end)


async def _cached(edge: Edge, prompt: KeyedPrompt, params: SendParams) -> tuple[list[Push] | None, int | None]:
    """Return the pushes of KV that is fully here, and the core's word that guarantees unpinned blocks.

    Both may be None: some KV is missing, or the blocks are pinned. A stuck core pins nothing, but has published the
    places of its sequences. If it continues, it handles the pending call, and then the end of the send, which unpins
    the blocks.
    """
    asked = asyncio.ensure_future(edge.core.push_cached(prompt, params))
    if edge.bypass is None or not edge.generated.beginning_with(prompt):
        return await asked, None
    silent = asyncio.ensure_future(edge.probe.core_stands_still(BYPASS_SECONDS))
    try:
        await asyncio.wait({asked, silent}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result(), None
        owners = [each.number for each in edge.generated.beginning_with(prompt)]
        pushes, word = edge.bypass.find(owners, params)
        agent_metrics.sends_bypassing.inc()
        logger.warning("the core has made no progress for %.1f s: sending KV without it", silent.result())
        return pushes, word
    finally:
        asked.cancel()
        silent.cancel()


async def _end_send(edge: Edge, send_id: str) -> None:
    # Unpinned blocks may be rewritten at once, so the agents must have stopped reading them.
    await edge.agents.cancel(send_id)
    with suppress(UnknownSequence):
        await edge.core.end_send(send_id)
