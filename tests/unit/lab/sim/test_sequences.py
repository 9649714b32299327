"""What a simulated engine reports of its sequences is what it would have after settling them."""

from __future__ import annotations

import asyncio
import random
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.protocol import Request
from tercet_lab.sim import EngineOptions, Network, SimEngine, run_virtual
from tercet_lab.sim.block_pool import Prompt
from tercet_lab.sim.step_selection import DecodeRun, DecodingBatch, Work
from tercet_lab.sim.step_times import StepTimes
from tests.virtual_time import in_virtual_time

from .models import BLOCK, engines_of, is_empty, profile_of, request_of, tokens_of


@pytest.mark.parametrize("every", [0, 1])
@in_virtual_time
async def test_tokens_and_blocks_follow_the_steps(every: int) -> None:
    (engine,) = engines_of("e", stream_every=every)
    asking = asyncio.ensure_future(tokens_of(engine, request_of("s", max_tokens=50)))
    await asyncio.sleep(0.05)
    (report,) = await engine.sequences()
    assert (report.tokens, report.blocks, report.running) == (100, 7, True)
    assert report.age == pytest.approx(0.05)
    for steps in range(1, 49):
        # The prompt takes 109 ms and brings the first token; each step after that takes 10.
        await asyncio.sleep(0.109 + steps * 0.010 + 0.005 - asyncio.get_running_loop().time())
        (report,) = await engine.sequences()
        assert report.tokens == 101 + steps
        assert report.blocks == -(-(101 + steps) // BLOCK)
    assert len(await asking) == 50
    assert await engine.sequences() == []
    assert is_empty(engine)


@in_virtual_time
async def test_who_waits_or_is_preempted_does_not_run() -> None:
    (engine,) = engines_of("e", profile=profile_of(blocks=16), stream_every=1)
    both = [
        asyncio.ensure_future(tokens_of(engine, request_of(name, max_tokens=60, first=first)))
        for name, first in (("one", 0), ("two", 1000))
    ]
    await asyncio.sleep(0.001)
    seen = set[tuple[str, bool]]()
    while not both[1].done():
        for report in await engine.sequences():
            seen.add((report.seq_id, report.running))
            assert report.running or report.blocks == 0
        await asyncio.sleep(0.01)
    assert engine.counters.preemptions
    assert {("one", True), ("two", True), ("two", False)} <= seen


@in_virtual_time
async def test_a_frozen_engine_reports_what_was_last_true() -> None:
    (engine,) = engines_of("e")
    asking = asyncio.ensure_future(tokens_of(engine, request_of("s", max_tokens=50)))
    await asyncio.sleep(0.2)
    engine.freeze()
    (then,) = await engine.sequences()
    await asyncio.sleep(60)
    (now,) = await engine.sequences()
    assert (now.tokens, now.blocks) == (then.tokens, then.blocks)
    engine.thaw()
    await asking


# Runs of equal steps are a shortcut: it must not show.

TIMES = StepTimes(knots=((1, 0.010), (64, 0.012), (512, 0.050)), pair=1e-7, context=2e-6, sequence=1e-4, step=1e-3)
Schedule = Literal["chunked", "prefill_first"]
Ends = dict[str, tuple[float, float, int]]


async def _serve(engine: SimEngine, request: Request, at: float, stop: float | None, ends: Ends) -> None:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(at)
    first, tokens = 0.0, 0
    try:
        async with asyncio.timeout(stop):
            async for output in engine.start_generate(request):
                first = first or loop.time()
                tokens += len(output.token_ids)
    except TimeoutError:
        tokens = -1
    ends[request.seq_id] = (first, loop.time(), tokens)


def _run(seed: int, every: int, schedule: Schedule, blocks: int) -> Ends:
    """A burst of requests, some of which give up, on one engine that is too small for them."""

    async def main() -> Ends:
        chance, ends = random.Random(seed), Ends()
        options = EngineOptions(stream_every=every, schedule=schedule, max_num_batched_tokens=96, max_num_seqs=12)
        engine = SimEngine("a", profile_of(TIMES, blocks), Network(), options)
        tasks: list[asyncio.Task[None]] = []
        for index in range(30):
            shared = chance.choice((0, 7))
            prompt = tuple(range(shared * 1000, shared * 1000 + 64)) + tuple(
                range(index * 10_000, index * 10_000 + chance.randrange(1, 200))
            )
            request = Request(seq_id=str(index), prompt=prompt, sampling_params={"max_tokens": chance.randrange(1, 90)})
            stop = chance.uniform(0.1, 3) if chance.random() < 0.2 else None
            tasks.append(asyncio.create_task(_serve(engine, request, chance.uniform(0, 4), stop, ends)))
        await asyncio.wait_for(asyncio.gather(*tasks), 1000)
        await asyncio.sleep(1)
        assert is_empty(engine)
        return ends

    return run_virtual(main())


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["chunked", "prefill_first"])
@pytest.mark.parametrize("blocks", [40, 1000])
@pytest.mark.parametrize("seed", range(8))
def test_streams_begin_and_end_at_the_same_times_however_often_they_are_woken(
    seed: int, schedule: Schedule, blocks: int
) -> None:
    coarse, fine = _run(seed, 0, schedule, blocks), _run(seed, 1, schedule, blocks)
    assert coarse.keys() == fine.keys()
    for name, (first, last, tokens) in fine.items():
        if tokens >= 0:
            assert coarse[name][2] == tokens
            assert coarse[name][:2] == pytest.approx((first, last), abs=1e-9)


