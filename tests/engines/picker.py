"""`tercet epp` as a process over real engines, as Envoy and as Prometheus see it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import msgspec

from ..conformance.envoy_side import PREFILLER, EnvoySide, Verdict
from .commands import SECONDS, counted, tercet_process
from .conftest import free_port


class Picker:
    """One that runs."""

    def __init__(self, envoy: EnvoySide, url: str) -> None:
        self._envoy = envoy
        self._url = url

    async def ask(self, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Verdict:
        """What it says of one request."""
        verdict = await self._envoy.request(msgspec.json.encode(body), headers=headers)
        assert not verdict.status, verdict.refusal
        return verdict

    async def splits(self, body: Mapping[str, Any]) -> bool:
        """Whether it would have another engine prefill."""
        return PREFILLER in (await self.ask(body)).headers

    async def picks(self, many: int = 1) -> list[str]:
        """The first endpoint of each of so many requests that have no prefix in common."""
        bodies = [{"model": "m", "prompt": f"{time.monotonic_ns()} x" * 8} for _ in range(many)]
        return [f"http://{(await self.ask(body)).endpoints[0]}" for body in bodies]

    def says(self, name: str, **labels: str) -> float:
        """One of its numbers."""
        return counted(self._url, name, **labels)

    async def until_ready(self, engines: int) -> None:
        """It picks among so many."""
        async with asyncio.timeout(SECONDS):
            while self.says("inference_pool_ready_pods") != engines:
                await asyncio.sleep(0.1)


@asynccontextmanager
async def picking(tmp: Path, engines: int, *flags: str) -> AsyncGenerator[Picker]:
    """One with these flags, from when it picks among so many engines."""
    port, metrics_port = free_port(), free_port()
    url = f"http://127.0.0.1:{metrics_port}"
    ports = f"--port={port}", f"--metrics-port={metrics_port}"
    with tercet_process(tmp / "epp.log", f"{url}/metrics", "epp", *ports, *flags):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            made = Picker(EnvoySide(channel), url)
            await made.until_ready(engines)
            yield made
