"""``/openapi.json``: describing all routes takes about a second, which must not be that of other clients."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
from fastapi import FastAPI

from tercet.router.openai.openai_server import describe_in_a_thread


async def test_routes_are_described_once_and_not_on_the_event_loop() -> None:
    app, described = FastAPI(), list[threading.Thread]()
    app.get("/x")(lambda: 1)
    whole = app.openapi

    def openapi() -> dict[str, Any]:
        described.append(threading.current_thread())
        return whole()

    app.openapi = openapi
    describe_in_a_thread(app)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        answers = await asyncio.gather(*(client.get("/openapi.json") for _ in range(3)))
    assert [list(answer.json()["paths"]) for answer in answers] == [["/x"]] * 3
    assert described[0] is not threading.main_thread()
    # The later calls, on the event loop, find the description.
    assert described.count(threading.main_thread()) == 3
    assert len(described) == 4


async def test_without_a_description_nothing_is_added() -> None:
    app = FastAPI(openapi_url=None)
    describe_in_a_thread(app)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        assert (await client.get("/openapi.json")).status_code == 404
