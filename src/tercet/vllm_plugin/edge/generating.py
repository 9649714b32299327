"""Generation on an engine: a vLLM request that decodes on the sequence's lease, if it has one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tercet.protocol import BadRequest, Conflict, Output, Request, UnknownSequence
from tercet.protocol.wire import StartGenerateCall, StreamDestination
from tercet.vllm_plugin.core.connector_messages import SeqParams, TercetParams
from tercet.vllm_plugin.core.keyed_prompt import KeyedPrompt
from tercet.vllm_plugin.edge.adapters import Adapters
from tercet.vllm_plugin.edge.call_reader import CallReader
from tercet.vllm_plugin.edge.lease_timers import EdgeLease, LeaseTimers, usage_of
from tercet.vllm_plugin.edge.llm_requests import DecodingSequence, LLMRequest
from tercet.vllm_plugin.edge.sequence_table import SequenceTable
from tercet.vllm_plugin.edge.sequence_work import SequenceWork
from tercet.wire.streams import RouterConnection

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class GeneratingVerb:
    """The verb ``start_generate``; its outputs are an iterator, or are sent to a router.

    The sequences enter ``generated``. ``token`` marks requests of this engine.
    """

    def __init__(
        self, client: AsyncLLM, token: str, reader: CallReader, adapters: Adapters,
        leases: LeaseTimers, generated: SequenceTable, work: SequenceWork,
    ) -> None:  # fmt: skip
        self._client = client
        self._token = token
        self._reader = reader
        self._adapters = adapters
        self._leases = leases
        self._generated = generated
        self._work = work
        self._numbers = itertools.count(1)

    async def start_generate(self, call: StartGenerateCall) -> AsyncGenerator[Output, None]:
        """Decode, on the sequence's reservation if there is one; yield outputs, including the last one."""
        decoding = await self._decoding(call)
        with decoding.ended():
            async for output in decoding.request.outputs():
                yield decoding.told(output)

    async def stream(self, call: StartGenerateCall, connection: RouterConnection, router: StreamDestination) -> None:
        """Decode, and send the outputs over a router's connection; return once the engine has the request."""
        decoding = await self._decoding(call)
        await decoding.stream(connection, router, len(call.output))

    async def _decoding(self, call: StartGenerateCall) -> DecodingSequence:
        tokens = await self._reader.tokens(call.prompt)
        if call.begin > len(tokens):
            raise BadRequest(f"begin: {call.begin} is past a prompt of {len(tokens)} tokens", "begin")
        self._reader.limits.check_output(tokens, call.output)
        prompt = await self._reader.keyed(call, tokens)
        if self._work.generates(call.seq_id):
            raise Conflict(f"seq_id: {call.seq_id} is generating here already", "seq_id")
        known = prompt.with_output(call.output)
        claimed = await self._claimed(call.seq_id, known)
        number = next(self._numbers)
        request = self._request(call, prompt, _seq_params(claimed, call.output, number))
        self._work.begin(call.seq_id, request.abort)

        def ended(adopted: bool) -> None:
            self._work.end(call.seq_id)
            self._generated.remove(decoding)
            if claimed is not None and not adopted:
                self._leases.release_soon(claimed)

        total = len(known.tokens)
        decoding = DecodingSequence(
            call.seq_id,
            number,
            request,
            [*known.tokens],
            lambda cached: usage_of(total, cached, claimed),
            ended,
            self._reader.model_of(call),
        )
        self._generated.add(decoding)
        return decoding

    def _request(self, call: StartGenerateCall, prompt: KeyedPrompt, seq: SeqParams) -> LLMRequest:
        sampling, ours = call.sampling_params, TercetParams(self._token, seq=seq)
        return LLMRequest(self._client, prompt, sampling, ours, call.priority, call.mm_features)

    async def _claimed(self, seq_id: str, known: KeyedPrompt) -> EdgeLease | None:
        """Return the sequence's lease, for a request with ``known`` tokens, once no peer writes under it any more.

        None if the sequence has no lease, and at a timeout: then the sequence computes its KV itself.
        """
        claimed = self._leases.claim(seq_id, known)
        if claimed is None:
            return None
        aborted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._work.begin(seq_id, aborted.cancel)
        try:
            closed = await self._leases.closed(claimed, aborted)
        finally:
            self._work.end(seq_id)
        if aborted.cancelled():
            raise UnknownSequence(f"{seq_id} was aborted before it began to decode", "seq_id")
        return claimed if closed else None

    @asynccontextmanager
    async def adopted(self, request: Request) -> AsyncGenerator[TercetParams | None]:
        """Provide the core's parameters for a request of vLLM's API that decodes on its reservation; None without one.

        The context ends with the request: then all resources that the core has not taken are given back.
        """
        adapter = await self._adapters.find(request.adapter, request.adapter_digest)
        claimed = await self._claimed(request.seq_id, KeyedPrompt(list(request.prompt), request.cache_salt, adapter))
        if claimed is None or claimed.closing is None:
            yield None
            return
        try:
            yield TercetParams(self._token, seq=_seq_params(claimed))
        finally:
            self._leases.release_soon(claimed)


def _seq_params(claimed: EdgeLease | None, output: list[int] | None = None, number: int = 0) -> SeqParams:
    output = [] if output is None else output
    if claimed is None or claimed.closing is None:
        return SeqParams(output=output, number=number)
    return SeqParams(claimed.lease, claimed.closing.result(), output, number)
