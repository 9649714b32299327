"""SendPlanner: requests whose KV goes to another engine while it is computed.

Runs on the scheduler's thread, and never asks an agent. Per step it plans which blocks have become complete and pins
them; a pin lasts until :meth:`SendPlanner.end`, since the request may finish, or be preempted, before its last byte
left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tercet.protocol import UnknownSequence
from tercet.transport import Push, SendComplete
from tercet.vllm_plugin.engine.connector_messages import SendParams, StepMetadata

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request as VLLMRequest


@dataclass
class Sending:
    """One send. Blocks below ``next_block`` (an index into the block table) have been planned."""

    params: SendParams
    next_block: int
    opened: bool = False
    pins: list[KVCacheBlock] = field(default_factory=list)


class SendPlanner:
    """All sends of this engine, by send id and by the vLLM request that computes each."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._block_size = self._manager.coordinator.single_type_managers[0].block_size
        self._sending: dict[str, Sending] = {}
        self._by_request: dict[str, Sending] = {}
        # An end that overtakes its own request in the input queue must win; bounded, since some never arrive.
        self._ended_early: deque[str] = deque(maxlen=1024)

    def __len__(self) -> int:
        return len(self._sending)

    def begin(self, request: VLLMRequest, params: SendParams) -> None:
        """Follow ``request``; its KV of ``[begin, end)`` shall go out."""
        if params.send_id in self._ended_early:
            self._ended_early.remove(params.send_id)
            return
        sending = Sending(params, next_block=params.begin // self._block_size)
        self._sending[params.send_id] = sending
        self._by_request[request.request_id] = sending

    def plan(self, output: SchedulerOutput, metadata: StepMetadata) -> None:
        """Add to ``metadata`` what shall be pushed in the step that ``output`` describes."""
        for request_id, scheduled in output.num_scheduled_tokens.items():
            sending = self._by_request.get(request_id)
            if sending is not None:
                self._plan_one(self._scheduler.requests[request_id], sending, scheduled, metadata)

    def _plan_one(self, request: VLLMRequest, sending: Sending, scheduled: int, metadata: StepMetadata) -> None:
        # Before the step's own bookkeeping, num_computed_tokens counts what earlier steps or the cache provide. What
        # the cache provides may be computed in this very step, for a request with the same prefix: vLLM enters blocks
        # into it when they are scheduled. So cached blocks too are pushed layer by layer, behind the computation.
        params = sending.params
        done = request.num_computed_tokens + scheduled
        if not sending.opened:
            sending.opened = True
            metadata.opened.append(params.openings())
        # A partly filled block goes out once, when its last token of the range is there.
        until = -(-params.end // self._block_size) if done >= params.end else done // self._block_size
        blocks = self._manager.get_blocks(request.request_id).blocks[0][sending.next_block : until]
        if blocks:
            metadata.pushes.append(self._push(sending, blocks))
        if done >= params.end:
            metadata.finish.append(SendComplete(params.send_id, params.begin, params.end))
            del self._by_request[request.request_id]

    def _push(self, sending: Sending, blocks: Sequence[KVCacheBlock]) -> Push:
        """Pin a send's next blocks, wherever they were found; what to push then."""
        self._manager.block_pool.touch(blocks)
        sending.pins.extend(blocks)
        slot = sending.next_block - sending.params.base // self._block_size
        sending.next_block += len(blocks)
        return Push(sending.params.send_id, slot, tuple(block.block_id for block in blocks))

    def push_cached(self, probe: VLLMRequest, params: SendParams) -> Push | None:
        """Pin ``[begin, end)`` if all of it is here by now; what to push then, with no forward pass.

        That is so if it is in the prefix cache, or if a request that runs here has computed it: then the block that
        this request is still filling goes as it is, since later tokens leave the bytes of earlier ones alone.
        ``probe`` is a request of the tokens ``[0, end)`` and one more, used for the look-up only.
        """
        first, until = params.begin // self._block_size, -(-params.end // self._block_size)
        found = self._cached(probe, params.end) or self._running(probe, params.end)
        if found is None:
            return None
        sending = self._sending[params.send_id] = Sending(params, first, opened=True)
        return self._push(sending, list(found[first:until]))

    def _cached(self, probe: VLLMRequest, end: int) -> Sequence[KVCacheBlock] | None:
        # Under asynchronous scheduling the cache has blocks of steps that have not run yet.
        if any(request.num_in_flight_tokens for request in self._scheduler.running):
            return None
        computed, matched, _ = self._manager.get_computed_blocks(probe)
        return computed.blocks[0] if matched >= end else None

    def _running(self, probe: VLLMRequest, end: int) -> Sequence[KVCacheBlock] | None:
        """The blocks of a request that runs and has computed the probe's first ``end`` tokens.

        A step that is under way may not have run yet. One whose first step has not ended (it still has the statistics
        that go out with its first output) may stand on blocks that another request's step is computing.
        """
        tokens = probe._all_token_ids[:end]
        for request in self._scheduler.running:
            done = request.num_computed_tokens - request.num_in_flight_tokens
            if (
                done >= end
                and request.prefill_stats is None
                and request.cache_salt == probe.cache_salt
                and request._all_token_ids[:end] == tokens
            ):
                return self._manager.get_blocks(request.request_id).blocks[0]
        return None

    def end(self, send_id: str) -> None:
        """Stop a send, done or not, and unpin its blocks, which the agents have stopped reading: they may be rewritten.

        Raises :class:`UnknownSequence` if its request has not arrived; it is then refused when it does.
        """
        sending = self._sending.pop(send_id, None)
        if sending is None:
            self._ended_early.append(send_id)
            raise UnknownSequence(f"send {send_id} is not under way")
        self._by_request = {key: other for key, other in self._by_request.items() if other is not sending}
        self._manager.block_pool.free_blocks(reversed(sending.pins))
