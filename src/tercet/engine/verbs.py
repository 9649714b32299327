"""The three verbs of an engine, as functions on its :class:`~tercet.engine.edge.Edge`.

``prep_recv`` reserves blocks under a lease, or extends one. ``remote_send`` computes a prompt's KV, or finds it, and
pushes it into another engine's lease. ``start_generate`` runs a request that decodes on its sequence's lease, if it has
one. Every exit gives back what was taken here: a lease's timer, a send, a request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any, Protocol

import msgspec

from tercet.engine import agents
from tercet.engine.agents import SendInFlight
from tercet.engine.edge import Edge, check_adapter, check_send
from tercet.engine.interface import EngineRequest, KeyedPrompt, SendPlan, SeqParams, digest_of
from tercet.engine.lease_timers import EdgeLease
from tercet.engine.leases import check_generation, end_of_reservation, require_unused, time_to_live, usage_of
from tercet.logs import LoggedGeneration
from tercet.protocol import (
    KVAddrInfo,
    MoveProposal,
    Output,
    RankAddress,
    Request,
    Reservation,
    Sent,
    TercetError,
    UnknownSequence,
    Usage,
    resolve_range,
)
from tercet.protocol.content import whole_features
from tercet.protocol.spans import LeaseReport, current_span
from tercet.protocol.wire import PrepRecvAnswer, PrepRecvCall, RemoteSendCall, StartGenerateCall
from tercet.transport import Push, PushCached, SendDestination, SendReport, routes


async def prep_recv(edge: Edge, call: PrepRecvCall) -> PrepRecvAnswer:
    """Match the prompt's prefix and reserve blocks for the rest; or extend a lease."""
    tokens = await edge.tokens(call.prompt)
    end = end_of_reservation(len(tokens), call.end)
    prompt = (await edge.keyed(call, tokens)).first(end)
    # An extension: the sequence has grown, and its sender goes on under the same lease.
    if call.lease is not None:
        held = await edge.leases.extend(call.lease, call.seq_id, prompt)
        there = held.committed // edge.layout.block_size * edge.layout.block_size
        return _answer(edge, held, max(held.matched_len, there))
    # Before anything is reserved: a sequence has one lease, or one running request.
    require_unused(call.seq_id, edge.work.generates(call.seq_id))
    ttl = time_to_live(call.ttl, edge.description.lease_ttl)
    held = await edge.leases.reserve(call.seq_id, prompt, ttl, edge.reports.address)
    return _answer(edge, held, held.matched_len)


def _answer(edge: Edge, held: EdgeLease, matched_len: int) -> PrepRecvAnswer:
    ranks = tuple(RankAddress(rank, tuple(each)) for rank, each in enumerate(edge.description.transports))
    begin, end = held.matched_len, len(held.prompt.tokens)
    # Without groups there is one begin for all layers, the matched length.
    begins = held.group_begins if edge.layout.groups else ()
    digest = digest_of(held.prompt.adapter)
    info = KVAddrInfo(
        held.name, edge.name, begin, end, "tcp", ranks, edge.layout, group_begins=begins, adapter=digest
    )  # fmt: skip
    tier_len = held.tier_len if held.tier_len > matched_len else 0
    return PrepRecvAnswer(info.proved(edge.secret), matched_len, tier_len, ttl=held.ttl)


@asynccontextmanager
async def reserved(edge: Edge, request: Request, end: int | None) -> AsyncGenerator[Reservation]:
    """Reserve as :func:`prep_recv` does; the lease ends with the context unless it is adopted."""
    call = PrepRecvCall(
        prompt=list(request.prompt), seq_id=request.seq_id, end=end, cache_salt=request.cache_salt,
        adapter=request.adapter, adapter_digest=request.adapter_digest,
    )  # fmt: skip
    reservation = await prep_recv(edge, call)
    try:
        yield reservation
    finally:
        edge.leases.end_soon(reservation.lease)


