"""The HTTP server of a process's own application; how its routes read calls, and answer with values and errors."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Coroutine, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, ExceptionHandler

from tercet.protocol import TercetError, Unauthorized
from tercet.protocol.request_checks import VERB_FORMS, labelled
from tercet.protocol.wire import JSON, decode_call
from tercet.wire.callers import CHALLENGE_HEADER, Callers, require_digest
from tercet.wire.serving.answers import until_left
from tercet.wire.serving.client_connection import BoundedProtocol
from tercet.wire.serving.server_access import BodyPieces, read_whole

T = TypeVar("T")
CLOSE_SECONDS = 1
"""Seconds for remaining connections when a server closes: idle clients, and answers past their timeout."""
STARTED_POLL_S = 0.01


class QuietServer(uvicorn.Server):
    """A uvicorn server that does not handle signals; its caller does.

    With an ``address`` it listens there by itself: uvicorn's own start ends the process if the address is in use, and
    the start here raises ``OSError``.
    """

    address: tuple[str, int] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self.address is None:
            await super().startup(sockets)
            return
        config, loop = self.config, asyncio.get_running_loop()
        connection = partial(
            BoundedProtocol, config=config, server_state=self.server_state, app_state=self.lifespan.state
        )  # fmt: skip
        listening = await loop.create_server(connection, *self.address, ssl=config.ssl, backlog=config.backlog)
        self.servers, self.started = [listening], True

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def started_by(self, serving: asyncio.Future[None]) -> bool:
        """Wait until the server accepts connections; return False if the task ``serving`` ends before that."""
        while not self.started and not serving.done():  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(STARTED_POLL_S)
        return self.started


def server_of(app: ASGIApp, **options: Any) -> QuietServer:
    """Return a server of ``app`` that bounds its connections; ``options`` are further ones of uvicorn."""
    return QuietServer(
        uvicorn.Config(
            app, http=BoundedProtocol, ws="none", log_level="warning", access_log=False, lifespan="off",
            timeout_graceful_shutdown=CLOSE_SECONDS, **options,
        )
    )  # fmt: skip


@asynccontextmanager
async def served(app: ASGIApp, at: socket.socket | tuple[str, int], **options: Any) -> AsyncGenerator[None]:
    """Serve ``app`` at a socket, or at host and port, while entered; see :func:`server_of`.

    Raises ``OSError`` if the address is in use.
    """
    server = server_of(app, **options)
    server.address = at if isinstance(at, tuple) else None
    serving = asyncio.ensure_future(server.serve(None if isinstance(at, tuple) else [at]))
    try:
        if not await server.started_by(serving):
            serving.result()
        yield
    finally:
        server.should_exit = True
        await serving


# ---- calls and answers -----------------------------------------------------------------------------------------------


async def call_in(
    request: Request, kind: type[T], most: int, taker: str, forms: Sequence[str] = VERB_FORMS
) -> T:  # fmt: skip
    """Read the call in the body of an admitted request; ``most`` bytes are the limit of the ``taker``.

    Raises :class:`~tercet.protocol.TercetError` for another body, and ``ClientDisconnect`` if the client leaves.
    """
    form = labelled(request.scope["headers"], forms).form
    body = BodyPieces()
    if not await read_whole(request.receive, request.headers.get("content-length", ""), most, taker, body):
        raise ClientDisconnect
    require_digest(body.content, getattr(request.state, "tercet_digest", None))
    return decode_call(body.content, kind, form)


def json_response(value: Any, status: int = 200) -> Response:
    """Return an answer with ``value`` as JSON."""
    return Response(msgspec.json.encode(value), status, media_type=JSON)


def error_response(error: TercetError, callers: Callers | None) -> Response:
    """Return the answer that has an error; a caller without a valid proof learns what it must prove."""
    answer = json_response(error.to_wire(), error.status)
    if error.retry_after is not None:
        answer.headers["retry-after"] = str(error.retry_after)
    if isinstance(error, Unauthorized) and callers:
        answer.headers[CHALLENGE_HEADER] = callers.challenge()
    return answer


def error_handlers(callers: Callers | None) -> dict[Any, ExceptionHandler]:
    """Return Starlette's handlers of the errors of routes: an answer that has the error; none if the client left."""

    async def answered(_: Request, error: Exception) -> Response:
        return error_response(error, callers) if isinstance(error, TercetError) else Response(status_code=400)

    return {TercetError: answered, ClientDisconnect: answered}


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work``; if the client disconnects, cancel it, so that it releases its resources: ``ClientDisconnect``."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(until_left(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
            if task.cancelled():  # uvicorn would log a CancelledError with its traceback
                raise ClientDisconnect
        return await task
    finally:
        gone.cancel()
        task.cancel()
