"""The scheduler's half of the connector: handling of Tercet's requests, and each step's orders to the workers.

This code runs on the scheduler's thread, and never calls an agent. :class:`SchedulerSide` is what vLLM's scheduler
calls with each request and each step; its parts send KV (:class:`SendPlanner`), continue output of other engines
(:class:`ResumedRequests`), publish tables (:class:`TablePublisher`) and lease blocks (:mod:`.reservations`).
"""

from __future__ import annotations

import copy
import logging
import secrets
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from operator import is_, le
from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.request import RequestStatus

from tercet.engine.block_tables import BlockTableWriter, TablePlace, TableShape, create_table, row_owner
from tercet.engine.interface import KeyedPrompt, PinnedPrefix, ReservedBlocks, SendPlan
from tercet.protocol import UnknownSequence
from tercet.transport import CoreWords, Push, SendComplete
from tercet.vllm_plugin.core.background import BackgroundRequests
from tercet.vllm_plugin.core.cache_groups import GroupTables
from tercet.vllm_plugin.core.connector_messages import StepMetadata, TercetParams
from tercet.vllm_plugin.core.reservations import ReservationQueue, Reservations, give_way, same_adapter, same_features
from tercet.vllm_plugin.core.sibling_waits import SiblingWaits

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request as VLLMRequest
    from vllm.v1.structured_output import StructuredOutputManager


logger = logging.getLogger(__name__)
EPOCH_BITS = 48


@dataclass
class Followed:
    """A request that decodes for a sequence."""

    request: VLLMRequest
    owner: int
    preemptions: int = 0
    since: int | None = None  # computed tokens when the request was first seen running, after ``preemptions``
    rows: list[int] = field(default_factory=list)  # one for each group of layers
    blocks: list[list[KVCacheBlock]] = field(default_factory=list)  # those in ``rows``


