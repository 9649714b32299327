"""Simulated engines behind HTTP: in this process, and in processes of their own, which can be killed and stopped."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from tercet.cluster.ports import free_ports
from tercet.settings.process_settings import PrefillBudget
from tercet_lab.sim import EngineOptions, load_profile
from tercet_lab.sim.sim_server import ServerConfig, serve
from tests.longest_wait import LONGEST_WAIT_S, until

HOST = "127.0.0.1"
LOOPBACK = "127.0.0.1:*"
PROFILE = load_profile("smollm2-135m-cpu")
BUDGET = PrefillBudget(timeout_s=20.0, stuck_after_s=0.5)
PREFILLER = "x-prefiller-host-port"
# Engines of their own begin in a tenth of a second: what they need is imported once.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tercet_lab.sim.sim_server"])


def config_of(name: str, port: int | None = None, **more: Any) -> ServerConfig:
    port = port or free_ports(HOST, 1)[0]
    told: dict[str, Any] = {"prefill_hosts": LOOPBACK, "prefill_budget": BUDGET, **more}
    return ServerConfig(name=name, profile=PROFILE, port=port, url=f"http://{HOST}:{port}", model="m", **told)


def prompt_of(number: int, words: int = 200) -> str:
    """A prompt that begins as no other one, of so many tokens."""
    return f"number{number} " + "word " * (words - 1)


class Engine:
    """An engine in a process of its own."""

    def __init__(self, config: ServerConfig, session: aiohttp.ClientSession) -> None:
        self.url = config.url
        self.address = config.url.removeprefix("http://")
        self._session = session
        self._process = _processes.Process(target=serve, args=(config,), daemon=True)

    async def start(self) -> None:
        self._process.start()
        await until(self._answers)

    async def status(self) -> dict[str, Any]:
        async with self._session.get(f"{self.url}/tercet/v1/status") as answer:
            return await answer.json()

    async def _answers(self) -> bool:
        try:
            await self.status()
        except aiohttp.ClientError:
            return False
        return True

    async def is_busy(self) -> bool:
        status = await self.status()
        return bool(status["running"] or status["sends"])

    async def is_empty(self) -> bool:
        status = await self.status()
        return not (status["running"] or status["waiting"] or status["sends"] or status["leases"])

    def signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def stop(self) -> None:
        if self._process.is_alive():
            self.signal(signal.SIGKILL)
        self._process.join(LONGEST_WAIT_S)


@asynccontextmanager
async def engine(name: str, session: aiohttp.ClientSession, slower: float = 1.0) -> AsyncGenerator[Engine]:
    """An engine that prefills so many times slower than others."""
    made = Engine(config_of(name, options=EngineOptions(stream_every=1, prefill_scale=slower)), session)
    try:
        await made.start()
        yield made
    finally:
        made.stop()
