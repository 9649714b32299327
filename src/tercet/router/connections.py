"""Connections to engines: the verbs by HTTP, tokens and reports by the engine's stream, KV events by their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from tercet.client import HttpEngine
from tercet.fleet import EngineFleet
from tercet.protocol import Engine, EngineLoad
from tercet.router.kv_events import follow_cache
from tercet.streams import Listener

Connect = Callable[[str, str], AbstractAsyncContextManager[Engine]]


def connecting(fleet: EngineFleet, listener: Listener) -> Connect:
    """How to connect to an engine by its name and URL, so that ``fleet`` hears what it reports."""

    @asynccontextmanager
    async def connect(name: str, url: str) -> AsyncGenerator[Engine]:
        def report(load: EngineLoad) -> None:
            fleet.report(name, load)

        async with HttpEngine(name, url, listener=listener, on_load=report) as engine:
            following = asyncio.create_task(follow_cache(name, url, engine, fleet.knowledge))
            try:
                yield engine
            finally:
                following.cancel()
                await asyncio.wait({following})

    return connect
