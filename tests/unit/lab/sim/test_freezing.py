"""A core that stands still: nothing of it goes on, nothing is lost, and all goes on where it stopped."""

from __future__ import annotations

import asyncio

import pytest

from tercet.protocol import EngineUnreachable
from tercet_lab.sim import run_virtual

from .models import collect, engines_of, is_empty, request_of, tokens_of

# A prompt of 100 tokens takes 109 ms, each further token 10 ms.
DURING = {"idle": 0.0, "prefill": 0.05, "decode": 0.2}


@pytest.mark.parametrize("moment", DURING.values(), ids=DURING)
@pytest.mark.parametrize("every", [0, 1])
def test_everything_is_later_by_as_long_as_it_stood_still(moment: float, every: int) -> None:
    async def ends(frozen: float) -> tuple[float, list[int]]:
        (engine,) = engines_of("e", stream_every=every)
        loop = asyncio.get_running_loop()
        began = loop.time()
        if not moment:
            engine.freeze()
        asking = asyncio.ensure_future(tokens_of(engine, request_of("s", max_tokens=30)))
        await asyncio.sleep(moment)
        engine.freeze()
        await asyncio.sleep(frozen)
        assert not asking.done()
        engine.thaw()
        tokens = await asking
        ended = loop.time()
        await asyncio.sleep(1)
        assert is_empty(engine)
        return ended - began, tokens

    async def check() -> None:
        calm, expected = await ends(0.0)
        late, found = await ends(7.0)
        assert found == expected
        assert late - calm == pytest.approx(7.0)

    run_virtual(check())


def test_a_frozen_core_answers_nothing_and_takes_in_what_was_asked_later() -> None:
    async def check() -> None:
        (engine,) = engines_of("e", stream_every=0)
        running = asyncio.ensure_future(tokens_of(engine, request_of("first", max_tokens=50)))
        await asyncio.sleep(0.2)
        engine.freeze()
        asked = [asyncio.ensure_future(collect(engine.start_generate(request_of("second", first=500))))]
        status = asyncio.ensure_future(engine.status())
        await asyncio.sleep(60)
        assert engine.load().stalled_s == pytest.approx(60)
        assert not any(task.done() for task in (running, status, *asked))
        engine.thaw()
        assert (await status).running >= 1
        assert engine.load().stalled_s == 0
        done, _ = await asyncio.wait([running, *asked], return_when=asyncio.FIRST_COMPLETED)
        assert done == set(asked)  # it need not wait for the end of the run of steps that the freeze was in
        await running
        await asyncio.sleep(1)
        assert is_empty(engine)

    run_virtual(check())


def test_a_frozen_core_can_be_killed() -> None:
    async def check() -> None:
        (engine,) = engines_of("e")
        asking = asyncio.ensure_future(tokens_of(engine, request_of("s", max_tokens=50)))
        await asyncio.sleep(0.2)
        engine.freeze()
        engine.fail()
        with pytest.raises(EngineUnreachable):
            await asking
        engine.recover()
        assert len(await tokens_of(engine, request_of("t", max_tokens=3))) == 3

    run_virtual(check())
