"""The simulated engine's order is that of vLLM's scheduler with the plugin: random arrivals through both.

A step takes a second on either side. Every token's time, every reservation's and what was preempted must be the same.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec
import pytest
from vllm.config import VllmConfig

from tercet.engine.interface import KeyedPrompt
from tercet.protocol import NoSpace, Request
from tercet.vllm_plugin.core import core_methods
from tercet_lab.sim import EngineOptions, Network, SimEngine, run_virtual
from tercet_lab.sim.step_times import StepTimes
from tests.long_runs import FULL
from tests.unit.lab.sim.models import profile_of

from .tiny_engine import BLOCK, MAX_BATCHED, NUM_BLOCKS, TinyEngine

MAX_SEQS = 8
WAIT = 4.0  # as reserve_wait, in steps
MOST_STEPS = 3000
CASES = 400 if FULL else 40


@dataclass(frozen=True)
class Arrival:
    """A sequence that is asked for at ``at``; with ``reserved`` it has first a lease for so many of its tokens.

    The lease's KV is there ``transfer`` seconds after it was given, and then the sequence begins on it.
    """

    at: float
    length: int
    max_tokens: int
    reserved: int = 0
    transfer: float = 0.0


@dataclass
class Seen:
    """What happened, rounded to a millisecond: when each sequence had its tokens, and its lease or the refusal."""

    tokens: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    leases: dict[int, tuple[float, bool]] = field(default_factory=dict[int, tuple[float, bool]])
    preemptions: int = 0


def arrivals_of(seed: int) -> list[Arrival]:
    """Sequences that need several times the blocks that there are; none alone needs more than there are."""
    choice = random.Random(seed)
    many, pace = choice.randint(4, 24), choice.choice([0.3, 1.0, 4.0])
    largest, share = choice.choice([6, 12, 20]) * BLOCK, choice.choice([0.0, 0.5, 1.0])
    found, at = list[Arrival](), 0.0
    for _ in range(many):
        at += choice.expovariate(1 / pace) + 0.001
        length, max_tokens = choice.randint(2, largest), choice.randint(1, 3 * BLOCK)
        reserved = 0
        if choice.random() < share:
            reserved = length - 1 if choice.random() < 0.5 else choice.randint(1, length - 1)
        found.append(Arrival(at, length, max_tokens, reserved, choice.uniform(0.1, 5.0)))
    return found


def prompt_of(number: int, length: int) -> list[int]:
    return list(range(10_000 * (number + 1), 10_000 * (number + 1) + length))


# ---- through vLLM --------------------------------------------------------------------------------------------


class Clocked:
    """vLLM's scheduler in a time of its own: calls and arrivals happen between steps, each of which takes a second."""

    def __init__(self, engine: TinyEngine) -> None:
        self.engine = engine
        self.now = 0.0
        self.ends: float | None = None
        self.seen = Seen()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._adds: list[Callable[[], None]] = []
        self._calls: list[Callable[[], None]] = []
        self._requests: dict[int, Any] = {}
        self._known: dict[int, int] = {}

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), act))

    def add(self, act: Callable[[], None]) -> None:
        """A request's time of arrival is that of its call, a reservation's that of its first look at the core."""
        self._adds.append(act)

    def call(self, act: Callable[[], None]) -> None:
        self._calls.append(act)

    def run(self, arrivals: list[Arrival]) -> Seen:
        for number, arrival in enumerate(arrivals):
            self.at(arrival.at, self._arriving(number, arrival))
        for _ in range(MOST_STEPS):
            if self.ends is None and not self._events:
                break
            if self.ends is not None and (not self._events or self.ends <= self._events[0][0]):
                self.now, self.ends = self.ends, None
                self._tell()
            else:
                self.now, _, act = heapq.heappop(self._events)
                act()
            if self.ends is None:
                self._begin()
        else:
            raise AssertionError("it does not end")
        return self.seen

    def _begin(self) -> None:
        for acts in (self._adds, self._calls):
            between, acts[:] = acts[:], []
            for act in between:
                act()
        for _ in range(50):
            if not self.engine.scheduler.has_requests():
                return
            self._known = {number: len(each.output_token_ids) for number, each in self._requests.items()}
            before = {number: each.num_preemptions for number, each in self._requests.items()}
            output, _ = self.engine.step()
            self.seen.preemptions += sum(
                each.num_preemptions - before[number] for number, each in self._requests.items()
            )
            if output.total_num_scheduled_tokens:
                self.ends = self.now + 1.0
                return

    def _tell(self) -> None:
        for number, request in self._requests.items():
            if len(request.output_token_ids) > self._known[number]:
                self.seen.tokens[number].append(round(self.now, 3))

    def _arriving(self, number: int, arrival: Arrival) -> Callable[[], None]:
        tokens, lease = prompt_of(number, arrival.length), f"{number:032x}"
        self.seen.tokens[number] = []

        def start(held: str | None) -> None:
            self._requests[number] = self.engine.add(str(number), tokens, arrival.max_tokens, lease=held)
            self._known[number] = 0

        def reserve() -> None:
            part = tokens[: arrival.reserved]
            try:
                waiting = core_methods.reserve(self.engine.core, lease, KeyedPrompt(part))
            except NoSpace:
                waiting = Future[Any]()
                waiting.set_exception(NoSpace(""))
            give_up = lambda: core_methods.give_up(self.engine.core, lease)  # noqa: E731
            self.at(max(self.now, arrival.at + WAIT), lambda: None if waiting.done() else self.call(give_up))
            waiting.add_done_callback(answered)

        def answered(answer: Future[Any]) -> None:
            given = answer.exception() is None
            self.seen.leases[number] = (round(self.now, 3), given)
            if not given:
                self.at(self.now, lambda: self.add(lambda: start(None)))
                return
            self.engine.granted(lease, tokens[: arrival.reserved], answer)
            self.at(self.now + arrival.transfer, lambda: self.add(arrived))

        def arrived() -> None:
            self.engine.agent.received[lease] = arrival.reserved
            self.engine.commit(lease, arrival.reserved)
            start(lease)

        return lambda: self.call(reserve) if arrival.reserved else self.add(lambda: start(None))


