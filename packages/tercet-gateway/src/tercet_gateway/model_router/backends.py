"""Regular polls of routers for the models that they serve; the log says when a router is lost or answers again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import aiohttp
import msgspec

from tercet.aio import TaskSet, repeat
from tercet.protocol import EngineUnreachable
from tercet.protocol.access import bearer
from tercet.protocol.wire import UNREADABLE
from tercet.wire.client.bounded_answers import PLAIN, read_answer, reason_of
from tercet.wire.client.passing import Origin
from tercet_gateway.model_router.routes import ModelRoutes, WeightedRouter

logger = logging.getLogger("tercet.gateway")
POLL_TIMEOUT = aiohttp.ClientTimeout(total=5.0, sock_connect=2.0)
SILENT_POLLS = 3
"""Consecutive polls without an answer in time, after which a router that accepts connections counts as lost."""
KEEPALIVE_SECONDS, CONNECT_SECONDS, MOST_ANSWER_HEAD = 2.0, 5.0, 1024 * 1024


class _ModelList(msgspec.Struct):
    data: list[dict[str, Any]]


class BackendPolls:
    """Polls of the routers of ``routes`` every ``interval_s`` seconds, with the key that ``key`` returns.

    An async context manager. ``origins`` are their connections, by URL.
    """

    def __init__(self, routes: ModelRoutes, interval_s: float, key: Callable[[], str]) -> None:
        self.origins: dict[str, Origin] = {}
        self._routes = routes
        self._interval_s = interval_s
        self._key = key
        self._polls: dict[str, asyncio.Task[None]] = {}
        self._tasks = TaskSet()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False)
        await self._begin(self._routes.backends)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.close()
        for origin in self.origins.values():
            origin.close()
        if self._session is not None:
            await self._session.close()

    async def replace(self, weights: Mapping[str, float]) -> None:
        """Set the routers, by URL and weight; new ones are first asked for their models."""
        new, left = self._routes.replaced(weights.items())
        for backend in left:
            self._polls.pop(backend.url).cancel()
            self.origins.pop(backend.url).close()
            logger.info("%s is no longer polled", backend.url)
        await self._begin(new)

    async def _begin(self, backends: Sequence[WeightedRouter]) -> None:
        for backend in backends:
            self.origins[backend.url] = Origin(
                backend.url, None, keep_alive_s=KEEPALIVE_SECONDS, connect_s=CONNECT_SECONDS, max_head=MOST_ANSWER_HEAD
            )
        firsts = [asyncio.Event() for _ in backends]
        for backend, first in zip(backends, firsts, strict=True):
            polling = self._polling(backend, first)
            self._polls[backend.url] = self._tasks.spawn(polling, f"polls of {backend.url}")
        for first in firsts:  # a caller that leaves here leaves routers that are polled
            await first.wait()

    async def _polling(self, backend: WeightedRouter, first: asyncio.Event) -> None:
        """Poll a router until cancelled; set ``first`` after the first poll, or when none will follow."""

        async def poll() -> None:
            try:
                await self.poll(backend)
            finally:
                first.set()

        await repeat(poll, self._interval_s, f"polls of {backend.url}")

    async def poll(self, backend: WeightedRouter) -> None:
        """Ask one router for its models."""
        assert self._session is not None
        try:
            async with self._session.get(
                f"{backend.url}/v1/models",
                headers={**bearer(self._key()), **PLAIN},
                timeout=POLL_TIMEOUT,
                allow_redirects=False,
            ) as response:
                response.raise_for_status()
                found = msgspec.json.decode(await read_answer(response), type=_ModelList)
                models = {str(each["id"]): each for each in found.data}
        except TimeoutError as error:
            self._silent(backend, error)
        except aiohttp.ClientResponseError as error:
            self.lost(backend, f"it answers {error.status} when asked for its models")
        except (aiohttp.ClientError, OSError) as error:
            self.lost(backend, reason_of(error))
        except (KeyError, *UNREADABLE):
            self.lost(backend, "its list of models cannot be read")
        else:
            if not backend.answers or backend.models is None or models.keys() != backend.models.keys():
                logger.info("%s serves %s", backend.url, ", ".join(models) or "no model")
            backend.models, backend.answers, backend.silent, backend.lost = models, True, 0, False
            backend.still = 0

    def _silent(self, backend: WeightedRouter, error: TimeoutError) -> None:
        """Count a poll without an answer. A router that is overloaded may still send its answers; they continue."""
        backend.silent += 1
        backend.still = 0 if backend.sent else backend.still + 1
        backend.sent = False
        if backend.silent >= SILENT_POLLS:
            self.lost(backend, reason_of(error))
        if backend.still >= SILENT_POLLS:
            reason = f"{backend.url} was lost: it did not answer {SILENT_POLLS} polls, and sent nothing meanwhile"
            backend.calls.lose(EngineUnreachable(reason))

    def lost(self, backend: WeightedRouter, reason: str) -> None:
        """Mark the router as lost: it gets no request until a poll succeeds. Running requests continue."""
        if not backend.lost:
            logger.warning("%s is unavailable: %s", backend.url, reason)
        backend.answers, backend.lost = False, True