def test_the_same_seed_gives_the_same_run() -> None:
    assert _run(3, 0, "chunked", 40) == _run(3, 0, "chunked", 40)


@given(st.integers(1, 400), st.floats(0.001, 0.1), st.floats(0, 0.001), st.floats(0, 1.2))
def test_where_a_run_is(steps: int, first: float, growth: float, share: float) -> None:
    run = DecodeRun(5.0, steps, first, growth)
    ends = [run.after(count) for count in range(1, steps + 1)]
    now = 5.0 + share * (ends[-1] - 5.0)
    expected = next((count for count, end in enumerate(ends, 1) if end >= now), steps)
    assert run.steps_at(now) == expected


@settings(max_examples=settings().max_examples // 2)
@given(st.lists(st.tuples(st.integers(1, 70), st.integers(0, 40)), min_size=1, max_size=8), st.integers(1, 80))
def test_blocks_are_counted_as_if_tick_by_tick(joins: list[tuple[int, int]], ticks: int) -> None:
    """``joins``: sequences by computed tokens and the ticks that pass before the next one joins."""
    decoding, works = DecodingBatch(BLOCK), list[tuple[Work, int, int]]()
    for computed, wait in joins:
        work = Work(Prompt((1,), None), computed + 1, 0, 1_000_000)
        work.computed, work.holding.plain = computed, -(-computed // BLOCK)
        decoding.join(work, 1_000_000)
        works.append((work, computed, decoding.tick))
        decoding.tick += wait
    tokens = [computed + decoding.tick - joined for _, computed, joined in works]
    needed = sum(-(-(count + ticks) // BLOCK) - -(-count // BLOCK) for count in tokens)
    assert decoding.blocks_for(ticks) == needed
    assert decoding.contexts == sum(tokens) + len(works)
    within = decoding.ticks_within(needed, ticks + 50)
    assert within >= ticks
    assert decoding.blocks_for(within) <= needed
    for (work, *_), count in zip(works, tokens, strict=True):
        decoding.leave(work)
        assert (work.computed, work.holding.blocks) == (count, -(-count // BLOCK))
    assert (decoding.size, decoding.blocks_for(100), decoding.contexts) == (0, 0, 0)