# ---- through the simulated engine ----------------------------------------------------------------------------


async def simulated(arrivals: list[Arrival]) -> Seen:
    steady = StepTimes(knots=((1, 1.0), (2, 1.0)), pair=0.0, context=0.0)
    profile = msgspec.structs.replace(profile_of(steady, blocks=NUM_BLOCKS - 1), block_size=BLOCK)
    options = EngineOptions(
        max_num_seqs=MAX_SEQS, max_num_batched_tokens=MAX_BATCHED, stream_every=1, reserve_wait=WAIT,
        max_lease_share=int(NUM_BLOCKS * 0.8) / (NUM_BLOCKS - 1) + 1e-9,
    )  # fmt: skip
    engine, seen = SimEngine("e", profile, Network(), options), Seen()
    now = asyncio.get_running_loop().time
    await asyncio.gather(*(_arrive(engine, number, each, seen, now) for number, each in enumerate(arrivals)))
    seen.preemptions = engine.counters.preemptions
    assert engine.pool.free == engine.pool.total
    return seen


async def _arrive(engine: SimEngine, number: int, arrival: Arrival, seen: Seen, now: Callable[[], float]) -> None:
    tokens = tuple(prompt_of(number, arrival.length))
    request = Request(seq_id=str(number), prompt=tokens, sampling_params={"max_tokens": arrival.max_tokens})
    seen.tokens[number] = []
    await asyncio.sleep(arrival.at)
    if arrival.reserved:
        try:
            found = await engine.reserve(request, arrival.reserved, 1000.0)
            seen.leases[number] = (round(now(), 3), True)
            await asyncio.sleep(arrival.transfer)
            engine.take_in(found.lease, 0, arrival.reserved)
        except NoSpace:
            seen.leases[number] = (round(now(), 3), False)
    async for output in engine.start_generate(request):
        seen.tokens[number] += [round(now(), 3)] * len(output.token_ids)


@pytest.mark.parametrize("seed", range(CASES))
def test_random_arrivals_have_their_tokens_at_the_same_times(config: VllmConfig, seed: int) -> None:
    arrivals = arrivals_of(seed)
    real = Clocked(TinyEngine(config)).run(arrivals)
    ours = run_virtual(simulated(arrivals))
    for number, arrival in enumerate(arrivals):
        assert ours.leases.get(number) == real.leases.get(number), (number, arrival)
        assert len(real.tokens[number]) == arrival.max_tokens
        assert ours.tokens[number] == real.tokens[number], (number, arrival)
    assert ours.preemptions == real.preemptions
