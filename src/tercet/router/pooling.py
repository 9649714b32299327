"""Embeddings, scores and reranking: passed on to servers of pooling models, which take no part in Tercet's verbs.

Such a server is any vLLM. A request computes everything at once and leaves nothing behind, so it may be asked of
another server as long as its client has nothing of an answer.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import unquote, urlsplit

import aiohttp
import msgspec
from yarl import URL

from tercet.aio import TaskSet, repeat
from tercet.client.connection_errors import reason_of
from tercet.protocol import DeadlineExceeded, EngineError, EngineUnreachable, UnknownModel
from tercet.protocol.bearer import bearer
from tercet.protocol.wire import UNREADABLE

logger = logging.getLogger("tercet.router")
PATHS = frozenset(
    {"/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank",
     "/v2/rerank"}
)  # fmt: skip
# Each is asked for its models so often, and is left alone once so many questions in a row got no answer in time: a
# server that is busy with a large batch may be late.
LOOK_SECONDS = 2.0
LOOK_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
SILENT_LOOKS = 3
# A large batch takes as long as it takes; who set a limit for requests has one here. Once a server begins to answer it
# has computed everything.
CONNECT_SECONDS = 5.0
PART_SECONDS = 30.0
# What servers may see of a request besides its body, and clients of an answer: where vectors come as bytes, a header
# says which is whose, for all of a batch.
ASKED_WITH = ("content-type", "accept", "x-request-id", "traceparent", "tracestate")
ANSWERED_WITH = ("content-type", "retry-after", "x-request-id", "metadata")
HEADER_BYTES = 1024 * 1024
# A request that servers break at must not get to all of them.
MOST_BROKEN = 2
# vLLM closes connections that were idle for five seconds; one that it is about to close is not used any more.
KEEP_ALIVE_SECONDS = 2.0


Asking = asyncio.Future[aiohttp.ClientResponse]


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


class Answer:
    """A server's, which comes while it is passed on. Whoever got it calls :meth:`close`."""

    def __init__(self, response: aiohttp.ClientResponse, server: PoolingServer) -> None:
        self.status = response.status
        self.headers = [
            (name.encode(), response.headers[name].encode("latin-1"))
            for name in ANSWERED_WITH
            if name in response.headers
        ]
        self._response = response
        self._server = server
        server.in_flight += 1

    async def parts(self) -> AsyncIterator[bytes]:
        """Its body; raises :class:`~tercet.protocol.EngineUnreachable` if it does not come to an end."""
        try:
            while True:
                async with asyncio.timeout(PART_SECONDS):
                    part = await self._response.content.readany()
                if not part:
                    return
                yield part
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineUnreachable(f"{self._server.url} broke off its answer: {reason_of(error)}") from error

    def close(self) -> None:
        """Nobody waits for more of it."""
        self._response.close()
        self._server.in_flight -= 1


