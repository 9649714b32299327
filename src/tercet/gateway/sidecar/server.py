"""Puts ``tercet sidecar`` together: its leg to engines that prefill, and the way to its own."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from ssl import SSLContext

import aiohttp
from aiohttp import web
from prometheus_client.exposition import generate_latest

from tercet.client import HttpEngine, engine_tls, prefill_metrics
from tercet.client.http_engine import KEEPALIVE_SECONDS
from tercet.client.prefill_attempts import PrefillAttempts
from tercet.client.remote_prefill import RemotePrefill
from tercet.gateway.sidecar.prefill_legs import NixlLeg, PrefillLeg, TercetLeg
from tercet.gateway.sidecar.proxy import Proxy
from tercet.protocol import BadRequest
from tercet.settings import SidecarConfig
from tercet.settings.log_lines import log_to_stderr
from tercet.vllm_plugin.engine.server_access import is_loopback

logger = logging.getLogger("tercet.gateway")
LAST_SECONDS = 30.0
"""For requests that run when it is told to stop; a second signal ends them."""
DRAIN_SECONDS = 10.0
METRICS = "/sidecar/metrics"


def serve(config: SidecarConfig) -> None:
    """Run the sidecar until SIGINT or SIGTERM."""
    import uvloop

    log_to_stderr(config.log_level, config.log_format)
    uvloop.run(_serve(config))


async def _serve(config: SidecarConfig) -> None:
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stopped.set)
    async with sidecar(config) as port:
        logger.info("serves %s on port %d", config.engine, port)
        await stopped.wait()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)


@asynccontextmanager
async def sidecar(config: SidecarConfig) -> AsyncGenerator[int]:
    """Serve while entered, on the port that is given.

    Raises :class:`~tercet.protocol.BadRequest` for one that is taken.
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
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=LAST_SECONDS)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        try:
            await web.TCPSite(runner, config.host, config.port).start()
        except OSError as error:
            raise BadRequest(
                f"port: nothing can listen on {config.host}:{config.port}: {error.strerror}", "port"
            ) from error
        yield int(runner.addresses[0][1])


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
            await leg.draining.wait(DRAIN_SECONDS)
        return
    async with HttpEngine(url, url, secret=config.secret, tls=tls) as engine:

        async def weights() -> str:
            return (await engine.status()).fingerprint

        async with RemotePrefill(attempts, weights, config.secret, https, tls) as remote:
            yield TercetLeg(engine, session, remote, config.stuck_after_s)


async def _metrics(_: web.Request) -> web.Response:
    body = b"".join(generate_latest(each) for each in prefill_metrics.ALL)
    return web.Response(body=body, content_type="text/plain")
