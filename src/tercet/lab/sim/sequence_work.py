"""One sequence's work on one engine, and the sequences that decode in lock step, represented by counts.

A run of equal steps costs what one step costs. Time is counted in ticks; at each tick every sequence gains a token. A
sequence records the tick at which it joined; its tokens, context and blocks follow from the ticks since then. Blocks
are counted by phase: a sequence needs a new block every ``block_size`` ticks, so only the number of sequences with a
tick's remainder is needed.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Literal

import msgspec

from tercet.lab.sim.block_pool import Holding
from tercet.lab.sim.prompts import Prompt
from tercet.protocol import Output, OutputStream, Request, Usage


class Work(msgspec.Struct, eq=False):
    """Tokens to compute and tokens to produce.

    ``length`` prompt tokens and ``given`` output tokens exist when it arrives; ``goal`` more are wanted. ``known``
    tokens exist now, ``computed`` of them have KV here. While the work decodes, both lag behind the clock of
    :class:`DecodingBatch` until it settles them. Outputs go into ``stream``, if there is one.
    ``arrived`` is a time of the event loop; ``arrival`` and ``admitted`` count earlier arrivals and admissions.
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
        """Existing tokens: prompt, given output, and output that was produced here."""
        return self.length + self.given + self.produced

    @property
    def todo(self) -> int:
        """Known tokens without KV."""
        return self.length + self.given + self.produced - self.computed

    def may_be(self, request: Request) -> bool:
        """Whether a request is for its prompt, and output after it, with its adapter."""
        length, tokens = self.length, request.prompt
        return (
            len(tokens) > length
            and tokens[length - 1] == self.prompt.tokens[-1]
            and tokens[:length] == self.prompt.tokens
            and request.adapter == self.prompt.adapter
        )

    def deliver(self, ahead: int = 0) -> None:
        """Deliver new output, with a finish reason if it is complete.

        ``ahead`` tokens more than the accounted ones were produced.
        """
        produced = self.produced + ahead
        begin, end = self.given + self.delivered, self.given + produced
        reason = "length" if produced >= self.goal else None
        usage = self.usage if self.delivered == 0 else None
        self.delivered = produced
        if self.stream is not None:
            self.stream.put(Output(self.prompt.output(begin, end), reason, usage=usage))


def has_computed(source: Work, request: Request, work: Work) -> bool:
    """Whether a sequence has the KV of all known tokens of ``work``, a request that continues with its output."""
    end, length = work.known, source.length
    return source.computed >= end and source.prompt.output(0, end - length) == request.prompt[length:end]


class DecodingBatch:
    """The decoding sequences of one engine, ``size`` of them."""

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
        """KV tokens that all sequences together read at the next tick."""
        return self._context + self.size * (self.tick + 1)

    def works(self) -> list[Work]:
        """The sequences, in the order in which they joined."""
        return list(self._works.values())

    def newest(self) -> Work:
        """The sequence that was admitted last."""
        return max(self._works.values(), key=lambda work: work.admitted)

    def join(self, work: Work, wake_after: int) -> None:
        """Let a sequence decode from the next tick on, and be due after ``wake_after`` ticks.

        All its known tokens except the last are computed, and it holds just the blocks that those need.
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
        """Make a sequence due ``ticks`` from now."""
        self._count += 1
        work.wake = self._count
        heapq.heappush(self._due, (self.tick + ticks, self._count, work))

    def leave(self, work: Work) -> None:
        """Remove a sequence, with its tokens and blocks as of now."""
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
        # As if it joined now, with the same remainder and the same contribution to the context.
        work.joined = self.tick

    def after(self, work: Work, ticks: int) -> tuple[int, int]:
        """A decoding sequence's known tokens, and its number of blocks, ``ticks`` from now."""
        tick = self.tick + ticks
        return work.known + tick - work.joined, work.holding.blocks + self._hits(work.joined, tick, work.phase)

    def _hits(self, begin: int, end: int, phase: int) -> int:
        size = self._block_size
        return (end - 1 - phase) // size - (begin - 1 - phase) // size

    def blocks_for(self, ticks: int) -> int:
        """New blocks that the next ``ticks`` ticks need."""
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
        """The most ticks, up to ``limit``, whose new blocks are no more than ``blocks``."""
        if (limit // self._block_size + 1) * self.size <= blocks or self.blocks_for(limit) <= blocks:
            return limit
        low, high = 0, limit
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.blocks_for(middle) <= blocks else (low, middle)
        return low

    def ticks_to_due(self) -> int:
        """Ticks until a sequence is due next."""
        due = self._due
        while not _valid(due[0]):
            heapq.heappop(due)
        return due[0][0] - self.tick

    def pop_due(self) -> list[Work]:
        """The sequences that are due now."""
        found, due = list[Work](), self._due
        while due and due[0][0] <= self.tick:
            entry = heapq.heappop(due)
            if _valid(entry):
                found.append(entry[2])
        return found


def _valid(entry: tuple[int, int, Work]) -> bool:
    """Whether an entry is its sequence's latest; older ones are left after a leave or another due time."""
    _, number, work = entry
    return work.state == "decoding" and work.wake == number


class DecodeRun(msgspec.Struct, eq=False):
    """Consecutive decode steps of one batch: step ``i`` takes ``first + i * growth`` seconds from ``begin`` on."""

    begin: float
    steps: int
    first: float
    growth: float

    def after(self, steps: int) -> float:
        """When ``steps`` steps have ended."""
        return self.begin + steps * self.first + self.growth * steps * (steps - 1) / 2

    def steps_at(self, now: float) -> int:
        """Number of steps that have ended when the one running at ``now`` ends; at least one, at most all."""
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
