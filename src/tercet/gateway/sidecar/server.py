"""Puts ``tercet sidecar`` together: its leg to engines that prefill, and the way to its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from ssl import SSLContext

import aiohttp
from aiohttp import web
from prometheus_client.exposition import generate_latest

from tercet.aio import signals_to
from tercet.client import HttpEngine, engine_tls, prefill_metrics
from tercet.client.http_engine import KEEPALIVE_SECONDS
from tercet.client.prefill_attempts import PrefillAttempts
from tercet.client.remote_prefill import RemotePrefill
from tercet.gateway.sidecar.prefill_legs import NixlLeg, PrefillLeg, TercetLeg
from tercet.gateway.sidecar.proxy import Proxy
from tercet.protocol import BadRequest, ShuttingDown
from tercet.settings import SidecarConfig
from tercet.settings.log_lines import log_to_stderr
from tercet.vllm_plugin.engine.server_access import is_loopback

logger = logging.getLogger("tercet.gateway")
LAST_SECONDS = 30.0
"""For requests that run when it is told to stop; a second signal ends them."""
END_SECONDS = LAST_SECONDS + 2.0
"""Until no connection is waited for any more: those that are given up have got their errors to their clients."""
DRAIN_SECONDS = 10.0
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

    async def finish(self, seconds: float, hurried: asyncio.Event) -> None:
        """Take nothing new, and return when nothing runs any more.

        What still runs after so many seconds, or when ``hurried`` is set, ends with an error.
        """
        giving_up = asyncio.create_task(self._give_up(seconds, hurried))
        try:
            await self._runner.cleanup()
        finally:
            giving_up.cancel()

    async def _give_up(self, seconds: float, hurried: asyncio.Event) -> None:
        try:
            async with asyncio.timeout(seconds):
                await hurried.wait()
        except TimeoutError:
            pass
        self._proxy.give_up(ShuttingDown("this sidecar is shutting down, and the request was not waited for"))


@asynccontextmanager
async def sidecar(config: SidecarConfig) -> AsyncGenerator[SidecarServer]:
    """Serve while entered.

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
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=END_SECONDS)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        try:
            await web.TCPSite(runner, config.host, config.port).start()
        except OSError as error:
            raise BadRequest(
                f"port: nothing can listen on {config.host}:{config.port}: {error.strerror}", "port"
            ) from error
        yield SidecarServer(int(runner.addresses[0][1]), proxy, runner)


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
