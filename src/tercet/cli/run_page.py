"""Server of the page of a recorded run, on this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import socket

import uvicorn

from tercet.aio import signals_to
from tercet.cli.terminal import say
from tercet.router.admin.admin_server import QuietServer
from tercet.router.page.page_app import RecordedPage

HOST = "127.0.0.1"
CLOSE_SECONDS = 1


def show_run(result: bytes, port: int = 0) -> None:
    """Serve the page of ``result`` at ``port`` (0: any free port) until a signal; print its URL."""
    with socket.create_server((HOST, port)) as listening:
        asyncio.run(_serve(result, listening))


async def _serve(result: bytes, listening: socket.socket) -> None:
    config = uvicorn.Config(
        RecordedPage(result), log_level="warning", access_log=False, lifespan="off",
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )  # fmt: skip
    server = QuietServer(config)
    stopped = asyncio.Event()
    with signals_to(stopped.set, stopped.set):
        serving = asyncio.ensure_future(server.serve([listening]))
        if await server.started_by(serving):
            say(f"open http://{HOST}:{listening.getsockname()[1]}/ to see the run; Ctrl-C ends it")
            await stopped.wait()
        server.should_exit = True
        await serving
