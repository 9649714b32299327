"""The ASGI application for the page at ``/tercet`` and its stream.

The files contain no data of the fleet, and need no key. The stream needs access to admin routes, or a client key; with
a client key it leaves out ids and errors of other clients' requests.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec
from starlette.types import Receive, Scope, Send

from tercet import __version__
from tercet.protocol import MethodNotAllowed, TercetError, Unauthorized, UnknownPath
from tercet.router.page.records import About, FleetPoint, reported_loads
from tercet.router.page.watch import POINTS, SECONDS, FleetWatch, History, OtherWorkers, Viewers, about_service, joined
from tercet.router.serve.shutdown import Shutdown
from tercet.router.state.shared_state import SharedState
from tercet.wire.callers import BearerKeys, ShownHeaders, require_no_page
from tercet.wire.serving.answers import error_headers, until_left
from tercet.wire.serving.server_access import AT_ADMIN, AdminAccess, RouterKeys, is_admin_path, path_of


async def send_file(scope: Scope, name: str, send: Send) -> None:
    """Send the file ``name`` of the page; raise :class:`~tercet.protocol.UnknownPath` for an unknown name."""
    file = page_files().get(name)
    if file is None:
        raise UnknownPath(f"the page has no file {name[:80]!r}")
    headers = {"etag": file.tag, "cache-control": "no-cache"}
    status, content = 200, file.content
    if (b"if-none-match", file.tag.encode()) in scope["headers"]:
        status, content = 304, b""
    await answer(send, status, content, file.media_type, headers)


async def answer(send: Send, status: int, body: bytes, media_type: str, headers: Mapping[str, str] = {}) -> None:
    """Send a whole answer; the server leaves out its body for HEAD."""
    await send(start_of(status, media_type, {**headers, "content-length": str(len(body))}))
    await send({"type": "http.response.body", "body": body})


def start_of(status: int, media_type: str, headers: dict[str, str]) -> dict[str, object]:
    """Return the ASGI message that starts an answer."""
    shown = {"content-type": media_type, **SAFETY, **headers}
    listed = [(name.lower().encode(), value.encode("latin-1")) for name, value in shown.items()]
    return {"type": "http.response.start", "status": status, "headers": listed}


async def answer_error(send: Send, error: TercetError) -> None:
    """Send an error in OpenAI's form, the form of all errors of a router."""
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    await answer(send, error.status, msgspec.json.encode(error.to_wire()), "application/json", headers)


FOLDER = Path(__file__).parent / "static"
INDEX = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}  # fmt: skip
# Policy of the page: no content from other hosts, not inside other pages, no inline script or style.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# Headers of every answer.
SAFETY = {
    "content-security-policy": POLICY,
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class PageFile(NamedTuple):
    """One file, its media type, and a tag that changes with it."""

    content: bytes
    media_type: str
    tag: str


@cache
def page_files() -> Mapping[str, PageFile]:
    """Return the files by their path below the page; the page itself has the empty path."""
    found: dict[str, PageFile] = {}
    for path in sorted(FOLDER.rglob("*")):
        if path.suffix in TYPES:
            content = path.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
            found[path.relative_to(FOLDER).as_posix()] = PageFile(content, TYPES[path.suffix], tag)
    found[""] = found.pop(INDEX)
    return found


ROOT = "/tercet"
ABOUT, STREAM, HISTORY = "about", "stream", "history"
# Seconds after which a viewer that reads nothing is dropped; a viewer that is only slow skips frames.
SEND_SECONDS = 20.0
VIEW_HEADER = "x-tercet-view"
ELSEWHERE = "this address does not serve admin routes; use the router's --admin-listen address"
ASKS = "this page requires the router's admin key or a client key: Authorization: Bearer KEY"


def is_of_page(path: str) -> bool:
    """True for a path of the page; admin routes are below the page's path, and are not."""
    return path.startswith(ROOT) and (path == ROOT or path[len(ROOT)] == "/") and not is_admin_path(path)


class PageApp:
    """The page.

    ``clients`` are the client keys, and ``admins`` checks access to admin routes. ``admin_apart`` is true if only a
    separate address serves admin routes. ``past`` returns the points of the last minutes: those of this process, which
    ``history`` keeps, and of the other workers.
    """

    def __init__(
        self, viewers: Viewers, history: History, past: Callable[[], Awaitable[Sequence[FleetPoint]]],
        admins: AdminAccess, clients: BearerKeys, admin_apart: bool = False,
    ) -> None:  # fmt: skip
        self._viewers = viewers
        self._past = past
        self.history = history
        self._admins = admins
        self._clients = clients
        self._admin_apart = admin_apart

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._serve(scope, path_of(scope).removeprefix(ROOT), receive, send)
        except TercetError as error:
            await answer_error(send, error)

    async def _serve(self, scope: Scope, path: str, receive: Receive, send: Send) -> None:
        if scope["method"] not in ("GET", "HEAD"):
            raise MethodNotAllowed(f"{ROOT}{path} does not accept the method {scope['method']}; use GET or HEAD")
        if not path:  # links in the page are relative to a folder, so any prefix of a proxy works
            await answer(send, 307, b"", "text/plain", {"location": f"{ROOT[1:]}/"})
        elif path == f"/{ABOUT}":
            apart = self._admin_apart and not scope.get(AT_ADMIN, False)  # another address serves admin routes
            about = {"mode": "live", "tercet": __version__, "why_no_changes": ELSEWHERE if apart else ""}
            await answer(send, 200, msgspec.json.encode(about), "application/json")
        elif path == f"/{STREAM}":
            await self._stream(scope, receive, send)
        elif path == f"/{HISTORY}":
            self._admit(scope)
            past = {"seconds": SECONDS, "points": await self._past()}
            await answer(send, 200, msgspec.json.encode(past), "application/json", {"cache-control": "no-store"})
        else:
            await send_file(scope, path.removeprefix("/"), send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        view = "admin" if self._admit(scope) else "client"
        headers = {"cache-control": "no-store", "x-accel-buffering": "no", VIEW_HEADER: view}
        if scope["method"] == "HEAD":
            await answer(send, 200, b"", "text/event-stream", headers)
            return
        viewer = self._viewers.enter(view)
        leaving = asyncio.ensure_future(until_left(receive))
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


def page_of(state: SharedState, keys: RouterKeys, model: str, shutdown: Shutdown, admin_apart: bool = False) -> PageApp:
    """Return the page of the fleet that serves ``model``; the caller begins its ``history``."""
    service = state.service
    fleet = service.fleet

    def about() -> About:
        refusal = state.reports.refusal()
        roles = "fixed" if state.role_keeper is None else "auto"
        found = about_service(service, model, roles, "" if refusal is None else refusal.message)
        return msgspec.structs.replace(found, process=os.getpid(), workers=1 + len(others), since=since)

    def unix_time() -> float:
        return epoch + fleet.costs.clock()

    async def past() -> list[FleetPoint]:
        return joined([history.points(), *await state.traces.histories(POINTS)])

    def watch() -> FleetWatch:
        fleet.knowledge.start_reports()
        return FleetWatch(service, reported_loads(fleet), about, epoch)

    others = OtherWorkers(state.traces.others, state.traces.frames_of)
    viewers = Viewers(watch, lambda: len(fleet.members), lambda: shutdown.has_begun, others)
    state.traces.frames = lambda: viewers.stream(viewers.enter("worker"))
    epoch = time.time() - fleet.costs.clock()
    since = round(unix_time(), 3)
    history = History(service, reported_loads(fleet), unix_time)
    state.traces.history = history.points
    return PageApp(viewers, history, past, keys.access, keys.clients, admin_apart)
