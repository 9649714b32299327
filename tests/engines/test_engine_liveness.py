"""A process of an engine that stands still behind a healthy HTTP server: the engine says so itself."""

from __future__ import annotations

import asyncio
import time
import uuid

import pytest

from tercet.protocol import EngineStatus, Request
from tercet.wire.client import HttpEngine
from tercet_checks.chaos.chaos_report import ProcessKind

from .conftest import settled
from .processes import part_of, stopped
from .prompts import prompt_of

# What a status may take on a machine where others compute, and how long news of a stall may take.
ANSWERS_WITHIN = 1.0
NOTICED_WITHIN = 30.0


async def quick_status(engine: HttpEngine) -> EngineStatus:
    asked = time.monotonic()
    status = await engine.status()
    assert time.monotonic() - asked < ANSWERS_WITHIN
    return status


async def until(engine: HttpEngine, stalled: bool, by: float = 0.0) -> EngineStatus:
    async with asyncio.timeout(NOTICED_WITHIN):
        while True:
            status = await quick_status(engine)
            if (status.stalled_s > by) == stalled:
                return status
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("which", ["core", "worker", "agent"])
async def test_an_idle_engine_says_which_time_one_of_its_processes_has_stood_still(
    decode: HttpEngine, which: ProcessKind
) -> None:
    before = await settled(decode)
    await until(decode, stalled=False, by=0.5)
    with stopped(part_of(decode.url, which)):
        first = await until(decode, stalled=True, by=1.0)
        later = await until(decode, stalled=True, by=first.stalled_s + 1.0)
        assert later.incarnation == before.incarnation
    await until(decode, stalled=False, by=0.5)
    request = Request(seq_id=uuid.uuid4().hex, prompt=tuple(prompt_of(40)), sampling_params={"max_tokens": 3})
    assert [output async for output in decode.start_generate(request)][-1].finished
    after = await settled(decode)
    assert after.free_blocks == before.free_blocks


async def test_a_worker_that_stops_in_the_middle_of_a_step(decode: HttpEngine) -> None:
    await settled(decode)
    sampling = {"max_tokens": 60, "ignore_eos": True}
    request = Request(seq_id=uuid.uuid4().hex, prompt=tuple(prompt_of(40)), sampling_params=sampling)
    outputs = decode.start_generate(request)
    assert (await anext(outputs)).token_ids
    with stopped(part_of(decode.url, "worker")):
        await until(decode, stalled=True, by=2.0)
    tokens = [token async for output in outputs for token in output.token_ids]
    assert len(tokens) == 59
    await until(decode, stalled=False, by=0.5)
    await settled(decode)


async def test_a_busy_engine_does_not_stand_still(decode: HttpEngine) -> None:
    await settled(decode)

    async def one() -> None:
        sampling = {"max_tokens": 20, "ignore_eos": True}
        request = Request(seq_id=uuid.uuid4().hex, prompt=tuple(prompt_of(700)), sampling_params=sampling)
        assert [output async for output in decode.start_generate(request)][-1].finished

    working = [asyncio.create_task(one()) for _ in range(4)]
    longest = 0.0
    while not all(task.done() for task in working):
        longest = max(longest, (await decode.status()).stalled_s)
        await asyncio.sleep(0.1)
    await asyncio.gather(*working)
    # A step of 256 tokens takes a fraction of a second, with other work on the machine perhaps some.
    assert longest < 5.0
    await settled(decode)
