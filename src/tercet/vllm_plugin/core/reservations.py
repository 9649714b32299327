"""Blocks reserved for KV that other engines push: lease them, fill them, and hand them over or free them.

This code runs on the scheduler's thread, so it does not race with scheduling; it never calls an agent, so it does not
wait. The verbs, in the API server's process, open a reservation's blocks for writing, and end a lease here only when
every agent has confirmed that it does not write them any more. Until then the blocks have no other owner. To the KV
cache manager a reservation is a request that waits for an external load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tercet.engine.interface import KeyedPrompt, ReservedBlocks
from tercet.protocol import BadRequest, Conflict, Content, EngineError, NoSpace, UnknownSequence
from tercet.vllm_plugin.core.cache_groups import GroupTables
from tercet.vllm_plugin.differences import ZEROED_BY_BLOCK
from tercet.vllm_plugin.worker.drafters import tokens_of_a_step

if TYPE_CHECKING:
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

    @property
    def end(self) -> int:
        """Absolute end of the reserved range."""
        return len(self.prompt.tokens)

    def valid_end(self, reported: int) -> int:
        """Return the valid end, from the one that agents have ``reported``; cached KV is valid in any case."""
        return max(self.matched_len, min(reported, self.end))


class Reservations:
    """All leases of this engine, which together pin at most ``max_blocks``: leases cannot be preempted."""

    def __init__(self, scheduler: Scheduler, max_blocks: int) -> None:
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._step_tokens = tokens_of_a_step(scheduler)
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
        needed = self.blocks_for(end)
        if needed > self._max_blocks:
            raise NoSpace(f"{needed} blocks exceed max_lease_share ({self._max_blocks} blocks)")

    def blocks_for(self, end: int) -> int:
        """Return the number of blocks of a lease for ``end`` tokens."""
        return self._tables.needed(end)

    def within_share(self, end: int) -> bool:
        """True if one more lease for ``end`` tokens is within the limit of all leases."""
        return self._pinned() + self.blocks_for(end) <= self._max_blocks

    def _pinned(self) -> int:
        return sum(held.num_blocks for held in self._held.values())

    def reserve(
        self, lease: str, owner: VLLMRequest, prompt: KeyedPrompt, needed_before: int
    ) -> ReservedBlocks:  # fmt: skip
        """Reserve blocks for a prompt, if ``needed_before`` free blocks remain.

        ``owner`` is a vLLM request of the prompt's tokens plus :data:`FILLER_TOKEN`, and :meth:`check` has passed.
        Raises :class:`NoSpace`; then no blocks stay allocated.
        """
        try:
            matched = self._allocate(owner, len(prompt.tokens), needed_before)
        except NoSpace:
            self._manager.free(owner)  # with windows or states, vLLM has registered the owner, without blocks
            raise
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

    def _allocate(self, owner: VLLMRequest, end: int, needed_before: int) -> int:
        # Relies on the scheduler's path for an asynchronous external load, with the same conditions.
        scheduler, manager = self._scheduler, self._manager
        if self._tables.states:
            return self._allocate_with_states(owner, end, needed_before)
        computed, matched, _ = manager.get_computed_blocks(owner)
        # A model whose blocks are zeroed has no windows, and all tokens from elsewhere count as loaded.
        loaded = end if scheduler.needs_kv_cache_zeroing else max(matched, self._tables.resumed_at(end))
        self._take_slots(
            owner,
            end - loaded,
            self.blocks_for(end),
            needed_before,
            num_new_computed_tokens=matched,
            new_computed_blocks=computed,
            num_external_computed_tokens=loaded - matched,
            **({} if ZEROED_BY_BLOCK.is_here else {"skip_zeroing_group_ids": (0,)}),
        )
        if ZEROED_BY_BLOCK.is_here and scheduler.needs_kv_cache_zeroing:
            written = manager.get_zeroing_block_ids_in_range(owner.request_id, matched, end)  # type: ignore[attr-defined]
            scheduler._skip_zero_block_ids.update(written)  # type: ignore[attr-defined]
        return matched

    def _allocate_with_states(self, owner: VLLMRequest, end: int, needed_before: int) -> int:
        # vLLM defers a request that finds a state of the step being planned. A lease is used in a later step.
        self._manager.new_step_starts()
        computed, matched, _ = self._manager.get_computed_blocks(owner)
        loaded = max(matched, self._tables.resumed_at(end))
        with self._tables.written_by_peers():
            self._take_slots(
                owner,
                end - loaded,
                self.blocks_for(end),
                # vLLM counts neither the state that arrives, nor the one that decoding begins with.
                needed_before + 2 * len(self._tables.states),
                num_new_computed_tokens=matched,
                new_computed_blocks=computed,
                num_external_computed_tokens=loaded - matched,
            )
            self._take_first_state_to_decode_into(owner, end)
        return matched

    def _take_first_state_to_decode_into(self, owner: VLLMRequest, end: int) -> None:
        # vLLM allocates no block for it before the step that needs it, and a request that holds blocks must not wait
        # for another.
        if self._tables.missing(owner.request_id, end):
            self._manager.allocate_slots(owner, end + 1, delay_cache_blocks=True)

    def _take_slots(self, owner: VLLMRequest, num_tokens: int, more: int, needed_before: int, **how: Any) -> None:
        """Make vLLM allocate ``more`` blocks; this engine computes ``num_tokens`` itself. Raises :class:`NoSpace`."""
        scheduler, pinned, most = self._scheduler, self._pinned(), self._max_blocks
        if pinned + more > most:
            raise NoSpace(f"{more} blocks on top of {pinned} under lease exceed max_lease_share ({most} blocks)")
        promised = scheduler._inflight_prefill_reserved_blocks()
        allocated = self._manager.allocate_slots(
            owner,
            num_tokens,
            num_lookahead_tokens=self._step_tokens,
            delay_cache_blocks=True,
            reserved_blocks=promised + needed_before,
            has_scheduled_reqs=bool(scheduler.running),
            **how,
        )
        if allocated is None:
            free = self._manager.block_pool.get_num_free_blocks()
            raise NoSpace(f"{more} blocks are needed and {free} are free, some of them promised to earlier requests")

    def extend(
        self, lease: str, owner: VLLMRequest, prompt: KeyedPrompt, needed_before: int
    ) -> ReservedBlocks:  # fmt: skip
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
            self._allocate_more(owner, end, more, needed_before)
        held.owner, held.prompt = owner, prompt
        return self._reserved(held)

    def _allocate_more(self, owner: VLLMRequest, end: int, more: int, needed_before: int) -> None:
        # Allocate as for a running request without computed tokens: otherwise vLLM would free blocks that leave a
        # window, while peers may write there.
        if self._tables.states:
            with self._tables.written_by_peers():
                self._take_slots(owner, end, more, needed_before + len(self._tables.states))
                self._take_first_state_to_decode_into(owner, end)
        elif self._scheduler.needs_kv_cache_zeroing:
            raise NoSpace("blocks of this model are zeroed before use, so leases cannot be extended: reserve again")
        else:
            self._take_slots(owner, end, more, needed_before)

    def commit(self, lease: str, valid: Content) -> None:
        """Make the KV received so far available in the prefix cache; the lease stays open.

        Raises :class:`EngineError` if the KV does not belong to the lease's tokens: it would be found under wrong
        hashes.
        """
        held = self._held.get(lease)
        if held is None:
            return
        if held.prompt.content(valid.end) != valid:
            raise EngineError(f"lease {lease}: the agents report KV of other tokens than those of the lease")
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
        held = self._take(lease)
        valid_end = held.valid_end(valid_end)
        self._give_back(held, valid_end)
        return valid_end

    def adopt(self, lease: str, valid_end: int, request: VLLMRequest) -> None:
        """Hand the blocks of an ended lease over to the request that decodes with them.

        Leaves the request as vLLM leaves one whose asynchronous load has finished: blocks attached,
        ``num_computed_tokens`` set, queued among requests that hold KV. A lease that has ended otherwise in the
        meantime is not an error: the request then computes everything itself.
        """
        if lease not in self._held:
            return
        held = self._take(lease)
        valid_end = held.valid_end(valid_end)
        computed = min(valid_end, request.num_tokens - 1)
        if not self._can_continue(held, request, computed):
            self._give_back(held, valid_end)
            return
        self._tables.hand_over(held.owner.request_id, request.request_id)
        self._zero_unwritten(request, valid_end)
        request.num_computed_tokens = computed
        self._cache(held, request, computed)
        self._count_prefill(request, held.matched_len, computed)
        # Behind a request that needs blocks, a request that holds blocks would wait for ever.
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

    def _take(self, lease: str) -> Held:
        try:
            return self._held.pop(lease)
        except KeyError:
            raise UnknownSequence(f"lease {lease} is not held here: released, expired or already used") from None

    def _zero_unwritten(self, request: VLLMRequest, valid_end: int) -> None:
        if self._scheduler.needs_kv_cache_zeroing:
            size = self._block_size
            self._manager.record_blocks_for_zeroing(request.request_id, -(-valid_end // size) * size)

    def _count_prefill(self, request: VLLMRequest, matched: int, computed: int) -> None:
        if request.prefill_stats is not None:
            cached = min(matched, computed)
            total = request.num_prompt_tokens
            request.prefill_stats.set(total, min(cached, total), min(computed, total) - min(cached, total))


def same_adapter(one: VLLMRequest, other: VLLMRequest) -> bool:
    """True if the same weights compute both requests: vLLM's comparison uses only the name."""
    (mine, theirs) = (request.lora_request for request in (one, other))
    if mine is None or theirs is None:
        return mine is theirs
    return (mine.lora_int_id, mine.lora_name, mine.lora_path) == (
        theirs.lora_int_id, theirs.lora_name, theirs.lora_path,
    )  # fmt: skip


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
