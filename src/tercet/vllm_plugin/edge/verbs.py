"""The verbs, carried out in the API server's process; the core owns the blocks, and is called from here to free them.

What is taken here (a lease's timer, a send, a request) is given back on every exit.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from tercet import __version__
from tercet.aio import TaskSet
from tercet.protocol import (
    BadRequest,
    Conflict,
    EngineStatus,
    KVAddrInfo,
    KVEvents,
    MultiModalFeature,
    Output,
    RankAddress,
    Request,
    Reservation,
    Sent,
    SequenceReport,
    UnknownSequence,
    Usage,
    cache_key,
    content_of,
    digest_of_features,
    packed,
    resolve_range,
)  # fmt: skip
from tercet.protocol.multimodal import whole_features
from tercet.protocol.ranges import resolve_end
from tercet.protocol.types import TextFingerprint
from tercet.protocol.wire import (
    MoveCall,
    PrepRecvAnswer,
    PrepRecvCall,
    Prompt,
    RemoteSendCall,
    StartGenerateCall,
    StreamDestination,
)
from tercet.transport import AsyncControlClient, Push, PushCached, ReadCounters, SendComplete
from tercet.vllm_plugin.core import core_methods
from tercet.vllm_plugin.core.connector_messages import SendParams, SeqParams, TercetParams
from tercet.vllm_plugin.core.core_methods import CoreCalls, EngineDescription
from tercet.vllm_plugin.edge import agent_metrics
from tercet.vllm_plugin.edge.adapters import Adapter, Adapters, digest_of
from tercet.vllm_plugin.edge.agent_calls import AgentCalls
from tercet.vllm_plugin.edge.agent_reports import AgentReports, SendInFlight
from tercet.vllm_plugin.edge.block_tables import open_table
from tercet.vllm_plugin.edge.bypass import Bypass
from tercet.vllm_plugin.edge.call_checks import check_adapter, check_send, limits_of
from tercet.vllm_plugin.edge.first_uses import practise_first_uses
from tercet.vllm_plugin.edge.lease_timers import EdgeLease, LeaseTimers, usage_of
from tercet.vllm_plugin.edge.liveness_probe import LivenessProbe
from tercet.vllm_plugin.edge.llm_requests import DecodingSequence, LLMRequest
from tercet.vllm_plugin.edge.load_meter import LoadMeter
from tercet.vllm_plugin.edge.send_destinations import destinations_of
from tercet.vllm_plugin.edge.sequence_table import SequenceTable
from tercet.vllm_plugin.edge.text_fingerprint import text_fingerprint
from tercet.vllm_plugin.hooks import vllm_version
from tercet.vllm_plugin.start.plugin_settings import MAX_REQUEST_BYTES
from tercet.wire.streams import RouterConnections

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


logger = logging.getLogger(__name__)
BYPASS_SECONDS = 1.0
"""Time without progress after which the core is bypassed, if KV is available without it."""

UNKNOWN_TEXT = TextFingerprint()

# Work for a sequence: its generation (None), or one of its sends.
BusyKey = tuple[str, str | None]


class EngineVerbs:
    """One engine's verbs."""

    def __init__(
        self,
        client: AsyncLLM,
        name: str,
        core: CoreCalls,
        description: EngineDescription,
        agents: AgentCalls,
        probe: LivenessProbe,
        adapters: Adapters,
        secret: str = "",
        longest_call: int = MAX_REQUEST_BYTES,
        text: TextFingerprint = UNKNOWN_TEXT,
    ) -> None:
        self._client = client
        self._name = name
        self._secret = secret
        self._core = core
        self._about = description
        self._layout = description.layout
        self._probe = probe
        self.adapters = adapters
        self._limits = limits_of(client)
        self._text = text
        self._tasks = TaskSet()
        self._agents = agents
        self.leases = LeaseTimers(core, agents, self._tasks, description.reserve_wait)
        adapters.count_users(self.leases.adapters)
        self._busy: dict[BusyKey, Callable[[], object]] = {}
        self._generated = SequenceTable(partial(core.call, core_methods.sequences))
        self._numbers = itertools.count(1)
        tables = description.tables
        self._bypass = None if tables is None else Bypass(open_table(tables), self._layout.block_size)
        self._reports = AgentReports(len(description.transports), self.leases.note)
        self.incarnation = uuid.uuid4().hex
        events = description.kv_events
        self._kv_events = None if events is None else KVEvents(**events, epoch=self.incarnation)
        self.meter = LoadMeter(client, probe, adapters)
        start, load = self.stream_generate, self.meter.load
        self.router_connections = RouterConnections(name, self.incarnation, load, start, longest_call)

    @classmethod
    async def attach(cls, client: AsyncLLM, name: str, secret: str, adapters: Adapters, longest: int) -> EngineVerbs:
        """The verbs of the engine behind ``client``; raises ``EngineError`` without the connector.

        ``secret`` is the fleet's; empty if it has none. A call has ``longest`` bytes at most.
        """
        core = CoreCalls(client)
        description = await core.call(core_methods.describe)
        agents = [AsyncControlClient(*endpoint) for endpoint in description.agents]
        workers = [AsyncControlClient(*endpoint) for endpoint in description.workers]
        counters = [[partial(each.call, ReadCounters()) for each in asked] for asked in (agents, workers)]
        probe = LivenessProbe(partial(core.call, core_methods.status), *counters)
        await probe.start()
        await practise_first_uses(client, core, description.token)
        agent_metrics.export(probe)
        has_text = not client.vllm_config.model_config.skip_tokenizer_init
        text = text_fingerprint(client.get_tokenizer()) if has_text else UNKNOWN_TEXT
        return cls(client, name, core, description, AgentCalls(agents), probe, adapters, secret, longest, text)

    # ---- prep_recv -------------------------------------------------------------------------------------------

    async def prep_recv(self, call: PrepRecvCall) -> PrepRecvAnswer:
        """Match the prompt's prefix and reserve blocks for the rest; or extend a lease."""
        tokens = self._tokens(call.prompt)
        end = resolve_end(len(tokens), call.end)
        if end == 0:
            raise BadRequest(f"end: {call.end} leaves nothing of a prompt of {len(tokens)} tokens", "end")
        adapter = await self.adapters.find(call.adapter, call.adapter_digest)
        features = self._names_of(call, tokens)
        if call.lease is not None:
            held = await self.leases.extend(call.lease, call.seq_id, tokens[:end], call.cache_salt, adapter, features)
            there = held.committed // self._layout.block_size * self._layout.block_size
            return self._reserved(held, max(held.matched_len, there))
        if (call.seq_id, None) in self._busy or self.leases.holds(call.seq_id):
            raise Conflict(f"seq_id: {call.seq_id} is in use on this engine; abort it or choose another", "seq_id")
        ttl = min(call.ttl or self._about.lease_ttl, self._about.lease_ttl)
        where, salt = self._reports.address, call.cache_salt
        held = await self.leases.reserve(call.seq_id, tokens[:end], salt, ttl, where, adapter, features)
        return self._reserved(held, held.matched_len)

    def _reserved(self, held: EdgeLease, matched_len: int) -> PrepRecvAnswer:
        ranks = tuple(RankAddress(rank, tuple(addresses)) for rank, addresses in enumerate(self._about.transports))
        begin, end = held.matched_len, len(held.tokens)
        begins = held.group_begins if self._layout.groups else ()
        digest = digest_of(held.adapter)
        info = KVAddrInfo(
            held.lease, self._name, begin, end, "tcp", ranks, self._layout, group_begins=begins, adapter=digest
        )  # fmt: skip
        info = info.proved(self._secret)
        return PrepRecvAnswer(kv_addr_info=info, matched_len=matched_len, ttl=held.ttl)

    async def release(self, lease: str) -> int:
        """End a lease; returns how far its KV was valid. Raises ``UnknownSequence`` if it has ended already."""
        return await self.leases.release(lease)

    # ---- remote_send -----------------------------------------------------------------------------------------

    async def remote_send(self, call: RemoteSendCall) -> Sent:
        """Get the KV and push it; returns when every rank has acknowledged it."""
        started = time.monotonic()
        tokens = self._tokens(call.prompt)
        begin, end = resolve_range(len(tokens), call.begin, call.end)
        call.kv_addr_info.require_proof(self._secret)
        check_send(call, begin, end, len(tokens), self._layout)
        adapter = await self.adapters.find(call.adapter, call.adapter_digest)
        check_adapter(call, digest_of(adapter))
        features = self._names_of(call, tokens)
        with self._reports.sending() as sending:
            params = SendParams(
                send_id=sending.send_id,
                lease=call.kv_addr_info.lease,
                content=content_of(
                    packed(tokens), cache_key(call.cache_salt, digest_of(adapter), digest_of_features(features)), end
                ),
                base=call.kv_addr_info.begin,
                begin=begin,
                end=end,
                destinations=destinations_of(call.kv_addr_info, self._layout, len(self._about.transports)),
                notify=self._reports.address,
                group_begins=call.kv_addr_info.group_begins,
            )
            try:
                async with self._ended_by_abort(call.seq_id, params.send_id):
                    first, cached = await self._push(call, tokens, params, sending, adapter, features)
                    done = await sending.wait()
            finally:
                # Only the engine needs to unpin, so the answer does not wait for it.
                self._tasks.spawn(self._end_send(sending.send_id))
        usage = Usage(cached=cached, computed=end - cached)
        return Sent(begin, end, done.bytes, done.chunks, time.monotonic() - started, usage, first, done.transport)

    async def _push(
        self, call: RemoteSendCall, tokens: list[int], params: SendParams, sending: SendInFlight,
        adapter: Adapter | None, features: tuple[MultiModalFeature, ...],
    ) -> tuple[Output | None, int]:  # fmt: skip
        """Let the engine compute and push; returns the first token, if requested, and the number of cached tokens."""
        cached, word = None, None
        if not call.sample:
            cached, word = await self._cached(tokens[: params.end], call.cache_salt, params, adapter, features)
        if cached is not None:
            end = SendComplete(params.send_id, params.begin, params.end)
            pushes = tuple(cached)
            await self._agents.push([PushCached(opening, pushes, end, word) for opening in params.openings()])
            return None, params.end
        request = LLMRequest(
            self._client, tokens[: whole_features(features, params.end)], call.sampling_params if call.sample else {},
            TercetParams(self._about.token, send=params), call.priority, call.cache_salt, adapter, call.mm_features,
        )  # fmt: skip
        computing = asyncio.ensure_future(request.first())
        try:
            # A refusal by the receiver ends the work at once; the result would not be used.
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

    async def _cached(
        self, tokens: list[int], salt: str | None, params: SendParams, adapter: Adapter | None,
        features: tuple[MultiModalFeature, ...],
    ) -> tuple[list[Push] | None, int | None]:  # fmt: skip
        """What to push of KV that is fully here, if it is; and the core's word that guarantees unpinned blocks.

        A stuck core pins nothing, but has published the places of its sequences. If it continues, it handles the
        pending call, and then the end of the send, which unpins the blocks.
        """
        asked = asyncio.ensure_future(
            self._core.call(core_methods.push_cached, tokens, salt, params, adapter, features)
        )
        if self._bypass is None or not self._generated.beginning_with(tokens, salt, adapter, features):
            return await asked, None
        silent = asyncio.ensure_future(self._probe.core_stands_still(BYPASS_SECONDS))
        try:
            await asyncio.wait({asked, silent}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result(), None
            owners = [each.number for each in self._generated.beginning_with(tokens, salt, adapter, features)]
            pushes, word = self._bypass.find(owners, params)
            agent_metrics.sends_bypassing.inc()
            logger.warning("the core has made no progress for %.1f s: sending KV without it", silent.result())
            return pushes, word
        finally:
            asked.cancel()
            silent.cancel()

    async def _end_send(self, send_id: str) -> None:
        # Unpinned blocks may be rewritten at once, so the agents must have stopped reading them.
        await self._agents.cancel(send_id)
        with suppress(UnknownSequence):
            await self._core.call(core_methods.end_send, send_id)

    # ---- start_generate --------------------------------------------------------------------------------------

    async def start_generate(self, call: StartGenerateCall) -> AsyncGenerator[Output, None]:
        """Decode, on the sequence's reservation if there is one; yields outputs until one is the last."""
        decoding = await self._decoding(call)
        with decoding.ended():
            async for output in decoding.request.outputs():
                yield decoding.told(output)

    async def stream_generate(self, call: StartGenerateCall, router: StreamDestination) -> None:
        """Decode, and send the outputs to a router; returns once the engine has the request."""
        connection = await self.router_connections.connect(router.address, router.key)
        decoding = await self._decoding(call)
        await decoding.stream(connection, router, len(call.output))

    async def _decoding(self, call: StartGenerateCall) -> DecodingSequence:
        tokens = self._tokens(call.prompt)
        if call.begin > len(tokens):
            raise BadRequest(f"begin: {call.begin} is past a prompt of {len(tokens)} tokens", "begin")
        self._limits.check_output(tokens, call.output)
        adapter = await self.adapters.find(call.adapter, call.adapter_digest)
        if (call.seq_id, None) in self._busy:
            raise Conflict(f"seq_id: {call.seq_id} is generating here already", "seq_id")
        features = self._names_of(call, tokens)
        claimed = await self._claimed(call.seq_id, [*tokens, *call.output], call.cache_salt, adapter, features)
        number = next(self._numbers)
        seq = SeqParams(output=call.output, number=number)
        if claimed is not None and claimed.closing is not None:
            seq = SeqParams(claimed.lease, claimed.closing.result(), call.output, number)
        params = TercetParams(self._about.token, seq=seq)
        sampling, salt = call.sampling_params, call.cache_salt
        request = LLMRequest(
            self._client, tokens, sampling, params, call.priority, salt, adapter, call.mm_features
        )  # fmt: skip
        self._busy[call.seq_id, None] = request.abort

        def ended(adopted: bool) -> None:
            del self._busy[call.seq_id, None]
            self._generated.remove(decoding)
            if claimed is not None and not adopted:
                self.leases.release_soon(claimed)

        total = len(tokens) + len(call.output)
        decoding = DecodingSequence(
            call.seq_id,
            number,
            request,
            [*tokens, *call.output],
            lambda cached: usage_of(total, cached, claimed),
            ended,
            self.model_of(call),
        )
        self._generated.add(decoding)
        return decoding

    async def _claimed(
        self,
        seq_id: str,
        tokens: list[int],
        cache_salt: str | None,
        adapter: Adapter | None,
        features: tuple[MultiModalFeature, ...] = (),
    ) -> EdgeLease | None:
        """The sequence's lease, for a request of these tokens, once no peer writes under it any more.

        None without one, and at a timeout: the sequence computes by itself.
        """
        claimed = self.leases.claim(seq_id, tokens, cache_salt, adapter, features)
        if claimed is None:
            return None
        aborted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._busy[seq_id, None] = aborted.cancel
        try:
            closed = await self.leases.closed(claimed, aborted)
        finally:
            del self._busy[seq_id, None]
        if aborted.cancelled():
            raise UnknownSequence(f"{seq_id} was aborted before it began to decode", "seq_id")
        return claimed if closed else None

    # ---- for requests of vLLM's own API ----------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The engine's name."""
        return self._name

    def model_of(self, call: PrepRecvCall | RemoteSendCall | StartGenerateCall) -> str:
        """The name of what serves a call: that of its LoRA adapter, or the model's."""
        return call.adapter or self._served_name

    @property
    def _served_name(self) -> str:
        return str(self._client.vllm_config.model_config.served_model_name)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of its weights."""
        return self._layout.model

    @asynccontextmanager
    async def reserved(self, request: Request, end: int | None) -> AsyncGenerator[Reservation]:
        """:meth:`prep_recv`, whose lease ends with the context unless it is adopted."""
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
            self.leases.end_soon(reservation.lease)

    @asynccontextmanager
    async def adopted(self, request: Request) -> AsyncGenerator[TercetParams | None]:
        """Parameters for the core: a request of vLLM's API decodes on its reservation; None if there is none.

        At the context's end, which is the request's, everything that the core has not taken is given back.
        """
        adapter = await self.adapters.find(request.adapter, request.adapter_digest)
        claimed = await self._claimed(request.seq_id, list(request.prompt), request.cache_salt, adapter)
        if claimed is None or claimed.closing is None:
            yield None
            return
        try:
            yield TercetParams(self._about.token, seq=SeqParams(claimed.lease, claimed.closing.result()))
        finally:
            self.leases.release_soon(claimed)

    # ---- abort and status ------------------------------------------------------------------------------------

    async def abort(self, seq_id: str) -> bool:
        """End the sequence's reservation, sends and generation; returns whether there was any."""
        found = [stop for (busy, _), stop in self._busy.items() if busy == seq_id]
        for stop in found:
            stop()
        return await self.leases.abort(seq_id) or bool(found)

    async def status(self) -> EngineStatus:
        """This engine's present load and holdings; those last known if the core is stuck."""
        await self._probe.news()
        return EngineStatus(
            engine=self._name,
            model=self._served_name,
            version=__version__,
            vllm_version=vllm_version(),
            block_size=self._layout.block_size,
            max_model_len=self._limits.max_model_len,
            kv_events=self._kv_events,
            incarnation=self.incarnation,
            fingerprint=self._layout.model,
            text=self._text,
            dtype=self._layout.dtype,
            model_dtype=str(self._client.vllm_config.model_config.dtype).removeprefix("torch."),
            stalled_s=self._probe.stalled_s,
            counters=self._probe.counters,
            max_adapters=self.adapters.most,
            adapters=await self.adapters.reports(),
            **self._probe.core_status,
        )

    async def sequences(self) -> list[SequenceReport]:
        """The sequences that this engine generates; the core's last answer, if it is stuck."""
        return await self._generated.reports()

    def propose_move(self, seq_id: str, call: MoveCall) -> None:
        """Pass a proposal to move a sequence on to the router that runs it.

        ``seq_id`` is this engine's id for it, or its client's. Raises ``UnknownSequence``, and ``Conflict`` if no
        router receives its tokens.
        """
        self._generated.propose_move(seq_id, call)

    def announce_stop(self) -> int:
        """Notify the routers that this engine stops when it is empty; returns their number."""
        self.meter.stopping = True
        return self.router_connections.tell_now()

    @property
    def is_empty(self) -> bool:
        """Whether it runs, sends and holds nothing, including requests of vLLM's own API; or cannot any more."""
        running = self._client.output_processor.get_num_unfinished_requests()
        return self._client.errored or not (running or self._busy or len(self.leases))

    # ---- plumbing --------------------------------------------------------------------------------------------

    def _tokens(self, prompt: Prompt) -> list[int]:
        tokens: list[int] = self._client.get_tokenizer().encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._limits.check_prompt(tokens)
        return tokens

    def _names_of(
        self, call: PrepRecvCall | RemoteSendCall | StartGenerateCall, tokens: list[int]
    ) -> tuple[MultiModalFeature, ...]:  # fmt: skip
        """Features that identify the KV of a call's images. Raises :class:`~tercet.protocol.BadRequest`."""
        self._limits.check_features(tokens, call.mm_features, call.adapter)
        return tuple(feature.without_data() for feature in call.mm_features)

    @asynccontextmanager
    async def _ended_by_abort(self, seq_id: str, send_id: str) -> AsyncGenerator[None]:
        """End the current task by ``UnknownSequence`` at an :meth:`abort` of the sequence while entered.

        Other cancellations of the task are unchanged.
        """
        until_aborted = asyncio.timeout(None)
        self._busy[seq_id, send_id] = lambda: until_aborted.expired() or until_aborted.reschedule(0)
        try:
            async with until_aborted:
                yield
        except TimeoutError:
            if not until_aborted.expired():
                raise
            raise UnknownSequence(f"{seq_id} was aborted while its KV was being sent", "seq_id") from None
        finally:
            del self._busy[seq_id, send_id]
