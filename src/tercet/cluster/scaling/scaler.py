"""Scaling of a fleet: the fleet's provisioner carries out the steps of :mod:`.decide`, which gets their results.

A command reaches the process that owns the fleet by HTTP on a Unix socket that only this user can open: ``GET /scale``
answers with a :class:`~tercet.cluster.scaling.decide.ScaleRecord`, ``POST /scale`` takes a
:class:`~tercet.cluster.scaling.decide.ScaleCall`. Errors have the format of all other routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from tercet.aio.files import descriptors_watched
from tercet.aio.tasks import TaskSet
from tercet.cluster.running_fleet import EngineProvisioner, OnEvent
from tercet.cluster.scaling.decide import (
    Counts,
    Do,
    Drain,
    EngineStep,
    Flip,
    Present,
    ScaleCall,
    ScaleRecord,
    Scaling,
    Start,
    Stop,
)
from tercet.protocol import Conflict, EngineUnreachable, TercetError, from_wire
from tercet.protocol.wire import UNREADABLE, decode_call
from tercet.wire.serving.http_server import error_handlers, json_response, served
from tercet.wire.serving.server_access import BodyPieces, read_whole

LOOK_SECONDS = 0.2
# Number of polls in a row without sequences, one report of the router apart, before an engine is stopped.
EMPTY_LOOKS = 3


class Scaler:
    """Scaler of one fleet, for one change at a time. ``on_event`` receives each engine's steps.

    Use it as an async context manager: its end cancels a running change; the provisioner stops engines that it started.
    """

    def __init__(self, provisioner: EngineProvisioner, on_event: OnEvent) -> None:
        self._provisioner = provisioner
        self._router = provisioner.router
        self._on_event = on_event
        self._tasks = TaskSet()
        self._scaling: Scaling | None = None
        self._number = 0
        self._began = self._took = 0.0
        self._drain_seconds = 0.0
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> Scaler:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.close()

    async def record(self) -> ScaleRecord:
        """Return the running or the last scaling; without one, the present size of the fleet."""
        scaling = self._scaling
        if scaling is None:
            present = await self._present()
            counts = Counts.of(each.role for each in present)
            steps = tuple(EngineStep(each.name, each.role, "serving", each.in_flight) for each in present)
            return ScaleRecord(0, "done", counts, counts, steps)
        seconds = time.monotonic() - self._began if scaling.state == "under_way" else self._took
        return ScaleRecord(
            self._number, scaling.state, scaling.wanted, scaling.present, scaling.engines, seconds, scaling.why
        )

    async def scale(self, call: ScaleCall) -> ScaleRecord:
        """Start to scale the fleet to the wanted size, and return the first record.

        Raises :class:`~tercet.protocol.Conflict` while another change runs, and :class:`~tercet.protocol.BadRequest`
        for an impossible size.
        """
        # Two commands at once: the second one must see the first one's scaling.
        async with self._lock:
            under_way = self._scaling
            if under_way is not None and under_way.state == "under_way":
                raise Conflict(
                    f"COUNTS: the fleet is being scaled to {under_way.wanted}; wait until that ends, `tercet scale` "
                    "without counts shows the progress",
                    "COUNTS",
                )
            present = await self._present()
            wanted = call.counts(Counts.of(each.role for each in present))
            # Names of engines that were removed are not used again: their logs are still there.
            scaling = Scaling(present, wanted, self._provisioner.used)
            # Before anything changes: a scaling that cannot end is refused as a whole.
            self._provisioner.require_room(scaling.starting)
            self._scaling, self._drain_seconds = scaling, call.drain_seconds
            self._number += 1
            self._began = time.monotonic()
            self._on_event("scale", f"to {wanted}")
            self._carry_out(scaling, scaling.begin())
        return await self.record()

    async def _present(self) -> list[Present]:
        here = set(self._provisioner.engines)
        found = await self._router.engines()
        return [Present(each["name"], each["role"], each["in_flight"]) for each in found if each["name"] in here]

    def _carry_out(self, scaling: Scaling, orders: Sequence[Do]) -> None:
        for order in orders:
            self._tasks.spawn(self._do(scaling, order), f"scaling of {order.name}")
        if not orders and scaling.state != "under_way":
            self._took = time.monotonic() - self._began
            self._on_event("scale", f"{scaling.state}: {scaling.present}{f'; {scaling.why}' if scaling.why else ''}")

    async def _do(self, scaling: Scaling, order: Do) -> None:
        try:
            match order:
                case Flip(name, role):
                    await self._provisioner.set_role(name, role)
                    self._on_event(name, f"role {role}")
                    after = scaling.flipped(name, role)
                case Start(name, role):
                    await self._provisioner.start(name, role)
                    after = scaling.ready(name)
                case Drain(name):
                    engine: dict[str, Any] = await self._router.drain(name)
                    empty, said = 0, -1
                    with contextlib.suppress(TimeoutError):  # then it is stopped with the sequences that are left
                        async with asyncio.timeout(self._drain_seconds):
                            # Several looks in a row: a request that was routed before the drain may be on its way.
                            while empty < EMPTY_LOOKS:
                                left = engine["in_flight"]
                                scaling.runs(name, left)
                                empty = 0 if left else empty + 1
                                if left != said:
                                    self._on_event(name, f"draining: {left} sequences left")
                                    said = left
                                await asyncio.sleep(LOOK_SECONDS)
                                engine = await self._router.engine(name)
                    after = scaling.drained(name)
                case Stop(name):
                    await self._provisioner.stop(name)
                    self._on_event(name, "has left the fleet")
                    after = scaling.gone(name)
        except TercetError as error:
            after = scaling.failed(order.name, error.message)
            self._on_event(order.name, error.message)
        except OSError as error:
            after = scaling.failed(order.name, f"{type(error).__name__}: {error}")
        # One order's end, also a failed one, may allow the next orders: the plan decides, and no engine waits here.
        self._carry_out(scaling, after)


PATH = "/scale"
MOST_BYTES = 64 * 1024
ANSWER = aiohttp.ClientTimeout(total=60.0, sock_connect=5.0)


@asynccontextmanager
async def control_socket(scaler: Scaler) -> AsyncGenerator[Path]:
    """Serve commands until the block ends; yield the socket's path, which is short enough for every system."""

    async def show(_: Request) -> Response:
        return json_response(await scaler.record())

    async def scale(request: Request) -> Response:
        body = BodyPieces()
        if not await read_whole(request.receive, "", MOST_BYTES, "this fleet's process", body):
            raise ClientDisconnect
        return json_response(await scaler.scale(decode_call(body.content, ScaleCall)))

    routes = [Route(PATH, show), Route(PATH, scale, methods=["POST"])]
    app = Starlette(routes=routes, exception_handlers=error_handlers(None))
    with (
        tempfile.TemporaryDirectory(prefix="tercet-up-") as directory,  # its mode keeps other users out
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening,
    ):
        path = Path(directory) / "control"
        listening.bind(str(path))
        listening.listen()
        async with served(app, listening), descriptors_watched():
            yield path


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
            if status == HTTPStatus.OK:
                return msgspec.json.decode(content, type=ScaleRecord)
            raise from_wire(status, msgspec.json.decode(content))
    except (aiohttp.ClientError, TimeoutError, OSError, *UNREADABLE) as error:
        raise EngineUnreachable(f"the fleet's process does not answer at {socket}: {error}") from error
