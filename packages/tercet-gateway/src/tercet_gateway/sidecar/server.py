"""The assembly of ``tercet sidecar``: the leg for prefill engines, and the proxy of its decode engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from ssl import SSLContext
from typing import Any

import aiohttp
from prometheus_client.exposition import generate_latest

from tercet.aio import signals_to
from tercet.aio.descriptors import descriptors_watched
from tercet.protocol import BadRequest, Revision, ShuttingDown
from tercet.protocol.errors import error_body
from tercet.settings.log_lines import log_to_stderr
from tercet.wire.client import HttpEngine, engine_tls, remote_prefill
from tercet.wire.client.engine_calls import KEEPALIVE_SECONDS
from tercet.wire.client.passing import Origin
from tercet.wire.client.remote_prefill import PrefillAttempts, RemotePrefill
from tercet.wire.exported_spans import exporting_spans
from tercet.wire.serving.server_access import is_loopback
from tercet_gateway.served_certificate import ServedCertificate
from tercet_gateway.sidecar.listener import ClientCall, Listener
from tercet_gateway.sidecar.prefill_legs import NixlLeg, PrefillLeg, TercetLeg
from tercet_gateway.sidecar.proxy import Proxy
from tercet_gateway.sidecar.sidecar_config import SidecarConfig

logger = logging.getLogger("tercet.gateway")
LAST_SECONDS = 30.0
"""Seconds for running requests after the stop signal; a second signal ends them."""
ERROR_SECONDS = 2.0
"""Seconds to send errors of ended requests to their clients; then connections are closed."""
DRAIN_SECONDS = 10.0
"""Seconds to fetch KV for clients that have left."""
METRICS = "/sidecar/metrics"
CONNECT_SECONDS = 5.0
MOST_ANSWER_HEAD = 1024 * 1024
"""Largest head of the engine's answers, in bytes."""


def serve(config: SidecarConfig) -> None:
    """Run the sidecar until SIGINT or SIGTERM.

    After the first signal it finishes running requests; a second one ends it at once.
    """
    import uvloop

    log_to_stderr(config.log_level, config.log_format)
    with exporting_spans("tercet-sidecar"):
        uvloop.run(_serve(config))


async def _serve(config: SidecarConfig) -> None:
    stopped, hurried = asyncio.Event(), asyncio.Event()
    with signals_to(stopped.set, hurried.set):
        async with descriptors_watched(), sidecar(config) as server:
            logger.info("proxying %s on port %d", config.engine, server.port)
            await stopped.wait()
            await server.finish(LAST_SECONDS, hurried)


@dataclass
class SidecarServer:
    """A serving sidecar: its port, and its shutdown."""

    port: int
    _proxy: Proxy
    _listener: Listener
    _leg: PrefillLeg

    async def finish(self, seconds: float, hurried: asyncio.Event) -> None:
        """Accept no new requests, and return when all requests have ended.

        Requests that still run after ``seconds``, or when ``hurried`` is set, end with an error; a client has two
        seconds to read it.
        """
        giving_up = asyncio.create_task(self._give_up(seconds, hurried))
        try:
            await self._listener.finish()
            await _unless(hurried, self._leg.finish(DRAIN_SECONDS))
        finally:
            giving_up.cancel()

    async def _give_up(self, seconds: float, hurried: asyncio.Event) -> None:
        await _unless(hurried, asyncio.sleep(seconds))
        self._proxy.give_up(ShuttingDown("this sidecar is shutting down, and ended the request"))
        await asyncio.sleep(ERROR_SECONDS)
        self._listener.abort()


async def _unless(hurried: asyncio.Event, work: Coroutine[Any, Any, object]) -> None:
    """Wait until the ``work`` is done, or ``hurried`` is set."""
    tasks = {asyncio.ensure_future(work), asyncio.ensure_future(hurried.wait())}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def require_usable(config: SidecarConfig) -> None:
    """Raise :class:`~tercet.protocol.BadRequest` for certificates that cannot be used."""
    engine_tls(config.engine_tls.ca, config.engine_tls.cert, config.engine_tls.key)
    _shown(config)


@asynccontextmanager
async def sidecar(config: SidecarConfig) -> AsyncGenerator[SidecarServer]:
    """Serve in this context.

    Raises :class:`~tercet.protocol.BadRequest` for a port in use, and for a certificate that cannot be used.
    """
    tls = engine_tls(config.engine_tls.ca, config.engine_tls.cert, config.engine_tls.key)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS, ssl=tls or True)
    async with AsyncExitStack() as stack:
        session = aiohttp.ClientSession(connector=connector, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar())
        await stack.enter_async_context(session)
        leg = await stack.enter_async_context(_leg(config, session, tls))
        origin = Origin(
            config.engine, tls, keep_alive_s=KEEPALIVE_SECONDS, connect_s=CONNECT_SECONDS, max_head=MOST_ANSWER_HEAD
        )
        stack.callback(origin.close)
        proxy = Proxy(config, origin, leg, config.allowed_prefillers(), is_loopback(config.host))

        async def handle(http: ClientCall) -> None:
            if http.path == METRICS and http.method in (b"GET", b"HEAD"):
                body = b"".join(generate_latest(each) for each in remote_prefill.METRICS)
                await http.answer(HTTPStatus.OK, body, "text/plain")
            else:
                await proxy.handle(http)

        listener = Listener(handle, error_body)
        stack.push_async_callback(listener.close)
        try:
            await listener.start(config.host, config.port, _shown(config))
        except OSError as error:
            raise BadRequest(f"port: cannot listen on {config.host}:{config.port}: {error.strerror}", "port") from error
        yield SidecarServer(listener.port, proxy, listener, leg)


def _shown(config: SidecarConfig) -> SSLContext | None:
    """Return the TLS context for clients; None without TLS."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    return ServedCertificate(Path(config.tls_cert), Path(config.tls_key)).context()


@asynccontextmanager
async def _leg(
    config: SidecarConfig, session: aiohttp.ClientSession, tls: SSLContext | None
) -> AsyncGenerator[PrefillLeg]:
    attempts = PrefillAttempts(config.prefill_budget)
    url = config.engine.rstrip("/")
    https = url.startswith("https:")
    if config.connector == "nixl":
        leg = NixlLeg(url, session, attempts, https)
        try:
            yield leg
        finally:
            await leg.draining.close()
        return
    async with HttpEngine(url, url, secret=config.secret, tls=tls) as engine:

        async def ours() -> Revision:
            return (await engine.status()).revision

        async with RemotePrefill(attempts, ours, config.secret, https, tls) as remote:
            yield TercetLeg(engine, session, remote, config.stuck_after_s)
