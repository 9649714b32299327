"""The KV agent of an engine is stopped while the engine decodes: its streams go on, and what it holds comes back.

It stops processes of its fleet, so it has one of its own.
"""

from __future__ import annotations

import asyncio
import signal
import time
import uuid
from collections.abc import Iterator
from itertools import pairwise

import psutil
import pytest

from tercet.client import HttpEngine
from tercet.protocol import Request, TercetError

from .conftest import ENGINE_ARGS, Fleet, settled, start_fleet
from .prompts import prompt_of
from .test_failures import processes_of, send_signal

TOKENS = 150


@pytest.fixture
def breakable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    running = start_fleet(tmp_path_factory.mktemp("stopped"), "--program-arg", "min_send=1", "--", *ENGINE_ARGS)
    yield running
    running.stop()


def agents_of(url: str) -> list[psutil.Process]:
    return [process for process in processes_of(url) if "tercet.transport.agent" in process.cmdline()]


def request(length: int, max_tokens: int = TOKENS, seed: int = 0) -> Request:
    sampling = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    return Request(seq_id=uuid.uuid4().hex, prompt=tuple(prompt_of(length, seed=seed)), sampling_params=sampling)


async def read(engine: HttpEngine, sequence: Request, times: list[float]) -> list[int]:
    found: list[int] = []
    async for output in engine.start_generate(sequence):
        found += output.token_ids
        times.append(time.monotonic())
    return found


async def test_streams_go_on_and_blocks_come_back(breakable: Fleet) -> None:
    async with (
        HttpEngine("prefill-0", breakable.engine_url("prefill")) as prefill,
        HttpEngine("decode-0", breakable.engine_url("decode")) as decode,
    ):
        stream, adopting, released = request(60), request(300, 8, seed=1), request(200, seed=2)
        calm, calm_adopting = await read(prefill, stream, []), await read(prefill, adopting, [])
        await settled(decode)
        agents = agents_of(decode.url)
        assert agents
        times: list[float] = []
        reading = asyncio.create_task(read(decode, stream, times))
        while len(times) < 5:
            await asyncio.sleep(0.01)
        try:
            async with decode.prep_recv(released), decode.prep_recv(adopting):
                send_signal(agents, signal.SIGSTOP)
                with pytest.raises(TercetError):
                    async with decode.prep_recv(request(100, seed=3)):
                        pytest.fail("no agent has opened it")
                # Nobody says that no agent writes any more, so it computes by itself.
                assert await asyncio.wait_for(read(decode, adopting, []), 60) == calm_adopting
            assert await asyncio.wait_for(reading, 60) == calm
            assert (await decode.status()).leases == 3
        finally:
            send_signal(agents, signal.SIGCONT)
        await settled(decode)
    gaps = [after - before for before, after in pairwise(times)]
    assert max(gaps) < 10, "no step waits for an agent that may never answer"
