"""Serves the page at ``/tercet`` and its stream, before the application that serves all else.

The files tell nothing and are open. The stream opens to those who may call admin routes, and, without what belongs to
other clients, to those who show a client's key.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from tercet import __version__
from tercet.protocol import MethodNotAllowed, TercetError, Unauthorized
from tercet.protocol.bearer import BearerKeys
from tercet.protocol.own_requests import ShownHeaders, require_no_page
from tercet.protocol.wire import API_PREFIX
from tercet.router.admin_access import AT_ADMIN, AdminAccess, path_of
from tercet.router.page.page_answers import answer, answer_error, send_file, start_of
from tercet.router.page.viewers import Viewers

ROOT = "/tercet"
ABOUT, STREAM = "about", "stream"
SEND_SECONDS = 20.0
"""A viewer who takes nothing for that long is dropped; less than that, and it skips frames."""
VIEW_HEADER = "x-tercet-view"
ELSEWHERE = "admin routes are not served at this address, but at the router's --admin-listen"
NOT_ADMIN = "a client's key shows the fleet; changes need the admin key"
ASKS = "this page asks for the router's admin key, or a client's key: Authorization: Bearer KEY"


class PageApp:
    """The page before ``app``, which serves every other path.

    ``clients`` are the keys of clients, ``admins`` says who may change the fleet. ``admin_apart``: admin routes are
    served at a separate address alone.
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
        """ASGI."""
        if scope["type"] != "http" or not is_of_page(path := path_of(scope)):
            await self._app(scope, receive, send)
            return
        try:
            await self._serve(scope, path.removeprefix(ROOT), receive, send)
        except TercetError as error:
            await answer_error(send, error)

    async def _serve(self, scope: Scope, path: str, receive: Receive, send: Send) -> None:
        if scope["method"] not in ("GET", "HEAD"):
            raise MethodNotAllowed(f"{ROOT}{path} is not for {scope['method']}; it takes GET and HEAD")
        if not path:  # addresses in the page are relative to a folder, whatever a proxy puts before it
            await answer(send, 307, b"", "text/plain", {"location": f"{ROOT[1:]}/"})
        elif path == f"/{ABOUT}":
            await answer(send, 200, self._about(scope), "application/json")
        elif path == f"/{STREAM}":
            await self._stream(scope, receive, send)
        else:
            await send_file(scope, path.removeprefix("/"), send)

    def _about(self, scope: Scope) -> bytes:
        """What the page must know before it has a key."""
        apart = self._is_apart(scope)
        return msgspec.json.encode(
            {"mode": "live", "tercet": __version__, "why_no_changes": ELSEWHERE if apart else ""}
        )

    def _is_apart(self, scope: Scope) -> bool:
        """Whether admin routes are served at another address than the one that was asked."""
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
            return  # without an end: the server closes the connection
        finally:
            leaving.cancel()
            self._viewers.leave(viewer)  # a stream that was never begun does not

    def _admit(self, scope: Scope) -> bool:
        """Whether an administrator asks. Raises :class:`~tercet.protocol.TercetError` for those who may see nothing."""
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
    """Whether a path is the page's: those of admin routes, below it, are not."""
    below = path.startswith(f"{ROOT}/") and path != API_PREFIX and not path.startswith(f"{API_PREFIX}/")
    return path == ROOT or below


async def _until_left(receive: Receive) -> None:
    """Return when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
