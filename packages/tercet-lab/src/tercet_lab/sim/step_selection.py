"""The selection of tokens for a simulated engine's next step, and their effects on sequences and blocks.

Tokens and blocks are assigned as in vLLM's scheduler with the plugin: first to running sequences, in the order of
admission; then to waiting sequences with a lease's blocks; then to waiting sequences without blocks, in the order of
arrival. A prompt takes blocks chunk by chunk. It is admitted when all its blocks are available.
"""

from __future__ import annotations

from dataclasses import dataclass

from tercet.protocol import Usage
from tercet_lab.sim.adapter_slots import AdapterSlots
from tercet_lab.sim.block_pool import BlockPool
from tercet_lab.sim.engine_options import EngineOptions
from tercet_lab.sim.hosts import EngineTime
from tercet_lab.sim.reservation_queue import SimReservationQueue
from tercet_lab.sim.sequence_work import DecodingBatch, Work
from tercet_lab.sim.waiting_works import WaitingWorks

Chunk = tuple[Work, int]


@dataclass(slots=True)
class Counters:
    """The counters of an engine since its start; ``busy`` is the time during which a step ran, in seconds.

    The block pool counts evicted cached blocks; ``evicted`` here has only those of earlier starts.
    """

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preemptions: int = 0
    busy: float = 0.0
    evicted: int = 0

    def plus(self, later: Counters, evicted: int) -> Counters:
        """Return the sum of these and the ``later`` start's counters. ``evicted`` is that of the later start."""
        return Counters(
            self.steps + later.steps,
            self.prefill_tokens + later.prefill_tokens,
            self.decode_tokens + later.decode_tokens,
            self.preemptions + later.preemptions,
            self.busy + later.busy,
            self.evicted + evicted,
        )


