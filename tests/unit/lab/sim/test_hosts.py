"""What a simulated engine shares: its host with other engines, its places with adapters, its steps with background
sequences.
"""

from __future__ import annotations

import asyncio
import runpy
from collections.abc import Coroutine
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tercet.protocol import BadRequest, EngineUnreachable, Request, UnknownAdapter
from tercet_lab.sim import EngineOptions, Host, Network, Profile, SimEngine, run_virtual
from tercet_lab.sim.adapter_slots import AdapterSlots
from tercet_lab.sim.step_times import HostSharing
from tests.virtual_time import in_virtual_time

from .models import BLOCK, collect, engines_of, is_empty, profile_of, request_of, tokens_of

TWICE = HostSharing(
    prefill_beside_prefill=2.0, prefill_beside_decode=2.0, decode_beside_prefill=2.0, decode_beside_decode=2.0
)
DIFFERENT = HostSharing(
    prefill_beside_prefill=2.0, prefill_beside_decode=1.5, decode_beside_prefill=3.0, decode_beside_decode=1.25
)


def sharing(factors: HostSharing = TWICE) -> Profile:
    return replace(profile_of(), sharing=factors)


def engines_on(host: Host | None, profile: Profile, count: int = 2) -> list[SimEngine]:
    network, options = Network(), EngineOptions(stream_every=1)
    return [SimEngine(f"e{index}", profile, network, options, host=host) for index in range(count)]


async def ends_of(engine: SimEngine, request: Request, start: float = 0.0) -> list[float]:
    """When each token came."""
    clock = asyncio.get_running_loop().time
    await asyncio.sleep(start)
    return [clock() async for _ in engine.start_generate(request)]


def both(profile: Profile, first: tuple[int, int, float], second: tuple[int, int, float]) -> list[list[float]]:
    """Token times of two requests, ``(prompt, output, start)``, each on an engine of its own, on one host."""

    async def main() -> list[list[float]]:
        engines = engines_on(Host(), profile)
        runs: list[Coroutine[Any, Any, list[float]]] = [
            ends_of(engine, request_of(f"s{index}", length, tokens), start)
            for index, (engine, (length, tokens, start)) in enumerate(zip(engines, (first, second), strict=True))
        ]
        return list(await asyncio.gather(*runs))

    return run_virtual(main())


def test_steps_beside_one_another_take_longer() -> None:
    # 100 tokens take 109 ms alone.
    (a,), (b,) = both(sharing(), (100, 1, 0.0), (100, 1, 0.0))
    assert (a, b) == (pytest.approx(0.218), pytest.approx(0.218))


def test_a_step_is_slowed_for_the_part_that_runs_beside_another() -> None:
    (a,), (b,) = both(sharing(), (100, 1, 0.0), (100, 1, 0.050))
    # 50 ms alone, then 59 ms of work at half the speed; b has 50 ms of work left when a ends.
    assert a == pytest.approx(0.050 + 2 * 0.059)
    assert b == pytest.approx(a + 0.050)


def test_the_factor_depends_on_what_both_do() -> None:
    # One decodes at 10 ms per step, the other prefills for 109 ms from 1 s on.
    decodes, (prefilled,) = both(sharing(DIFFERENT), (1, 201, 0.0), (100, 1, 1.0))
    assert prefilled == pytest.approx(1.0 + 1.5 * 0.109)
    gaps = [after - before for before, after in pairwise(decodes)]
    beside = [gap for gap, at in zip(gaps, decodes[1:], strict=True) if 1.03 < at < prefilled - 0.001]
    assert beside == pytest.approx([0.030] * len(beside))
    assert len(beside) >= 3
    alone = [gap for gap, at in zip(gaps, decodes[1:], strict=True) if at < 1.0 or at > prefilled + 0.03]
    assert alone == pytest.approx([0.010] * len(alone))


def test_runs_of_decodes_slow_one_another() -> None:
    a, b = both(sharing(DIFFERENT), (1, 101, 0.0), (1, 101, 0.0))
    assert a[-1] == b[-1] == pytest.approx(101 * 1.25 * 0.010)


def test_an_engine_that_is_alone_on_its_host_is_not_slowed() -> None:
    async def times(host: Host | None) -> list[float]:
        engine, _ = engines_on(host, sharing(DIFFERENT))
        runs = [ends_of(engine, request_of(f"s{index}", 50 * index + 1, 20), 0.03 * index) for index in range(5)]
        return [at for run in await asyncio.gather(*runs) for at in run]

    shared, own = run_virtual(times(Host())), run_virtual(times(None))
    assert shared == pytest.approx(own)


