"""Services beside a fleet are killed, and then the fleet's router: no request ends with a service, and all go on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tercet.cluster.ports import free_ports
from tercet.settings.fleet_settings import Objectives
from tests.longest_wait import LONGEST_WAIT_S
from tests.unit.cluster.test_router_restarts import kill_router, simulated, until_restarted
from tests.unit.cluster.whole_streams import read_whole, until
from tests.warm import start_guarded

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600), pytest.mark.usefixtures("forked")]


class Service:
    """A command of Tercet that is ready when its log has a text."""

    def __init__(self, log: Path, ready: str, *command: str) -> None:
        self._log, self._ready = log, ready
        self._argv = [sys.executable, "-m", "tercet.cli", *command]
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        with self._log.open("wb") as written:
            self.process = start_guarded(self._argv, dict(os.environ), written)
        await until(lambda: self._ready in self._log.read_text())

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@asynccontextmanager
async def killed_at_last(service: Service) -> AsyncGenerator[Service]:
    try:
        await service.start()
        yield service
    finally:
        if service.runs:
            service.kill()


async def until_it_passes_requests_on(client: aiohttp.ClientSession, url: str) -> None:
    """Requests are refused (503) until the model router has polled the restarted router."""
    body = {"model": "smollm2", "prompt": "one two", "max_tokens": 2}
    async with asyncio.timeout(LONGEST_WAIT_S):
        while True:
            async with client.post(f"{url}/v1/completions", json=body) as response:
                if response.status == 200:
                    return
                assert response.status == 503, await response.text()
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("who", ["planner", "model-router"])
async def test_a_killed_service_costs_no_running_request_and_a_new_start_works(tmp_path: Path, who: str) -> None:
    said: list[str] = []
    (port,) = free_ports("127.0.0.1", 1)
    async with (
        simulated(tmp_path, said, objectives=Objectives(ttft=1.0, tpot=0.05)) as fleet,
        aiohttp.ClientSession() as client,
    ):
        commands = {
            "planner": ("planning for", "--url", fleet.url),
            "model-router": ("serves", "--router", fleet.url, "--port", str(port)),
        }
        ready, *flags = commands[who]
        async with killed_at_last(Service(tmp_path / f"{who}.log", ready, who, *flags)) as service:
            begun = asyncio.Event()
            stream = asyncio.create_task(read_whole(client, fleet.url, "one two", 600, begun))
            await begun.wait()
            service.kill()
            await stream
            await service.start()
            kill_router(fleet)
            await until_restarted(said)
            assert service.runs, "it waits for its router"
            if who == "model-router":
                await until_it_passes_requests_on(client, f"http://127.0.0.1:{port}")
