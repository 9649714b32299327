"""The KV agent of an engine is stopped while the engine decodes: its streams go on, and what it holds comes back."""

from __future__ import annotations

import asyncio
import signal
import time
import uuid
from itertools import pairwise

import pytest

from tercet.protocol import Request, TercetError
from tercet.wire.client import HttpEngine

from .conftest import settled
from .processes import part_of, send_signal
from .prompts import prompt_of

pytestmark = pytest.mark.verifies("failures of engines")

TOKENS = 150


def request(length: int, max_tokens: int = TOKENS, seed: int = 0) -> Request:
    sampling = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    return Request(
        seq_id=uuid.uuid4().hex,
        prompt=tuple(prompt_of(length, seed=seed)),
        sampling_params=sampling,
        cache_salt=uuid.uuid4().hex,
    )


async def read(engine: HttpEngine, sequence: Request, times: list[float]) -> list[int]:
    found: list[int] = []
    async for output in engine.start_generate(sequence):
        found += output.token_ids
        times.append(time.monotonic())
    return found


async def test_streams_go_on_and_blocks_come_back(prefill: HttpEngine, decode: HttpEngine) -> None:
    stream, adopting, released = request(60), request(300, 8, seed=1), request(200, seed=2)
    calm, calm_adopting = await read(prefill, stream, []), await read(prefill, adopting, [])
    await settled(decode)
    agents = part_of(decode.url, "agent")
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
