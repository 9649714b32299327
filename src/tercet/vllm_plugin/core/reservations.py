"""Blocks reserved for KV that other engines push: lease them, fill them, and hand them over or free them.

One reservation, of a prompt of which this engine had two blocks in its prefix cache::

    token       0        8        16       24       32       40   45
    block       |   b3   |   b7   |  b12   |  b13   |  b20   |  b21   |  b22   |
                '-- matched_len --'------ reserved, for peers ----'--- step ---'
    filled      '===== cached ====+====== valid =====>            |
                                  grant.begin        valid_end    end

The blocks from ``matched_len`` on belong to the lease: agents write them, and ``valid_end`` moves to the right as KV
arrives. What follows ``end`` is for the first decoding step: a request that holds blocks must not wait for one. Then
the blocks are handed over to the request that decodes with them (:meth:`Reservations.adopt`), or freed.

This code runs on the scheduler's thread, so it does not race with scheduling; it never calls an agent, so it does not
wait. The verbs open a reservation's blocks for writing, and end a lease here only when every agent has confirmed that
it does not write them any more. To the KV cache manager a reservation is a request that waits for an external load.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from tercet.engine.interface import KeyedPrompt, ReservedBlocks
from tercet.protocol import BadRequest, Conflict, Content, NoSpace, UnknownSequence
from tercet.vllm_plugin.core.cache_groups import GroupTables
from tercet.vllm_plugin.differences import ZEROED_BY_BLOCK

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request as VLLMRequest


# Token that vLLM's request has after the reserved tokens: a cache hit never covers a request's last token.
FILLER_TOKEN = 0


@dataclass
class Held:
    """One reservation: blocks for a prompt's tokens, of which ``[0, matched_len)`` were cached here."""

    owner: VLLMRequest
    prompt: KeyedPrompt
    matched_len: int
    num_blocks: int = 0
    opened: set[int] = field(default_factory=set[int])  # blocks that have been given to peers

    @property
    def end(self) -> int:
        return len(self.prompt.tokens)

    def valid_end(self, reported: int) -> int:
        """Return the valid end, from the one that agents have ``reported``; cached KV is valid in any case."""
        return max(self.matched_len, min(reported, self.end))


