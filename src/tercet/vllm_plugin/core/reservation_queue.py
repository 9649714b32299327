"""The order in which reservations and vLLM's waiting requests get blocks: the order of their arrival.

A reservation cannot be preempted. If it took free blocks at once, an earlier request could wait for ever; if it got
only blocks that others leave, it would wait for ever on a busy engine. A reservation therefore waits here, in order of
arrival, until it fits in addition to the needs of earlier requests in vLLM's queue and of requests that already hold
blocks; later requests are held back while they would take its blocks. A reservation that waits too long fails, and its
caller tries another engine.

With vLLM's priority scheduling a reservation counts as a request of priority 0.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tercet.engine.interface import KeyedPrompt, ReservedBlocks
from tercet.protocol import NoSpace
from tercet.vllm_plugin.core.reservations import Reservations

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request as VLLMRequest


@dataclass
class Waiting:
    """A waiting reservation for all tokens of a prompt, and why it waits."""

    lease: str
    owner: VLLMRequest
    prompt: KeyedPrompt
    why: NoSpace | None = None
    answer: Future[ReservedBlocks] = field(default_factory=Future)

    @property
    def end(self) -> int:
        """Number of tokens to reserve blocks for."""
        return len(self.prompt.tokens)


class ReservationQueue:
    """Reservations without blocks. All methods run on the scheduler's thread."""

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
                before = self._needed_before(first)
                found = self._reservations.reserve(first.lease, first.owner, first.prompt, before)
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

    def holds_back(self, request: VLLMRequest) -> bool:
        """True if ``request``, which has no blocks, must wait so that an earlier reservation gets its blocks."""
        first = next(iter(self._waiting.values()), None)
        if first is None or not self._is_before(first.owner, request):
            return False
        if not self._reservations.within_share(first.end):
            return False  # the reservation waits for another lease to end, so it takes nothing from requests
        free = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return free < self._blocks_of(request) + self._reservations.blocks_for(first.end)

    def _needed_before(self, waiting: Waiting) -> int:
        # Requests that already hold blocks come first, as in vLLM: while they wait for more, their blocks are useless.
        before = [each for each in self._scheduler.waiting if self._is_before(each, waiting.owner)]
        return sum(self._blocks_of(each) for each in (*self._scheduler.kv_holding_waiting, *before))

    def _needed(self) -> int:
        requests = (*self._scheduler.kv_holding_waiting, *self._scheduler.waiting)
        return sum(self._blocks_of(each) for each in requests)

    def _blocks_of(self, request: VLLMRequest) -> int:
        return max(self._scheduler._request_remaining_blocks(request), 0)

    def _is_before(self, one: VLLMRequest, other: VLLMRequest) -> bool:
        return self._place(one) < self._place(other)

    def _place(self, request: VLLMRequest) -> tuple[int, float]:
        by_priority = self._scheduler.policy.value == "priority"
        return (request.priority if by_priority else 0), request.arrival_time
