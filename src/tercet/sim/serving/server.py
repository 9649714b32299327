"""One simulated engine as a server process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web

from tercet.sim.engine import SimEngine
from tercet.sim.options import EngineOptions
from tercet.sim.profile import Profile
from tercet.sim.serving.openai import OpenAI
from tercet.sim.serving.peers import HttpNetwork
from tercet.sim.serving.verbs import Verbs, errors_as_json

# Prompts of a million tokens are a few megabytes of JSON.
LONGEST_BODY = 64 * 1024 * 1024


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated engine and where it listens.

    ``url`` is where other engines reach it. ``model`` is the name in the OpenAI API, ``root`` a checkpoint whose
    tokenizer clients may use, if there is one.
    """

    name: str
    profile: Profile
    options: EngineOptions = EngineOptions(stream_every=1)
    host: str = "127.0.0.1"
    port: int
    url: str
    model: str
    root: str | None = None


@asynccontextmanager
async def serving(config: ServerConfig) -> AsyncGenerator[SimEngine]:
    """Serve while entered; raises ``OSError`` when the address is taken."""
    # What a call costs is what it costs here.
    profile = msgspec.structs.replace(config.profile, call=0.0)
    async with HttpNetwork(profile.transfer) as network:
        engine = SimEngine(config.name, profile, network, config.options, address=config.url)
        verbs = Verbs(engine)
        app = web.Application(middlewares=[errors_as_json], client_max_size=LONGEST_BODY)
        app.add_routes([*verbs.routes(), *OpenAI(engine, config.model, config.root).routes()])
        # A client that goes away cancels its handler, which gives back what it took.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, config.host, config.port).start()
            yield engine
        finally:
            await verbs.relay.close()
            await runner.cleanup()


def serve(config: ServerConfig) -> None:
    """Serve until SIGINT or SIGTERM."""
    import uvloop

    uvloop.run(_serve(config))


async def _serve(config: ServerConfig) -> None:
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    async with serving(config):
        await stopped.wait()
