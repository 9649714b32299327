"""The work for one sequence on one engine, and the batch of sequences that decode in lock step.

The batch is represented by counts, so simulating a run of many steps costs as much as one step. Time is counted in
ticks: at each tick, every sequence of the batch gains a token. A sequence records the tick at which it joined; its
tokens, context and blocks follow from the number of ticks since then. A sequence needs a new block every
``block_size`` ticks, so blocks are counted by phase: for each remainder ``tick % block_size``, the number of sequences
that need a block at such ticks.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Literal

import msgspec

from tercet.protocol import Output, OutputStream, Request, Usage
from tercet_lab.sim.block_pool import Holding
from tercet_lab.sim.prompts import Prompt


class Work(msgspec.Struct, eq=False):
    """The work for one sequence: tokens to compute and tokens to produce.

    ``length`` prompt tokens and ``given`` output tokens exist when the sequence arrives; ``goal`` more tokens are
    requested. ``known`` tokens exist now; ``computed`` of them have KV on this engine. While the sequence decodes, both
    lag behind the ticks of :class:`DecodingBatch` until it settles them. Outputs go into ``stream`` unless it is None.
    ``arrived`` is a time of the event loop, in seconds; ``arrival`` and ``admitted`` are the numbers of its arrival and
    of its admission, in the order of all.
    """

    prompt: Prompt
    length: int
    given: int
    goal: int
    on_computed: Callable[[], None] | None = None
    on_chunk: Callable[[int, int, float, float], None] | None = None
    holding: Holding = msgspec.field(default_factory=Holding)
    stream: OutputStream | None = None
    computed: int = 0
    produced: int = 0
    delivered: int = 0
    usage: Usage | None = None
    each_token: bool = False
    state: Literal["waiting", "prefilling", "sending", "decoding", "left"] = "waiting"
    joined: int = 0
    phase: int = 0
    wake: int = 0
    arrived: float = 0.0
    arrival: int = 0
    admitted: int = 0

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


class DecodingBatch:
    """The batch of ``size`` decoding sequences of one engine."""

    __slots__ = ("_block_size", "_context", "_count", "_due", "_phases", "_works", "size", "tick")

    def __init__(self, block_size: int) -> None:
        self.tick = 0
        self._block_size = block_size
        self._works: dict[int, Work] = {}
        self.size = 0
        self._phases = [0] * block_size
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
        self._phases[work.phase] += 1
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
        self._phases[work.phase] -= 1
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
        size, phases = self._block_size, self._phases
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
        found, due = list[Work](), self._due
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
