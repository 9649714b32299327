"""A watch on a collection of the API server, which keeps a :class:`Mirror` equal to it.

The collection is listed once and then watched. A watch that ends, fails, is silent, or is refused by an overloaded
server (429, 503) continues from the last version received. If the server cannot do that (410, or another refusal of a
watch), the collection is listed again. While the server does not answer, the copy stays as it is, and requests are
retried after growing pauses.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from random import Random
from typing import Generic, Protocol, TypeVar
from urllib.parse import urlencode

import aiohttp
import msgspec

from tercet import logs
from tercet.aio import Failures
from tercet.fleet.discovery.kubernetes_api import ApiAccess, Marked, Metadata, ObjectList, Status, WatchEvent
from tercet.protocol.sse import ItemTooLong, LineSplitter
from tercet.protocol.wire import UNREADABLE
from tercet.wire.client.bounded_answers import reason_of

GONE = 410
logger = logging.getLogger("tercet.fleet.discovery")
PAGE = 500
# A pod with many annotations has tens of kilobytes.
LONGEST_LINE = 8 * 1024 * 1024
BUSY = 429, 503
HINTS = {
    401: "; check that the token is still valid",
    403: "; its Role must allow get, list and watch",
    404: "; check that the resource definition (CRD) is installed",
}


class HasMetadata(Protocol):
    """An object of the API server."""

    @property
    def metadata(self) -> Metadata: ...


T = TypeVar("T", bound=HasMetadata)


class WatchBroken(Exception):
    """Raised if a watch cannot continue, so that the collection must be listed again.

    Its input is invalid, or the server reports an error; ``code`` is the server's, or 0.
    """

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class Mirror(Generic[T]):
    """Objects of one ``kind`` by name, as of ``version``, from which a watch continues.

    ``version`` is empty while a list is needed.
    """

    def __init__(self, kind: type[T]) -> None:
        self.version = ""
        self._decoder = msgspec.json.Decoder(kind)
        self._objects: dict[str, T] = {}

    @property
    def objects(self) -> Sequence[T]:
        """All objects in the order of their names."""
        return [self._objects[name] for name in sorted(self._objects)]

    def listed(self, objects: Iterable[T], version: str) -> None:
        """Replace all objects by the objects of a list as of ``version``."""
        self._objects = {each.metadata.name: each for each in objects}
        self.version = version

    def void(self) -> None:
        """Mark that a watch cannot continue from here; the objects stay until the next list."""
        self.version = ""

    def heard(self, line: bytes) -> bool:
        """Apply one event of a watch; return True if objects may have changed.

        Raises :class:`WatchBroken` for an invalid line and for an error of the server.
        """
        try:
            event = msgspec.json.decode(line, type=WatchEvent)
            match event.type:
                case "ADDED" | "MODIFIED":
                    found = self._decoder.decode(event.object)
                    self._objects[found.metadata.name] = found
                    self.version = found.metadata.resource_version
                    return True
                case "DELETED":
                    return self._deleted(self._decoder.decode(event.object).metadata)
                case "BOOKMARK":
                    self.version = msgspec.json.decode(event.object, type=Marked).metadata.resource_version
                    return False
                case "ERROR":
                    status = msgspec.json.decode(event.object, type=Status)
                    raise WatchBroken(status.message or status.reason or "an error without a message", status.code)
                case other:
                    raise WatchBroken(f"the watch sent an event of the unknown type {other!r}")
        except UNREADABLE as error:
            raise WatchBroken(f"the watch sent a line that is not an event: {error}") from error

    def _deleted(self, gone: Metadata) -> bool:
        """Delete an object unless another object of the same name has replaced it; return True if it was deleted."""
        self.version = gone.resource_version
        known = self._objects.get(gone.name)
        if known is None or known.metadata.uid != gone.uid:
            return False
        del self._objects[gone.name]
        return True


@dataclass(frozen=True)
class Waits:
    """Timeouts and pauses of a watch, in seconds.

    ``list_s`` limits a list. The server should end a watch after ``watch_s``; ``grace_s`` later the client ends it. The
    pause before a retry begins at ``first_pause_s`` and doubles up to ``longest_pause_s``, each minus a random part of
    up to half.
    """

    list_s: float = 30.0
    watch_s: float = 60.0
    grace_s: float = 10.0
    first_pause_s: float = 0.2
    longest_pause_s: float = 15.0


WAITS = Waits()


class ApiRefused(Exception):
    """Raised if the server answers with an error. ``retry_after`` is the pause in seconds that the server requests."""

    def __init__(self, message: str, code: int, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after


class Watch(Generic[T]):
    """A watch on the collection of ``kind`` at ``path`` of the API; ``query`` narrows it.

    ``on_change`` is called with all objects after each list, and after each event that may have changed them.
    """

    def __init__(
        self,
        api: ApiAccess,
        path: str,
        kind: type[T],
        query: dict[str, str],
        on_change: Callable[[Sequence[T]], object],
        waits: Waits = WAITS,
    ) -> None:
        self._api = api
        self._path = path
        self._query = query
        self._page = msgspec.json.Decoder(ObjectList[kind])
        self._mirror = Mirror(kind)
        self._on_change = on_change
        self._waits = waits
        self._pause_s = waits.first_pause_s
        self._random = Random()
        self._lost = False
        self._failures = Failures(f"the watch on {path}")

    async def run(self) -> None:
        """Follow the collection until cancelled."""
        async with aiohttp.ClientSession(auto_decompress=True) as session:
            while True:
                pause = await self._turn(session)
                if pause:
                    await asyncio.sleep(pause)

    async def _turn(self, session: aiohttp.ClientSession) -> float:
        """Make one list or one watch; return how many seconds to pause after it."""
        try:
            if not self._mirror.version:
                await self._list(session)
                return 0.0
            lasted = await self._watch(session)
        except WatchBroken as error:
            logger.debug("listing %s again: %s", self._path, error)
            self._mirror.void()
            return self._next_pause()
        except ApiRefused as error:
            if error.code not in BUSY:  # a list would cost the server more, and nothing was missed
                self._mirror.void()
            if error.code != GONE:
                self._is_lost(f"{error}{HINTS.get(error.code, '')}")
            return max(self._next_pause(), min(error.retry_after, self._waits.longest_pause_s))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._is_lost(reason_of(error))
            return self._next_pause()
        except Exception as error:  # discovery must continue after any error
            self._failures.tell(error)
            self._mirror.void()
            return self._next_pause()
        if lasted < self._waits.first_pause_s:  # the server, or a proxy before it, ends every watch at once
            return self._next_pause()
        self._pause_s = self._waits.first_pause_s
        self._failures.works()
        return 0.0

    def _next_pause(self) -> float:
        pause, self._pause_s = self._pause_s, min(2 * self._pause_s, self._waits.longest_pause_s)
        return pause * (1 - self._random.random() / 2)

    def _is_lost(self, reason: str) -> None:
        if not self._lost:
            self._lost = True
            logs.DISCOVERY_LOST.tell(path=self._path, reason=reason)

    # ---- listing ---------------------------------------------------------------------------------------------

    async def _list(self, session: aiohttp.ClientSession) -> None:
        objects, page = list[T](), None
        async with asyncio.timeout(self._waits.list_s):
            while True:
                query = {**self._query, "limit": str(PAGE), **({"continue": page} if page else {})}
                async with self._get(session, query) as response:
                    await self._require_ok(response)
                    found = self._decoded(await response.read())
                objects += found.items or ()
                page = found.metadata.next_page
                if not page:
                    break
        if not found.metadata.resource_version:
            raise WatchBroken("the server sent a list without a resourceVersion")
        self._mirror.listed(objects, found.metadata.resource_version)
        self._on_change(self._mirror.objects)

    def _decoded(self, body: bytes) -> ObjectList[T]:
        try:
            return self._page.decode(body)
        except UNREADABLE as error:
            raise ApiRefused(f"the server at this address is not a Kubernetes API server: {error}", 200) from error

    # ---- watching --------------------------------------------------------------------------------------------

    async def _watch(self, session: aiohttp.ClientSession) -> float:
        """Follow one watch until it ends or is silent for too long; return how many seconds it lasted."""
        query = {
            **self._query,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._mirror.version,
            "timeoutSeconds": str(max(1, round(self._waits.watch_s))),
        }
        splitter, opened = LineSplitter(LONGEST_LINE), 0.0
        try:
            async with (
                asyncio.timeout(self._waits.watch_s + self._waits.grace_s),
                self._get(session, query) as response,
            ):
                await self._require_ok(response)
                if self._lost:
                    self._lost = False
                    logs.DISCOVERY_BACK.tell(path=self._path, reason="the API server answers")
                opened = time.monotonic()
                async for piece in response.content.iter_any():
                    self._heard(splitter, piece)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if not opened:
                raise
            logger.debug("the watch on %s continues after an interruption: %s", self._path, reason_of(error))
        return time.monotonic() - opened

    def _heard(self, splitter: LineSplitter, piece: bytes) -> None:
        changed = False
        try:
            for line in splitter.split(piece):
                if line.strip():
                    changed |= self._mirror.heard(line)
                    self._pause_s = self._waits.first_pause_s
        except ItemTooLong as error:
            raise WatchBroken(str(error)) from error
        finally:
            if changed:
                self._on_change(self._mirror.objects)

    # ---- asking ----------------------------------------------------------------------------------------------

    def _get(
        self, session: aiohttp.ClientSession, query: dict[str, str]
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        headers = {"accept": "application/json"}
        if token := self._api.token():
            headers["authorization"] = f"Bearer {token}"
        return session.get(
            f"{self._api.url}{self._path}?{urlencode(query)}",
            headers=headers,
            ssl=self._api.tls() or True,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0),
            allow_redirects=False,  # the token is for this server only
        )

    async def _require_ok(self, response: aiohttp.ClientResponse) -> None:
        if response.status == 200:
            return
        try:
            said = msgspec.json.decode(await response.content.read(65536), type=Status)
            message = said.message or said.reason
        except UNREADABLE:
            message = ""
        after = response.headers.get("retry-after", "")
        raise ApiRefused(
            f"HTTP {response.status}{f': {message}' if message else ''}",
            response.status,
            float(after) if after.isdecimal() else 0.0,
        )
