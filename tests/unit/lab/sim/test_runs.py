"""Runs of equal steps are a shortcut: it must not show."""

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

from .models import BLOCK, is_empty, profile_of

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
        options = EngineOptions(
            stream_every=every,
            schedule=schedule,
            max_num_batched_tokens=96,
            max_num_seqs=12,
        )
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
