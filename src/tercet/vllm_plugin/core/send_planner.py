"""Sends of requests whose KV goes to another engine while it is computed.

This code runs on the scheduler's thread, and never calls an agent. In each step it plans which blocks have become
complete, and pins them; a pin lasts until :meth:`SendPlanner.end`, since the request may finish, or be preempted,
before its last byte is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tercet.engine.interface import SendParams
from tercet.protocol import UnknownSequence
from tercet.transport import Push, SendComplete
from tercet.vllm_plugin.core.cache_groups import GroupTables
from tercet.vllm_plugin.core.connector_messages import StepMetadata
from tercet.vllm_plugin.core.reservations import same_adapter, same_features

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request as VLLMRequest


@dataclass
class Sending:
    """One send. In each group, blocks below ``next_block`` (an index into its block table) have been planned."""

    params: SendParams
    next_block: list[int]
    opened: bool = False
    pins: list[KVCacheBlock] = field(default_factory=list)


class SendPlanner:
    """All sends of this engine, by send id and by the vLLM request that computes each."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._tables = GroupTables(self._manager)
        self._block_size = self._tables.block_size
        self._sending: dict[str, Sending] = {}
        self._by_request: dict[str, Sending] = {}
        self._steps = 0  # steps that were planned and have not ended
        # Ids of sends whose end overtook the request in the input queue; limited, since some requests never arrive.
        self._ended_early: deque[str] = deque(maxlen=1024)

    def __len__(self) -> int:
        return len(self._sending)

    def begin(self, request: VLLMRequest, params: SendParams) -> None:
        """Follow ``request``, whose KV of ``[begin, end)`` will be sent."""
        if params.send_id in self._ended_early:
            self._ended_early.remove(params.send_id)
            return
        self._compute_what_is_gone(request, params)
        sending = Sending(params, self._first_blocks(params))
        self._sending[params.send_id] = sending
        self._by_request[request.request_id] = sending

    def _compute_what_is_gone(self, request: VLLMRequest, params: SendParams) -> None:
        """Make a request compute from its beginning if it would continue after blocks that the receiver needs.

        The prefix cache keeps only the parts of a window that some positions look back at, and a receiver whose lease
        has grown may need more.
        """
        if not params.group_begins or request.skip_reading_prefix_cache:
            return
        computed, matched, _ = self._manager.get_computed_blocks(request)
        found = zip(computed.blocks, self._first_blocks(params), strict=True)
        if any(block.is_null for table, first in found for block in table[first : matched // self._block_size]):
            request.skip_reading_prefix_cache = True

    def _first_blocks(self, params: SendParams) -> list[int]:
        return [params.first_block(group, self._block_size) for group in range(len(self._tables.groups))]

    def plan(self, output: SchedulerOutput, metadata: StepMetadata) -> None:
        """Add the pushes of the step that ``output`` describes to ``metadata``; :meth:`stepped` follows."""
        self._steps += 1
        for request_id, scheduled in output.num_scheduled_tokens.items():
            sending = self._by_request.get(request_id)
            if sending is not None:
                self._plan_one(self._scheduler.requests[request_id], sending, scheduled, metadata)

    def stepped(self) -> None:
        """Record that the first of the planned steps has ended; steps planned before this object do not count."""
        self._steps = max(0, self._steps - 1)

    def _plan_one(self, request: VLLMRequest, sending: Sending, scheduled: int, metadata: StepMetadata) -> None:
        # Before the step's own bookkeeping, num_computed_tokens counts tokens from earlier steps or the cache. Cached
        # tokens may be computed in this very step, for a request with the same prefix: vLLM enters blocks into the
        # cache when they are scheduled. So cached blocks too are pushed layer by layer, after the computation.
        params = sending.params
        done = request.num_computed_tokens + scheduled
        if not sending.opened:
            sending.opened = True
            metadata.opened.append(params.openings())
        # A partly filled block is sent once, when its last token of the range is there.
        until = -(-params.end // self._block_size) if done >= params.end else done // self._block_size
        metadata.pushes += self._push(sending, self._tables.of(request.request_id), until)
        if done >= params.end:
            metadata.finish.append(SendComplete(params.send_id, params.begin, params.end))
            del self._by_request[request.request_id]

    def _push(self, sending: Sending, tables: Sequence[Sequence[KVCacheBlock]], until: int) -> list[Push]:
        """Pin a send's next blocks, up to a position in their tables; return the pushes.

        Blocks that vLLM has freed, since they left a window, are left out, and those before them: a push fills
        consecutive slots. A receiver that needs them refuses the send's end, since the send is incomplete.
        """
        base, found = sending.params.base // self._block_size, list[Push]()
        for group, table in enumerate(tables):
            first = sending.next_block[group]
            blocks = table[first:until]
            gone = max((at for at, block in enumerate(blocks, 1) if block.is_null), default=0)
            if blocks := blocks[gone:]:
                self._manager.block_pool.touch(blocks)
                sending.pins.extend(blocks)
                numbers = tuple(block.block_id for block in blocks)
                found.append(Push(sending.params.send_id, first + gone - base, numbers, group))
            sending.next_block[group] = max(first, until)
        return found

    def push_cached(self, probe: VLLMRequest, params: SendParams) -> list[Push] | None:
        """Pin ``[begin, end)`` if all of it is here; return the pushes, which need no forward pass, or None.

        All of it is here if it is in the prefix cache, or if a request that runs here has computed it: then the block
        that this request is still filling is sent as it is, since later tokens do not change the bytes of earlier ones.
        States are sent from the prefix cache only. ``probe`` is a request of the tokens ``[0, end)`` and one more; it
        is used only for the look-up.
        """
        firsts, until = self._first_blocks(params), -(-params.end // self._block_size)
        for found in (self._cached(probe, params.end), self._running(probe, params.end)):
            if found is None:
                continue
            tables = [self._completed(probe, params.end // self._block_size, *each) for each in enumerate(found)]
            # Blocks that left a window may be missing.
            wanted = (table[first:until] for table, first in zip(tables, firsts, strict=True))
            if not any(block.is_null for blocks in wanted for block in blocks):
                sending = self._sending[params.send_id] = Sending(params, firsts, opened=True)
                return self._push(sending, tables, until)
        return None

    def _completed(
        self, probe: VLLMRequest, full: int, group: int, table: Sequence[KVCacheBlock]
    ) -> Sequence[KVCacheBlock]:
        """Return a group's blocks of the probe's tokens, including those that left its window but not the prefix cache.

        The first ``full`` blocks contain only tokens that are sent.
        """
        pool, hashes = self._manager.block_pool, probe.block_hashes
        if self._steps_in_flight():
            return table
        return [
            (pool.get_cached_block(hashes[at], [group]) or [block])[0] if block.is_null and at < full else block
            for at, block in enumerate(table)
        ]

    def _cached(self, probe: VLLMRequest, end: int) -> Sequence[Sequence[KVCacheBlock]] | None:
        if self._steps_in_flight():
            return None
        computed, matched, _ = self._manager.get_computed_blocks(probe)
        return computed.blocks if matched >= end else None

    def _steps_in_flight(self) -> bool:
        """True if the prefix cache may have blocks of steps that have not run yet, under asynchronous scheduling.

        The list of requests does not show this: an aborted request is removed, while a step still computes blocks that
        others find.
        """
        return self._steps > 0

    def _running(self, probe: VLLMRequest, end: int) -> Sequence[Sequence[KVCacheBlock]] | None:
        """Return the blocks of a request that runs and has computed the probe's first ``end`` tokens; None without one.

        A planned step may not have run yet. A request whose first step has not ended (it still has the statistics for
        its first output) may use blocks that another request's step is computing.
        """
        tokens = probe._all_token_ids[:end]
        for request in self._scheduler.running:
            done = request.num_computed_tokens - request.num_in_flight_tokens
            if (
                done >= end
                and request.prefill_stats is None
                and request.cache_salt == probe.cache_salt
                and same_adapter(request, probe)
                and same_features(request, probe, end)
                and request._all_token_ids[:end] == tokens
            ):
                tables = self._tables.of(request.request_id)
                for group in self._tables.states:
                    # The request's state belongs to the tokens computed so far, and changes with every step.
                    tables[group] = [self._manager.block_pool.null_block] * len(tables[group])
                return tables
        return None

    def end(self, send_id: str) -> None:
        """Stop a send, done or not, and unpin its blocks, which may then be rewritten: no agent reads them any more.

        Raises :class:`UnknownSequence` if its request has not arrived; the request is refused when it arrives.
        """
        sending = self._sending.pop(send_id, None)
        if sending is None:
            self._ended_early.append(send_id)
            raise UnknownSequence(f"send {send_id} is not running")
        self._by_request = {key: other for key, other in self._by_request.items() if other is not sending}
        self._manager.block_pool.free_blocks(reversed(sending.pins))
