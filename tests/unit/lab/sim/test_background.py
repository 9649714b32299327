"""Background sequences of a simulated engine: left out of steps, preempted first, and never lost."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tercet.protocol import Request
from tercet_lab.sim import SimEngine, run_virtual
from tests.virtual_time import in_virtual_time

from .models import engines_of, is_empty, profile_of, request_of, tokens_of


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
