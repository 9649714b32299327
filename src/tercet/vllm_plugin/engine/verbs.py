"""The verbs, carried out in the API server's process: validation, lease timers, and waiting for the workers.

What the edge takes (a lease's timer, a send, a request) it gives back on every exit. Blocks are the core's; the edge
tells it when to free them.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from tercet import __version__
from tercet.protocol import (
    BadRequest,
    Conflict,
    EngineError,
    EngineStatus,
    KVAddrInfo,
    KVEvents,
    KVLayout,
    LeaseEnded,
    Output,
    RankAddress,
    Sent,
    TercetError,
    UnknownSequence,
    Usage,
    from_wire,
    resolve_range,
)
from tercet.protocol.ranges import resolve_end
from tercet.protocol.wire import Destination as DoorDestination
from tercet.protocol.wire import PrepRecvAnswer, PrepRecvCall, Prompt, RemoteSendCall, StartGenerateCall
from tercet.streams import FrontDoors
from tercet.transport import Destination, LeaseFilled, routes
from tercet.vllm_plugin.engine import agent_metrics
from tercet.vllm_plugin.engine.agent_reports import AgentReports, SendInFlight
from tercet.vllm_plugin.engine.call_checks import check_address
from tercet.vllm_plugin.engine.connector_messages import SendParams, SeqParams, TercetParams
from tercet.vllm_plugin.engine.llm_requests import DecodingSequence, LLMRequest
from tercet.vllm_plugin.engine.load_meter import LoadMeter
from tercet.vllm_plugin.hooks import vllm_version

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


# What runs for a sequence: its generation (None), or one of its sends.
BusyKey = tuple[str, str | None]


@dataclass
class EdgeLease:
    """A lease as the edge knows it: whose it is, the tokens it was reserved for, and its timer."""

    lease: str
    seq_id: str
    tokens: list[int]
    timer: asyncio.TimerHandle
    matched_len: int = 0


class EngineVerbs:
    """One engine's verbs."""

    def __init__(self, engine_client: AsyncLLM, name: str) -> None:
        self._client = engine_client
        self._name = name
        self._leases: dict[str, EdgeLease] = {}
        self._lease_of_seq: dict[str, str] = {}
        self._busy: dict[BusyKey, Callable[[], None]] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._inbox = AgentReports(self._lease_filled)
        self.front_doors = FrontDoors(name, LoadMeter(engine_client).load, self.stream_generate)
        self._layout: KVLayout | None = None
        self._transports: list[list[str]] = []
        self._lease_ttl = 0.0
        self._token = ""
        self._kv_events: KVEvents | None = None

    async def start(self) -> None:
        """Attach to the engine; raises if it runs without the connector."""
        found = await self._core("tercet_describe")
        self._layout = msgspec.convert(found["layout"], KVLayout)
        self._transports, self._lease_ttl, self._token = found["transports"], found["lease_ttl"], found["token"]
        if found["kv_events"] is not None:
            self._kv_events = KVEvents(**found["kv_events"], epoch=uuid.uuid4().hex)
        self._inbox.start(len(self._transports))
        agent_metrics.export([(address, secret) for address, secret in found["agents"]])

    # ---- verbs -----------------------------------------------------------------------------------------------

    async def prep_recv(self, call: PrepRecvCall) -> PrepRecvAnswer:
        """Match the prompt's prefix and reserve blocks for the rest."""
        tokens = await self._tokens(call.prompt)
        end = resolve_end(len(tokens), call.end)
        if end == 0:
            raise BadRequest(f"end: {call.end} leaves nothing of a prompt of {len(tokens)} tokens", "end")
        self._require_free(call.seq_id)
        lease, tokens = uuid.uuid4().hex, tokens[:end]
        ttl = min(call.ttl or self._lease_ttl, self._lease_ttl)
        timer = asyncio.get_running_loop().call_later(ttl, self._spawn_release, lease)
        self._leases[lease] = EdgeLease(lease, call.seq_id, tokens, timer)
        self._inbox.expect(lease)
        self._lease_of_seq[call.seq_id] = lease
        try:
            matched = await self._core("tercet_reserve", lease, tokens, call.cache_salt, self._inbox.address)
        except BaseException as error:
            self._forget(lease)
            if not isinstance(error, TercetError):
                self._spawn(self._release_quietly(lease))
            raise
        held = self._leases.get(lease)
        if held is None:
            raise LeaseEnded(f"{call.seq_id} was aborted, or its ttl ended, while blocks were being reserved", "seq_id")
        held.matched_len = matched
        info = self._address(lease, matched, end)
        return PrepRecvAnswer(kv_addr_info=info, matched_len=matched, ttl=ttl)

    async def remote_send(self, call: RemoteSendCall) -> Sent:
        """Have the KV here and push it; returns when every rank has acknowledged it."""
        started = time.monotonic()
        tokens = await self._tokens(call.prompt)
        begin, end = resolve_range(len(tokens), call.begin, call.end)
        self._check_send(call, begin, end, len(tokens))
        with self._inbox.sending() as sending:
            params = SendParams(
                send_id=sending.send_id,
                lease=call.kv_addr_info.lease,
                base=call.kv_addr_info.begin,
                begin=begin,
                end=end,
                destinations=self._destinations(call),
                notify=self._inbox.address,
            )
            try:
                first, cached = await self._push(call, tokens[:end], params, sending)
                done = await sending.wait()
            finally:
                # Unpinning is nobody's business but the core's, so the answer does not wait for it.
                self._spawn(self._end_send(sending.send_id))
        usage = Usage(cached=cached, computed=end - cached)
        return Sent(begin, end, done.bytes, done.chunks, time.monotonic() - started, usage, first, done.transport)

    async def _push(
        self, call: RemoteSendCall, tokens: list[int], params: SendParams, sending: SendInFlight
    ) -> tuple[Output | None, int]:
        """Let the engine compute and push; returns the first token, if asked for, and how many tokens were cached."""
        if not call.sample:
            send = msgspec.to_builtins(params)
            if await self._core("tercet_push_cached", tokens, call.cache_salt, send):
                return None, len(tokens)
        generation = LLMRequest(
            self._client,
            tokens,
            call.sampling_params if call.sample else {},
            TercetParams(self._token, send=params),
            call.priority,
            call.cache_salt,
        )
        computing = asyncio.ensure_future(generation.first())
        with self._cancellable((call.seq_id, params.send_id), computing):
            # A refusal by the receiver ends the work at once; there is nobody left to compute for.
            await asyncio.wait({computing, sending.failed}, return_when=asyncio.FIRST_COMPLETED)
            if not computing.done():
                agent_metrics.sends_aborted.inc()
                computing.cancel()
                await asyncio.wait({computing})
                await sending.wait()
            if computing.cancelled():
                raise UnknownSequence(f"{call.seq_id} was aborted while its KV was being sent", "seq_id")
            output = computing.result()
        return (output if call.sample else None), min(generation.num_cached, len(tokens))

    async def start_generate(self, call: StartGenerateCall) -> AsyncGenerator[Output, None]:
        """Decode, on the sequence's reservation if there is one; yields outputs until one is the last."""
        decoding = await self._decoding(call)
        try:
            async for output in decoding.request.outputs():
                yield decoding.told(output)
        finally:
            decoding.end()

    async def stream_generate(self, call: StartGenerateCall, door: DoorDestination) -> None:
        """Decode, and send the outputs to a front door; returns once the engine has the request."""
        connection = await self.front_doors.connect(door.address, door.key)
        decoding = await self._decoding(call)
        await decoding.stream(connection, door, len(call.output))

    async def _decoding(self, call: StartGenerateCall) -> DecodingSequence:
        tokens = await self._tokens(call.prompt)
        if call.begin > len(tokens):
            raise BadRequest(f"begin: {call.begin} is past a prompt of {len(tokens)} tokens", "begin")
        self._check_output(tokens, call.output)
        if (call.seq_id, None) in self._busy:
            raise Conflict(f"seq_id: {call.seq_id} is generating here already", "seq_id")
        claimed = self._claim(call.seq_id, [*tokens, *call.output])
        lease = claimed.lease if claimed else None
        params = TercetParams(self._token, seq=SeqParams(lease, call.output))
        generation = LLMRequest(
            self._client, tokens, call.sampling_params, params, call.priority, call.cache_salt, len(call.output)
        )
        self._busy[call.seq_id, None] = generation.abort

        def ended(adopted: bool) -> None:
            del self._busy[call.seq_id, None]
            if lease is not None and not adopted:
                self._spawn(self._release_quietly(lease))

        total = len(tokens) + len(call.output)
        return DecodingSequence(generation, lambda cached: _usage(total, cached, claimed), ended)

    async def abort(self, seq_id: str) -> bool:
        """End the sequence's reservation, sends and generation; whether there was any."""
        found = [stop for (busy, _), stop in self._busy.items() if busy == seq_id]
        for stop in found:
            stop()
        lease = self._lease_of_seq.get(seq_id)
        if lease is not None:
            agent_metrics.leases_aborted.inc()
            await self.release(lease)
        return bool(found) or lease is not None

    async def release(self, lease: str) -> int:
        """End a lease; returns how far its KV was valid. Raises ``UnknownSequence`` if it is over already."""
        self._forget(lease)
        return await asyncio.shield(self._spawn(self._core("tercet_release", lease)))

    async def status(self) -> EngineStatus:
        """This engine's load and holdings."""
        found = await self._core("tercet_status")
        config = self._client.vllm_config
        return EngineStatus(
            engine=self._name,
            model=str(config.model_config.served_model_name),
            version=__version__,
            vllm_version=vllm_version(),
            block_size=self.layout.block_size,
            max_model_len=config.model_config.max_model_len,
            kv_events=self._kv_events,
            **found,
        )

    @property
    def layout(self) -> KVLayout:
        """This engine's KV layout."""
        if self._layout is None:
            raise EngineError("the engine has not described itself yet")
        return self._layout

    # ---- checks ----------------------------------------------------------------------------------------------

    def _check_send(self, call: RemoteSendCall, begin: int, end: int, length: int) -> None:
        info = call.kv_addr_info
        check_address(info)
        self.layout.require_mappable(info.layout, info.engine)
        if begin < info.begin:
            raise BadRequest(f"begin: {begin} is before {info.begin}, where the reservation starts", "begin")
        if end > info.end:
            raise BadRequest(f"end: {end} is past {info.end}, where the reservation ends", "end")
        if call.recv_rank + info.layout.tp_size > len(info.ranks):
            raise BadRequest(
                f"recv_rank: from {call.recv_rank} on the receiver has fewer ranks than its layout's "
                f"{info.layout.tp_size}; it has {len(info.ranks)} in all",
                "recv_rank",
            )
        if call.sample and end != length:
            raise BadRequest(f"sample: needs the whole prompt, and end {end} is not its length {length}", "sample")

    def _check_output(self, tokens: list[int], output: list[int]) -> None:
        config = self._client.vllm_config.model_config
        if output and max(output) >= config.get_vocab_size():
            raise BadRequest(f"output: token id {max(output)} is outside the vocabulary", "output")
        if output and len(tokens) + len(output) >= config.max_model_len:
            raise BadRequest(
                f"output: {len(tokens)} + {len(output)} tokens leave no room in the model's {config.max_model_len}",
                "output",
            )

    def _require_free(self, seq_id: str) -> None:
        if (seq_id, None) in self._busy or seq_id in self._lease_of_seq:
            raise Conflict(f"seq_id: {seq_id} is in use on this engine; abort it or choose another", "seq_id")

    def _claim(self, seq_id: str, tokens: list[int]) -> EdgeLease | None:
        """Take the sequence's lease out of the edge's hands, so that its timer cannot end it any more."""
        lease = self._lease_of_seq.get(seq_id)
        if lease is None:
            return None
        claimed = self._leases[lease]
        reserved = claimed.tokens
        if tokens[: len(reserved)] != reserved:
            differs = next((i for i, token in enumerate(reserved) if i >= len(tokens) or tokens[i] != token), 0)
            raise BadRequest(f"prompt: differs from what prep_recv reserved, first at position {differs}", "prompt")
        self._forget(lease)
        return claimed

    async def _tokens(self, prompt: Prompt) -> list[int]:
        tokens: list[int] = self._client.get_tokenizer().encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not tokens:
            raise BadRequest("prompt: is empty", "prompt")
        vocab_size = self._client.vllm_config.model_config.get_vocab_size()
        if max(tokens) >= vocab_size:
            raise BadRequest(f"prompt: token id {max(tokens)} is outside the vocabulary of {vocab_size}", "prompt")
        limit = self._client.vllm_config.model_config.max_model_len
        if len(tokens) > limit:
            raise BadRequest(f"prompt: {len(tokens)} tokens exceed the model's maximum of {limit}", "prompt")
        return tokens

    # ---- plumbing --------------------------------------------------------------------------------------------

    def _destinations(self, call: RemoteSendCall) -> list[list[Destination]]:
        """For each rank of this engine, the receiver's ranks that have heads in common with it."""
        info = call.kv_addr_info
        ranks = sorted(info.ranks, key=lambda rank: rank.rank)[call.recv_rank :]
        return [
            [
                Destination(ranks[route.receiver].addresses, route.head_slice)
                for route in routes(self.layout, info.layout, rank)
            ]
            for rank in range(len(self._transports))
        ]

    def _address(self, lease: str, matched: int, end: int) -> KVAddrInfo:
        ranks = tuple(RankAddress(rank, tuple(addresses)) for rank, addresses in enumerate(self._transports))
        return KVAddrInfo(lease, self._name, matched, end, "tcp", ranks, self.layout)

    async def _core(self, method: str, *args: Any) -> Any:
        result, error = await self._client.engine_core.call_utility_async(method, *args)
        if error is not None:
            code, message, param = error
            raise from_wire(500, {"error": {"code": code, "message": message, "param": param}})
        return result

    async def _end_send(self, send_id: str) -> None:
        with suppress(UnknownSequence):
            await self._core("tercet_end_send", send_id)

    def _spawn_release(self, lease: str) -> None:
        agent_metrics.leases_expired.inc()
        self._forget(lease)
        self._spawn(self._release_quietly(lease))

    async def _release_quietly(self, lease: str) -> None:
        with suppress(UnknownSequence):
            await self._core("tercet_release", lease)

    def _forget(self, lease: str) -> None:
        self._inbox.forget(lease)
        known = self._leases.pop(lease, None)
        if known is not None:
            known.timer.cancel()
            self._lease_of_seq.pop(known.seq_id, None)

    def _lease_filled(self, filled: LeaseFilled, valid_end: int) -> None:
        self._spawn(self._core("tercet_commit", filled.lease, valid_end))

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def _cancellable(self, key: BusyKey, task: asyncio.Future[Any]) -> _Busy:
        return _Busy(self._busy, key, task)


class _Busy:
    """While entered, :meth:`EngineVerbs.abort` of the sequence cancels the task; leaving by an error does so too."""

    def __init__(self, busy: dict[BusyKey, Callable[[], None]], key: BusyKey, task: asyncio.Future[Any]) -> None:
        self._busy, self._key, self._task = busy, key, task

    def __enter__(self) -> None:
        self._busy[self._key] = self._cancel

    def __exit__(self, *_: object) -> None:
        del self._busy[self._key]
        self._cancel()

    def _cancel(self) -> None:
        self._task.cancel()


def _usage(total: int, num_cached: int, claimed: EdgeLease | None) -> Usage:
    # vLLM counts what a connector provided as cached too; what prep_recv matched was here before.
    local = min(num_cached, claimed.matched_len) if claimed is not None else num_cached
    return Usage(cached=local, received=num_cached - local, computed=total - num_cached)
