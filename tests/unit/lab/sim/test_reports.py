"""What a simulated engine reports is what a real one would: load, cached blocks, sequences; and nothing is asked of
somebody else at its address.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Callable
from typing import Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.cluster.ports import free_ports, url_of
from tercet.decisions.scheduling import Scheduling, SchedulingProfile
from tercet.decisions.scheduling.profiles import MaxScorePicker
from tercet.fleet import EngineFleet, FleetView, Member
from tercet.fleet.membership import ServedModel
from tercet.protocol import EngineUnreachable, Request
from tercet.wire.client import HttpEngine, StreamListener
from tercet_lab.bench.simulated.moving_fleet import EngineObserver
from tercet_lab.sim import Network, SimEngine, run_virtual
from tercet_lab.sim.block_pool import Prompt
from tercet_lab.sim.engine_options import EngineOptions
from tercet_lab.sim.sim_engine import REPORT_SECONDS
from tercet_lab.sim.sim_server import ServerConfig, serving
from tercet_lab.sim.step_selection import DecodeRun, DecodingBatch, Work
from tercet_lab.sim.step_times import StepTimes
from tests.virtual_time import in_virtual_time

from .models import BLOCK, engines_of, is_empty, profile_of, request_of, tokens_of
from .test_stream_kills import HOST, config_of, up


def observed(blocks: int = 1000) -> tuple[EngineFleet, SimEngine]:
    engine = SimEngine("e", profile_of(blocks=blocks), Network(), EngineOptions())
    fleet = EngineFleet([Member("e", "sim://e", "both", engine)], stale_after=math.inf)
    observer = EngineObserver(fleet.knowledge, "e", BLOCK)
    fleet.knowledge.hear_from(lambda: engine.observe(observer), lambda: engine.observe_blocks(observer))
    return fleet, engine


@in_virtual_time
async def test_blocks_are_known_as_they_come_and_go() -> None:
    fleet, engine = observed(blocks=10)
    first, second = request_of("a", 100), request_of("b", 100, first=5000)
    await tokens_of(engine, first)  # before anybody asks
    assert fleet.knowledge.cached_tokens("e", first) == 96
    await tokens_of(engine, second)
    assert fleet.knowledge.cached_tokens("e", second) == 96
    assert fleet.knowledge.cached_tokens("e", first) < 96, "there is no room for both"
    engine.fail()
    engine.recover()
    assert fleet.knowledge.cached_tokens("e", second) == 0
    await tokens_of(engine, second)
    assert fleet.knowledge.cached_tokens("e", second) == 96


@in_virtual_time
async def test_load_is_reported_at_most_once_in_a_while_and_not_at_rest() -> None:
    fleet, engine = observed()
    times: list[float] = []
    loop = asyncio.get_running_loop()
    report = fleet.knowledge.loads.report

    def noted(name: str, load: object) -> None:
        times.append(loop.time())
        report(name, load)  # type: ignore[arg-type]

    fleet.knowledge.loads.report = noted  # type: ignore[method-assign]
    fleet.knowledge.start_reports()
    works = [asyncio.ensure_future(tokens_of(engine, request_of(f"s{i}", 100, 50, i * 1000))) for i in range(3)]
    await asyncio.sleep(0.3)
    last = fleet.knowledge.loads.last("e")
    assert last is not None
    assert last[0].running == 3
    assert last[0].kv_usage > 0
    await asyncio.gather(*works)
    await asyncio.sleep(100)
    last = fleet.knowledge.loads.last("e")
    assert last is not None
    assert (last[0].running, last[0].waiting) == (0, 0)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert min(gaps) >= REPORT_SECONDS - 1e-9
    assert len(times) < 30, "an engine at rest says nothing"


@in_virtual_time
async def test_a_pick_by_profile_asks() -> None:
    fleet, _engine = observed()
    fleet.scheduling = Scheduling({"p": SchedulingProfile("p", [], [], MaxScorePicker())})
    with FleetView(fleet).pick(by="p"):
        assert fleet.knowledge.loads.last("e") is not None


@in_virtual_time
async def test_blocks_are_told_of_once_somebody_asks_for_them() -> None:
    fleet, engine = observed()
    fleet.knowledge.start_reports()
    await tokens_of(engine, request_of("a", 100))
    assert not fleet.knowledge.indexes
    assert fleet.knowledge.cached_tokens("e", request_of("b", 100)) == 96
    assert fleet.knowledge.indexes
    engine.fail()
    engine.recover()
    assert fleet.knowledge.cached_tokens("e", request_of("b", 100)) == 0


@in_virtual_time
async def test_nothing_is_told_before_somebody_asks() -> None:
    fleet, engine = observed()
    await tokens_of(engine, request_of("a", 100))
    assert fleet.knowledge.loads.last("e") is None
    with FleetView(fleet).pick(by="round_robin"):
        assert fleet.knowledge.loads.last("e") is None
    fleet.knowledge.cached_tokens("e", request_of("b", 100))
    assert fleet.knowledge.loads.last("e") is not None


@in_virtual_time
async def test_the_step_time_is_that_of_recent_steps() -> None:
    """A prompt of 10,000 tokens makes a step of many times a decode's; it weighs less with each later step."""

    _, engine = observed()
    assert engine.load().step_time is None
    await tokens_of(engine, request_of("a", 10_000, max_tokens=1))
    prefill = engine.load().step_time
    await tokens_of(engine, request_of("b", 100, max_tokens=200, first=20_000))
    decode = engine.load().step_time
    before = asyncio.get_running_loop().time()
    await tokens_of(engine, request_of("c", 100, max_tokens=101, first=30_000))
    each = (asyncio.get_running_loop().time() - before) / 101
    assert prefill is not None
    assert decode is not None
    assert prefill > 10 * decode
    assert math.isclose(decode, each, rel_tol=0.3)


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


def with_other_weights(config: ServerConfig) -> ServerConfig:
    model = msgspec.structs.replace(config.profile.model, name="another")
    return msgspec.structs.replace(config, profile=msgspec.structs.replace(config.profile, model=model))


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("other", [with_other_weights, lambda config: config])
async def test_an_engine_that_was_replaced(streaming: bool, other: Callable[[ServerConfig], ServerConfig]) -> None:
    (port,) = free_ports(HOST, 1)
    config, promises, anew = config_of("e", port), list[ServedModel](), list[str]()
    async with StreamListener() as listener:
        engine = HttpEngine(
            "e",
            url_of(HOST, port),
            listener if streaming else None,
            admit=lambda status: [promise.require_kept(status) for promise in promises],
            on_new=lambda: anew.append("e"),
        )
        async with engine:
            async with serving(config):
                await up(engine.url)
                promises.append(ServedModel.of([await engine.status()]))
                assert [output async for output in engine.start_generate(request_of("s", 100, 3))]
            async with serving(other(config)):
                await up(engine.url)
                second = engine.start_generate(request_of("t", 100, 3))
                if other is with_other_weights:
                    with pytest.raises(EngineUnreachable, match="another"):
                        _ = [output async for output in second]
                    with pytest.raises(EngineUnreachable, match="another"):
                        async with engine.prep_recv(request_of("u", 100, 3)):
                            pytest.fail("it holds blocks for us")
                else:
                    assert [output async for output in second][-1].finished
            assert anew == ["e"]
