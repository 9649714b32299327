"""Connections to engines without Tercet's plugin, whose load is read from their ``/metrics``."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from urllib.parse import urlsplit

from tercet.fleet.connecting import Connect
from tercet.fleet.engine_fleet import EngineFleet
from tercet.fleet.kv_events import cache_followed
from tercet.protocol import Engine, KVEvents
from tercet.protocol.hosts import bracketed
from tercet.wire.client import Admit
from tercet.wire.client.scraped_engine import ScrapedEngine


def scraping(
    fleet: EngineFleet,
    interval: float,
    kv_events_port: int | None = None,
    tls: ssl.SSLContext | None = None,
) -> Connect:
    """Return a function that connects to an engine and reads its ``/metrics`` every ``interval`` seconds.

    With ``kv_events_port`` each engine publishes vLLM's KV events on this port of its host. ``tls`` is that of
    :class:`~tercet.wire.client.HttpEngine`. The page needs no key on any vLLM server, so none is sent.
    """

    @asynccontextmanager
    async def connect(name: str, url: str, admit: Admit) -> AsyncGenerator[Engine]:
        restarted = asyncio.Event()

        def note_restart() -> None:
            fleet.health.restarted(name)
            restarted.set()

        events = None if kv_events_port is None else KVEvents(f"tcp://{_host_of(url)}:{kv_events_port}")
        reported = partial(fleet.report, name)
        async with (
            ScrapedEngine(name, url, interval, reported, note_restart, tls, events) as engine,
            cache_followed(name, url, engine, fleet.knowledge, restarted),
        ):
            yield engine

    return connect


def _host_of(url: str) -> str:
    return bracketed(urlsplit(url).hostname or "127.0.0.1")
