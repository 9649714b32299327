"""A process of an engine that stands still behind a healthy HTTP server: the engine says so itself.

This stops processes of its engine, so it runs on one of its own.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import psutil
import pytest

from tercet.client import HttpEngine
from tercet.protocol import EngineStatus, Request

from .conftest import running_engine, settled
from .prompts import prompt_of
from .test_failures import processes_of

# What a status may take on a machine where others compute, and how long news of a stall may take.
ANSWERS_WITHIN = 1.0
NOTICED_WITHIN = 30.0


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_engine(tmp_path_factory.mktemp("liveness"), "alive", "--max-num-batched-tokens", "128") as found:
        yield found


def parts_of(url: str) -> dict[str, psutil.Process]:
    """The engine's core, its worker and its agent: each is the child of the one before."""
    (agent,) = [each for each in processes_of(url) if "tercet.transport.agent" in " ".join(each.cmdline())]
    worker = agent.parent()
    assert worker is not None
    core = worker.parent()
    assert core is not None
    assert core.pid != processes_of(url)[0].pid
    return {"core": core, "worker": worker, "agent": agent}


@contextmanager
def stopped(process: psutil.Process) -> Generator[None]:
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


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
async def test_an_idle_engine_says_which_time_one_of_its_processes_has_stood_still(url: str, which: str) -> None:
    async with HttpEngine("alive", url) as engine:
        before = await settled(engine)
        await until(engine, stalled=False, by=0.5)
        with stopped(parts_of(url)[which]):
            first = await until(engine, stalled=True, by=1.0)
            later = await until(engine, stalled=True, by=first.stalled_s + 1.0)
            assert later.incarnation == before.incarnation
        await until(engine, stalled=False, by=0.5)
        request = Request(seq_id=uuid.uuid4().hex, prompt=tuple(prompt_of(40)), sampling_params={"max_tokens": 3})
        assert [output async for output in engine.start_generate(request)][-1].finished
        after = await settled(engine)
        assert after.free_blocks == before.free_blocks


async def test_a_worker_that_stops_in_the_middle_of_a_step(url: str) -> None:
    async with HttpEngine("alive", url) as engine:
        await settled(engine)
        sampling = {"max_tokens": 60, "ignore_eos": True}
        request = Request(seq_id=uuid.uuid4().hex, prompt=tuple(prompt_of(40)), sampling_params=sampling)
        outputs = engine.start_generate(request)
        assert (await anext(outputs)).token_ids
        with stopped(parts_of(url)["worker"]):
            await until(engine, stalled=True, by=2.0)
        tokens = [token async for output in outputs for token in output.token_ids]
        assert len(tokens) == 59
        await until(engine, stalled=False, by=0.5)
        await settled(engine)


async def test_a_busy_engine_does_not_stand_still(url: str) -> None:
    async with HttpEngine("alive", url) as engine:
        await settled(engine)

        async def one() -> None:
            sampling = {"max_tokens": 20, "ignore_eos": True}
            request = Request(seq_id=uuid.uuid4().hex, prompt=tuple(prompt_of(700)), sampling_params=sampling)
            assert [output async for output in engine.start_generate(request)][-1].finished

        working = [asyncio.create_task(one()) for _ in range(4)]
        longest = 0.0
        while not all(task.done() for task in working):
            longest = max(longest, (await engine.status()).stalled_s)
            await asyncio.sleep(0.1)
        await asyncio.gather(*working)
        # A step of 128 tokens takes a fraction of a second, with other work on the machine perhaps some.
        assert longest < 5.0
        await settled(engine)
