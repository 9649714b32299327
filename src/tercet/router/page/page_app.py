"""The ASGI application for the page at ``/tercet`` and its stream, which passes other paths to the next application.

The files contain no data of the fleet, and need no key. The stream needs access to admin routes, or a client key; with
a client key it leaves out ids and errors of other clients' requests.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from tercet import __version__
from tercet.protocol import MethodNotAllowed, TercetError, Unauthorized
from tercet.protocol.access import BearerKeys
from tercet.protocol.request_checks import ShownHeaders, require_no_page
from tercet.protocol.wire import API_PREFIX
from tercet.router.page.page_answers import answer, answer_error, send_file, start_of
from tercet.router.page.viewers import Viewers
from tercet.wire.serving.server_access import AT_ADMIN, AdminAccess, path_of

ROOT = "/tercet"
ABOUT, STREAM = "about", "stream"
SEND_SECONDS = 20.0
"""Seconds after which a viewer that reads nothing is dropped; a viewer that is only slow skips frames."""
VIEW_HEADER = "x-tercet-view"
ELSEWHERE = "this address does not serve admin routes; use the router's --admin-listen address"
ASKS = "this page requires the router's admin key or a client key: Authorization: Bearer KEY"


class PageApp:
    """The page, before ``app``, which serves every other path.

    ``clients`` are the client keys, and ``admins`` checks access to admin routes. ``admin_apart`` is true if only a
    separate address serves admin routes.
    """

    def __init__(
        self, app: ASGIApp, viewers: Viewers, admins: AdminAccess, clients: BearerKeys, admin_apart: bool = False
    ) -> None:
        self._app = app
        self._viewers = viewers
        self._admins = admins
        self._clients = clients
        self._admin_apart = admin_apart

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http" or not is_of_page(path := path_of(scope)):
            await self._app(scope, receive, send)
            return
        try:
            await self._serve(scope, path.removeprefix(ROOT), receive, send)
        except TercetError as error:
            await answer_error(send, error)

    async def _serve(self, scope: Scope, path: str, receive: Receive, send: Send) -> None:
        if scope["method"] not in ("GET", "HEAD"):
            raise MethodNotAllowed(f"{ROOT}{path} does not accept the method {scope['method']}; use GET or HEAD")
        if not path:  # links in the page are relative to a folder, so any prefix of a proxy works
            await answer(send, 307, b"", "text/plain", {"location": f"{ROOT[1:]}/"})
        elif path == f"/{ABOUT}":
            await answer(send, 200, self._about(scope), "application/json")
        elif path == f"/{STREAM}":
            await self._stream(scope, receive, send)
        else:
            await send_file(scope, path.removeprefix("/"), send)

    def _about(self, scope: Scope) -> bytes:
        """Return the JSON that the page needs before it has a key."""
        apart = self._is_apart(scope)
        return msgspec.json.encode(
            {"mode": "live", "tercet": __version__, "why_no_changes": ELSEWHERE if apart else ""}
        )

    def _is_apart(self, scope: Scope) -> bool:
        """True if another address than the requested one serves admin routes."""
        return self._admin_apart and not scope.get(AT_ADMIN, False)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_admin = self._admit(scope)
        view = "admin" if is_admin else "client"
        headers = {"cache-control": "no-store", "x-accel-buffering": "no", VIEW_HEADER: view}
        if scope["method"] == "HEAD":
            await answer(send, 200, b"", "text/event-stream", headers)
            return
        viewer = self._viewers.enter(is_admin)
        leaving = asyncio.ensure_future(_until_left(receive))
        leaving.add_done_callback(lambda _: viewer.leave())
        try:
            async with aclosing(self._viewers.stream(viewer)) as frames:
                await send(start_of(200, "text/event-stream", headers))
                async for part in frames:
                    async with asyncio.timeout(SEND_SECONDS):
                        await send({"type": "http.response.body", "body": part, "more_body": True})
            if not leaving.done():
                await send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            return  # the answer has no end, so the server closes the connection
        finally:
            leaving.cancel()
            self._viewers.leave(viewer)  # a stream that never began does not do this

    def _admit(self, scope: Scope) -> bool:
        """True for admin access, False for a client key; raises :class:`~tercet.protocol.TercetError` for others."""
        shown = ShownHeaders.of_asgi(scope["headers"])
        require_no_page(shown)
        try:
            self._admins.require(scope)
        except TercetError as refusal:
            if not self._clients:
                raise
            with suppress(TercetError):
                self._clients.require(shown.all("authorization"), ASKS)
                return False
            raise Unauthorized(ASKS, "authorization") from refusal
        return True


def is_of_page(path: str) -> bool:
    """True if a path belongs to the page; the admin routes below it do not."""
    below = path.startswith(f"{ROOT}/") and path != API_PREFIX and not path.startswith(f"{API_PREFIX}/")
    return path == ROOT or below


async def _until_left(receive: Receive) -> None:
    """Wait until the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