class PoolingServers:
    """Those of a front door. Use as an async context manager; while entered they are looked at.

    ``key`` is what they ask for, unless a URL says ``user:password@``; ``tls`` is for ``https://`` ones,
    ``timeout_s`` how long an answer may take; ``told`` hears of each, by its URL, whether it answers.
    """

    def __init__(
        self, urls: Sequence[str], key: str = "", tls: ssl.SSLContext | None = None, timeout_s: float | None = None,
        told: Callable[[str, bool], object] = lambda _url, _answers: None,
    ) -> None:  # fmt: skip
        self.servers = [_server(url, key, told) for url in urls]
        self._tls = tls
        self._timeout_s = timeout_s
        self._tasks = TaskSet()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, ssl=self._tls or True, keepalive_timeout=KEEP_ALIVE_SECONDS)
        self._session = aiohttp.ClientSession(
            connector=connector, max_field_size=HEADER_BYTES, max_line_size=HEADER_BYTES
        )
        for server in self.servers:
            self._tasks.spawn(repeat(lambda server=server: self.look_at(server), LOOK_SECONDS), f"look at {server.url}")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.close()
        if self._session is not None:
            await self._session.close()

    def take(self, path: str) -> bool:
        """Whether requests for ``path`` are for them."""
        return bool(self.servers) and path in PATHS

    async def answer(
        self, target: str, model: str | None, body: bytes, headers: Mapping[str, str], began: float
    ) -> Answer:
        """What one of them that serves ``model`` says to ``body``; of those that answer, the one with least to do.

        Without a model, any. One that fails to answer is not asked again for it, but another one; if that breaks off,
        too, nobody is. ``target`` is the path, with its query. ``began`` is when the request came, by
        :func:`time.monotonic`; names of ``headers`` are in lower case. Raises
        :class:`~tercet.protocol.UnknownModel`, :class:`~tercet.protocol.EngineUnreachable`,
        :class:`~tercet.protocol.EngineError` and :class:`~tercet.protocol.DeadlineExceeded`.
        """
        shown = {name: headers[name] for name in ASKED_WITH if name in headers}
        within = None if self._timeout_s is None else max(0.0, began + self._timeout_s - time.monotonic())
        try:
            async with asyncio.timeout(within):
                return await self._answer(target, model, body, shown)
        except TimeoutError:
            raise DeadlineExceeded(f"the answer took longer than the {self._timeout_s:g} s that it may take") from None

    async def _answer(self, target: str, model: str | None, body: bytes, headers: Mapping[str, str]) -> Answer:
        failed: list[PoolingServer] = []
        broken, why = 0, ""
        if not any(each.models for each in self.servers):
            await self.look()
        while broken < MOST_BROKEN and (server := self._pick(model, failed)) is not None:
            try:
                return await self._ask(server, target, body, headers)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                why = f": {server.url} {reason_of(error)}"
                server.leave(reason_of(error))
            except aiohttp.ClientResponseError as error:
                raise EngineError(f"the answer of {server.url} is not to be read: {reason_of(error)}") from error
            except (aiohttp.ClientError, OSError) as error:
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
                f"model: no pooling server of this front door serves {model!r:.200}; there is {', '.join(known)}",
                "model",
            )

    async def _ask(self, server: PoolingServer, target: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        asking = asyncio.ensure_future(
            self._client.post(
                URL(server.url + target, encoded=True),
                data=body,
                headers={**headers, **server.headers},
                timeout=timeout,
                allow_redirects=False,
            )
        )
        server.asking.add(asking)
        server.in_flight += 1
        server.asked += 1
        try:
            await asyncio.wait({asking})
            if asking.cancelled():
                raise ServerSilent("it has stopped answering")
            return Answer(asking.result(), server)
        except asyncio.CancelledError:
            close_result(asking)
            raise
        finally:
            server.asking.discard(asking)
            server.in_flight -= 1

    # ---- who is there ------------------------------------------------------------------------------------------------

    async def look(self) -> None:
        """Ask all for their models that have not told them, or did not answer."""
        await asyncio.gather(*(self.look_at(each) for each in self.servers if each.models is None))

    async def look_at(self, server: PoolingServer) -> None:
        """Ask it for its models."""
        try:
            async with self._client.get(
                f"{server.url}/v1/models", headers=server.headers, timeout=LOOK_TIMEOUT, allow_redirects=False
            ) as response:
                response.raise_for_status()
                found = msgspec.json.decode(await response.read(), type=_Models)
        except TimeoutError as error:
            server.silent += 1
            if server.silent >= SILENT_LOOKS:
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


def _server(url: str, key: str, told: Callable[[str, bool], object]) -> PoolingServer:
    """Names and passwords are in no log, no metric and no answer."""
    parts = urlsplit(url.rstrip("/"))
    if parts.username is None:
        return PoolingServer(parts.geturl(), told, bearer(key))
    who = aiohttp.encode_basic_auth(unquote(parts.username), unquote(parts.password or ""))
    bare = parts._replace(netloc=parts.netloc.rpartition("@")[2])
    return PoolingServer(bare.geturl(), told, {"authorization": who})


def close_result(asking: Asking | asyncio.Future[Answer]) -> None:
    """Nobody waits for it, whether it has come already or not."""
    if not asking.cancel() and not asking.cancelled() and asking.exception() is None:
        asking.result().close()