JOBS = st.lists(st.tuples(st.integers(0, 400), st.integers(1, 300)), min_size=1, max_size=6)


@given(JOBS)
def test_steps_that_are_twice_as_long_beside_another_share_the_machine(jobs: list[tuple[int, int]]) -> None:
    """With factors of 2, so many engines that compute run at one part of the speed each: no work is lost or won."""

    async def main() -> float:
        engines = engines_on(Host(), sharing(), len(jobs))
        runs = [
            ends_of(engine, request_of(f"s{index}", length, 1), start / 1000)
            for index, (engine, (start, length)) in enumerate(zip(engines, jobs, strict=True))
        ]
        return max(end for run in await asyncio.gather(*runs) for end in run)

    # The same work, one job after the other.
    ends = 0.0
    for start, length in sorted(jobs):
        ends = max(ends, start / 1000) + 0.010 + 0.001 * (length - 1)
    assert run_virtual(main()) == pytest.approx(ends)


@given(st.integers(1, 300), st.integers(1, 30), st.integers(1, 300), st.integers(1, 30), st.integers(0, 500))
def test_nobody_is_faster_than_alone_or_slower_than_the_largest_factor(
    prompt: int, tokens: int, other: int, others: int, start: int
) -> None:
    a, b = both(sharing(DIFFERENT), (prompt, tokens, 0.0), (other, others, start / 1000))
    for times, length, count, began in ((a, prompt, tokens, 0.0), (b, other, others, start / 1000)):
        alone = 0.010 + 0.001 * (length - 1) + 0.010 * (count - 1)
        assert alone - 1e-9 <= times[-1] - began <= 3.0 * alone + 1e-9
        assert times == sorted(times)


def test_an_engine_that_dies_slows_nobody_any_more() -> None:
    async def main() -> tuple[float, float]:
        dying, staying = engines_on(Host(), sharing(replace(TWICE, linger=5.0, prefill_beside_linger=9.0)))
        lost = asyncio.create_task(collect(dying.start_generate(request_of("a", 1000))))
        run = asyncio.create_task(ends_of(staying, request_of("b", 100, 1)))
        await asyncio.sleep(0.1)
        dying.fail()
        with pytest.raises(EngineUnreachable):
            await lost
        (first,) = await run
        dying.recover()
        began = asyncio.get_running_loop().time()
        assert began == pytest.approx(first)
        again = [tokens_of(engine, request_of(engine.name, 50, 1, first=5000)) for engine in (dying, staying)]
        await asyncio.gather(*again)
        return first, asyncio.get_running_loop().time() - began

    # Nor does it linger.
    first, after = run_virtual(main())
    assert first == pytest.approx(0.1 + 0.109 - 0.050)
    assert after == pytest.approx(2 * 0.059)


LINGERING = replace(TWICE, linger=0.3, decode_beside_linger=3.0, prefill_beside_linger=1.5)


def test_an_engine_that_has_just_computed_slows_others_for_a_while() -> None:
    # One prefills for 109 ms alone; the other begins 20 ms later to decode, at 10 ms per step.
    decodes, (prefilled,) = both(sharing(LINGERING), (1, 61, 0.050), (100, 1, 0.0))
    assert prefilled == pytest.approx(0.050 + 2 * 0.059)
    lingers = [after - before for before, after in pairwise(decodes) if prefilled < before and after < prefilled + 0.3]
    assert lingers == pytest.approx([0.030] * len(lingers))
    assert len(lingers) >= 8
    later = [after - before for before, after in pairwise(decodes) if before > prefilled + 0.3]
    assert later == pytest.approx([0.010] * len(later))
    assert later


def test_an_engine_that_computes_again_lingers_no_longer() -> None:
    async def main() -> float:
        first, second = engines_on(Host(), sharing(LINGERING))
        await tokens_of(first, request_of("a", 100, 1))
        await asyncio.sleep(0.2)
        # From now on both compute; 0.1 s later the end of the lingering must not count as the end of this prefill.
        runs = (ends_of(first, request_of("b", 300, 1, first=5000)), ends_of(second, request_of("c", 300, 1)))
        return (await asyncio.gather(*runs))[1][0]

    assert run_virtual(main()) == pytest.approx(0.109 + 0.2 + 2 * 0.309)


