"""The verb ``start_generate``: a request of the engine that decodes on the sequence's lease, if it has one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from tercet.engine.edge import Edge
from tercet.engine.interface import KeyedPrompt, SeqParams
from tercet.engine.lease_timers import EdgeLease, usage_of
from tercet.engine.sequences import DecodingSequence, RouterLink
from tercet.protocol import BadRequest, Conflict, Output, Request, UnknownSequence
from tercet.protocol.wire import StartGenerateCall, StreamDestination


async def start_generate(edge: Edge, call: StartGenerateCall) -> AsyncGenerator[Output, None]:
    """Decode, on the sequence's reservation if there is one; yield outputs, including the last one."""
    decoding = await _decoding(edge, call)
    with decoding.ended():
        async for output in decoding.request.outputs():
            yield decoding.told(output)


async def stream(edge: Edge, call: StartGenerateCall, link: RouterLink, router: StreamDestination) -> None:
    """Decode, and send the outputs over a router's connection; return once the engine has the request."""
    decoding = await _decoding(edge, call)
    await decoding.stream(link, router, len(call.output))


async def _decoding(edge: Edge, call: StartGenerateCall) -> DecodingSequence:
    tokens = await edge.reader.tokens(call.prompt)
    if call.begin > len(tokens):
        raise BadRequest(f"begin: {call.begin} is past a prompt of {len(tokens)} tokens", "begin")
    edge.reader.limits.check_output(tokens, call.output)
    prompt = await edge.reader.keyed(call, tokens)
    if edge.work.generates(call.seq_id):
        raise Conflict(f"seq_id: {call.seq_id} is generating here already", "seq_id")
    known = prompt.with_output(call.output)
    claimed = await _claimed(edge, call.seq_id, known)
    number = next(edge.generated.numbers)
    seq = _seq_params(claimed, call.output, number)
    request = edge.generation.request(prompt, call.sampling_params, seq, call.priority, call.mm_features)
    edge.work.begin(call.seq_id, request.abort)

    def ended(adopted: bool) -> None:
        edge.work.end(call.seq_id)
        edge.generated.remove(decoding)
        if claimed is not None and not adopted:
            edge.leases.release_soon(claimed)

    total = len(known.tokens)
    decoding = DecodingSequence(
        call.seq_id,
        number,
        request,
        [*known.tokens],
        lambda cached: usage_of(total, cached, claimed),
        ended,
        edge.reader.model_of(call),
    )
    edge.generated.add(decoding)
    return decoding


async def _claimed(edge: Edge, seq_id: str, known: KeyedPrompt) -> EdgeLease | None:
    """Return the sequence's lease, for a request with ``known`` tokens, once no peer writes under it any more.

    None if the sequence has no lease, and at a timeout: then the sequence computes its KV itself.
    """
    claimed = edge.leases.claim(seq_id, known)
    if claimed is None:
        return None
    aborted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    edge.work.begin(seq_id, aborted.cancel)
    try:
        closed = await edge.leases.closed(claimed, aborted)
    finally:
        edge.work.end(seq_id)
    if aborted.cancelled():
        raise UnknownSequence(f"{seq_id} was aborted before it began to decode", "seq_id")
    return claimed if closed else None


@asynccontextmanager
async def adopted(edge: Edge, request: Request) -> AsyncGenerator[SeqParams | None]:
    """Provide the parameters for a request of the engine's own API that decodes on its reservation; None without one.

    The context ends with the request: then all resources that the core has not taken are given back.
    """
    adapter = await edge.adapters.find(request.adapter, request.adapter_digest)
    known = KeyedPrompt(list(request.prompt), request.cache_salt, adapter)
    claimed = await _claimed(edge, request.seq_id, known)
    if claimed is None or claimed.closing is None:
        yield None
        return
    try:
        yield _seq_params(claimed)
    finally:
        edge.leases.release_soon(claimed)


def _seq_params(claimed: EdgeLease | None, output: list[int] | None = None, number: int = 0) -> SeqParams:
    output = [] if output is None else output
    if claimed is None or claimed.closing is None:
        return SeqParams(output=output, number=number)
    return SeqParams(claimed.lease, claimed.closing.result(), output, number)
