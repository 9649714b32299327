"""A proxy for embeddings, scores and reranking, to servers of pooling models, which do not offer Tercet's verbs.

Such a server is any vLLM server. A request has no state on the server, so another server may be asked as long as the
client has no part of an answer.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Self
from urllib.parse import unquote, urlsplit

import aiohttp
import msgspec

from tercet.aio.tasks import TaskSet, repeat
from tercet.protocol import DeadlineExceeded, EngineError, EngineUnreachable, UnknownModel
from tercet.protocol.headers import CONTROL_HEADERS, POOLING, PROGRAM_HEADER, TRACE_HEADER
from tercet.protocol.wire import UNREADABLE
from tercet.wire.callers import bearer
from tercet.wire.client.bounded_answers import PLAIN, read_answer, reason_of
from tercet.wire.client.passing import (
    Fields,
    NotConnected,
    NotReadable,
    OriginAnswer,
    end_to_end,
    passed_on,
    passing_session,
    request,
)

logger = logging.getLogger("tercet.router")
# The interval at which each server is polled for its models, the timeout, and the number of consecutive timeouts after
# which it is not picked: a server that is busy with a large batch may answer late.
POLL_INTERVAL_S = 2.0
POLL_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
SILENT_POLLS = 3
# Only --request-timeout limits a whole answer, since a large batch takes long. A server that begins to answer has
# computed everything, so each part must arrive within PART_SECONDS.
CONNECT_SECONDS = 5.0
PART_SECONDS = 30.0
# Headers that servers do not get: the key to this router, its host name, the framing of the body, and Tercet's headers.
# Headers that clients do not get: the router sends its own Server and Date.
NOT_ASKED_WITH = frozenset(
    {
        b"authorization",
        b"host",
        b"expect",
        *(name.encode() for name in (*CONTROL_HEADERS, PROGRAM_HEADER, TRACE_HEADER)),
    }
)
NOT_ANSWERED_WITH = frozenset({b"date", b"server"})
# Largest head of an answer: if vectors come as bytes, a header describes all vectors of a batch.
HEADER_BYTES = 1024 * 1024
LARGEST_STATUS = 599
NO_CONTROLS = re.compile(rb"[^\x00-\x08\x0a-\x1f\x7f]*")
# Number of servers that may fail during one request: a request that crashes servers must not reach all of them.
MOST_BROKEN = 2
# vLLM closes connections that were idle for 5 s; a connection is not used again shortly before that.
KEEP_ALIVE_SECONDS = 2.0


Asking = asyncio.Future[OriginAnswer]


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class ServerSilent(OSError):
    """Raised if a server stops answering while a request is in flight."""


@dataclass(eq=False)
class PoolingServer:
    """One server of pooling models."""

    # Without a password, so it may be logged; ``headers`` carry the router's credentials.
    url: str
    # Called with the URL and whether the server answers.
    on_poll: Callable[[str, bool], object]
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    # The names that it serves; None while they are not known or it does not answer.
    models: frozenset[str] | None = None
    in_flight: int = 0
    asked: int = 0
    # Consecutive polls that timed out.
    silent: int = 0
    asking: set[Asking] = field(default_factory=set[Asking])

    def leave(self, reason: str) -> None:
        """Mark the server as lost: it gets no request until a poll returns its models."""
        if self.models is not None:
            logger.warning("the pooling server %s does not answer: %s", self.url, reason)
        self.models = None
        self.on_poll(self.url, False)

    def serves(self, models: frozenset[str]) -> None:
        """Record the models of a server that has answered a poll."""
        self.silent = 0
        self.models = models
        self.on_poll(self.url, True)

    def give_up(self) -> None:
        """Fail the requests whose answer has not begun with :class:`ServerSilent`."""
        for each in tuple(self.asking):
            each.cancel()


class PooledAnswer:
    """A server's answer, which is passed on while it arrives. The receiver calls :meth:`close`."""

    def __init__(self, response: OriginAnswer, server: PoolingServer) -> None:
        self.status = response.status
        has_length = response.status != HTTPStatus.NO_CONTENT
        self.headers = (passed_on if has_length else end_to_end)(response.fields, NOT_ANSWERED_WITH)
        self._response = response
        self._server = server
        server.in_flight += 1

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the body; raise :class:`~tercet.protocol.EngineUnreachable` if it breaks off before its end."""
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
        """Close the answer; the rest of its body is not needed."""
        self._response.close()
        self._server.in_flight -= 1


class PoolingServers:
    """The pooling servers of a router. Use as an async context manager; while entered, the servers are polled.

    ``key`` is the key for the servers, except those whose URL has ``user:password@``; ``tls`` is for ``https://`` URLs;
    ``timeout_s`` limits a whole answer, None for no limit. ``on_poll`` is called with a URL and whether that server
    answers.
    """

    def __init__(
        self, urls: Sequence[str], key: str = "", tls: ssl.SSLContext | None = None, timeout_s: float | None = None,
        on_poll: Callable[[str, bool], object] = lambda _url, _answers: None,
    ) -> None:  # fmt: skip
        self.servers = [_server(url, key, on_poll) for url in urls]
        self._tls = tls
        self._timeout_s = timeout_s
        self._tasks = TaskSet()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = passing_session(
            self._tls, keep_alive_s=KEEP_ALIVE_SECONDS, connect_s=CONNECT_SECONDS, max_head=HEADER_BYTES
        )
        for server in self.servers:
            name = f"poll of {server.url}"
            self._tasks.spawn(repeat(partial(self.look_at, server), POLL_INTERVAL_S, name), name)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.close()
        if self._session is not None:
            await self._session.close()

    @property
    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("PoolingServers are used outside their async context")
        return self._session

    def take(self, path: str) -> bool:
        return bool(self.servers) and path in POOLING

    async def answer(
        self, method: bytes, target: bytes, model: str | None, body: bytes, fields: Fields, began: float
    ) -> PooledAnswer:
        """Return the answer to ``body`` of a server of ``model`` (any server without a model): the least busy one.

        If a server fails, another one is asked; after two servers that broke off, none is. ``target`` is the path with
        its query as the client wrote it. ``began`` is the arrival of the request by :func:`time.monotonic`. Raises
        :class:`~tercet.protocol.UnknownModel`, :class:`~tercet.protocol.EngineUnreachable`,
        :class:`~tercet.protocol.EngineError` and :class:`~tercet.protocol.DeadlineExceeded`.
        """
        within = None if self._timeout_s is None else max(0.0, began + self._timeout_s - time.monotonic())
        fields = end_to_end(fields, NOT_ASKED_WITH)
        failed: list[PoolingServer] = []
        broken, why = 0, ""
        try:
            async with asyncio.timeout(within):
                if not any(each.models for each in self.servers):
                    await self.look()
                while broken < MOST_BROKEN and (server := self._pick(model, failed)) is not None:
                    try:
                        return await self._ask(server, method, target, body, fields)
                    except NotConnected as error:
                        reason = reason_of(error)
                        why = f": {server.url} {reason}"
                        server.leave(reason)
                    except NotReadable as error:
                        raise EngineError(f"the answer of {server.url} is invalid: {error}") from error
                    except OSError as error:
                        # The server may be gone, or it may only fail at this request: the poll finds out which.
                        why = f": {server.url} {reason_of(error)}"
                        broken += 1
                        self._tasks.spawn(self.look_at(server), f"poll of {server.url}")
                    failed.append(server)
        except TimeoutError:
            raise DeadlineExceeded(f"the answer took longer than {self._timeout_s:g} s, the request timeout") from None
        known = sorted({name for each in self.servers for name in each.models or ()})
        if model and known and model not in known and all(each.models is not None for each in self.servers):
            raise UnknownModel(
                f"model: no pooling server of this router serves {model!r:.200}; choose one of {', '.join(known)}",
                "model",
            )
        raise EngineUnreachable(f"no pooling server of this model answers{why}")

    def _pick(self, model: str | None, but: Sequence[PoolingServer]) -> PoolingServer | None:
        # By requests in flight, and of equals the one that was asked least: idle servers take turns.
        able = [
            each for each in self.servers
            if each.models is not None and (not model or model in each.models) and each not in but
        ]  # fmt: skip
        return min(able, key=lambda each: (each.in_flight, each.asked), default=None)

    async def _ask(
        self, server: PoolingServer, method: bytes, target: bytes, body: bytes, fields: Fields
    ) -> PooledAnswer:
        known = [(name.encode(), value.encode()) for name, value in server.headers.items()]
        fields = [*fields, *known, (b"Content-Length", str(len(body)).encode())]
        asking = asyncio.ensure_future(request(self._client, server.url, method.decode("ascii"), target, fields, body))
        server.asking.add(asking)  # so that a poll that finds the server silent can end the wait
        server.in_flight += 1
        server.asked += 1
        try:
            await asyncio.wait({asking})
            if asking.cancelled():
                raise ServerSilent("the server has stopped answering")
            answer = PooledAnswer(asking.result(), server)
        except asyncio.CancelledError:
            close_result(asking)
            raise
        finally:
            server.asking.discard(asking)
            server.in_flight -= 1
        wrong = next((name for name, value in answer.headers if not NO_CONTROLS.fullmatch(value)), None)
        if wrong is None and answer.status <= LARGEST_STATUS:
            return answer
        answer.close()  # the router cannot send on such a head
        what = f"its status is {answer.status}"
        if wrong is not None:
            what = f"its header {wrong.decode()} has control characters"
        raise EngineError(f"the answer of {server.url} is invalid: {what}")

    # ---- polls -------------------------------------------------------------------------------------------------------

    async def look(self) -> None:
        """Poll all servers whose models are not known."""
        await asyncio.gather(*(self.look_at(each) for each in self.servers if each.models is None))

    async def look_at(self, server: PoolingServer) -> None:
        try:
            async with self._client.get(
                f"{server.url}/v1/models", headers={**server.headers, **PLAIN}, timeout=POLL_TIMEOUT,
                allow_redirects=False,
            ) as response:  # fmt: skip
                response.raise_for_status()
                found = msgspec.json.decode(await read_answer(response), type=_Models)
        # One slow poll is not a lost server.
        except TimeoutError as error:
            server.silent += 1
            if server.silent >= SILENT_POLLS:
                server.leave(reason_of(error))
                server.give_up()
        except aiohttp.ClientResponseError as error:
            server.leave(f"GET /v1/models: HTTP {error.status}")
        except (aiohttp.ClientError, OSError) as error:
            server.leave(reason_of(error))
        except UNREADABLE:
            server.leave("invalid response from GET /v1/models")
        else:
            server.serves(frozenset(each.id for each in found.data))


def _server(url: str, key: str, on_poll: Callable[[str, bool], object]) -> PoolingServer:
    """Return the server of a URL, whose user name and password never appear in logs, metrics and answers."""
    parts = urlsplit(url.rstrip("/"))
    bare = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    if parts.username is None:
        return PoolingServer(bare, on_poll, bearer(key))
    who = aiohttp.encode_basic_auth(unquote(parts.username), unquote(parts.password or ""))
    return PoolingServer(bare, on_poll, {"authorization": who})


def close_result(asking: Asking | asyncio.Future[PooledAnswer]) -> None:
    """Close the answer, or cancel the request if no answer has arrived."""
    if not asking.cancel() and not asking.cancelled() and asking.exception() is None:
        asking.result().close()