def test_the_time_in_which_steps_run_is_the_loops() -> None:
    async def main() -> list[float]:
        engines = engines_on(Host(), sharing())
        runs = (tokens_of(engine, request_of(engine.name, 100, 11)) for engine in engines)
        await asyncio.gather(*runs)
        return [engine.counters.busy for engine in engines]

    assert run_virtual(main()) == pytest.approx([2 * 0.209] * 2)


@in_virtual_time
async def test_a_profile_must_say_what_engines_of_a_host_do_to_one_another() -> None:
    with pytest.raises(BadRequest, match=r"host: profile test has no data on engines that share a host") as refused:
        engines_on(Host(), profile_of())
    assert refused.value.param == "host"


def asking(adapter: str | None, seq_id: str = "s", **more: Any) -> Request:
    return msgspec.structs.replace(request_of(seq_id, **more), adapter=adapter)


def test_a_batch_uses_so_many_adapters_and_the_oldest_unused_one_gives_way() -> None:
    slots = AdapterSlots(2, 0.5)
    slots.join(1, "a")
    slots.join(2, "b")
    assert (slots.owed(), slots.owed()) == (1.0, 0.0)
    assert not slots.admits("c")
    assert slots.admits("a")
    assert slots.admits(None)
    slots.join(3, "b")
    slots.leave(1)
    slots.leave(1)
    assert slots.admits("c")
    slots.join(4, "c")
    assert slots.owed() == 0.5
    for user in (2, 3, 4):
        slots.leave(user)
    slots.join(5, "b")
    assert slots.owed() == 0.0, "it has kept its place"
    slots.join(6, "a")
    assert slots.owed() == 0.5, "it has not"
    found = slots.load(["x", None, "x"])
    assert found is not None
    assert (found.running, found.waiting, found.max) == (("a", "b"), ("x",), 2)


@in_virtual_time
async def test_who_needs_a_place_waits_and_others_overtake() -> None:
    (engine,) = engines_of("e", adapters="a,b", max_loras=1, lora_load=1.0)
    loop = asyncio.get_running_loop()
    ends: dict[str, float] = {}

    async def one(adapter: str | None, seq_id: str) -> None:
        await collect(engine.start_generate(asking(adapter, seq_id, length=20, max_tokens=3)))
        ends[seq_id] = loop.time()

    await asyncio.gather(one("a", "first"), one("b", "waits"), one(None, "base"), one("a", "same"))
    assert ends["waits"] > max(ends[each] for each in ("first", "same", "base")) + 1.0
    assert (await engine.status()).counters["adapter_loads"] == 2
    assert is_empty(engine)


@in_virtual_time
async def test_kv_and_tokens_are_of_one_adapter() -> None:
    sender, receiver = engines_of("p", "d", adapters="a,b", max_loras=2)
    said = [tuple(await tokens_of(sender, asking(adapter))) for adapter in ("a", "b", None)]
    assert len({*said}) == 3
    async with receiver.prep_recv(asking("a", length=2 * BLOCK)) as space:
        for wrong in ("b", None):
            with pytest.raises(BadRequest, match="adapter"):
                await sender.remote_send(asking(wrong, length=2 * BLOCK), space, 0)
        await sender.remote_send(asking("a", length=2 * BLOCK), space, 0)
        with pytest.raises(BadRequest, match="adapter"):
            await collect(receiver.start_generate(asking("b", length=2 * BLOCK)))
    for adapter, expected in (("a", 2 * BLOCK), ("b", 0), (None, 0)):
        async with receiver.prep_recv(asking(adapter, f"s{adapter}", length=2 * BLOCK)) as space:
            assert space.matched_len == expected
    with pytest.raises(UnknownAdapter, match="it has a, b"):
        await collect(receiver.start_generate(asking("c")))
    with pytest.raises(UnknownAdapter, match="the request requires"):
        await collect(receiver.start_generate(msgspec.structs.replace(asking("a"), adapter_digest="others")))
    assert is_empty(sender)
    assert is_empty(receiver)


@pytest.mark.slow
def test_affinity_saves_loads_and_waiting() -> None:
    """examples/lora_affinity.py, made small."""
    example = runpy.run_path(str(Path(__file__).resolve().parents[4] / "examples" / "lora_affinity.py"))
    setting = example["Setting"](engines=4, adapters=16, max_loras=2, lora_load=0.2, rate=4.0, requests=300)
    found = example["compare"](setting, seeds=1)
    without, with_scorer = found["without"], found["with lora-affinity"]
    assert with_scorer.loads < 0.8 * without.loads
    assert with_scorer.ttft < 0.8 * without.ttft