logger = logging.getLogger(__name__)
BYPASS_SECONDS = 1.0
"""Seconds without progress after which the core is bypassed, if KV is available without it."""


async def remote_send(edge: Edge, call: RemoteSendCall) -> Sent:
    """Get the KV and push it; return when every rank has acknowledged it."""
    started = time.monotonic()
    tokens = await edge.tokens(call.prompt)
    begin, end = resolve_range(len(tokens), call.begin, call.end)
    info = call.kv_addr_info
    # First: nothing of an address that another engine did not issue is trusted.
    info.require_proof(edge.secret)
    check_send(call, begin, end, len(tokens), edge.layout)
    prompt = await edge.keyed(call, tokens)
    check_adapter(call, digest_of(prompt.adapter))
    receivers = sorted(info.ranks, key=lambda rank: rank.rank)
    destinations = [  # for each rank of this engine, the receiver's ranks with common heads and layers
        [
            SendDestination(receivers[route.receiver].addresses, route.head_slice, route.planes)
            for route in routes(edge.layout, info.layout, rank)
        ]
        for rank in range(len(edge.description.transports))
    ]
    with edge.reports.sending() as sending:
        span = current_span()
        plan = SendPlan(
            send_id=sending.send_id,
            lease=info.lease,
            content=prompt.content(end),
            base=info.begin,
            begin=begin,
            end=end,
            destinations=destinations,
            notify=edge.reports.address,
            group_begins=info.group_begins,
            traceparent=span.traceparent if span is not None and span.sampled else "",
        )
        try:
            async with edge.work.sending(call.seq_id, plan.send_id):
                if call.cached_only:
                    # The longest cached whole blocks, and nothing if there are none: no block is computed.
                    pinned = await edge.core.push_longest(prompt.first(end), plan)
                    end = pinned.end
                    if end > begin:
                        found = msgspec.structs.replace(plan, content=prompt.content(end), end=end)
                        await edge.agents.begin(PushCached(found, tuple(pinned.pushes)))
                    first, cached = None, end if end > begin else 0
                else:
                    first, cached = await _push(edge, call, prompt, plan, sending)
                done = await sending.wait() if end > begin else SendReport(0, 0)
        finally:
            # Unpinning concerns only the engine, so the answer does not wait for it.
            if end > begin:
                edge.tasks.spawn(_end_send(edge, sending.send_id))
    usage = Usage(cached=cached, computed=0 if call.cached_only else end - cached)
    return Sent(begin, end, done.bytes, done.chunks, time.monotonic() - started, usage, first, done.transport)


async def _push(
    edge: Edge, call: RemoteSendCall, prompt: KeyedPrompt, plan: SendPlan, sending: SendInFlight
) -> tuple[Output | None, int]:  # fmt: skip
    """Make the engine compute and push; return the first token, if requested, and the number of cached tokens."""
    cached, word = (None, None) if call.sample else await _cached(edge, prompt.first(plan.end), plan)
    if cached is not None:
        await edge.agents.begin(PushCached(plan, tuple(cached), word))
        return None, plan.end
    sampling = call.sampling_params if call.sample else dict[str, Any]()
    # An image is computed whole, also if the send ends inside it.
    computed = prompt.first(whole_features(prompt.features, plan.end))
    request = edge.generation.request(computed, sampling, plan, call.priority, call.mm_features, call.background)
    computing = asyncio.ensure_future(request.first())
    try:
        # A refusal by the receiver ends the work at once, since the result would not be used.
        await asyncio.wait({computing, sending.failed}, return_when=asyncio.FIRST_COMPLETED)
        if not computing.done():
            agents.sends_aborted.inc()
            computing.cancel()
            await asyncio.wait({computing})
            await sending.wait()
        output = computing.result()
    finally:
        computing.cancel()
    return (output if call.sample else None), min(request.num_cached, plan.end)


