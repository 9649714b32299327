"""The selection of tokens for a simulated engine's next step, and their effects on sequences and blocks.

Tokens and blocks are assigned as in vLLM's scheduler with the plugin: first to running sequences, in the order of
admission; then to waiting sequences with a lease's blocks; then to waiting sequences without blocks, in the order of
arrival. A prompt takes blocks chunk by chunk. It is admitted when all its blocks are available. Background sequences
get what :class:`~tercet.decisions.background.StepShare` leaves them, and lose their blocks first.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from tercet.decisions.background import StepShare
from tercet.protocol import Output, OutputStream, Request, Usage
from tercet_lab.sim.adapter_slots import AdapterSlots
from tercet_lab.sim.block_pool import BlockPool, Holding, Prompt
from tercet_lab.sim.engine_options import EngineOptions
from tercet_lab.sim.step_times import EngineTime

if TYPE_CHECKING:
    from tercet_lab.sim.leases import SimLeases


class Work(msgspec.Struct, eq=False):
    """The work for one sequence: tokens to compute and tokens to produce.

    ``length`` prompt tokens and ``given`` output tokens exist when the sequence arrives; ``goal`` more tokens are
    requested. ``known`` tokens exist now; ``computed`` of them have KV on this engine. While the sequence decodes, both
    lag behind the ticks of :class:`DecodingBatch` until it settles them. Outputs go into ``stream`` unless it is None.
    ``arrived`` is a time of the event loop, in seconds; ``arrival`` and ``admitted`` are the numbers of its arrival and
    of its admission, in the order of all. A ``background`` sequence that decodes is "passed over" in some steps.
    """

    prompt: Prompt
    length: int
    given: int
    goal: int
    background: bool = False
    on_computed: Callable[[], None] | None = None
    on_chunk: Callable[[int, int, float, float], None] | None = None
    holding: Holding = msgspec.field(default_factory=Holding)
    stream: OutputStream | None = None
    computed: int = 0
    produced: int = 0
    delivered: int = 0
    usage: Usage | None = None
    each_token: bool = False
    state: Literal["waiting", "prefilling", "sending", "decoding", "passed over", "left"] = "waiting"
    joined: int = 0
    phase: int = 0
    wake: int = 0
    arrived: float = 0.0
    arrival: int = 0
    admitted: int = 0
    preempted: int = 0

    @property
    def known(self) -> int:
        """Number of existing tokens: prompt, given output, and output produced here."""
        return self.length + self.given + self.produced

    @property
    def todo(self) -> int:
        """Number of known tokens without KV."""
        return self.length + self.given + self.produced - self.computed

    def may_be(self, request: Request) -> bool:
        """True if a request has this work's prompt, followed by output tokens, and the same adapter."""
        length, tokens = self.length, request.prompt
        return (
            len(tokens) > length
            and tokens[length - 1] == self.prompt.tokens[-1]
            and tokens[:length] == self.prompt.tokens
            and request.adapter == self.prompt.adapter
        )

    def deliver(self, ahead: int = 0) -> None:
        """Deliver new output, with a finish reason if the output is complete.

        ``ahead`` is the number of tokens that were produced and are not counted in ``produced`` yet.
        """
        produced = self.produced + ahead
        begin, end = self.given + self.delivered, self.given + produced
        reason = "length" if produced >= self.goal else None
        usage = self.usage if self.delivered == 0 else None
        self.delivered = produced
        if self.stream is not None:
            self.stream.put(Output(self.prompt.output(begin, end), reason, usage=usage))


def has_computed(source: Work, request: Request, work: Work) -> bool:
    """True if ``source`` has the KV of all known tokens of ``work``, whose prompt ends with output of ``source``."""
    end, length = work.known, source.length
    return source.computed >= end and source.prompt.output(0, end - length) == request.prompt[length:end]


