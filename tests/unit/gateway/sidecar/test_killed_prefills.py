"""Engines that prefill are killed or stopped in the middle of it, 20 times (in full: 100): no request fails."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack

import aiohttp
import pytest

from tercet_gateway.gateway_settings import SidecarConfig
from tercet_gateway.sidecar import sidecar
from tercet_lab.sim.sim_server import serving
from tests.long_runs import FULL
from tests.longest_wait import until

from .engines import BUDGET, HOST, LOOPBACK, PREFILLER, Engine, config_of, engine, prompt_of

pytestmark = pytest.mark.processes

LANES, ROUNDS = 10, 10 if FULL else 2
TOKENS = 4
# What a request may take in all: what others get to prefill, and twice what it takes to do all of it here.
WITHIN = BUDGET.timeout_s + 10.0


async def asked(session: aiohttp.ClientSession, url: str, number: int, named: str) -> str:
    """How a request was served, whose answer must be whole, and in time."""
    body = {"model": "m", "prompt": prompt_of(number), "max_tokens": TOKENS}
    headers = {PREFILLER: named, "x-tercet-trace": "true"}
    async with asyncio.timeout(WITHIN), session.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
        said = await answer.json()
    assert answer.status == 200, said
    assert said["usage"]["completion_tokens"] == TOKENS
    assert said["choices"][0]["finish_reason"] == "length"
    return said["tercet"]["program"]


async def lose(prefill: Engine, number: int) -> bool:
    """Kill it or stop it; whether it can go on later."""
    await until(prefill.is_busy)
    await asyncio.sleep(0.02 * (number % 7))
    stops = number % 2 == 0
    prefill.signal(signal.SIGSTOP if stops else signal.SIGKILL)
    return stops


async def test_all_requests_succeed() -> None:
    served = list[str]()
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        config = config_of("d")
        decode = await stack.enter_async_context(serving(config))
        outside = SidecarConfig(
            engine=config.url, port=0, prefill_hosts=LOOPBACK,
            prefill_timeout=BUDGET.timeout_s, prefill_stuck_after=BUDGET.stuck_after_s,
        )  # fmt: skip
        beside = f"http://{HOST}:{(await stack.enter_async_context(sidecar(outside))).port}"

        async def lane(of: int) -> None:
            for turn in range(ROUNDS):
                number = of * ROUNDS + turn
                url = config.url if number % 4 < 2 else beside
                async with engine(f"p{number}", session, slower=20) as prefill:
                    asking = asyncio.create_task(asked(session, url, number, prefill.address))
                    comes_back = await lose(prefill, number)
                    served.append(await asking)
                    if comes_back:
                        prefill.signal(signal.SIGCONT)
                        await until(prefill.is_empty)

        async with asyncio.TaskGroup() as group:
            for of in range(LANES):
                group.create_task(lane(of))
        assert len(served) == LANES * ROUNDS
        assert served == ["disaggregated -> data_parallel"] * LANES * ROUNDS

        async def is_empty() -> bool:
            status = await decode.status()
            return not (status.running or status.waiting or status.leases or status.sends)

        await until(is_empty)
