"""Embeddings, scores and reranking: passed on to servers of pooling models, which take no part in Tercet's verbs.

Such a server is any vLLM. A request computes everything at once and leaves nothing behind, so it may be asked of
another server as long as its client has nothing of an answer.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Self
from urllib.parse import unquote, urlsplit

import aiohttp
import msgspec

from tercet.aio import TaskSet, repeat
from tercet.protocol import DeadlineExceeded, EngineError, EngineUnreachable, UnknownModel
from tercet.protocol.bearer import bearer
from tercet.protocol.headers import CONTROL_HEADERS, PROGRAM_HEADER, TRACE_HEADER
from tercet.protocol.openai_routes import POOLING
from tercet.protocol.wire import UNREADABLE
from tercet.wire.client.bounded_answers import PLAIN, read_answer
from tercet.wire.client.connection_errors import reason_of
from tercet.wire.client.passing import Fields, NotConnected, NotReadable, Origin, OriginAnswer, end_to_end, passed_on

logger = logging.getLogger("tercet.router")
# The interval at which each server is asked for its models, the timeout, and the number of timeouts in a row after
# which it is not picked: a server that is busy with a large batch may be late.
POLL_INTERVAL_S = 2.0
POLL_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
SILENT_POLLS = 3
# A large batch takes as long as it takes; who set a limit for requests has one here. Once a server begins to answer it
# has computed everything.
CONNECT_SECONDS = 5.0
PART_SECONDS = 30.0
# What servers do not see of a request: the key to this router, which server was meant, what the body's framing was
# before it was read, and what is said to Tercet. The router says by itself who it is and what time it is.
NOT_ASKED_WITH = frozenset(
    {
        b"authorization",
        b"host",
        b"expect",
        b"trailer",
        *(name.encode() for name in (*CONTROL_HEADERS, PROGRAM_HEADER, TRACE_HEADER)),
    }
)
NOT_ANSWERED_WITH = frozenset({b"date", b"server", b"trailer"})
# Where vectors come as bytes, a header says which is whose, for all of a batch.
HEADER_BYTES = 1024 * 1024
LARGEST_STATUS = 599
NO_CONTROLS = re.compile(rb"[^\x00-\x08\x0a-\x1f\x7f]*")
# A request that servers break at must not get to all of them.
MOST_BROKEN = 2
# vLLM closes connections that were idle for five seconds; one that it is about to close is not used any more.
KEEP_ALIVE_SECONDS = 2.0


Asking = asyncio.Future[OriginAnswer]


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class ServerSilent(OSError):
    """A server that does not answer any more, with a request under way."""


@dataclass(eq=False)
class PoolingServer:
    """One: ``models`` are the names of those that it serves, None while it has not said so or does not answer.

    ``url`` is as everybody may read it, ``headers`` show it who asks.
    ``silent`` counts the looks at it in a row that were not answered in time. ``told`` hears whether it answers.
    """

    url: str
    told: Callable[[str, bool], object]
    origin: Origin
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    models: frozenset[str] | None = None
    in_flight: int = 0
    asked: int = 0
    silent: int = 0
    asking: set[Asking] = field(default_factory=set[Asking])

    def leave(self, reason: str) -> None:
        """It is not asked again before it tells its models."""
        if self.models is not None:
            logger.warning("the pooling server %s does not answer: %s", self.url, reason)
        self.models = None
        self.told(self.url, False)

    def serves(self, models: frozenset[str]) -> None:
        """It has told its models."""
        self.silent = 0
        self.models = models
        self.told(self.url, True)

    def give_up(self) -> None:
        """Those whose answer has not begun get a :class:`ServerSilent`."""
        for each in tuple(self.asking):
            each.cancel()


class PooledAnswer:
    """A server's answer, which arrives while it is passed on. The receiver calls :meth:`close`."""

    def __init__(self, response: OriginAnswer, server: PoolingServer) -> None:
        self.status = response.status
        has_length = response.status != HTTPStatus.NO_CONTENT
        self.headers = (passed_on if has_length else end_to_end)(response.fields, NOT_ANSWERED_WITH)
        self._response = response
        self._server = server
        server.in_flight += 1

    def require_sendable(self) -> None:
        """Raises :class:`~tercet.protocol.EngineError` for a head that no router could send."""
        wrong = next((name for name, value in self.headers if not NO_CONTROLS.fullmatch(value)), None)
        if wrong is not None or self.status > LARGEST_STATUS:
            what = (
                f"its status is {self.status}"
                if wrong is None
                else f"its header {wrong.decode()} has control characters"
            )
            raise EngineError(f"the answer of {self._server.url} is not to be read: {what}")

    async def parts(self) -> AsyncIterator[bytes]:
        """Its body; raises :class:`~tercet.protocol.EngineUnreachable` if it does not come to an end."""
        try:
            while True:
                async with asyncio.timeout(PART_SECONDS):
                    part = await self._response.part()
                if not part:
                    return
                yield part
        except (NotReadable, OSError) as error:
            raise EngineUnreachable(f"{self._server.url} broke off its answer: {reason_of(error)}") from error

    def close(self) -> None:
        """Stop: no more of it is needed."""
        self._response.close()
        self._server.in_flight -= 1