def line_of(seq_id: str, length: int = 100, max_tokens: int = 5, first: int = 0) -> Request:
    return replace(request_of(seq_id, length, max_tokens, first), background=True)


async def times_of(engine: SimEngine, request: Request) -> list[float]:
    """The times at which its tokens come."""
    loop, found = asyncio.get_running_loop(), list[float]()
    async with aclosing(engine.start_generate(request)) as stream:
        async for item in stream:
            found += [loop.time()] * len(item.token_ids)
    return found


@in_virtual_time
async def test_a_line_gets_no_token_while_a_prompt_is_computed_and_continues() -> None:
    (engine,) = engines_of("e", stream_every=1, max_num_batched_tokens=100, max_num_seqs=8)
    line = asyncio.ensure_future(times_of(engine, line_of("line", 20, 200)))
    await asyncio.sleep(0.7)
    began = asyncio.get_running_loop().time()
    blocks = {each.seq_id: each.blocks for each in await engine.sequences()}
    client = await times_of(engine, request_of("client", 500, 3, first=1000))
    # At most the step in progress, of one token or few, and then five of 109 ms.
    assert 0.545 <= client[0] - began <= 0.545 + 0.03
    times = await line
    assert len(times) == 200
    assert not [each for each in times if began + 0.03 < each < client[0]]
    assert blocks["line"]
    assert engine.counters.preemptions == 0
    assert is_empty(engine)


def test_blocks_and_places_of_lines_go_to_others_at_once() -> None:
    async def check(**options: int) -> None:
        (engine,) = engines_of("e", profile=profile_of(blocks=32), stream_every=1, **options)
        scheduler: Any = engine._scheduler  # pyright: ignore[reportPrivateUsage]
        scheduler._share.tokens = lambda now, has_prompts, decodes: 0 if has_prompts else 200
        lines = [
            asyncio.ensure_future(tokens_of(engine, line_of(f"l{at}", 100, 60, first=1000 * at))) for at in range(3)
        ]
        await asyncio.sleep(0.5)
        began = asyncio.get_running_loop().time()
        client = await times_of(engine, request_of("client", 240, 3, first=9000))
        assert client[0] - began <= 0.249 + 0.05
        assert [len(each) for each in await asyncio.gather(*lines)] == [60] * 3
        assert engine.counters.preemptions >= 1
        assert is_empty(engine)

    run_virtual(check())
    run_virtual(check(max_num_seqs=3))


@in_virtual_time
async def test_a_line_that_is_passed_over_ends_at_once() -> None:
    (engine,) = engines_of("e", stream_every=1, max_num_batched_tokens=100, max_num_seqs=8)
    line = asyncio.ensure_future(tokens_of(engine, line_of("line", 20, 200)))
    await asyncio.sleep(0.7)
    client = asyncio.ensure_future(tokens_of(engine, request_of("client", 500, 3, first=1000)))
    await asyncio.sleep(0.2)
    assert [each.running for each in await engine.sequences()] == [True, True]
    await engine.abort("line")
    await asyncio.wait_for(line, 0.2)
    assert [each.seq_id for each in await engine.sequences()] == ["client"]
    assert len(await client) == 3
    assert is_empty(engine)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans(), st.floats(0, 2), st.integers(1, 300), st.integers(1, 40), st.none() | st.floats(0, 3)),
        max_size=12,
    ),
    st.sampled_from(["chunked", "prefill_first"]),
    st.sampled_from([0, 1]),
)
@in_virtual_time
async def test_all_end_and_all_is_given_back(
    requests: list[tuple[bool, float, int, int, float | None]], schedule: str, every: int
) -> None:
    """Each comes at a time, and is cancelled some seconds later or not."""

    options = {"schedule": schedule, "stream_every": every, "max_num_seqs": 4, "max_num_batched_tokens": 128}
    (engine,) = engines_of("e", profile=profile_of(blocks=32), **options)

    async def one(number: int, background: bool, at: float, length: int, most: int, gone: float | None) -> None:
        await asyncio.sleep(at)
        made = line_of if background else request_of
        task = asyncio.ensure_future(tokens_of(engine, made(f"s{number}", length, most, 1000 * number)))
        await asyncio.wait({task}, timeout=gone)
        if gone is None:
            assert len(task.result()) == most
        task.cancel()
        await asyncio.wait({task})

    async with asyncio.timeout(3600):
        await asyncio.gather(*(one(number, *each) for number, each in enumerate(requests)))
    await asyncio.sleep(0.7)
    assert is_empty(engine)
