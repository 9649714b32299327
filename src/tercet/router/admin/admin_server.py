"""The admin routes in an application, and the admin address: a listening address for operators, apart from clients'.

Requests to the address pass through the same application as those of clients. A mark in their scope distinguishes them
for :class:`~tercet.router.router_app.RouterApp`. Paths without a route are answered by JSON errors.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tercet.protocol import BadRequest, MethodNotAllowed, TercetError, UnknownPath
from tercet.router.admin.admin_routes import routes, vllms
from tercet.router.serve.plans import NamedFiles
from tercet.router.state.shared_state import SharedState
from tercet.settings.engine_addresses import AdminAddress
from tercet.wire.serving.http_server import error_response, served
from tercet.wire.serving.server_access import AT_ADMIN

BACKLOG = 128
OWNER_ALONE = 0o600


@asynccontextmanager
async def admin_served(app: ASGIApp, address: AdminAddress | None, **tls: Any) -> AsyncGenerator[None]:
    """Serve ``app`` at the admin address while entered; do nothing without an address.

    ``tls`` are uvicorn's TLS options for a TCP address. Raises :class:`~tercet.protocol.BadRequest` if the process
    cannot listen at the address.
    """
    if address is None:
        yield
        return

    async def marked(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, AT_ADMIN: True}, receive, send)

    with _listening(address) as sock:
        async with served(marked, sock, **({} if address.path else tls)):
            yield


@contextmanager
def _listening(address: AdminAddress) -> Generator[socket.socket]:
    """Listen at the address while entered; only its owner may open a socket's file, which is removed at the end."""
    family = socket.AF_UNIX if address.path else socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        try:
            if address.path:
                path = Path(address.path)
                if path.is_socket():
                    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
                        try:
                            asking.connect(str(path))
                        except ConnectionRefusedError:  # a killed router left it behind
                            path.unlink()
                        except OSError:
                            pass  # it is served, by whom is not known: the bind below refuses it
                sock.bind(str(path))
                path.chmod(OWNER_ALONE)  # before the socket listens, so no client can have connected
            else:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind((address.host, address.port))
            sock.listen(BACKLOG)
        except OSError as error:
            raise BadRequest(
                f"admin-listen: cannot listen at {address}: {error.strerror or error}; choose another address",
                "admin-listen",
            ) from error
        try:
            yield sock
        finally:
            if address.path:
                with suppress(OSError):
                    Path(address.path).unlink()


def install(
    app: FastAPI,
    shared: SharedState,
    models: Sequence[str],
    loads_adapters: bool = False,
    files: NamedFiles | None = None,
) -> None:
    """Add the admin routes to ``app``; they show and change ``shared``. ``models`` are the names of the base model.

    ``loads_adapters`` also replaces vLLM's routes for adapters by routes for the whole fleet. ``files`` are the files
    that requests may name; None for no files.
    """
    app.state.tercet, app.state.tercet_models, app.state.tercet_files = shared, models, files or NamedFiles()
    # The routes have their prefix and route class: include_router would make each of them again, which takes 50 ms.
    app.router.routes.extend(routes.routes)
    if loads_adapters:
        own = {route.path for route in vllms.routes if isinstance(route, Route)}
        app.router.routes[:] = [each for each in app.routes if not (isinstance(each, Route) and each.path in own)]
        app.router.routes.extend(vllms.routes)
    # A path or a method without a route gets OpenAI's error JSON. Starlette raises for these inside its router, before
    # any handler of errors is asked.
    served = app.router.middleware_stack

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await served(scope, receive, send)
        except HTTPException as refusal:  # raised by the routing itself: routes answer their own errors
            if scope["type"] != "http" or refusal.status_code not in (UnknownPath.status, MethodNotAllowed.status):
                raise
            method, path = scope["method"], scope["path"]
            known = [each for each in app.routes if isinstance(each, Route) and each.matches(scope)[0] is Match.PARTIAL]
            allowed = ", ".join(sorted({name for each in known for name in each.methods or ()}))
            if allowed:
                error: TercetError = MethodNotAllowed(f"{path} does not accept the method {method}; use {allowed}")
            else:
                error = UnknownPath(f"this server has no route {method} {path}; /openapi.json lists the routes")
            response = error_response(error, None)
            if allowed:
                response.headers["Allow"] = allowed
            await response(scope, receive, send)

    app.router.middleware_stack = answer
