"""What a simulated engine reports of its sequences is what it would have after settling them."""

from __future__ import annotations

import asyncio

import pytest

from tercet_lab.sim import run_virtual

from .models import BLOCK, engines_of, is_empty, profile_of, request_of, tokens_of


@pytest.mark.parametrize("every", [0, 1])
def test_tokens_and_blocks_follow_the_steps(every: int) -> None:
    async def check() -> None:
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

    run_virtual(check())


def test_who_waits_or_is_preempted_does_not_run() -> None:
    async def check() -> None:
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

    run_virtual(check())


def test_a_frozen_engine_reports_what_was_last_true() -> None:
    async def check() -> None:
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

    run_virtual(check())
