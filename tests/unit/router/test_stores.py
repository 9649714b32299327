"""What a router keeps after requests with long names: every store is in a table, and bounded in bytes.

The stores are found, not listed: after a hundred requests each container that is reached from the router's objects, and
has become longer, must be in :data:`BOUNDED_BY`. A new store fails here until somebody writes down what bounds it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from tercet.fleet.admission import Gate
from tercet.fleet.policy_views import SeenRequests
from tercet.protocol.headers import (
    AGENT_HEADERS,
    OTHER_SESSION_HEADERS,
    PROGRAM_HEADER,
    REQUEST_ID_HEADER,
    SESSION_HEADER,
    SUBAGENT_HEADER,
)
from tercet.protocol.names import LONGEST_KEPT
from tercet.router.observe.request_traces import RequestTraces
from tercet.router.router_app import RouterApp
from tercet.router.serve.sessions import Sessions
from tercet.settings import Limits
from tercet.settings.fleet_settings import Objectives, SessionSettings
from tercet_lab.bench.simulated.moving_fleet import SessionCounts
from tercet_lab.prompt_texts import PromptTexts
from tercet_lab.small_openai import small_app
from tests.unit.kept import Kept

from .conftest import LiveRouter

LONG = 30_000
BODY = {"model": "m", "prompt": " ".join(f"w{number}" for number in range(40)), "max_tokens": 3}
BOUNDED_BY = {
    "RequestTraces._last": "KEPT_BYTES, and trace-requests",
    "RequestTraces._slowest": "a tenth of KEPT_BYTES, and of trace-requests",
    "SessionTable._sessions": "SessionSettings.most; names have at most LONGEST_KEPT characters and a digest",
    "_Session.contexts": "MOST_CONTEXTS of a session, and SessionSettings.tokens of all",
    "_Session.engines": "one engine for each role",
    "SeenRequests._seen": "MOST_SEEN, and MOST_BLOCKS of all",
    "Admission._next_turns": "SPARE_FLOWS, and names of at most LONGEST_KEPT characters",
    "RoutingHistory._recent": "lruCapacityPerServer, by engine",
    "PrefixIndex._holders": "RoutingHistory._recent",
    "Exemplars._kept": "MOST_EXEMPLARS; only of sampled traces",
    "Moves._record": "REMEMBERED",
    "Summary._metrics": "one for each engine",
}
"""The stores that grow with requests, and what bounds each of them."""


class House:
    """A router with all that it keeps for requests: traces, sessions, and the requests that planners see."""

    def __init__(self, router: LiveRouter, checkpoint: Path) -> None:
        service = router.service
        wanted = msgspec.convert({"sessions": "on", "session-keep": "none"}, SessionSettings)
        service.sessions = Sessions(router.fleet, wanted, SessionCounts(), "test")
        service.remember(SeenRequests(600.0, Objectives(), router.fleet.costs.clock))
        app: FastAPI = small_app(service, PromptTexts(checkpoint), ["m"], 1000)
        traces = RequestTraces(kept=100_000)
        gate = Gate(Limits(), router.fleet, router.metrics)
        door = RouterApp(app.build_middleware_stack(), None, gate, (), service.program_called, 1_000_000, traces=traces)
        app.middleware_stack = door
        self._app, self._roots = app, (door, service, traces, gate)
        self._number = 0

    def kept(self) -> Kept:
        return Kept(*self._roots)

    async def asks(self, requests: int, length: int) -> set[int]:
        """Send requests whose names have this length, each in another field or header; return the statuses."""
        statuses = set[int]()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self._app), base_url="http://localhost") as client:
            for _ in range(requests):
                self._number += 1
                named = f"{self._number}-".ljust(length, "n")
                answer = await client.post("/v1/completions", **hostile(self._number, named))
                statuses.add(answer.status_code)
        return statuses


def hostile(number: int, named: str) -> dict[str, Any]:
    """One request in which the client's name is in every place that this kind of request has."""
    fields: dict[str, Any] = {**BODY, "user": named, "cache_salt": named, "request_id": named}
    headers = {"authorization": f"Bearer {named}", "traceparent": named, "baggage": named, "user-agent": named}
    session_headers = (SESSION_HEADER, *OTHER_SESSION_HEADERS, SUBAGENT_HEADER, *AGENT_HEADERS)
    in_bodies: tuple[dict[str, Any], ...] = (
        {"session_id": named},
        {"vllm_xargs": {"session_id": named}},
        {"nvext": {"agent_context": {"trajectory_id": named}}},
        {"nvext": {"agent_context": {"session_id": named}}},
        {"nvext": {"session_control": {"session_id": named}}},
        {"program_id": named},
    )
    kind = number % 12
    if kind < len(in_bodies):
        fields |= in_bodies[kind]
    elif kind < 10:
        headers[session_headers[number // 12 % len(session_headers)]] = named
    elif kind == 10:
        fields["model"] = named
    else:
        headers[PROGRAM_HEADER] = named
    if number % 2:
        headers[REQUEST_ID_HEADER] = named
    return {"json": fields, "headers": headers}


@pytest.fixture
async def house(router: LiveRouter, checkpoint: Path) -> House:
    return House(router, checkpoint)


@pytest.mark.slow
async def test_each_store_that_grows_is_in_the_table(house: House) -> None:
    await house.asks(48, 20)
    before = house.kept()
    statuses = await house.asks(96, 20)
    grown = house.kept().grown_since(before)
    assert statuses == {200, 400, 404}
    assert grown >= {"RequestTraces._last", "SessionTable._sessions", "SeenRequests._seen"}
    unknown = grown - BOUNDED_BY.keys()
    assert not unknown, f"these grow with requests: write down in BOUNDED_BY what bounds their bytes: {unknown}"


@pytest.mark.slow
async def test_long_names_are_kept_in_no_store(house: House) -> None:
    """A request keeps as many bytes whether its names have a hundred characters or thirty thousand."""
    await house.asks(48, LONGEST_KEPT)
    first = house.kept().bytes
    await house.asks(96, LONGEST_KEPT)
    short = house.kept().bytes - first
    second = house.kept().bytes
    await house.asks(96, LONG)
    long = house.kept().bytes - second
    assert long < 1.2 * short + 96 * 256, (short, long)


@pytest.mark.slow
async def test_the_measure_finds_a_store_of_long_names(house: House) -> None:
    before = house.kept()
    house._roots[1].__dict__["forgotten"] = [f"{number}".ljust(LONG, "n") for number in range(96)]
    after = house.kept()
    assert after.bytes - before.bytes > 96 * LONG
    assert "Service.forgotten" in after.grown_since(before)
