"""Background requests in vLLM's scheduler: they are left out of steps, and lose their blocks first.

While there are any, the scheduler's ``schedule`` is wrapped; without one, it is vLLM's own. vLLM passes over a running
request whose ``next_decode_eligible_step`` has not come, as in its diffusion scheduler, and the request keeps its
blocks. How many tokens a step may have is decided by :class:`~tercet.decisions.background.StepShare`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from tercet.decisions.background import StepShare
from tercet.vllm_plugin.core.reservations import take_blocks

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request as VLLMRequest

# Statuses in which a waiting request needs a step as soon as there is room.
READY = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class Planned(NamedTuple):
    """A planned step: its time, whether it has prompts of others, how many others generate, the background's tokens."""

    at: float
    has_prompts: bool
    decodes: int
    tokens: int


class BackgroundRequests:
    """The background requests of one scheduler; ``reserving`` returns the blocks for which reservations wait."""

    def __init__(self, scheduler: Scheduler, reserving: Callable[[], int]) -> None:
        self._scheduler, self._reserving = scheduler, reserving
        self._requests: dict[str, VLLMRequest] = {}
        self._of_vllm = scheduler.schedule
        most = scheduler.max_num_scheduled_tokens
        # Whole blocks where the cache keeps states for these only, whole prompts where vLLM does not divide them.
        least = scheduler.block_size if scheduler.need_mamba_block_aligned_split else 1
        self._share = StepShare(most, least if scheduler.scheduler_config.enable_chunked_prefill else most)
        self._steps = deque[Planned]()
        self._unseen = 0  # steps in flight that were planned before there were background requests
        self._ended_at = 0.0
        self._in_last_step = set[str]()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: VLLMRequest, in_flight: int) -> None:
        """Run a new request in the background; ``in_flight`` is the number of planned steps that have not ended."""
        if not self._requests:
            self._share.resume(time.monotonic())
            self._steps.clear()
            self._unseen = in_flight
            self._of_vllm = self._scheduler.schedule

            def schedule(throttle_prefills: bool = False) -> SchedulerOutput:
                return self._schedule(throttle_prefills)

            self._scheduler.schedule = schedule  # type: ignore[method-assign]
        self._requests[request.request_id] = request

    def finished(self, request_id: str) -> None:
        if self._requests.pop(request_id, None) is not None and not self._requests:
            self._scheduler.schedule = self._of_vllm  # type: ignore[method-assign]

    # ---- each step ---------------------------------------------------------------------------------------------------

    def _schedule(self, throttle_prefills: bool) -> SchedulerOutput:
        scheduler, ours = self._scheduler, self._requests
        found = [*scheduler.kv_holding_waiting]
        if scheduler.pause_state == PauseState.UNPAUSED:
            found += scheduler.waiting
        # The others that need a step, and are not paused.
        waiting = [each for each in found if each.request_id not in ours and each.status in READY]
        if waiting:
            self._make_room(waiting)
        # The last ones are preempted first, and get what others leave of the step: those that generate before prompts.
        scheduler.running.sort(key=lambda each: each.request_id in ours and 1 + each.is_prefill_chunk)
        others = [each for each in scheduler.running if each.request_id not in ours]
        has_prompts = bool(waiting) or any(each.is_prefill_chunk for each in others)
        room = self._share.tokens(time.monotonic(), has_prompts, len(others))
        needed = sum(each.num_tokens_with_spec + each.num_output_placeholders - each.num_computed_tokens
                     for each in others)  # fmt: skip
        with self._limited(others, needed, room):
            output = self._of_vllm(throttle_prefills)
        if waiting and not output.total_num_scheduled_tokens and not room:
            self._preempt_last()  # whatever it is that the others wait for: in the end they have the engine
        return output

    @contextmanager
    def _limited(self, others: list[VLLMRequest], needed: int, room: int) -> Generator[None]:
        """Let the step that is planned in this block have ``room`` tokens of the background, after the others'."""
        scheduler, most = self._scheduler, self._scheduler.max_num_scheduled_tokens
        for each in self._not_now(others) if room else [each for each in scheduler.running if self._is_ours(each)]:
            # The step that is planned has the next number.
            each.next_decode_eligible_step = max(each.next_decode_eligible_step, scheduler.current_step + 2)
        held: list[VLLMRequest] = []
        if room:
            scheduler.max_num_scheduled_tokens = min(most, needed + room)
        else:
            held = [each for queue in (scheduler.kv_holding_waiting, scheduler.waiting) for each in queue
                    if self._is_ours(each)]  # fmt: skip
            scheduler.kv_holding_waiting.remove_requests(held)
            scheduler.waiting.remove_requests(held)
        try:
            yield
        finally:
            scheduler.max_num_scheduled_tokens = most
            for each in held:
                holds = scheduler._holds_kv_blocks(each)
                (scheduler.kv_holding_waiting if holds else scheduler.waiting).add_request(each)

    def _is_ours(self, request: VLLMRequest) -> bool:
        return request.request_id in self._requests

    def _not_now(self, others: list[VLLMRequest]) -> list[VLLMRequest]:
        """Return the running ones that must not be in the next step even if there is room.

        One that was passed over continues once its last token is known, since workers know only those of the step
        before. While some were passed over, others with more adapters than fit into one step may have begun.
        """
        lora = self._scheduler.lora_config
        adapters = {each.lora_request.lora_int_id for each in others if each.lora_request}
        found: list[VLLMRequest] = []
        for each in self._scheduler.running:
            if not self._is_ours(each):
                continue
            late = each.num_in_flight_tokens > 0 and each.request_id not in self._in_last_step
            adapter = each.lora_request.lora_int_id if each.lora_request else None
            fits = lora is None or adapter is None or adapter in adapters or len(adapters) < lora.max_loras
            if late or not fits:
                found.append(each)
            elif adapter is not None:
                adapters.add(adapter)
        return found

    # ---- blocks and places -------------------------------------------------------------------------------------------

    def _make_room(self, waiting: list[VLLMRequest]) -> None:
        """Preempt background requests until there are blocks and places for the ``waiting`` ones, or none is left."""
        scheduler = self._scheduler
        pool = scheduler.kv_cache_manager.block_pool
        needed = self._reserving() + sum(max(scheduler._request_remaining_blocks(each), 0) for each in waiting)
        most = getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs)
        while pool.get_num_free_blocks() < needed or len(scheduler.running) + len(waiting) > most:
            if not self._preempt_last():
                return

    def _preempt_last(self) -> bool:
        """Preempt the background request that began last; return False if none holds blocks that are free at once."""
        scheduler = self._scheduler
        for each in reversed(scheduler.running):
            if self._is_ours(each):
                if not scheduler._request_blocks_can_be_freed(each):
                    return False  # a step in flight writes into them: the next step finds them free
                scheduler.running.remove(each)
                scheduler._preempt_request(each, time.monotonic(), drop_stale_output=scheduler.requires_kv_delivery)
                return True
        for each in reversed([*scheduler.kv_holding_waiting]):
            if self._is_ours(each) and each.status == RequestStatus.WAITING:
                take_blocks(scheduler, each)
                return True
        return False

    # ---- what steps cost ---------------------------------------------------------------------------------------------

    def plan(self, output: SchedulerOutput) -> None:
        """Note a planned step, before vLLM counts its tokens as computed; :meth:`stepped` follows when it has ended."""
        requests, ours = self._scheduler.requests, self._requests
        begun = {new.req_id for new in output.scheduled_new_reqs} | set(output.scheduled_cached_reqs.resumed_req_ids)
        prompts = decodes = tokens = 0
        self._in_last_step = ours.keys() & output.num_scheduled_tokens.keys()
        for request_id, scheduled in output.num_scheduled_tokens.items():
            if request_id in ours:
                tokens += scheduled
            elif request_id in begun or requests[request_id].is_prefill_chunk:
                prompts += 1
            else:
                decodes += 1
        self._steps.append(Planned(time.monotonic(), prompts > 0, decodes, tokens))

    def stepped(self) -> None:
        now = time.monotonic()
        if self._unseen:
            self._unseen -= 1
        elif self._steps:
            step = self._steps.popleft()
            if step.has_prompts or step.decodes or step.tokens:
                # It ran since the step before it had ended, or since it was planned.
                seconds = now - max(step.at, self._ended_at)
                self._share.ended(seconds, step.has_prompts, step.decodes, step.tokens)
        self._ended_at = now
