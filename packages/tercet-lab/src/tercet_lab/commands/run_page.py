"""The page of a recorded run, without a fleet, served until Ctrl-C; only this machine may open it."""

from __future__ import annotations

import asyncio
import socket

import msgspec
from starlette.types import Receive, Scope, Send

from tercet import __version__
from tercet.aio.tasks import signals_to
from tercet.cli.terminal import say
from tercet.protocol import MethodNotAllowed, TercetError
from tercet.router.page.page_app import answer, answer_error, send_file
from tercet.wire.callers import ShownHeaders, require_own_call
from tercet.wire.serving.http_server import served

HOST = "127.0.0.1"
CLOSE_SECONDS = 1


RUN = "run.json"


class RecordedPage:
    """The ASGI application of the page; ``result`` is the JSON of a run's result with timelines."""

    def __init__(self, result: bytes) -> None:
        self._result = result

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            await self._serve(scope, send)
        except TercetError as error:
            await answer_error(send, error)

    async def _serve(self, scope: Scope, send: Send) -> None:
        client = scope.get("client")
        require_own_call(ShownHeaders.of_asgi(scope["headers"]), None if client is None else client[0])
        path = scope["path"].removeprefix("/")
        if scope["method"] not in ("GET", "HEAD"):
            raise MethodNotAllowed(f"/{path} does not accept the method {scope['method']}; use GET or HEAD")
        if path == "about":
            about = msgspec.json.encode({"mode": "recorded", "tercet": __version__})
            await answer(send, 200, about, "application/json")
        elif path == RUN:
            await answer(send, 200, self._result, "application/json")
        else:
            await send_file(scope, path, send)


def show_run(result: bytes, port: int = 0) -> None:
    """Serve the page of ``result`` at ``port`` (0: any free port) until a signal; print its URL."""
    with socket.create_server((HOST, port)) as listening:
        asyncio.run(_serve(result, listening))


async def _serve(result: bytes, listening: socket.socket) -> None:
    stopped = asyncio.Event()
    with signals_to(stopped.set, stopped.set):
        async with served(RecordedPage(result), listening):
            say(f"open http://{HOST}:{listening.getsockname()[1]}/ to see the run; Ctrl-C ends it")
            await stopped.wait()
