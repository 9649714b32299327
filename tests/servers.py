"""How tests start a server in their own process: an aiohttp application, an ASGI application, or a server in a thread.

Each listens on a free port of 127.0.0.1, and what it yields is its URL. Processes are started by tests/warm.py and by
tests/engines/conftest.py.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from http.server import HTTPServer
from typing import Any

import uvicorn
from aiohttp import web

HOST = "127.0.0.1"
# How often a server of the standard library looks whether it shall stop; its default is half a second.
SHUTDOWN_POLL_S = 0.01


@asynccontextmanager
async def served(app: web.Application, *, port: int = 0, tls: ssl.SSLContext | None = None) -> AsyncGenerator[str]:
    """Serves an aiohttp application; its handlers are cancelled when their client leaves."""
    running = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await running.setup()
    try:
        await web.TCPSite(running, HOST, port, ssl_context=tls).start()
        yield f"http{'s' if tls else ''}://{HOST}:{running.addresses[0][1]}"
    finally:
        await running.cleanup()


@asynccontextmanager
async def served_asgi(app: Any, **options: Any) -> AsyncGenerator[str]:
    """Serves an ASGI application; ``options`` are uvicorn's."""
    server = uvicorn.Server(uvicorn.Config(app, host=HOST, port=0, log_level="error", lifespan="off", **options))
    running = asyncio.create_task(server.serve())
    try:
        while not server.started:
            if running.done():
                running.result()
                raise RuntimeError("the server ended before it listened")
            await asyncio.sleep(0.002)
        yield f"http://{HOST}:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await running


@contextmanager
def served_in_thread(server: HTTPServer) -> Generator[str]:
    """Serves with a server of the standard library, for a test that blocks."""
    thread = threading.Thread(target=server.serve_forever, args=(SHUTDOWN_POLL_S,), daemon=True)
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