class TablePublisher:
    """Publishes the core's running sequences with each step, so that they are known when the core is stuck.

    KV of a running request is rewritten only after its blocks were freed and allocated again from the block pool.
    Therefore, before the pool allocates anything, the published tables are revoked
    (:meth:`~tercet.engine.block_tables.BlockTableWriter.revoke`); they are guaranteed again once the step that took the
    blocks is planned. ``place`` is where other processes find the tables.
    """

    def __init__(self, scheduler: Scheduler, writer: BlockTableWriter, place: TablePlace) -> None:
        self.place = place
        self._writer = writer
        self._followed: dict[str, Followed] = {}
        groups = scheduler.kv_cache_manager.coordinator.single_type_managers
        self._blocks_of = [group.req_to_blocks for group in groups]
        pool = scheduler.kv_cache_manager.block_pool
        hand_out = pool.get_new_blocks

        def revoke_and_hand_out(num_blocks: int) -> list[KVCacheBlock]:
            writer.revoke()
            return hand_out(num_blocks)

        pool.get_new_blocks = revoke_and_hand_out

    @classmethod
    def begin(cls, scheduler: Scheduler, words: Sequence[tuple[str, int]], machines: int) -> TablePublisher | None:
        """Return a publisher for the core of ``scheduler``; ``words`` are the places of the core's words, by rank.

        Returns None, with a warning, if the words cannot be written from here, as on several ``machines``, or if the
        model's layers keep states, which a stuck step may have changed in some layers: then nothing is published.
        """
        tables, mapped, reason = GroupTables(scheduler.kv_cache_manager), list[CoreWords](), ""
        if tables.states:
            reason = "the model's layers keep states"
        elif machines > 1:  # the same path may be another file on this machine
            reason = "it has ranks on other machines"
        else:
            try:
                mapped = [CoreWords(*place) for place in words]
            except (OSError, ValueError) as error:
                reason = f"the memory of its workers' KV cannot be reached from the core: {error}"
        if reason:
            said = "sequences of this engine cannot be moved with their KV while its core is stuck: %s"
            logger.warning(said, reason)
            return None

        def turn(epoch: int) -> None:
            for each in mapped:
                each.advance(epoch)

        groups, row_blocks = len(tables.groups), -(-scheduler.max_model_len // tables.block_size) + 1
        table, place = create_table(TableShape(scheduler.max_num_running_reqs * groups, row_blocks, groups))
        return cls(scheduler, BlockTableWriter(table, place.shape, turn, 1 + secrets.randbits(EPOCH_BITS)), place)

    def follow(self, request: VLLMRequest, owner: int) -> None:
        """Publish a request from its first step on, under the API server's number for it."""
        self._followed[request.request_id] = Followed(request, owner)

    def forget(self, request_id: str) -> None:
        found = self._followed.pop(request_id, None)
        if found is not None and found.rows:
            # This may be late: its KV stays until a block is allocated again, which revokes the table.
            self._withdraw(found)

    def publish_planned(self) -> None:
        """Publish the tables after a step was planned and has its blocks, unless they are still valid."""
        if not self._writer.stands:
            self.publish()

    def publish(self) -> None:
        if self._followed:
            verify = not self._writer.stands
            self._writer.begin()
            for each in self._followed.values():
                self._publish(each, verify)
            self._writer.end()

    def _publish(self, each: Followed, verify: bool) -> None:
        request = each.request
        running = request.status is RequestStatus.RUNNING
        if not running or request.num_preemptions != each.preemptions:
            self._withdraw(each)
            each.preemptions = request.num_preemptions
            if not running:
                return
        # Under asynchronous scheduling, blocks that the request found in the prefix cache may belong to another
        # request's step that has not run. Its own step adds tokens after them; once that step has run, the earlier
        # steps have run, too.
        if each.since is None:
            each.since = request.num_computed_tokens
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        if not each.rows and (computed <= each.since or not self._enter(each)):
            return
        for row, known, blocks_of in zip(each.rows, each.blocks, self._blocks_of, strict=True):
            blocks = blocks_of.get(request.request_id, ())
            if len(known) > len(blocks) or (verify and not all(map(is_, known, blocks))):
                known.clear()
            if len(known) != len(blocks):
                first = len(known)
                known += blocks[first:]
                if not self._writer.blocks(row, first, (block.block_id for block in islice(blocks, first, None))):
                    self._withdraw(each)
                    return
            self._writer.computed(row, computed)

    def _enter(self, each: Followed) -> bool:
        """Add the rows of a sequence, for all of its groups or for none; return whether there was room."""
        for group in range(len(self._blocks_of)):
            row = self._writer.enter(row_owner(each.owner, group, self.place.shape))
            if row is None:
                self._withdraw(each)
                return False
            each.rows.append(row)
            each.blocks.append([])
        return True

    def _withdraw(self, each: Followed) -> None:
        each.since = None
        for row in each.rows:
            self._writer.leave(row)
        each.rows, each.blocks = [], []


@dataclass
class Sending:
    """One send. In each group, blocks below ``next_block`` (an index into its block table) have been planned."""

    plan: SendPlan
    next_block: list[int]
    opened: bool = False
    pins: list[KVCacheBlock] = field(default_factory=list)


@dataclass
class HeldPushes:
    """What one step adds to a send, until ``steps`` more steps have ended: some of them load KV, which may fail."""

    steps: int
    sending: Sending
    request_id: str
    before: list[int]  # the send's next blocks before the step
    table: set[int]  # the blocks of the request's tokens so far: what was sent was computed from them
    pushes: list[Push]
    finish: list[SendComplete]


class SendPlanner:
    """All sends of this engine, by send id and by the vLLM request that computes each.

    In each step it plans which blocks become complete, and pins them until :meth:`end`, since the request may finish,
    or be preempted, before its last byte is sent. A send of tokens ``[begin, end)`` over three steps::

        block    |   b3   |   b7   |   b12  |   b13  |
        step 1   |=============>                          pushes b3
        step 2                  ==============>           pushes b7
        step 3                                 ====> end  pushes b12 and b13, and completes the send

    A block that the step fills only in part waits for the step that fills it; the last one is sent as it is.

    Another connector may load KV into blocks within a step (a *synchronous* load), and whether that succeeded is known
    when the step has ended. Pushes of such a step are held until then, and taken back if it has failed: vLLM then fails
    the request, or computes its tokens again.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._tables = GroupTables(self._manager)
        self._block_size = self._tables.block_size
        self._sending: dict[str, Sending] = {}
        self._by_request: dict[str, Sending] = {}
        # For each step that was planned and has not ended, the blocks that it fills to their end. vLLM enters blocks
        # into the prefix cache when it plans their step, which under asynchronous scheduling and with pipeline stages
        # is in flight while calls are answered. The list of requests does not show this: an aborted request is removed,
        # while a step still computes blocks that others find.
        self._filling = deque[set[int]]()
        # For each of these steps, the blocks into which other connectors may load KV, and the blocks that were computed
        # from KV that could not be loaded, until they are computed again.
        self._loading = deque[set[int]]()
        self._failed = set[int]()
        self._held: list[HeldPushes] = []
        self._blocks_of = [group.req_to_blocks for group in self._tables.groups]
        # Ids of sends whose end overtook the request in the input queue; limited, since some requests never arrive.
        self._ended_early: deque[str] = deque(maxlen=1024)

    def __len__(self) -> int:
        return len(self._sending)

    def begin(self, request: VLLMRequest, plan: SendPlan) -> None:
        """Follow ``request``, whose KV of ``[begin, end)`` will be sent."""
        if plan.send_id in self._ended_early:
            self._ended_early.remove(plan.send_id)
            return
        firsts = self._first_blocks(plan)
        if plan.group_begins and not request.skip_reading_prefix_cache:
            # The prefix cache keeps only the parts of a window that some positions look back at, and a receiver whose
            # lease has grown may need more. What it needs and is gone is computed from the beginning.
            computed, matched, _ = self._manager.get_computed_blocks(request)
            wanted = (
                table[first : matched // self._block_size]
                for table, first in zip(computed.blocks, firsts, strict=True)
            )  # fmt: skip
            if any(block.is_null for blocks in wanted for block in blocks):
                request.skip_reading_prefix_cache = True
        self._sending[plan.send_id] = self._by_request[request.request_id] = Sending(plan, firsts)

    def _first_blocks(self, plan: SendPlan) -> list[int]:
        return [plan.first_block(group, self._block_size) for group in range(len(self._tables.groups))]

    def plan(self, output: SchedulerOutput, metadata: StepMetadata) -> None:
        """Add the pushes of the step that ``output`` describes to ``metadata``; :meth:`stepped` follows."""
        filling, loading = set[int](), set[int]()
        self._filling.append(filling)
        self._loading.append(loading)
        for held in [each for each in self._held if each.steps <= 0]:
            metadata.pushes += held.pushes
            metadata.finish += held.finish
            self._held.remove(held)
        if output.has_sync_kv_loads:
            begins = [new.req_id for new in output.scheduled_new_reqs]
            for request_id in (*begins, *output.scheduled_cached_reqs.resumed_req_ids):
                loading |= self._ids(request_id, self._scheduler.requests[request_id].num_computed_tokens)
        size, rewinds = self._block_size, self._scheduler.num_spec_tokens > 0
        for request_id, scheduled in output.num_scheduled_tokens.items():
            request = self._scheduler.requests[request_id]
            done = request.num_computed_tokens
            # After rejected tokens, a step that was planned behind them computes from an earlier position on.
            first = max(0, done - request.num_in_flight_tokens if rewinds else done) // size
            if (until := (done + scheduled) // size) > first:
                for blocks_of in self._blocks_of:
                    blocks = blocks_of[request_id][first:until]
                    filling.update([block.block_id for block in blocks if not block.is_null])
            sending = self._by_request.get(request_id)
            if sending is not None:
                self._plan_one(request, sending, scheduled, metadata)

    def stepped(self) -> None:
        """Record that the first of the planned steps has ended; steps planned before this object do not count."""
        if self._filling:
            self._failed -= self._filling.popleft()
            self._loading.popleft()
        for held in self._held:
            held.steps -= 1

    @property
    def steps_in_flight(self) -> int:
        """Number of planned steps that have not ended."""
        return len(self._filling)

    @property
    def held_back(self) -> bool:
        """True while pushes wait for a step: those of an engine that is idle would otherwise wait for ever."""
        return bool(self._held)

    def loading(self) -> set[int]:
        """Return the blocks into which unfinished steps may load KV."""
        return set[int]().union(*self._loading)

    def loads_failed(self, blocks: set[int]) -> set[int]:
        """Take back pushes of KV that was computed from these blocks, which could not be loaded.

        Returns them and the blocks computed from them. vLLM evicts these, or has their request compute them again.
        """
        failed = set(blocks)
        for group in self._blocks_of:
            for table in group.values():
                ids = [block.block_id for block in table]
                first = next((at for at, block in enumerate(ids) if block in blocks), len(ids))
                failed.update(block.block_id for block in table[first:] if not block.is_null)
        if self._scheduler.recompute_kv_load_failures:
            self._failed |= failed
        wrong = [each.sending for each in self._held if not each.table.isdisjoint(blocks)]
        for held in reversed(self._held):
            if held.sending in wrong:
                held.sending.next_block = held.before
                self._by_request[held.request_id] = held.sending
        self._held = [each for each in self._held if each.sending not in wrong]
        return failed

    def rewritten(self, blocks: set[int]) -> None:
        """Record that peers write these blocks."""
        self._failed -= blocks

    def _ids(self, request_id: str, tokens: int) -> set[int]:
        until = -(-tokens // self._block_size)
        tables = (blocks_of.get(request_id, ()) for blocks_of in self._blocks_of)
        return {block.block_id for blocks in tables for block in blocks[:until] if not block.is_null}

    def _is_filled(self, block: KVCacheBlock) -> bool:
        """True if no unfinished step computes or loads this block of the prefix cache, and no load of it has failed."""
        unfinished = (*self._filling, *self._loading, self._failed)
        return not any(block.block_id in blocks for blocks in unfinished)

    def _plan_one(self, request: VLLMRequest, sending: Sending, scheduled: int, metadata: StepMetadata) -> None:
        # Before the step's own bookkeeping, num_computed_tokens counts tokens from earlier steps or the cache. Cached
        # tokens may be computed in this very step, for a request with the same prefix: vLLM enters blocks into the
        # cache when they are scheduled. So cached blocks too are pushed layer by layer, after the computation.
        plan = sending.plan
        done = request.num_computed_tokens + scheduled
        if not sending.opened:
            sending.opened = True
            metadata.opened.append(plan)
        # A partly filled block is sent once, when its last token of the range is there.
        until = -(-plan.end // self._block_size) if done >= plan.end else done // self._block_size
        before = list(sending.next_block)
        pushes = self._push(sending, self._tables.of(request.request_id), until)
        finish = [SendComplete(plan.send_id, plan.begin, plan.end)] if done >= plan.end else []
        if finish:
            del self._by_request[request.request_id]
        if any(self._loading) or any(each.sending is sending for each in self._held):
            table = self._ids(request.request_id, done)
            steps = len(self._filling)
            self._held.append(HeldPushes(steps, sending, request.request_id, before, table, pushes, finish))
        else:
            metadata.pushes += pushes
            metadata.finish += finish

    def _push(self, sending: Sending, tables: Sequence[Sequence[KVCacheBlock]], until: int) -> list[Push]:
        """Pin a send's next blocks, up to a position in their tables; return the pushes.

        Blocks that vLLM has freed, since they left a window, are left out, and those before them: a push fills
        consecutive slots. A receiver that needs them refuses the send's end, since the send is incomplete.
        """
        base, found = sending.plan.base // self._block_size, list[Push]()
        for group, table in enumerate(tables):
            first = sending.next_block[group]
            blocks = table[first:until]
            gone = max((at for at, block in enumerate(blocks, 1) if block.is_null), default=0)
            if blocks := blocks[gone:]:
                self._manager.block_pool.touch(blocks)
                sending.pins.extend(blocks)
                numbers = tuple(block.block_id for block in blocks)
                found.append(Push(sending.plan.send_id, first + gone - base, numbers, group))
            sending.next_block[group] = max(first, until)
        return found

    def push_cached(self, probe: VLLMRequest, plan: SendPlan) -> list[Push] | None:
        """Pin ``[begin, end)`` if all of it is here; return the pushes, which need no forward pass, or None.

        All of it is here if it is in the prefix cache, or if a request that runs here has computed it: then the block
        that this request is still filling is sent as it is, since later tokens do not change the bytes of earlier ones.
        States are sent from the prefix cache only. ``probe`` is a request of the tokens ``[0, end)`` and one more; it
        is used only for the look-up.
        """
        until, (cached, whole) = -(-plan.end // self._block_size), self._cached(probe)
        for found in (cached if whole >= until else None, self._running(probe, plan.end)):
            pushes = None if found is None else self._push_here(probe, plan, found, until)
            if pushes is not None:
                return pushes
        return None

    def push_longest(self, probe: VLLMRequest, plan: SendPlan) -> PinnedPrefix:
        """Pin the longest cached whole blocks of ``[begin, end)`` from its beginning on; return them, perhaps none.

        ``probe`` is as in :meth:`push_cached`. The receiver's lease must have the blocks of windows that a request
        needs to continue at their end. States belong to the end of a lease, so with states it is all blocks or none.
        """
        tables, whole = self._cached(probe)
        end, begins = whole * self._block_size, plan.group_begins
        needed = [self._tables.first_needed(group, end) * self._block_size for group in range(len(begins))]
        useful = end == plan.end if self._tables.states else all(map(le, begins, needed))
        if end > plan.begin and useful:
            pushes = self._push_here(probe, plan, tables, whole)
            if pushes is not None:
                return PinnedPrefix(end, pushes)
        return PinnedPrefix(plan.begin, [])

    def _push_here(
        self, probe: VLLMRequest, plan: SendPlan, found: Sequence[Sequence[KVCacheBlock]], until: int
    ) -> list[Push] | None:  # fmt: skip
        """Pin blocks up to a position in these tables, and return their pushes; None if some left a window."""
        firsts, full = self._first_blocks(plan), min(until, plan.end // self._block_size)
        tables = [self._completed(probe, full, *each) for each in enumerate(found)]
        wanted = (table[first:until] for table, first in zip(tables, firsts, strict=True))
        if any(block.is_null for blocks in wanted for block in blocks):
            return None
        sending = self._sending[plan.send_id] = Sending(plan, firsts, opened=True)
        return self._push(sending, tables, until)

    def _completed(
        self, probe: VLLMRequest, full: int, group: int, table: Sequence[KVCacheBlock]
    ) -> Sequence[KVCacheBlock]:
        """Return a group's blocks of the probe's tokens, including those that left its window but not the prefix cache.

        The first ``full`` blocks contain only tokens that are sent.
        """
        pool, hashes, completed = self._manager.block_pool, probe.block_hashes, list(table)
        for at in [at for at, block in enumerate(table[:full]) if block.is_null]:
            kept = pool.get_cached_block(hashes[at], [group])
            if kept is not None and self._is_filled(kept[0]):
                completed[at] = kept[0]
        return completed

    def _cached(self, probe: VLLMRequest) -> tuple[Sequence[Sequence[KVCacheBlock]], int]:
        """Return the cached blocks of the probe's tokens, by group, and how many of them no step computes any more."""
        computed, matched, _ = self._manager.get_computed_blocks(probe)
        whole, tables = matched // self._block_size, computed.blocks
        if any(self._filling) or any(self._loading) or self._failed:
            unfilled = (at for at in range(whole) if not all(self._is_filled(table[at]) for table in tables))
            whole = next(unfilled, whole)
        return tables, whole

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
        """Stop a send and unpin its blocks, which no agent reads any more; its request, if late, is refused."""
        sending = self._sending.pop(send_id, None)
        if sending is None:
            self._ended_early.append(send_id)
            raise UnknownSequence(f"send {send_id} is not running")
        self._by_request = {key: other for key, other in self._by_request.items() if other is not sending}
        self._held = [each for each in self._held if each.sending is not sending]
        self._manager.block_pool.free_blocks(reversed(sending.pins))


class ResumedRequests:
    """Requests with output from elsewhere that no step has started yet.

    vLLM does most of the work: ``Request.append_output_token_ids`` makes a request equal to a preempted one, so
    ``max_tokens``, ``min_tokens`` and stop conditions count the output. Three tasks remain. The grammar of a structured
    output must accept the output, or its part after the reasoning. The worker, which expects no output in new requests,
    must be notified (:mod:`~tercet.vllm_plugin.worker.model_runner`). Cached tokens are counted here, since vLLM
    assumes that they are not more than the prompt.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._waiting: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, request: VLLMRequest, output: list[int]) -> None:
        """Make ``request`` continue after ``output``; call this before it is first scheduled."""
        request.append_output_token_ids(list(output))
        start_grammar_after(self._scheduler.structured_output_manager, request, output)
        self._waiting[request.request_id] = output
        request.prefill_stats = None  # until the first step: with output, more than the prompt may be cached

    def plan(self, output: SchedulerOutput, metadata: StepMetadata) -> None:
        """Pass the output of requests that ``output`` schedules for the first time to the workers."""
        if not self._waiting:
            return
        starting = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        metadata.resumed = {key: self._waiting.pop(key) for key in starting.keys() & self._waiting.keys()}
        for request_id in metadata.resumed:
            request = self._scheduler.requests[request_id]
            if request.prefill_stats is None and request.num_preemptions == 0:
                request.prefill_stats = PrefillStats()
                # All earlier tokens, including output, count as prefilled: only the rest is computed.
                request.prefill_stats.set(request.num_tokens, starting[request_id], 0)

    def forget(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)


def start_grammar_after(manager: StructuredOutputManager, request: VLLMRequest, output: Sequence[int]) -> None:
    """Make the request's grammar, which vLLM compiles in the background, start after ``output``.

    ``request`` already contains ``output``. If vLLM's manager has a reasoning parser, the grammar covers neither the
    reasoning nor the token that ends it. If the output ends before that, the grammar starts where vLLM sees the
    reasoning end.
    """
    structured = request.structured_output_request
    if structured is None:
        return
    compiled: Any = structured._grammar
    advanced: Future[Any] = Future()

    def advance(done: Future[Any]) -> None:
        try:
            grammar = done.result()
            # A copy, since the scheduler must not see the grammar before it has accepted the output.
            behind, resumed = copy.copy(structured), copy.copy(request)
            behind.grammar, resumed.structured_output_request = grammar, behind
            accepted = manager.accept_tokens(resumed, list(output))
            structured.reasoning_ended, structured.reasoner = behind.reasoning_ended, behind.reasoner
            if not accepted:
                raise ValueError("output: the tokens generated so far do not follow the requested structure")
        except Exception as error:  # vLLM reports it as this request's grammar failure
            advanced.set_exception(error)
        else:
            advanced.set_result(grammar)

    if not isinstance(compiled, Future):
        ready: Future[Any] = Future()
        ready.set_result(compiled)
        compiled = ready
    structured._grammar = advanced
    compiled.add_done_callback(advance)


class SchedulerSide:
    """State of one scheduler for other engines; ``max_lease_blocks`` limits the blocks that leases pin together."""

    def __init__(
        self,
        scheduler: Scheduler,
        max_lease_blocks: int,
        tables: TablePublisher | None,
        siblings: Sequence[KVConnectorBase_V1] = (),
    ) -> None:
        self._scheduler = scheduler
        self.reservations = Reservations(scheduler, max_lease_blocks, siblings=bool(siblings))
        self.queue = ReservationQueue(scheduler, self.reservations)
        self.sends = SendPlanner(scheduler)
        self.resumed = ResumedRequests(scheduler)
        self.background = BackgroundRequests(scheduler, self.queue.wanted)
        self.tables = tables
        self.sibling_waits = SiblingWaits(scheduler, self.reservations, siblings, self.sends) if siblings else None

    def reserve(self, lease: str, owner: VLLMRequest, prompt: KeyedPrompt) -> Future[ReservedBlocks]:
        """Reserve as :meth:`ReservationQueue.reserve` does; the answer waits for the engine's other connectors."""
        return self._after_siblings(lease, self.queue.reserve(lease, owner, prompt), is_new=True)

    def extend(self, lease: str, owner: VLLMRequest, prompt: KeyedPrompt) -> Future[ReservedBlocks]:
        """Extend a lease as :meth:`ReservationQueue.extend` does; the answer waits as that of :meth:`reserve`.

        If it waits too long, the lease keeps the blocks, which its peers do not know.
        """
        reserved: Future[ReservedBlocks] = Future()
        reserved.set_result(self.queue.extend(lease, owner, prompt))
        return self._after_siblings(lease, reserved, is_new=False)

    def _after_siblings(self, lease: str, reserved: Future[ReservedBlocks], *, is_new: bool) -> Future[ReservedBlocks]:
        return reserved if self.sibling_waits is None else self.sibling_waits.pass_on(lease, reserved, is_new=is_new)

    def give_up(self, lease: str) -> None:
        """End the wait of a reservation for blocks, or for other connectors that use them."""
        self.queue.give_up(lease)
        if self.sibling_waits is not None and self.sibling_waits.give_up(lease):
            self.queue.admit()

    def begin(self, request: VLLMRequest, params: TercetParams) -> None:
        """Begin a request that sends its KV, uses a reservation, or continues output from another engine."""
        if params.background:
            self.background.add(request, self.sends.steps_in_flight)
        if params.send is not None:
            self.sends.begin(request, params.send)
        if params.seq is not None and params.seq.output:
            self.resumed.begin(request, params.seq.output)
        if params.seq is not None and params.seq.lease is not None:
            if self.sibling_waits is not None:
                self.sibling_waits.give_up(params.seq.lease)
            self.reservations.adopt(params.seq.lease, params.seq.valid_end, request)
        if params.seq is not None and params.seq.number and self.tables is not None:
            self.tables.follow(request, params.seq.number)

    def plan(self, output: SchedulerOutput) -> StepMetadata:
        metadata = StepMetadata()
        if self.sibling_waits is not None:
            self.sibling_waits.planned(output)
        if not give_way(self._scheduler, output):
            self.queue.admit()
        self.sends.plan(output, metadata)
        self.resumed.plan(output, metadata)
        if self.background:
            self.background.plan(output)
        if self.tables is not None:
            self.tables.publish_planned()
        return metadata

    def loads_failed(self, blocks: set[int]) -> None:
        """Stop uses of KV that other connectors could not load into these blocks."""
        failed = self.sends.loads_failed(blocks)
        if self.sibling_waits is not None:
            self.sibling_waits.loads_failed(failed)

    def stepped(self) -> None:
        self.sends.stepped()
        if self.background:
            self.background.stepped()
        if self.sibling_waits is not None:
            self.sibling_waits.stepped()
        if self.tables is not None:
            self.tables.publish()

    def finished(self, request_id: str) -> None:
        """Forget a request that has ended. vLLM frees its blocks; a send keeps its own blocks pinned."""
        self.resumed.forget(request_id)
        self.background.finished(request_id)
        if self.tables is not None:
            self.tables.forget(request_id)