class WaitingWorks:
    """Two queues of waiting sequences: ``holding`` has those with a lease's blocks, ``plain`` has those without blocks.

    As in vLLM, sequences that hold blocks are admitted first. Behind a sequence that needs these blocks they would wait
    forever.
    """

    __slots__ = ("_arrivals", "holding", "plain")

    def __init__(self) -> None:
        self.holding: deque[Work] = deque()
        self.plain: deque[Work] = deque()
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self.holding) + len(self.plain)

    def __iter__(self) -> Iterator[Work]:
        yield from self.holding
        yield from self.plain

    def __contains__(self, work: Work) -> bool:
        return work in self.plain or work in self.holding

    def arrival(self) -> int:
        """Return the number of an arrival now, in the order of all arrivals."""
        self._arrivals += 1
        return self._arrivals

    def add(self, work: Work) -> None:
        work.arrival = self.arrival()
        self.queue_of(work).append(work)

    def queue_of(self, work: Work) -> deque[Work]:
        """Return the queue that a sequence waits in."""
        return self.holding if work.holding.blocks else self.plain

    def clear(self) -> None:
        self.holding.clear()
        self.plain.clear()


class DecodingBatch:
    """The batch of ``size`` decoding sequences of one engine."""

    __slots__ = ("_block_size", "_context", "_count", "_due", "_works", "phases", "size", "tick")

    def __init__(self, block_size: int) -> None:
        self.tick = 0
        self._block_size = block_size
        self._works: dict[int, Work] = {}
        self.size = 0
        self.phases = [0] * block_size
        """Number of sequences that take a block in each of the ticks from 0 to the block size, and so on."""
        self._context = 0
        self._due: list[tuple[int, int, Work]] = []
        self._count = 0

    @property
    def contexts(self) -> int:
        """Number of KV tokens that all sequences together read at the next tick."""
        return self._context + self.size * (self.tick + 1)

    def works(self) -> list[Work]:
        """Return the sequences in the order in which they joined."""
        return list(self._works.values())

    def newest(self) -> Work:
        """Return the sequence that was admitted last."""
        return max(self._works.values(), key=lambda work: work.admitted)

    def join(self, work: Work, wake_after: int) -> None:
        """Let a sequence decode from the next tick on; it is due after ``wake_after`` ticks.

        All its known tokens except the last must have KV, and it must hold exactly the blocks for them.
        """
        work.state = "decoding"
        work.joined = self.tick
        room = work.holding.blocks * self._block_size - work.computed
        work.phase = (self.tick + room) % self._block_size
        self.phases[work.phase] += 1
        self._context += work.computed - self.tick
        self._works[id(work)] = work
        self.size += 1
        self.wake(work, wake_after)

    def wake(self, work: Work, ticks: int) -> None:
        """Make a sequence due after ``ticks`` ticks."""
        self._count += 1
        work.wake = self._count
        heapq.heappush(self._due, (self.tick + ticks, self._count, work))

    def leave(self, work: Work) -> None:
        """Remove a sequence, and update its tokens and blocks to now."""
        self.settle(work)
        del self._works[id(work)]
        self.size -= 1
        self.phases[work.phase] -= 1
        self._context -= work.computed - self.tick
        work.state = "left"

    def settle(self, work: Work) -> None:
        """Update a sequence's counts to now."""
        ticks = self.tick - work.joined
        if not ticks:
            return
        work.holding.plain += self._hits(work.joined, self.tick, work.phase)
        work.produced += ticks
        work.computed += ticks
        # The same as if it joined now: its phase and its contribution to the context do not change.
        work.joined = self.tick

    def after(self, work: Work, ticks: int) -> tuple[int, int]:
        """Return a decoding sequence's numbers of known tokens and of blocks after ``ticks`` more ticks."""
        tick = self.tick + ticks
        return work.known + tick - work.joined, work.holding.blocks + self._hits(work.joined, tick, work.phase)

    def _hits(self, begin: int, end: int, phase: int) -> int:
        size = self._block_size
        return (end - 1 - phase) // size - (begin - 1 - phase) // size

    def blocks_for(self, ticks: int) -> int:
        """Return the number of new blocks that the next ``ticks`` ticks need."""
        size, phases = self._block_size, self.phases
        start = self.tick % size
        if ticks == 1:
            return phases[start]
        full, rest = divmod(ticks, size)
        end = start + rest
        part = sum(phases[start:end])
        if end > size:
            part += sum(phases[: end - size])
        return full * self.size + part

    def ticks_within(self, blocks: int, limit: int) -> int:
        """Return the largest number of ticks, up to ``limit``, that needs at most ``blocks`` new blocks."""
        if (limit // self._block_size + 1) * self.size <= blocks or self.blocks_for(limit) <= blocks:
            return limit
        low, high = 0, limit
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.blocks_for(middle) <= blocks else (low, middle)
        return low

    def ticks_to_due(self) -> int:
        """Return the number of ticks until the next sequence is due."""
        due = self._due
        while not _valid(due[0]):
            heapq.heappop(due)
        return due[0][0] - self.tick

    def pop_due(self) -> list[Work]:
        """Return the sequences that are due now, and remove their entries."""
        found: list[Work] = []
        due = self._due
        while due and due[0][0] <= self.tick:
            entry = heapq.heappop(due)
            if _valid(entry):
                found.append(entry[2])
        return found


def _valid(entry: tuple[int, int, Work]) -> bool:
    """True if an entry is the latest of its sequence. Old entries stay after a leave or a new due time."""
    _, number, work = entry
    return work.state == "decoding" and work.wake == number


class DecodeRun(msgspec.Struct, eq=False):
    """Consecutive decode steps of one batch: step ``i`` takes ``first + i * growth`` seconds from ``begin`` on."""

    begin: float
    steps: int
    first: float
    growth: float

    def after(self, steps: int) -> float:
        """Return the time at which ``steps`` steps have ended."""
        return self.begin + steps * self.first + self.growth * steps * (steps - 1) / 2

    def steps_at(self, now: float) -> int:
        """Return the number of steps up to the end of the step that runs at ``now``: at least one, at most all."""
        elapsed, half = now - self.begin, self.growth / 2
        if elapsed <= 0:
            return 1
        slope = self.first - half
        guess = (math.sqrt(slope * slope + 4 * half * elapsed) - slope) / (2 * half) if half else elapsed / self.first
        steps = min(max(1, math.ceil(guess)), self.steps)
        while steps > 1 and self.after(steps - 1) >= now:
            steps -= 1
        while steps < self.steps and self.after(steps) < now:
            steps += 1
        return steps


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
        "_admitted", "_background", "_block_size", "_decoding", "_options", "_passed_over", "_prefilling", "_room",
        "_share", "_time", "_waiting", "counters", "pool", "reservations", "slots",
    )  # fmt: skip

    def __init__(self, pool: BlockPool, block_size: int, options: EngineOptions, time: EngineTime) -> None:
        self.pool = pool
        self.counters = Counters()
        self.slots = AdapterSlots(options.max_loras if options.adapters else 0, options.lora_load)
        self.reservations: SimLeases | None = None
        self._time = time
        self._block_size = block_size
        self._options = options
        self._waiting = WaitingWorks()
        self._prefilling: list[Work] = []
        self._decoding = DecodingBatch(block_size)
        self._admitted = 0
        # Background sequences that wait or run, and those that have generated and are not in the present step.
        self._background: dict[int, Work] = {}
        self._passed_over: list[Work] = []
        self._share = StepShare(options.max_num_batched_tokens)
        self._room = 0  # tokens that background sequences may still have in the step that is selected

    @property
    def running(self) -> int:
        """Number of sequences that were admitted and have not ended."""
        return len(self._prefilling) + self._decoding.size + len(self._passed_over)

    @property
    def waiting(self) -> int:
        """Number of sequences that wait for admission."""
        return len(self._waiting)

    def arrival(self) -> int:
        """Return the number of an arrival now, in the order of all arrivals."""
        return self._waiting.arrival()

    def needed_before(self, arrival: int | None) -> int:
        """Return the number of blocks that sequences still need.

        It counts those that run, that hold blocks, or that arrived before ``arrival`` (None: all).
        """
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
        mixed, waiting = self._options.schedule == "chunked", self._waiting
        while True:
            preemptions = self.counters.preemptions
            if self._background:
                self._select_background()
            admits = not (mixed and self._make_room())
            has_prompts = self._prefilling or waiting.plain or waiting.holding
            chunks = self._schedule(mixed, admits) if has_prompts else []
            if chunks and not mixed:
                return chunks, False
            if not mixed:
                self._make_room()
            decodes = self._decoding.size > 0
            if chunks or decodes or not waiting:
                return chunks, decodes
            # A step that preempts admits no sequence. If it is empty for that reason, it takes no time: select again.
            if self.counters.preemptions == preemptions and not (self._give_way() or self._preempt_background()):
                return chunks, decodes

    def _schedule(self, mixed: bool, admits: bool) -> list[Chunk]:
        """Return the prompt chunks of the next step: first of running prompts, then of new ones while they fit."""
        budget = self._options.max_num_batched_tokens - (self._decoding.size if mixed else 0)
        chunks: list[Chunk] = []
        for work in self._prefilling[:]:  # in the order of admission: only the last chunk is cut short
            if work.state != "prefilling":  # it was preempted for one before it
                continue
            count = min(work.todo, budget, self._room) if work.background else min(work.todo, budget)
            while count > 0 and not self._take(work, count):
                if work.background or not self._preempt_background():
                    self._preempt(work)
                    return chunks
            if count > 0:
                chunks.append((work, count))
                budget -= count
                self._room -= count if work.background else 0
        return self._admit_waiting(chunks, budget) if admits else chunks

    def _admit_waiting(self, chunks: list[Chunk], budget: int) -> list[Chunk]:
        passed_over: list[Work] = []
        waiting, reservations, most = self._waiting, self.reservations, self._options.max_num_seqs
        while budget > 0 and (queue := waiting.holding or waiting.plain):
            work = queue[0]
            left_out = work.background and self._room <= 0
            if reservations is not None and reservations.waits and not work.holding.blocks:
                free = self.pool.free - self._decoding.blocks_for(1)
                left_out = left_out or reservations.holds_back(work, self._missing(work), free)
            if left_out or not self.slots.admits(work.prompt.adapter):
                passed_over.append(queue.popleft())
                continue
            while not (admitted := self.running < most and self._admit(work)):
                if work.background or not self._preempt_background():
                    break
            if not admitted:
                break
            queue.popleft()
            self._admitted += 1
            work.admitted = self._admitted
            self.slots.join(id(work), work.prompt.adapter)
            count = self._begin(work, min(budget, self._room) if work.background else budget)
            if count:
                chunks.append((work, count))
            budget -= max(count, 1)
            self._room -= max(count, 1) if work.background else 0
        for work in reversed(passed_over):
            self._waiting.queue_of(work).appendleft(work)
        return chunks

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
            if not self._preempt_background():
                self._preempt(self._prefilling[-1] if self._prefilling else decoding.newest())
        return self.counters.preemptions > preemptions

    def _preempt(self, work: Work) -> None:
        """Take away a sequence's blocks, and put it first in the waiting queue."""
        self._stop_running(work)
        self._lose_blocks(work)
        self.counters.preemptions += 1
        work.preempted += 1

    def _stop_running(self, work: Work) -> None:
        """Take a sequence out of those that run."""
        if work.state == "decoding":
            self._decoding.leave(work)
        elif work.state == "passed over":
            self._passed_over.remove(work)
        elif work.state == "prefilling":
            self._prefilling.remove(work)

    def _lose_blocks(self, work: Work) -> None:
        self._give_back(work)
        work.computed = 0
        work.state = "waiting"
        if work.background:
            self._background[id(work)] = work
            self._waiting.plain.append(work)  # a sequence that is being admitted stays the first
        else:
            self._waiting.plain.appendleft(work)

    def _select_background(self) -> None:
        """Set which background sequences generate in the next step, and how many tokens of their prompts it may have.

        The oldest go first, so that some end, also if not all have room.
        """
        others = any(not work.background for works in (self._waiting, self._prefilling) for work in works)
        decodes = [work for work in self._decoding.works() if work.background]
        room = self._share.tokens(self._time.time(), others, self._decoding.size - len(decodes))
        decodes = sorted([*decodes, *self._passed_over], key=lambda work: work.admitted)
        for at, work in enumerate(decodes):
            if at < room and work.state == "passed over":
                self._passed_over.remove(work)
                self._decoding.join(work, self._ticks_to_wake(work))
            elif at >= room and work.state == "decoding":
                self._decoding.leave(work)
                work.state = "passed over"
                self._passed_over.append(work)
        self._room = max(0, room - len(decodes))

    def _preempt_background(self) -> bool:
        """Preempt the background sequence that was admitted last; return False if none runs or holds blocks."""
        running = [work for work in self._background.values() if work.state != "sending" and work.holding.blocks]
        if not running:
            return False
        work = max(running, key=lambda work: work.admitted)
        if work.state == "waiting":
            self._waiting.holding.remove(work)
            self._lose_blocks(work)
        else:
            self._preempt(work)
        return True

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
        self._background.pop(id(work), None)
        self.pool.publish(work.holding, work.prompt, work.computed // self._block_size)
        self.pool.give_back(work.holding)
        self.slots.leave(id(work))
        work.state = "left"
