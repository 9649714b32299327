"""Connections to engines with Tercet's plugin, whose reports go to the fleet."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

from tercet.fleet.engine_fleet import EngineFleet
from tercet.fleet.kv_events import cache_followed
from tercet.protocol import Engine
from tercet.wire.client import Admit, HttpEngine
from tercet.wire.streams import StreamListener

Connect = Callable[[str, str, Admit], AbstractAsyncContextManager[Engine]]
"""Connects to an engine. Arguments: name, URL, and a function that raises for an engine that must not serve here."""


def connecting(
    fleet: EngineFleet, listener: StreamListener, secret: str = "", tls: ssl.SSLContext | None = None
) -> Connect:
    """Return a function that connects to an engine by name and URL, and passes its reports to ``fleet``.

    Knowledge about an engine's cache is dropped when the engine was restarted. ``secret`` and ``tls`` are those of
    :class:`~tercet.wire.client.HttpEngine`.
    """

    @asynccontextmanager
    async def connect(name: str, url: str, admit: Admit) -> AsyncGenerator[Engine]:
        report, restarted = partial(fleet.report, name), asyncio.Event()

        def note_restart() -> None:
            fleet.health.restarted(name)
            restarted.set()

        proposed, hung_up = partial(fleet.proposed, name), partial(fleet.liveness.hung_up, name)
        async with (
            HttpEngine(name, url, listener, report, admit, note_restart, secret, tls, proposed, hung_up) as engine,
            cache_followed(name, url, engine, fleet.knowledge, restarted),
        ):
            yield engine

    return connect