class Reservations:
    """All leases of this engine, which together pin at most ``max_blocks``: leases cannot be preempted."""

    def __init__(self, scheduler: Scheduler, max_blocks: int, *, siblings: bool = False) -> None:
        self._scheduler = scheduler
        self._siblings = siblings
        self._manager = scheduler.kv_cache_manager
        # For how many tokens a decoding sequence has blocks in a step: one, the drafter's guesses, and what follows.
        guesses: int = scheduler.num_spec_tokens
        self._step_tokens = 1 + guesses + scheduler.num_lookahead_tokens if guesses else 1
        self._tables = GroupTables(self._manager, self._step_tokens)
        self._block_size = self._tables.block_size
        self._max_blocks = max_blocks
        self._held: dict[str, Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def check(self, lease: str, end: int) -> None:
        """Raise :class:`NoSpace` for a lease that can never fit, :class:`Conflict` for a lease that exists."""
        if lease in self._held:
            raise Conflict(f"lease {lease} exists already", "lease")
        if (needed := self.blocks_for(end)) > self._max_blocks:
            raise NoSpace(f"{needed} blocks exceed max_lease_share ({self._max_blocks} blocks)")

    def blocks_for(self, end: int) -> int:
        return self._tables.needed(end)

    def within_share(self, end: int) -> bool:
        """True if one more lease for ``end`` tokens is within the limit of all leases."""
        return self._pinned() + self.blocks_for(end) <= self._max_blocks

    def _pinned(self) -> int:
        return sum(held.num_blocks for held in self._held.values())

    def reserve(self, lease: str, owner: VLLMRequest, prompt: KeyedPrompt, needed: int) -> ReservedBlocks:
        """Reserve blocks for a prompt, if the blocks that others ``needed`` before it stay free.

        ``owner`` is a vLLM request of the prompt's tokens plus :data:`FILLER_TOKEN`, and :meth:`check` has passed.
        Raises :class:`NoSpace`; then no blocks stay allocated.
        """
        # Relies on the scheduler's path for an asynchronous external load, with the same conditions.
        manager, states, end = self._manager, self._tables.states, len(prompt.tokens)
        if states:
            # vLLM defers a request that finds a state of the step being planned; a lease is used in a later step. It
            # counts neither the state that arrives, nor the one that decoding begins with.
            manager.new_step_starts()
            needed += 2 * len(states)
        computed, matched, _ = manager.get_computed_blocks(owner)
        # A model whose blocks are zeroed has no windows, and all tokens from elsewhere count as loaded.
        zeroed = self._scheduler.needs_kv_cache_zeroing and not states
        loaded = end if zeroed else max(matched, self._tables.resumed_at(end))
        how: dict[str, Any] = {"num_new_computed_tokens": matched, "new_computed_blocks": computed}
        how["num_external_computed_tokens"] = loaded - matched
        if not states and not ZEROED_BY_BLOCK.is_here:
            how["skip_zeroing_group_ids"] = (0,)
        try:
            with self._tables.written_by_peers() if states else nullcontext():
                self._take_slots(owner, end - loaded, self.blocks_for(end), needed, **how)
                if states:
                    self._take_first_state_to_decode_into(owner, end)
        except NoSpace:
            manager.free(owner)  # with windows or states, vLLM has registered the owner, without blocks
            raise
        if zeroed and ZEROED_BY_BLOCK.is_here:
            written = manager.get_zeroing_block_ids_in_range(owner.request_id, matched, end)  # type: ignore[attr-defined]
            self._scheduler._skip_zero_block_ids.update(written)  # type: ignore[attr-defined]
        held = self._held[lease] = Held(owner, prompt, matched)
        return self._reserved(held)

    def _reserved(self, held: Held) -> ReservedBlocks:
        size, request_id = self._block_size, held.owner.request_id
        # The filler makes the lease's end a place to resume at, while a request of only these tokens resumes before
        # that. vLLM keeps the windows and states that such places need, and has one field for another place.
        held.owner.shared_prefix_boundary = self._tables.resumed_at(held.end)
        held.num_blocks = self._tables.held(request_id)
        blocks = self._tables.leased(request_id, held.matched_len, held.end)
        return ReservedBlocks(held.matched_len, blocks, size)

    def _take_first_state_to_decode_into(self, owner: VLLMRequest, end: int) -> None:
        # vLLM allocates no block for it before the step that needs it, and a request that holds blocks must not wait
        # for another.
        if self._tables.missing(owner.request_id, end):
            self._manager.allocate_slots(owner, end + 1, delay_cache_blocks=True)

    def _take_slots(self, owner: VLLMRequest, num_tokens: int, more: int, needed: int, **how: Any) -> None:
        """Make vLLM allocate ``more`` blocks; this engine computes ``num_tokens`` itself. Raises :class:`NoSpace`."""
        scheduler, pinned, most = self._scheduler, self._pinned(), self._max_blocks
        if pinned + more > most:
            raise NoSpace(f"{more} blocks on top of {pinned} under lease exceed max_lease_share ({most} blocks)")
        promised = scheduler._inflight_prefill_reserved_blocks()
        allocated = self._manager.allocate_slots(
            owner, num_tokens, num_lookahead_tokens=self._step_tokens, delay_cache_blocks=True,
            reserved_blocks=promised + needed, has_scheduled_reqs=bool(scheduler.running), **how,
        )  # fmt: skip
        if allocated is None:
            free = self._manager.block_pool.get_num_free_blocks()
            raise NoSpace(f"{more} blocks are needed and {free} are free, some of them promised to earlier requests")

    def extend(self, lease: str, owner: VLLMRequest, prompt: KeyedPrompt, needed: int) -> ReservedBlocks:
        """Reserve more blocks for a lease, after its blocks, now or not at all. Return all of them.

        ``owner`` and ``prompt`` replace the lease's, and begin with the lease's tokens. Raises :class:`NoSpace`,
        :class:`BadRequest` or :class:`UnknownSequence`; then the lease is unchanged.
        """
        held, end = self._held.get(lease), len(prompt.tokens)
        if held is None:
            raise UnknownSequence(f"lease {lease} is not held here: released, expired or already used", "lease")
        if prompt.tokens[: held.end] != held.prompt.tokens or prompt.key != held.prompt.key:
            raise BadRequest("prompt: does not begin with the tokens of the lease", "prompt")
        more = self._tables.missing(held.owner.request_id, end)
        if more > 0:
            # Allocate as for a running request without computed tokens: otherwise vLLM would free blocks that leave a
            # window, while peers may write there.
            if self._tables.states:
                with self._tables.written_by_peers():
                    self._take_slots(owner, end, more, needed + len(self._tables.states))
                    self._take_first_state_to_decode_into(owner, end)
            elif self._scheduler.needs_kv_cache_zeroing:
                raise NoSpace("blocks of this model are zeroed before use, so leases cannot be extended: reserve again")
            else:
                self._take_slots(owner, end, more, needed)
        held.owner, held.prompt = owner, prompt
        return self._reserved(held)

    def unopened(self, lease: str) -> tuple[set[int], set[int]]:
        """Return a lease's blocks that no peer may write yet, and those that were matched in the prefix cache."""
        held = self._held[lease]
        tables, first = self._tables.of(held.owner.request_id), held.matched_len // self._block_size
        matched = {block.block_id for blocks in tables for block in blocks[:first] if not block.is_null}
        reserved = {block.block_id for blocks in tables for block in blocks[first:] if not block.is_null}
        return reserved - held.opened, matched

    def hashes_of(self, lease: str) -> tuple[Sequence[BlockHash], int]:
        """Return the hashes of a lease's whole blocks, and how many of these blocks were matched."""
        held = self._held[lease]
        return held.owner.block_hashes[: held.end // self._block_size], held.matched_len // self._block_size

    def open(self, lease: str) -> None:
        """Record that all blocks of a lease are free of other uses: peers may write them."""
        held = self._held[lease]
        written, _ = self.unopened(lease)
        held.opened |= written

    def commit(self, lease: str, valid: Content) -> None:
        """Make the KV received so far available in the prefix cache, unless it is of other tokens than the lease's."""
        held = self._held.get(lease)
        if held is not None:
            held.prompt.require(valid, lease)
            self._cache(held, held.owner, valid.end)

    def _cache(self, held: Held, request: VLLMRequest, valid_end: int) -> None:
        """Make a lease's KV available in the prefix cache; ``request`` has its blocks.

        In a model with states, KV is useless without the state at the lease's end, and before all of the lease has
        arrived a state's block may belong to another position.
        """
        if self._tables.states:
            if valid_end < held.end:
                return
            self._tables.forget_older_states(request.request_id, held.end)
        self._manager.cache_blocks(request, valid_end)

    def release(self, lease: str, valid_end: int) -> int:
        """Free the blocks of an ended lease; received KV stays in the prefix cache. Return its valid end.

        Raises :class:`UnknownSequence` for an unknown lease.
        """
        held = self._held.pop(lease, None)
        if held is None:
            raise UnknownSequence(f"lease {lease} is not held here: released, expired or already used")
        valid_end = held.valid_end(valid_end)
        self._give_back(held, valid_end)
        return valid_end

    def adopt(self, lease: str, valid_end: int, request: VLLMRequest) -> None:
        """Hand the blocks of an ended lease over to the request that decodes with them.

        Leaves the request as vLLM leaves one whose asynchronous load has finished: blocks attached,
        ``num_computed_tokens`` set, queued among requests that hold KV. A lease that has ended otherwise in the
        meantime is not an error: the request then computes everything itself.
        """
        held = self._held.pop(lease, None)
        if held is None:
            return
        valid_end = held.valid_end(valid_end)
        # The last token is computed here even if its KV has arrived: sampling needs its logits.
        computed = min(valid_end, request.num_tokens - 1)
        if not self._can_continue(held, request, computed):
            self._give_back(held, valid_end)
            return
        self._tables.hand_over(held.owner.request_id, request.request_id)
        if self._scheduler.needs_kv_cache_zeroing:  # blocks behind what has arrived have old bytes
            size = self._block_size
            self._manager.record_blocks_for_zeroing(request.request_id, -(-valid_end // size) * size)
        request.num_computed_tokens = computed
        self._cache(held, request, computed)
        if request.prefill_stats is not None:
            total = request.num_prompt_tokens
            cached = min(held.matched_len, computed, total)
            request.prefill_stats.set(total, cached, min(computed, total) - cached)
        # Behind a request that needs blocks, a request that holds blocks would wait for ever: the first waits for
        # blocks that only the second can free.
        self._scheduler.waiting.remove_request(request)
        self._scheduler.kv_holding_waiting.add_request(request)

    def _can_continue(self, held: Held, request: VLLMRequest, computed: int) -> bool:
        """True if ``request`` may continue at position ``computed`` in the reserved blocks.

        It cannot write into a block that the prefix cache shares; that happens when all tokens are present and only the
        last one is computed again. Without the reservation, vLLM finds the same blocks in its cache and recomputes the
        last one. If layers have windows, it cannot continue from a part of the reserved tokens either: blocks were
        reserved for the last token. A state belongs to the lease's end, not to an earlier position.
        """
        if self._tables.states and computed != held.end:
            return False
        if self._siblings and computed <= held.matched_len:  # vLLM asks siblings only for requests without blocks
            return False
        if request.skip_reading_prefix_cache:  # it needs every position computed here, as for prompt_logprobs
            return False
        if computed == 0 or list(request.all_token_ids)[:computed] != held.prompt.tokens[:computed]:
            return False
        if not same_adapter(held.owner, request) or not same_features(held.owner, request, computed):
            return False
        return self._tables.continues(held.owner.request_id, computed)

    def _give_back(self, held: Held, valid_end: int) -> None:
        self._cache(held, held.owner, valid_end)
        self._manager.free(held.owner)


def same_adapter(one: VLLMRequest, other: VLLMRequest) -> bool:
    """True if the same weights compute both requests: vLLM's comparison uses only the name."""
    loras = (one.lora_request, other.lora_request)
    mine, theirs = (lora and (lora.lora_int_id, lora.lora_name, lora.lora_path) for lora in loras)
    return mine == theirs


def same_features(one: VLLMRequest, other: VLLMRequest, end: int) -> bool:
    """True if both requests have the same images and the like among the first ``end`` tokens."""
    (mine, theirs) = (
        [
            (feature.identifier, feature.mm_position.offset, feature.mm_position.length)
            for feature in request.mm_features
            if feature.mm_position.offset < end
        ]
        for request in (one, other)
    )
    return mine == theirs


@dataclass
class Waiting:
    """A waiting reservation for all tokens of a prompt, and why it waits."""

    lease: str
    owner: VLLMRequest
    prompt: KeyedPrompt
    why: NoSpace | None = None
    answer: Future[ReservedBlocks] = field(default_factory=Future)


class ReservationQueue:
    """Reservations without blocks. They and vLLM's waiting requests get blocks in the order of their arrival.

    A reservation cannot be preempted. If it took free blocks at once, an earlier request could wait for ever; if it got
    only blocks that others leave, it would wait for ever on a busy engine. So it waits here until it fits in addition
    to the needs of earlier requests, and of requests that already hold blocks; later requests are held back while they
    would take its blocks. One that waits too long fails, and its caller tries another engine. With vLLM's priority
    scheduling a reservation counts as a request of priority 0.
    """

    def __init__(self, scheduler: Scheduler, reservations: Reservations) -> None:
        self._scheduler = scheduler
        self._reservations = reservations
        self._waiting: OrderedDict[str, Waiting] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def reserve(self, lease: str, owner: VLLMRequest, prompt: KeyedPrompt) -> Future[ReservedBlocks]:
        """Reserve as :meth:`Reservations.reserve` does, once there is room; :meth:`give_up` ends the wait.

        Raises :class:`~tercet.protocol.NoSpace` for a reservation that can never fit, and
        :class:`~tercet.protocol.Conflict` for a lease that exists.
        """
        self._reservations.check(lease, len(prompt.tokens))
        waiting = self._waiting[lease] = Waiting(lease, owner, prompt)
        self.admit()
        return waiting.answer

    def extend(self, lease: str, owner: VLLMRequest, prompt: KeyedPrompt) -> ReservedBlocks:
        """Extend a lease as :meth:`Reservations.extend` does, with the blocks that all waiting requests leave."""
        if self._waiting:
            raise NoSpace("reservations that came before it wait for blocks")
        return self._reservations.extend(lease, owner, prompt, self._needed())

    def admit(self) -> None:
        """Give blocks to waiting reservations in order; call this when some may have become free."""
        while self._waiting:
            first = next(iter(self._waiting.values()))
            try:
                needed = self._needed(first.owner)
                found = self._reservations.reserve(first.lease, first.owner, first.prompt, needed)
            except NoSpace as error:
                first.why = error
                return
            del self._waiting[first.lease]
            first.answer.set_result(found)

    def give_up(self, lease: str) -> bool:
        """End a wait, with :class:`~tercet.protocol.NoSpace`; return whether the lease was waiting."""
        waiting = self._waiting.pop(lease, None)
        if waiting is None:
            return False
        waiting.answer.set_exception(waiting.why or NoSpace("reservations that came before it wait for blocks"))
        self.admit()
        return True

    def wanted(self) -> int:
        """Return the number of blocks for which reservations wait."""
        return sum(self._reservations.blocks_for(len(each.prompt.tokens)) for each in self._waiting.values())

    def holds_back(self, request: VLLMRequest) -> bool:
        """True if ``request``, which has no blocks, must wait so that an earlier reservation gets its blocks."""
        first = next(iter(self._waiting.values()), None)
        if first is None or not self._is_before(first.owner, request):
            return False
        end = len(first.prompt.tokens)
        if not self._reservations.within_share(end):
            return False  # the reservation waits for another lease to end, so it takes nothing from requests
        free = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return free < self._blocks_of(request) + self._reservations.blocks_for(end)

    def _needed(self, before: VLLMRequest | None = None) -> int:
        """Return the number of blocks that waiting requests need, of those in the queue only the ones ``before`` one.

        Requests that already hold blocks come first, as in vLLM: while they wait for more, their blocks are useless.
        """
        queued = [each for each in self._scheduler.waiting if before is None or self._is_before(each, before)]
        return sum(self._blocks_of(each) for each in (*self._scheduler.kv_holding_waiting, *queued))

    def _blocks_of(self, request: VLLMRequest) -> int:
        return max(self._scheduler._request_remaining_blocks(request), 0)

    def _is_before(self, one: VLLMRequest, other: VLLMRequest) -> bool:
        if self._scheduler.policy.value == "priority" and one.priority != other.priority:
            return one.priority < other.priority
        return one.arrival_time < other.arrival_time


def give_way(scheduler: Scheduler, planned: SchedulerOutput) -> int:
    """Take blocks from waiting requests if the ``planned`` step computes nothing; return the number of requests.

    A lease may cover only a part of a prompt, so a request that adopted it may need more blocks. If several such
    requests hold all blocks, and no other request runs that would free more, each would wait for the others for ever.
    Then the last of them lose their blocks, as a preempted request does, until the first one's need is met; their KV
    stays in the prefix cache until the blocks are needed.
    """
    if planned.total_num_scheduled_tokens or scheduler.running or len(scheduler.kv_holding_waiting) < 2:
        return 0
    first, *others = scheduler.kv_holding_waiting
    others = [request for request in others if request.status == RequestStatus.WAITING]
    pool, tables = scheduler.kv_cache_manager.block_pool, GroupTables(scheduler.kv_cache_manager)
    missing = scheduler._request_remaining_blocks(first) - pool.get_num_free_blocks()
    held = [tables.held(request.request_id) for request in others]
    if not 0 < missing <= sum(held):
        return 0
    given = 0
    while missing > 0:
        take_blocks(scheduler, others.pop())
        missing -= held.pop()
        given += 1
    return given


def take_blocks(scheduler: Scheduler, request: VLLMRequest) -> None:
    """Take the blocks of a waiting request, which is then equal to a preempted one."""
    scheduler.kv_holding_waiting.remove_request(request)
    scheduler._free_request_blocks(request)
    request.num_computed_tokens = 0
    scheduler.waiting.prepend_request(request)