@dataclass(frozen=True)
class PassedRequest:
    """A request as servers are asked with it: ``target`` as its client wrote it, and all of its fields that go on."""

    method: bytes
    target: bytes
    body: bytes
    fields: Fields


class PoolingServers:
    """Those of a router. Use as an async context manager; while entered they are looked at.

    ``key`` is what they ask for, unless a URL says ``user:password@``; ``tls`` is for ``https://`` ones,
    ``timeout_s`` how long an answer may take; ``told`` hears of each, by its URL, whether it answers.
    """

    def __init__(
        self, urls: Sequence[str], key: str = "", tls: ssl.SSLContext | None = None, timeout_s: float | None = None,
        told: Callable[[str, bool], object] = lambda _url, _answers: None,
    ) -> None:  # fmt: skip
        self.servers = [_server(url, key, told, tls) for url in urls]
        self._tls = tls
        self._timeout_s = timeout_s
        self._tasks = TaskSet()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, ssl=self._tls or True, keepalive_timeout=KEEP_ALIVE_SECONDS)
        self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        for server in self.servers:
            self._tasks.spawn(
                repeat(lambda server=server: self.look_at(server), POLL_INTERVAL_S), f"look at {server.url}"
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.close()
        for server in self.servers:
            server.origin.close()
        if self._session is not None:
            await self._session.close()

    def take(self, path: str) -> bool:
        """Whether requests for ``path`` are for them."""
        return bool(self.servers) and path in POOLING

    async def answer(
        self, method: bytes, target: bytes, model: str | None, body: bytes, fields: Fields, began: float
    ) -> PooledAnswer:
        """What one of them that serves ``model`` says to ``body``; of those that answer, the one with least to do.

        Without a model, any. One that fails to answer is not asked again for it, but another one; if that breaks off,
        too, no server is. ``target`` is the path, with its query, as the client wrote it. ``began`` is when the request
        came, by :func:`time.monotonic`. Raises
        :class:`~tercet.protocol.UnknownModel`, :class:`~tercet.protocol.EngineUnreachable`,
        :class:`~tercet.protocol.EngineError` and :class:`~tercet.protocol.DeadlineExceeded`.
        """
        within = None if self._timeout_s is None else max(0.0, began + self._timeout_s - time.monotonic())
        asking = PassedRequest(method, target, body, end_to_end(fields, NOT_ASKED_WITH))
        try:
            async with asyncio.timeout(within):
                return await self._answer(asking, model)
        except TimeoutError:
            raise DeadlineExceeded(f"the answer took longer than the {self._timeout_s:g} s that it may take") from None

    async def _answer(self, asked: PassedRequest, model: str | None) -> PooledAnswer:
        failed: list[PoolingServer] = []
        broken, why = 0, ""
        if not any(each.models for each in self.servers):
            await self.look()
        while broken < MOST_BROKEN and (server := self._pick(model, failed)) is not None:
            try:
                return await self._ask(server, asked)
            except NotConnected as error:
                reason = reason_of(error.__cause__ or error)
                why = f": {server.url} {reason}"
                server.leave(reason)
            except NotReadable as error:
                raise EngineError(f"the answer of {server.url} is not to be read: {error}") from error
            except OSError as error:
                # Perhaps it is gone, and perhaps it is only this request that it does not take.
                why = f": {server.url} {reason_of(error)}"
                broken += 1
                self._tasks.spawn(self.look_at(server), f"look at {server.url}")
            failed.append(server)
        self._require_known(model)
        raise EngineUnreachable(f"no server of this model answers{why}")

    def _pick(self, model: str | None, but: Sequence[PoolingServer]) -> PoolingServer | None:
        able = [
            each for each in self.servers
            if each.models is not None and (not model or model in each.models) and each not in but
        ]  # fmt: skip
        return min(able, key=lambda each: (each.in_flight, each.asked), default=None)

    def _require_known(self, model: str | None) -> None:
        known = sorted({name for each in self.servers for name in each.models or ()})
        if model and known and model not in known and all(each.models is not None for each in self.servers):
            raise UnknownModel(
                f"model: no pooling server of this router serves {model!r:.200}; there is {', '.join(known)}",
                "model",
            )

    async def _ask(self, server: PoolingServer, asked: PassedRequest) -> PooledAnswer:
        known = [(name.encode(), value.encode()) for name, value in server.headers.items()]
        fields = [(b"Host", server.origin.host), *asked.fields, *known]
        length = (b"Content-Length", str(len(asked.body)).encode())
        asking = asyncio.ensure_future(server.origin.ask(asked.method, asked.target, [*fields, length], asked.body))
        server.asking.add(asking)
        server.in_flight += 1
        server.asked += 1
        try:
            await asyncio.wait({asking})
            if asking.cancelled():
                raise ServerSilent("it has stopped answering")
            answer = PooledAnswer(asking.result(), server)
        except asyncio.CancelledError:
            close_result(asking)
            raise
        finally:
            server.asking.discard(asking)
            server.in_flight -= 1
        try:
            answer.require_sendable()
        except EngineError:
            answer.close()
            raise
        return answer

    # ---- who is there ------------------------------------------------------------------------------------------------

    async def look(self) -> None:
        """Ask all for their models that have not told them, or did not answer."""
        await asyncio.gather(*(self.look_at(each) for each in self.servers if each.models is None))

    async def look_at(self, server: PoolingServer) -> None:
        """Ask it for its models."""
        try:
            async with self._client.get(
                f"{server.url}/v1/models",
                headers={**server.headers, **PLAIN},
                timeout=POLL_TIMEOUT,
                allow_redirects=False,
            ) as response:
                response.raise_for_status()
                found = msgspec.json.decode(await read_answer(response), type=_Models)
        except TimeoutError as error:
            server.silent += 1
            if server.silent >= SILENT_POLLS:
                server.leave(reason_of(error))
                server.give_up()
        except aiohttp.ClientResponseError as error:
            server.leave(f"it says {error.status} when asked for its models")
        except (aiohttp.ClientError, OSError) as error:
            server.leave(reason_of(error))
        except UNREADABLE:
            server.leave("what it says of its models is not to be understood")
        else:
            server.serves(frozenset(each.id for each in found.data))

    @property
    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("PoolingServers are used outside their async context")
        return self._session


def _server(url: str, key: str, told: Callable[[str, bool], object], tls: ssl.SSLContext | None) -> PoolingServer:
    """Names and passwords are in no log, no metric and no answer."""
    parts = urlsplit(url.rstrip("/"))
    bare = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    origin = Origin(bare, tls, keep_alive_s=KEEP_ALIVE_SECONDS, connect_s=CONNECT_SECONDS, max_head=HEADER_BYTES)
    if parts.username is None:
        return PoolingServer(bare, told, origin, bearer(key))
    who = aiohttp.encode_basic_auth(unquote(parts.username), unquote(parts.password or ""))
    return PoolingServer(bare, told, origin, {"authorization": who})


def close_result(asking: Asking | asyncio.Future[PooledAnswer]) -> None:
    """Close the answer, whether it has arrived or not."""
    if not asking.cancel() and not asking.cancelled() and asking.exception() is None:
        asking.result().close()