async def _cached(edge: Edge, prompt: KeyedPrompt, plan: SendPlan) -> tuple[list[Push] | None, int | None]:
    """Return the pushes of KV that is fully here, and the core's word that guarantees unpinned blocks.

    Both may be None: some KV is missing, or the blocks are pinned. A stuck core pins nothing, but has published the
    places of its sequences. If it continues, it handles the pending call, and then the end of the send, which unpins
    the blocks.
    """
    asked = asyncio.ensure_future(edge.core.push_cached(prompt, plan))
    if edge.bypass is None or not edge.generated.beginning_with(prompt):
        return await asked, None
    silent = asyncio.ensure_future(edge.probe.core_stands_still(BYPASS_SECONDS))
    try:
        await asyncio.wait({asked, silent}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result(), None
        owners = [each.number for each in edge.generated.beginning_with(prompt)]
        pushes, word = edge.bypass.find(owners, plan)
        agents.sends_bypassing.inc()
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


class RouterLink(Protocol):
    """The engine's connection to one router, at ``address``: a ``RouterConnection`` of ``tercet.wire.streams``."""

    address: str

    # Calls ``stop`` if the sequence has to end early.
    def sender(self, number: int, position: int, stop: Callable[[], object]) -> OutputSender: ...


class OutputSender(Protocol):
    """The sender of one sequence's outputs to its router; ``open`` as long as the router wants them."""

    @property
    def connection(self) -> RouterLink: ...
    @property
    def open(self) -> bool: ...
    def send(self, output: Output) -> None: ...
    def fail(self, error: Exception) -> None: ...
    def propose(self, proposal: MoveProposal) -> None: ...
    def close(self) -> None: ...


@dataclass(eq=False)
class DecodingSequence:
    """A generation, and the resources to give back at its end."""

    seq_id: str
    number: int  # identifies it in the core
    request: EngineRequest
    tokens: list[int]  # the prompt and the output so far
    usage: Callable[[int], Usage]  # makes the first output's usage from the number of cached tokens
    on_end: Callable[[bool], None]  # called once, with whether it began
    model: str = ""  # for the log
    sender: OutputSender | None = field(default=None, init=False)  # of its outputs to a router, if it has one
    _logged: LoggedGeneration = field(init=False)
    _num_given: int = field(init=False)
    _status: int = field(default=0, init=False)
    _begun: bool = field(default=False, init=False)
    _over: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._num_given = len(self.tokens)
        self._logged = LoggedGeneration(self.seq_id, self.model, self._num_given)
        self.request.span = self._logged.span

    @property
    def age(self) -> float:
        return time.monotonic() - self._logged.began

    def counted(self, output: Output) -> Output:
        """Return the output for callers, with its usage if it is the first one; record its tokens."""
        self.tokens += output.token_ids
        if output.finished:
            self._status = int(HTTPStatus.OK)
        if self._begun:
            return output
        self._begun = True
        return msgspec.structs.replace(output, usage=self.usage(self.request.num_cached))

    def end(self) -> None:
        """Give back the sequence's resources; further calls do nothing."""
        if not self._over:
            self._over = True
            self._logged.over(self._status, len(self.tokens) - self._num_given)
            self.on_end(self._begun)

    @contextmanager
    def ended(self) -> Generator[None]:
        """End the sequence at the block's exit; an error that ends it becomes its status."""
        try:
            yield
        except TercetError as error:
            self._status = error.status
            raise
        finally:
            self.end()

    async def stream(self, connection: RouterLink, number: int, position: int) -> None:
        """Send outputs to a router until the last one, or until it cancels; return once the engine has the request."""
        with ExitStack() as undo:
            undo.callback(self.end)
            sender = self.sender = connection.sender(number, position, self._stop)
            undo.callback(sender.close)
            await self.request.start(lambda found: self._deliver(sender, found))
            # From here on the engine's outputs end the sequence.
            undo.pop_all()

    def _deliver(self, sender: OutputSender, found: Output | TercetError) -> None:
        if self._over:
            return  # stopped; further outputs are dropped
        if isinstance(found, TercetError):
            self._status = found.status
            self.end()
            sender.fail(found)
            return
        output = self.counted(found)
        if output.finished:
            self.end()
        sender.send(output)

    def _stop(self) -> None:
        self.request.abort()
        self.end()


async def start_generate(edge: Edge, call: StartGenerateCall) -> AsyncGenerator[Output, None]:
    """Decode, on the sequence's reservation if there is one; yield outputs, including the last one."""
    decoding = await _decoding(edge, call)
    with decoding.ended():
        async for output in decoding.request.outputs():
            yield decoding.counted(output)


async def stream(edge: Edge, call: StartGenerateCall, link: RouterLink, number: int) -> None:
    """Decode, and send the outputs over a router's connection; return once the engine has the request."""
    decoding = await _decoding(edge, call)
    await decoding.stream(link, number, len(call.output))


async def _decoding(edge: Edge, call: StartGenerateCall) -> DecodingSequence:
    tokens = await edge.tokens(call.prompt)
    edge.generation.limits.check_output(tokens, call.output)
    prompt = await edge.keyed(call, tokens)
    check_generation(call.seq_id, call.begin, len(tokens), edge.work.generates(call.seq_id))
    known = prompt.with_output(call.output)
    claimed = await _claimed(edge, call.seq_id, known)
    # The core knows the request by this number: ids of clients may be used again.
    number = next(edge.generated.numbers)
    seq = _seq_params(claimed, call.output, number)
    request = edge.generation.request(
        prompt, call.sampling_params, seq, call.priority, call.mm_features, call.background
    )
    edge.work.begin(call.seq_id, request.abort)

    def ended(adopted: bool) -> None:
        edge.work.end(call.seq_id)
        edge.generated.remove(decoding)
        if claimed is not None and not adopted:
            edge.leases.release_soon(claimed, "its request ended before its first token", failed=True)

    def usage(num_cached: int) -> Usage:  # called with the first output: the core has the blocks
        if claimed is not None:
            edge.leases.adopted(claimed)
        # The engine also counts tokens from a connector as cached; those that prep_recv matched were here before.
        return usage_of(len(known.tokens), num_cached, claimed.matched_len if claimed is not None else num_cached)

    tokens = [*known.tokens]  # it grows with the output
    decoding = DecodingSequence(call.seq_id, number, request, tokens, usage, ended, edge.model_of(call))
    edge.generated.add(decoding)
    return decoding


async def _claimed(edge: Edge, seq_id: str, known: KeyedPrompt) -> EdgeLease | None:
    """Return the sequence's lease, for a request with ``known`` tokens, once no peer writes under it any more.

    None if the sequence has no lease, and at a timeout: then the sequence computes its KV itself.
    """
    claimed = edge.leases.claim(seq_id, known)
    if claimed is None:
        return None
    # An abort that comes while the fence is awaited must end this request, which is not running yet.
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
    return SeqParams(claimed.name, claimed.closing.result(), output, number)


class EdgeVerbs:
    """The verbs and reports of one ``edge``, as HTTP routes call them (``tercet.wire.serving.verb_routes``)."""

    def __init__(self, edge: Edge) -> None:
        self.incarnation, self.model_of = edge.incarnation, edge.model_of
        self.prep_recv, self.remote_send = partial(prep_recv, edge), partial(remote_send, edge)
        self.start_generate, self.stream = partial(start_generate, edge), partial(stream, edge)
        self.abort, self.status, self.release = edge.abort, edge.status, edge.leases.release
        self.sequences, self.propose_move = edge.generated.reports, edge.generated.propose_move
        self._leases = edge.leases

    def leases(self, seq_id: str) -> list[LeaseReport]:
        return [each.report() for each in self._leases.stories(seq_id)]