class StepSelection:
    """The sequences of one engine, and the selection of each step's tokens."""

    # Slots, as in all classes with one object per engine: with a thousand engines, a step touches less memory.
    __slots__ = (
        "_admitted", "_block_size", "_decoding", "_options", "_prefilling", "_time", "_waiting", "counters", "pool",
        "reservations", "slots",
    )  # fmt: skip

    def __init__(self, pool: BlockPool, block_size: int, options: EngineOptions, time: EngineTime) -> None:
        self.pool = pool
        self.counters = Counters()
        self.slots = AdapterSlots(options.max_loras if options.adapters else 0, options.lora_load)
        self.reservations: SimReservationQueue | None = None
        self._time = time
        self._block_size = block_size
        self._options = options
        self._waiting = WaitingWorks()
        self._prefilling: list[Work] = []
        self._decoding = DecodingBatch(block_size)
        self._admitted = 0

    @property
    def running(self) -> int:
        """Number of sequences that were admitted and have not ended."""
        return len(self._prefilling) + self._decoding.size

    @property
    def waiting(self) -> int:
        """Number of sequences that wait for admission."""
        return len(self._waiting)

    def arrival(self) -> int:
        """See :meth:`tercet_lab.sim.reservation_queue.Needs.arrival`."""
        return self._waiting.arrival()

    def needed_before(self, arrival: int | None) -> int:
        """See :meth:`tercet_lab.sim.reservation_queue.Needs.needed_before`."""
        needed = sum(self._missing(work) for work in self._prefilling)
        needed += sum(self._missing(work) for work in self._waiting.holding)
        if self._waiting.plain:
            before = (work for work in self._waiting.plain if arrival is None or work.arrival < arrival)
            needed += sum(self._missing(work) for work in before)
        return needed

    def _missing(self, work: Work) -> int:
        """Return the number of blocks that a sequence still needs for its known tokens."""
        return max(0, -(-work.known // self._block_size) - work.holding.blocks)

    def pin_cached(self, work: Work) -> bool:
        """Pin the blocks of a sequence and return True if it is fully cached. Call this between steps."""
        match = self.pool.match(work.prompt, work.known // self._block_size)
        if match.blocks * self._block_size < work.known:
            return False
        self.pool.pin(work.holding, match)
        work.computed = work.known
        work.state = "sending"
        return True

    # ---- scheduling ------------------------------------------------------------------------------------------

    def _select(self) -> tuple[list[Chunk], bool]:
        """Return the prompt chunks of the next step, and True if each decoding sequence has a token in it."""
        while True:
            preemptions = self.counters.preemptions
            chunks, decodes = self._select_once()
            if chunks or decodes or not self._waiting:
                return chunks, decodes
            # A step that preempts admits no sequence. If it is empty for that reason, it takes no time: select again.
            if self.counters.preemptions == preemptions and not self._give_way():
                return chunks, decodes

    def _select_once(self) -> tuple[list[Chunk], bool]:
        mixed, waiting, chunks = self._options.schedule == "chunked", self._waiting, list[Chunk]()
        admits = not (mixed and self._make_room())
        if self._prefilling or waiting.plain or waiting.holding:
            chunks = self._schedule(mixed, admits)
        if chunks and not mixed:
            return chunks, False
        if not mixed:
            self._make_room()
        return chunks, self._decoding.size > 0

    def _schedule(self, mixed: bool, admits: bool) -> list[Chunk]:
        """Return the prompt chunks of the next step: first of running prompts, then of new ones while they fit."""
        budget = self._options.max_num_batched_tokens - (self._decoding.size if mixed else 0)
        chunks: list[Chunk] = []
        for work in self._prefilling[:]:  # in the order of admission: only the last chunk is cut short
            count = min(work.todo, budget)
            if count > 0 and not self._take(work, count):
                self._preempt(work)
                return chunks
            if count > 0:
                chunks.append((work, count))
                budget -= count
        return self._admit_waiting(chunks, budget) if admits else chunks

    def _admit_waiting(self, chunks: list[Chunk], budget: int) -> list[Chunk]:
        passed_over: list[Work] = []
        waiting, prefilling, decoding = self._waiting, self._prefilling, self._decoding
        most = self._options.max_num_seqs
        while budget > 0 and (queue := waiting.holding or waiting.plain) and len(prefilling) + decoding.size < most:
            work = queue[0]
            if not self.slots.admits(work.prompt.adapter) or self._held_back(work):
                passed_over.append(queue.popleft())
                continue
            if not self._admit(work):
                break
            queue.popleft()
            self._admitted += 1
            work.admitted = self._admitted
            self.slots.join(id(work), work.prompt.adapter)
            count = self._begin(work, budget)
            if count:
                chunks.append((work, count))
            budget -= max(count, 1)
        for work in reversed(passed_over):
            self._waiting.queue_of(work).appendleft(work)
        return chunks

    def _held_back(self, work: Work) -> bool:
        """True if a sequence without blocks must wait, because an earlier reservation needs the free blocks."""
        reservations = self.reservations
        if reservations is None or not reservations.waits or work.holding.blocks:
            return False
        free = self.pool.free - self._decoding.blocks_for(1)
        return reservations.holds_back(work, self._missing(work), free)

    def _admit(self, work: Work) -> bool:
        """Pin a sequence's cached prefix and return True, or return False if too few blocks are free for the rest."""
        pool, holding, known = self.pool, work.holding, work.known
        margin = self._decoding.blocks_for(1)
        if holding.blocks == 0:
            # At least one token must be computed to produce the next one.
            match = pool.match(work.prompt, (known - 1) // self._block_size)
            if not pool.fits(match, self._missing(work) - match.blocks + margin):
                return False
            pool.pin(holding, match)
            work.computed = match.blocks * self._block_size
        elif self._missing(work) + margin > pool.free:
            return False
        if work.usage is None:
            work.usage = Usage(cached=work.computed, computed=known - work.computed)
        return True

    def _begin(self, work: Work, budget: int) -> int:
        """Start an admitted sequence. Return the number of its prompt tokens in this step."""
        if work.on_chunk is not None and work.computed:
            now = self._time.on_loop(self._time.time())
            work.on_chunk(0, work.computed, now, now)
        todo = work.todo
        if todo == 1 and work.on_computed is None:
            self._join(work)
            return 0
        work.state = "prefilling"
        self._prefilling.append(work)
        count = min(todo, budget)
        self._take(work, count)
        return count

    def _take(self, work: Work, count: int) -> bool:
        """Take the blocks for ``count`` more tokens of a prompt. Return False if they are not available."""
        more = -(-(work.computed + count) // self._block_size) - work.holding.blocks
        if more > 0:
            if more + self._decoding.blocks_for(1) > self.pool.free:
                return False
            self.pool.take(work.holding, more)
        return True

    def _make_room(self) -> bool:
        """Preempt until each decoding sequence has a block for its next token. Return True if one was preempted."""
        decoding, preemptions = self._decoding, self.counters.preemptions
        if decoding.size <= self.pool.free:  # a sequence takes at most one block in a step
            return False
        while decoding.blocks_for(1) > self.pool.free:
            self._preempt(self._prefilling[-1] if self._prefilling else decoding.newest())
        return self.counters.preemptions > preemptions

    def _preempt(self, work: Work) -> None:
        """Take away a sequence's blocks, and put it first in the waiting queue."""
        if work.state == "decoding":
            self._decoding.leave(work)
        else:
            self._prefilling.remove(work)
        self._lose_blocks(work)
        self.counters.preemptions += 1

    def _lose_blocks(self, work: Work) -> None:
        self._give_back(work)
        work.computed = 0
        work.state = "waiting"
        self._waiting.put_back(work)

    def _give_way(self) -> bool:
        """Free the blocks of the last waiting sequence that holds a lease's blocks, if the first one needs them.

        Call this if no sequence runs. Waiting holders could block each other otherwise, since a lease may cover only a
        part of a prompt. Return True if blocks were freed.
        """
        holding = self._waiting.holding
        if len(holding) < 2:
            return False
        missing = self._missing(holding[0]) - self.pool.free
        if not 0 < missing <= sum(work.holding.blocks for work in holding) - holding[0].holding.blocks:
            return False
        self._lose_blocks(holding.pop())
        return True

    # ---- progress --------------------------------------------------------------------------------------------

    def _computed(self, work: Work, count: int) -> None:
        if work.state == "left":
            return
        work.computed += count
        self.pool.publish(work.holding, work.prompt, work.computed // self._block_size)
        if work.todo == 0:
            self._prefilling.remove(work)
            self._finish_prefill(work)

    def _finish_prefill(self, work: Work) -> None:
        if work.on_computed is not None:
            work.state = "sending"
            work.on_computed()
            return
        work.produced += 1
        work.deliver()
        if work.produced >= work.goal:
            self._give_back(work)
        else:
            self._join(work)

    def _join(self, work: Work) -> None:
        spare = work.holding.blocks - -(-work.computed // self._block_size)
        if spare > 0:
            self.pool.drop_plain(work.holding, spare)
        self._decoding.join(work, self._ticks_to_wake(work))

    def _ticks_to_wake(self, work: Work) -> int:
        left, every = work.goal - work.produced, self._options.stream_every
        if work.delivered == 0 or work.each_token:
            return 1
        return min(left, every) if every else left

    def _due(self, work: Work) -> None:
        self._decoding.settle(work)
        work.deliver()
        if work.produced < work.goal:
            self._decoding.wake(work, self._ticks_to_wake(work))
            return
        self._decoding.leave(work)
        self._give_back(work)

    def _give_back(self, work: Work) -> None:
        self.pool.publish(work.holding, work.prompt, work.computed // self._block_size)
        self.pool.give_back(work.holding)
        self.slots.leave(id(work))
        work.state = "left"
