"""An operator pauses an engine by vLLM's own routes: others take what runs there, and it comes back by itself."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import pytest

from tests.long_runs import in_full

from .client_streams import read
from .conftest import Fleet
from .test_stopping import LEAVING, STREAMS, begin_on, undrain

BACK_SECONDS = 20.0


async def told(fleet: Fleet, path: str, **options: Any) -> None:
    """What an operator tells the engine itself."""
    url = f"{fleet.places[LEAVING].url}{path}"
    async with aiohttp.ClientSession() as session, session.post(url, **options) as answer:
        assert answer.status == 200, await answer.text()


async def shows(fleet: Fleet, paused: str) -> None:
    deadline = time.monotonic() + BACK_SECONDS
    while (found := (await asyncio.to_thread(fleet.engine, LEAVING))["paused"]) != paused:
        assert time.monotonic() < deadline, f"{LEAVING} is said to be paused: {found!r}"
        await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("pause", "paused", "resume"),
    [
        ("/pause?mode=keep", "all", "/resume"),
        ("/pause?mode=abort", "new", "/resume"),
        pytest.param("/sleep?level=0&mode=keep", "all", "/wake_up", marks=in_full("by /pause")),
    ],
)
async def test_others_take_what_a_paused_engine_has_and_it_comes_back(
    breakable: Fleet, pause: str, paused: str, resume: str
) -> None:
    calm = await asyncio.gather(*(read(breakable.url, body) for body in STREAMS))
    streams = await begin_on(breakable, LEAVING)
    await undrain(breakable)
    await told(breakable, pause)
    try:
        await shows(breakable, paused)
        assert [answer.text for answer in await asyncio.gather(*streams)] == [answer.text for answer in calm]
        assert (await read(breakable.url, STREAMS[0])).text == calm[0].text
        # As while its weights are replaced; here they are the same as before.
        await told(breakable, "/collective_rpc", json={"method": "reload_weights"})
    finally:
        await told(breakable, resume)
    await shows(breakable, "")
    again = await begin_on(breakable, LEAVING)
    await undrain(breakable)
    assert [answer.text for answer in await asyncio.gather(*again)] == [answer.text for answer in calm]
