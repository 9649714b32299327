"""Connection from a command to the process that owns a fleet: HTTP on a Unix socket that only this user can open.

``GET /scale`` answers with a :class:`~tercet.cluster.scaling.records.ScaleRecord`, ``POST /scale`` takes a
:class:`~tercet.cluster.scaling.records.ScaleCall`. Errors have the format of all other routes.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web

from tercet.aio.descriptors import descriptors_watched
from tercet.cluster.scaling.records import ScaleCall, ScaleRecord
from tercet.cluster.scaling.scaler import Scaler
from tercet.protocol import EngineUnreachable, TercetError, from_wire
from tercet.protocol.wire import UNREADABLE, decode_call

PATH = "/scale"
MOST_BYTES = 64 * 1024
ANSWER = aiohttp.ClientTimeout(total=60.0, sock_connect=5.0)
Handler = Callable[[web.Request], Awaitable[ScaleRecord]]


@asynccontextmanager
async def control_socket(scaler: Scaler) -> AsyncGenerator[Path]:
    """Serve commands until the block ends; yield the socket's path, which is short enough for every system."""

    async def show(_: web.Request) -> ScaleRecord:
        return await scaler.record()

    async def scale(request: web.Request) -> ScaleRecord:
        return await scaler.scale(decode_call(await request.read(), ScaleCall))

    app = web.Application(client_max_size=MOST_BYTES)
    app.add_routes([web.get(PATH, _answering(show)), web.post(PATH, _answering(scale))])
    runner = web.AppRunner(app, access_log=None)
    with tempfile.TemporaryDirectory(prefix="tercet-up-") as directory:  # its mode keeps other users out
        socket = Path(directory) / "control"
        await runner.setup()
        try:
            await web.UnixSite(runner, str(socket)).start()
            async with descriptors_watched():
                yield socket
        finally:
            await runner.cleanup()


def _answering(handler: Handler) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(request: web.Request) -> web.Response:
        try:
            status, value = 200, await handler(request)
        except TercetError as error:
            status, value = error.status, error.to_wire()
        return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")

    return answer


async def scale_fleet(socket: Path, call: ScaleCall) -> ScaleRecord:
    """Start to scale the fleet whose owner listens at ``socket``, and return the first record.

    Raises the owner's :class:`~tercet.protocol.TercetError`, and :class:`~tercet.protocol.EngineUnreachable` if the
    owner does not answer.
    """
    return await _ask(socket, "POST", msgspec.json.encode(call))


async def scaling_of(socket: Path) -> ScaleRecord:
    """Return the fleet's scaling, or its size. Raises the errors of :func:`scale_fleet`."""
    return await _ask(socket, "GET", None)


async def _ask(socket: Path, method: str, body: bytes | None) -> ScaleRecord:
    try:
        async with (
            aiohttp.ClientSession(timeout=ANSWER, connector=aiohttp.UnixConnector(str(socket))) as session,
            session.request(method, f"http://fleet{PATH}", data=body) as response,
        ):
            status, content = response.status, await response.read()
            if status == web.HTTPOk.status_code:
                return msgspec.json.decode(content, type=ScaleRecord)
            raise from_wire(status, msgspec.json.decode(content))
    except (aiohttp.ClientError, TimeoutError, OSError, *UNREADABLE) as error:
        raise EngineUnreachable(f"the fleet's process does not answer at {socket}: {error}") from error
