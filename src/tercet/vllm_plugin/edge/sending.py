"""The sending half of a KV transfer: it computes the KV, or finds it in the cache, and has the agents push it."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from tercet.aio import TaskSet
from tercet.protocol import Output, Sent, UnknownSequence, Usage, resolve_range
from tercet.protocol.content import whole_features
from tercet.protocol.spans import current_span
from tercet.protocol.wire import RemoteSendCall
from tercet.transport import Push, PushCached, SendComplete
from tercet.vllm_plugin.core import core_methods
from tercet.vllm_plugin.core.connector_messages import SendParams, TercetParams
from tercet.vllm_plugin.core.core_methods import CoreCalls, EngineDescription
from tercet.vllm_plugin.core.keyed_prompt import KeyedPrompt
from tercet.vllm_plugin.edge import agent_metrics
from tercet.vllm_plugin.edge.adapters import digest_of
from tercet.vllm_plugin.edge.agent_calls import AgentCalls
from tercet.vllm_plugin.edge.agent_reports import AgentReports, SendInFlight
from tercet.vllm_plugin.edge.block_tables import open_table
from tercet.vllm_plugin.edge.bypass import Bypass
from tercet.vllm_plugin.edge.call_checks import check_adapter, check_send
from tercet.vllm_plugin.edge.call_reader import CallReader
from tercet.vllm_plugin.edge.liveness_probe import LivenessProbe
from tercet.vllm_plugin.edge.llm_requests import LLMRequest
from tercet.vllm_plugin.edge.send_destinations import destinations_of
from tercet.vllm_plugin.edge.sequence_table import SequenceTable
from tercet.vllm_plugin.edge.sequence_work import SequenceWork

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)
BYPASS_SECONDS = 1.0
"""Seconds without progress after which the core is bypassed, if KV is available without it."""


class SendingVerb:
    """The verb ``remote_send``. ``generated`` has the sequences whose KV may be found without the core.

    ``secret`` is the fleet's, or empty.
    """

    def __init__(
        self, client: AsyncLLM, secret: str, description: EngineDescription, reader: CallReader, core: CoreCalls,
        agents: AgentCalls, reports: AgentReports, probe: LivenessProbe, generated: SequenceTable,
        work: SequenceWork, tasks: TaskSet,
    ) -> None:  # fmt: skip
        self._client = client
        self._secret = secret
        self._about = description
        self._layout = description.layout
        self._reader = reader
        self._core = core
        self._agents = agents
        self._reports = reports
        self._probe = probe
        self._generated = generated
        self._work = work
        self._tasks = tasks
        tables = description.tables
        self._bypass = None if tables is None else Bypass(open_table(tables), self._layout.block_size)

    async def remote_send(self, call: RemoteSendCall) -> Sent:
        """Get the KV and push it; return when every rank has acknowledged it."""
        started = time.monotonic()
        tokens = await self._reader.tokens(call.prompt)
        begin, end = resolve_range(len(tokens), call.begin, call.end)
        call.kv_addr_info.require_proof(self._secret)
        check_send(call, begin, end, len(tokens), self._layout)
        prompt = await self._reader.keyed(call, tokens)
        check_adapter(call, digest_of(prompt.adapter))
        with self._reports.sending() as sending:
            params = self._params(call, prompt, begin, end, sending.send_id)
            try:
                async with self._work.sending(call.seq_id, params.send_id):
                    first, cached = await self._push(call, prompt, params, sending)
                    done = await sending.wait()
            finally:
                # Unpinning concerns only the engine, so the answer does not wait for it.
                self._tasks.spawn(self._end_send(sending.send_id))
        usage = Usage(cached=cached, computed=end - cached)
        return Sent(begin, end, done.bytes, done.chunks, time.monotonic() - started, usage, first, done.transport)

    def _params(self, call: RemoteSendCall, prompt: KeyedPrompt, begin: int, end: int, send_id: str) -> SendParams:
        info = call.kv_addr_info
        return SendParams(
            send_id=send_id,
            lease=info.lease,
            content=prompt.content(end),
            base=info.begin,
            begin=begin,
            end=end,
            destinations=destinations_of(info, self._layout, len(self._about.transports)),
            notify=self._reports.address,
            group_begins=info.group_begins,
            traceparent=place.traceparent if (place := current_span()) is not None and place.sampled else "",
        )

    async def _push(
        self, call: RemoteSendCall, prompt: KeyedPrompt, params: SendParams, sending: SendInFlight
    ) -> tuple[Output | None, int]:  # fmt: skip
        """Make the engine compute and push; return the first token, if requested, and the number of cached tokens."""
        cached, word = (None, None) if call.sample else await self._cached(prompt.first(params.end), params)
        if cached is not None:
            end = SendComplete(params.send_id, params.begin, params.end)
            pushes = tuple(cached)
            await self._agents.push([PushCached(opening, pushes, end, word) for opening in params.openings()])
            return None, params.end
        request = self._request(call, prompt.first(whole_features(prompt.features, params.end)), params)
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

    def _request(self, call: RemoteSendCall, prompt: KeyedPrompt, params: SendParams) -> LLMRequest:
        sampling, ours = call.sampling_params if call.sample else {}, TercetParams(self._about.token, send=params)
        return LLMRequest(self._client, prompt, sampling, ours, call.priority, call.mm_features)

    async def _cached(self, prompt: KeyedPrompt, params: SendParams) -> tuple[list[Push] | None, int | None]:
        """Return the pushes of KV that is fully here, and the core's word that guarantees unpinned blocks.

        Both may be None: some KV is missing, or the blocks are pinned. A stuck core pins nothing, but has published the
        places of its sequences. If it continues, it handles the pending call, and then the end of the send, which
        unpins the blocks.
        """
        asked = asyncio.ensure_future(self._core.call(core_methods.push_cached, prompt, params))
        if self._bypass is None or not self._generated.beginning_with(prompt):
            return await asked, None
        silent = asyncio.ensure_future(self._probe.core_stands_still(BYPASS_SECONDS))
        try:
            await asyncio.wait({asked, silent}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result(), None
            owners = [each.number for each in self._generated.beginning_with(prompt)]
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
