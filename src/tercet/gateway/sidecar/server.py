"""Puts ``tercet sidecar`` together: its leg to engines that prefill, and the way to its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from ssl import SSLContext
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client.exposition import generate_latest

from tercet.aio import signals_to
from tercet.client import HttpEngine, engine_tls, prefill_metrics
from tercet.client.http_engine import KEEPALIVE_SECONDS
from tercet.client.prefill_attempts import PrefillAttempts
from tercet.client.remote_prefill import RemotePrefill
from tercet.gateway.bounded_server import BoundedRunner
from tercet.gateway.served_certificate import ServedCertificate
from tercet.gateway.sidecar.prefill_legs import NixlLeg, PrefillLeg, TercetLeg
from tercet.gateway.sidecar.proxy import Proxy
from tercet.protocol import BadRequest, ShuttingDown
from tercet.settings import SidecarConfig
from tercet.settings.log_lines import log_to_stderr
from tercet.vllm_plugin.engine.server_access import is_loopback

logger = logging.getLogger("tercet.gateway")
LAST_SECONDS = 30.0
"""For requests that run when it is told to stop; a second signal ends them."""
ERROR_SECONDS = 2.0
"""For those that are given up, to get their errors to their clients; then connections are closed, read or not."""
END_SECONDS = LAST_SECONDS + ERROR_SECONDS
DRAIN_SECONDS = 10.0
"""For KV that is fetched for clients who have left."""
METRICS = "/sidecar/metrics"


def serve(config: SidecarConfig) -> None:
    """Run the sidecar until SIGINT or SIGTERM.

    The first signal has it finish what runs, any other one ends it at once.
    """
    import uvloop

    log_to_stderr(config.log_level, config.log_format)
    uvloop.run(_serve(config))


async def _serve(config: SidecarConfig) -> None:
    stopped, hurried = asyncio.Event(), asyncio.Event()
    with signals_to(stopped.set, hurried.set):
        async with sidecar(config) as server:
            logger.info("serves %s on port %d", config.engine, server.port)
            await stopped.wait()
            await server.finish(LAST_SECONDS, hurried)


@dataclass
class SidecarServer:
    """A sidecar that serves: its port, and its end."""

    port: int
    _proxy: Proxy
    _runner: web.AppRunner
    _leg: PrefillLeg

    async def finish(self, seconds: float, hurried: asyncio.Event) -> None:
        """Take nothing new, and return when nothing runs any more.

        What still runs after so many seconds, or when ``hurried`` is set, ends with an error; a client that has not
        read its error two seconds later is not waited for.
        """
        giving_up = asyncio.create_task(self._give_up(seconds, hurried))
        try:
            await self._runner.cleanup()
            await _unless(hurried, self._leg.finish(DRAIN_SECONDS))
        finally:
            giving_up.cancel()

    async def _give_up(self, seconds: float, hurried: asyncio.Event) -> None:
        await _unless(hurried, asyncio.sleep(seconds))
        self._proxy.give_up(ShuttingDown("this sidecar is shutting down, and the request was not waited for"))
        await asyncio.sleep(ERROR_SECONDS)
        for connection in self._runner.server.connections if self._runner.server is not None else ():
            if connection.transport is not None:
                connection.transport.abort()  # close() would wait until all is read


async def _unless(hurried: asyncio.Event, work: Coroutine[Any, Any, object]) -> None:
    """Until the ``work`` is done, or there is no time for it any more."""
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
    """Serve while entered.

    Raises :class:`~tercet.protocol.BadRequest` for a port that is taken, and a certificate that cannot be used.
    """
    tls = engine_tls(config.engine_tls.ca, config.engine_tls.cert, config.engine_tls.key)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS, ssl=tls or True)
    async with AsyncExitStack() as stack:
        session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        await stack.enter_async_context(session)
        leg = await stack.enter_async_context(_leg(config, session, tls))
        proxy = Proxy(config, session, leg, config.allowed_prefillers(), is_loopback(config.host))
        app = web.Application(client_max_size=config.max_request_bytes)
        app.add_routes([web.get(METRICS, _metrics), web.route("*", "/{path:.*}", proxy.handle)])
        # A client that goes away cancels its handler, and with it what runs for it.
        runner = BoundedRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=END_SECONDS)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        try:
            await web.TCPSite(runner, config.host, config.port, ssl_context=_shown(config)).start()
        except OSError as error:
            raise BadRequest(
                f"port: nothing can listen on {config.host}:{config.port}: {error.strerror}", "port"
            ) from error
        yield SidecarServer(int(runner.addresses[0][1]), proxy, runner, leg)


def _shown(config: SidecarConfig) -> SSLContext | None:
    """What clients are shown, where they speak TLS."""
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

        async def weights() -> str:
            return (await engine.status()).fingerprint

        async with RemotePrefill(attempts, weights, config.secret, https, tls) as remote:
            yield TercetLeg(engine, session, remote, config.stuck_after_s)


async def _metrics(_: web.Request) -> web.Response:
    body = b"".join(generate_latest(each) for each in prefill_metrics.ALL)
    return web.Response(body=body, content_type="text/plain")
