"""What the servers of the gateway keep after requests whose names their clients chose.

The stores are found, as in ``tests/unit/router/test_stores.py``: each container that is reached from a server's objects
and has become longer must be in :data:`BOUNDED_BY`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
import pytest

from tercet.protocol.headers import OTHER_SESSION_HEADERS, REQUEST_ID_HEADER, SESSION_HEADER
from tercet.wire.client import remote_prefill
from tercet_gateway.openai_call import FAIRNESS_HEADERS, OBJECTIVE_HEADERS
from tests.conformance.envoy_side import BUFFERED
from tests.unit.kept import Kept

from .model_router.test_model_router import Router, world
from .sidecar.engines import LOOPBACK, PREFILLER
from .sidecar.test_sidecar import house as sidecar_house
from .test_service import asked

LONG = 30_000
BOUNDED_BY = {
    "PickerMetrics._models": "MOST_MODELS, LONGEST_MODEL",
    "Counter._metrics": "MOST_MODELS at the picker; elsewhere statuses and codes",
    "Histogram._metrics": "MOST_MODELS",
    "Histogram._buckets": "Histogram._metrics",
    "Histogram._kwargs": "Histogram._metrics",
    "Histogram._upper_bounds": "Histogram._metrics",
    "Counter._kwargs": "Counter._metrics",
    "RoutingHistory._recent": "lruCapacityPerServer, by engine",
    "RoutingHistory._holders": "RoutingHistory._recent",
    "Admission._next_turns": "SPARE_FLOWS, and names of at most LONGEST_NAME characters",
    "_Recent.picks": "UNTIL_COUNTED seconds",
    "PrefillAttempts._lost": "MOST_LOST; hosts match the pattern of a host's name",
    "RemotePrefill._peers": "MOST_PEERS; hosts match the pattern of a host's name",
    "Origin._idle": "connections at a time",
    "Listener._clients": "connections at a time",
    "Listener._idle": "connections at a time",
}
"""The stores that grow with requests, and what bounds each of them."""


class Server(NamedTuple):
    """The objects of a server, and a function that sends a request to it and returns the status."""

    roots: Sequence[Any]
    ask: Callable[[dict[str, Any], dict[str, str], str], Awaitable[int]]

    def kept(self) -> Kept:
        return Kept(*self.roots)

    async def asks(self, first: int, requests: int, length: int) -> set[int]:
        """Send requests whose names have this length, each in another place; return the statuses."""
        return {
            await self.ask(*hostile(number, f"{number}-".ljust(length, "n")))
            for number in range(first, first + requests)
        }


def hostile(number: int, named: str) -> tuple[dict[str, Any], dict[str, str], str]:
    """Body, headers and path of a request with the client's name in one place."""
    body: dict[str, Any] = {"model": "m", "prompt": f"{number} " + "word " * 400, "max_tokens": 3}
    kinds: tuple[tuple[dict[str, Any], dict[str, str], str], ...] = (
        ({"model": named}, {}, "/v1/completions"),
        ({"user": named, "cache_salt": named, named: named}, {}, "/v1/completions"),
        ({"cache_salt": named[:1024], "request_id": named}, {}, "/v1/completions"),
        ({}, {REQUEST_ID_HEADER: named}, "/v1/completions"),
        ({}, {"authorization": f"Bearer {named}", "traceparent": named, "baggage": named}, "/v1/completions"),
        ({}, {PREFILLER: f"{named}:8000"}, "/v1/completions"),
        ({}, {PREFILLER: f"127.0.0.1:{1 + number % 9}", REQUEST_ID_HEADER: named}, "/v1/completions"),
        ({}, {}, f"/v1/{named}"),
        *(({}, {name: named}, "/v1/completions") for name in (*FAIRNESS_HEADERS, *OBJECTIVE_HEADERS)),
        *(({}, {name: named}, "/v1/completions") for name in (SESSION_HEADER, *OTHER_SESSION_HEADERS)),
    )
    fields, headers, path = kinds[number % len(kinds)]
    return {**body, **fields}, headers, path


@asynccontextmanager
async def picker() -> AsyncGenerator[Server]:
    async with asked("both", "both") as (envoy, served):

        async def ask(body: dict[str, Any], headers: dict[str, str], path: str) -> int:
            verdict = await envoy.request(json.dumps(body).encode(), BUFFERED, headers={**headers, ":path": path})
            return verdict.status or 200

        yield Server((served.server, served.fleet), ask)


@asynccontextmanager
async def model_router() -> AsyncGenerator[Server]:
    async with AsyncExitStack() as stack:
        router = Router("m")
        stack.push_async_callback(router.running.aclose)
        found = await stack.enter_async_context(world(await router.start()))
        yield Server((found.server,), over_http(found.session, found.url))


@asynccontextmanager
async def sidecar() -> AsyncGenerator[Server]:
    async with sidecar_house(prefill_hosts=f"{LOOPBACK},*:8000") as found:
        yield Server((found.server, remote_prefill.METRICS), over_http(found.session, found.url))


def over_http(
    session: aiohttp.ClientSession, url: str
) -> Callable[[dict[str, Any], dict[str, str], str], Awaitable[int]]:
    async def ask(body: dict[str, Any], headers: dict[str, str], path: str) -> int:
        async with asyncio.timeout(60), session.post(url + path, json=body, headers=headers) as answer:
            await answer.read()
            return answer.status

    return ask


servers = pytest.mark.parametrize("serving", [picker, model_router, sidecar])


@servers
@pytest.mark.slow
async def test_each_store_that_grows_is_in_the_table(serving: Any) -> None:
    async with serving() as server:
        await server.asks(0, 30, 20)
        before = server.kept()
        statuses = await server.asks(30, 60, 20)
        unknown = server.kept().grown_since(before) - BOUNDED_BY.keys()
        assert 200 in statuses
        assert max(statuses) < 500
        assert not unknown, f"these grow with requests: write down in BOUNDED_BY what bounds their bytes: {unknown}"


@servers
@pytest.mark.slow
async def test_long_names_are_kept_in_no_store(serving: Any) -> None:
    """A request keeps as many bytes whether its names have a hundred characters or thirty thousand."""
    async with serving() as server:
        await server.asks(0, 30, 128)
        first = server.kept().bytes
        await server.asks(30, 60, 128)
        second = server.kept().bytes
        await server.asks(90, 60, LONG)
        long = server.kept().bytes - second
        assert long < 1.2 * max(second - first, 0) + 60 * 512, (second - first, long)
