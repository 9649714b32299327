"""Waits of leases for other connectors: no block is opened for a peer while a sibling reads or writes it.

A sibling may read blocks that the block pool has taken back. vLLM's OffloadingConnector does: it stores KV of finished
requests a step later, in the background, and waits only before a *scheduled* request gets these blocks. A lease is not
scheduled, and its peer writes at once, so the tier would keep the peer's KV under the hash of the former::

    step       X ends        X's store is planned
    pool       X's blocks free ──▶ lease ......................... answer ──▶ peer writes
    sibling                  '──────── reads X's blocks ─────────'
                                                 this is the wait

So the blocks belong to the lease at once, and its answer waits. Which blocks are busy is a sibling's to say:

- It holds them: it pins what it reads (``touch``), delays the release (``request_finished``), or is done when its step
  is done. The pool does not give such blocks away.
- It lists its jobs, as OffloadingConnector does: the blocks of those in flight are busy.
- Neither: work in flight (``has_pending_push_work``) counts as all blocks, and all steps must be over, up to the one
  that is planned when the requests that had the blocks have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from tercet.engine.interface import ReservedBlocks
from tercet.protocol import NoSpace

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler

    from tercet.vllm_plugin.core.reservations import Reservations
    from tercet.vllm_plugin.core.scheduler_side import SendPlanner

HOLD_THEIR_BLOCKS = frozenset({
    "ExampleConnector", "SimpleCPUOffloadConnector", "MooncakeStoreConnector", "NixlConnector", "NixlPushConnector",
    "NixlPullConnector", "MooncakeConnector",
})  # fmt: skip
"""Connectors of vLLM whose code holds, in each supported version, the blocks that it uses."""
MOST_BLOCKS = 1 << 18
"""Blocks that are remembered, the latest ones; one that is forgotten costs a send."""


class TierBlocks:
    """The blocks that siblings have stored and not removed, by hash, with the media that have each.

    A look-up in the siblings would create state there for a request that never comes. Without KV events, or with a
    sibling that publishes none, nothing is known here.
    """

    def __init__(self) -> None:
        self._media: dict[Any, set[str | None]] = {}

    def note(self, events: Iterable[KVCacheEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                for block in event.block_hashes:
                    media = self._media.pop(block, set())
                    self._media[block] = media | {event.medium}
            elif isinstance(event, BlockRemoved):
                for block in event.block_hashes:
                    left = self._media.get(block, set()) - {event.medium}
                    if left:
                        self._media[block] = left
                    else:
                        self._media.pop(block, None)
            elif isinstance(event, AllBlocksCleared):
                self._media.clear()
        while len(self._media) > MOST_BLOCKS:
            del self._media[next(iter(self._media))]

    def prefix(self, hashes: Sequence[BlockHash], first: int) -> int:
        """Return the number of blocks of a prompt that are here if its ``first`` ones are cached on the device."""
        until = first
        while until < len(hashes) and maybe_convert_block_hash(hashes[until]) in self._media:
            until += 1
        return until


@dataclass
class WaitingLease:
    """A reservation that has its blocks and waits for siblings."""

    found: ReservedBlocks
    answer: Future[ReservedBlocks]
    written: set[int]  # by peers
    matched: set[int]  # in the prefix cache
    planned: int  # the number of steps that siblings must have planned, and those that say nothing, ended
    is_new: bool  # not an extension of a lease that peers write
    why: str = ""


class SiblingWaits:
    """Answers reservations when no sibling uses their blocks; runs on the scheduler's thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        reservations: Reservations,
        siblings: Sequence[KVConnectorBase_V1],
        sends: SendPlanner,
    ) -> None:
        self._scheduler = scheduler
        self._reservations = reservations
        self._sends = sends
        self.tiers = TierBlocks()
        # Those that list their jobs; those in HOLD_THEIR_BLOCKS hold their blocks; the others are silent.
        self._exact = list[tuple[str, Callable[[], Iterable[int]]]]()
        for each in siblings:
            half: Any = getattr(each, "connector_scheduler", None)
            kinds = {kind.__qualname__ for kind in type(each).__mro__ if kind.__module__.startswith("vllm.")}
            if "OffloadingConnector" in kinds and half is not None:
                self._exact.append((type(each).__name__, partial(_in_jobs, half)))
        listed = {name for name, _ in self._exact}
        self._silent = [each for each in siblings if type(each).__name__ not in HOLD_THEIR_BLOCKS | listed]
        self._waiting: dict[str, WaitingLease] = {}
        self._planned = self._ended = self._all_busy_until = 0
        # vLLM makes another set with each step: these are the ended requests that siblings have seen last.
        self._seen: set[str] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def pass_on(self, lease: str, reserved: Future[ReservedBlocks], *, is_new: bool) -> Future[ReservedBlocks]:
        """Return a future of ``reserved`` that is done once no sibling uses the lease's blocks.

        If that takes too long (:meth:`give_up`), it fails, and a new lease ends.
        """
        answer: Future[ReservedBlocks] = Future()

        def wait(done: Future[ReservedBlocks]) -> None:
            if (error := done.exception()) is not None:
                answer.set_exception(error)
                return
            # A silent sibling may still read blocks of requests that have ended since it planned its last step: it
            # learns of them with the next one.
            ended = self._scheduler.finished_req_ids
            planned = self._planned + (bool(ended) and ended is not self._seen)
            written, matched = self._reservations.unopened(lease)
            self._waiting[lease] = WaitingLease(done.result(), answer, written, matched, planned, is_new)
            self._answer(lease)

        reserved.add_done_callback(wait)
        return answer

    def planned(self, output: SchedulerOutput) -> None:
        """Record that siblings have planned a step, of which they know which requests have ended."""
        self._planned += 1
        self._seen = output.finished_req_ids

    def stepped(self) -> None:
        """Record that the first of the planned steps has ended; answer those for which it was the last."""
        self._ended = min(self._ended + 1, self._planned)
        for lease in list(self._waiting):
            self._answer(lease)

    def siblings_reset(self) -> None:
        """Count all blocks as busy until the next step has ended: siblings forget their jobs, and end them there."""
        self._all_busy_until = self._planned + 1

    def loads_failed(self, blocks: set[int]) -> None:
        """End the waits of reservations that count KV in these blocks as cached."""
        for lease, waiting in list(self._waiting.items()):
            if not waiting.matched.isdisjoint(blocks):
                waiting.why = "it could not load what is counted as cached"
                self.give_up(lease)

    def give_up(self, lease: str) -> bool:
        """End a wait, with :class:`~tercet.protocol.NoSpace`; return whether the lease was waiting."""
        waiting = self._waiting.pop(lease, None)
        if waiting is None:
            return False
        # An extension that fails leaves the lease as it was, with blocks that its peers write.
        if waiting.is_new:
            self._reservations.release(lease, 0)
        waiting.answer.set_exception(
            NoSpace(f"its blocks are still in use by another KV connector of this engine: {waiting.why}")
        )
        return True

    def _answer(self, lease: str) -> None:
        waiting = self._waiting[lease]
        waiting.why = self._in_use(waiting)
        if not waiting.why:
            del self._waiting[lease]
            self._reservations.open(lease)
            self._sends.rewritten(waiting.written)
            hashes, matched = self._reservations.hashes_of(lease)
            found, until = waiting.found, self.tiers.prefix(hashes, matched)
            tier_len = until * found.block_size if until > matched else 0
            waiting.answer.set_result(msgspec.structs.replace(found, tier_len=tier_len))

    def _in_use(self, waiting: WaitingLease) -> str:
        """Return who uses a reservation's blocks; empty if none does."""
        if self._planned < waiting.planned:
            return "one that will read blocks of requests that have just ended"
        if self._ended < self._all_busy_until:
            return "one whose cache was reset"
        if not waiting.matched.isdisjoint(self._sends.loading()):
            return "one that is loading them"
        for name, busy in self._exact:
            if not waiting.written.isdisjoint(busy()):
                return name
        for sibling in self._silent:
            if self._ended < waiting.planned or sibling.has_pending_push_work():
                return f"{type(sibling).__name__}, which does not say which blocks it uses"
        return ""


def _in_jobs(half: Any) -> Iterable[int]:
    """Yield the blocks that OffloadingConnector reads or will read, although the pool may have them back."""
    for job in half._jobs.values():
        yield from job.fenced_block_ids or ()
        yield from job.deferred_fence_block_ids or ()
    # Blocks may leave a window before enough of them are full for a job.
    for group in half._sliding_window_groups:
        for status in half._req_status.values():
            state = status.group_states[group]
            yield from state.block_ids[state.next_stored_chunk_idx * half.config.blocks_per_chunk :]
