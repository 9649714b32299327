"""SIGTERM to an engine: what runs there goes on elsewhere, unseen by clients, and then the engine is gone."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from typing import Any

import pytest

from .client_streams import BODIES, Answer, read
from .conftest import Fleet
from .moving import ask, until
from .processes import EnginePlace, processes_of, send_signal
from .prompts import prompt_of

pytestmark = pytest.mark.verifies("moves of running requests")

LEAVING = "decode-1"
OTHERS = ("prefill-0", "decode-0")
STREAMS: list[dict[str, Any]] = [
    {"prompt": prompt_of(300, seed=301), "temperature": 0, "max_tokens": 250},
    {"prompt": prompt_of(40, seed=302), "temperature": 0, "presence_penalty": 1.5, "max_tokens": 250},
    {"prompt": prompt_of(150, seed=303), "temperature": 0.9, "seed": 17, "max_tokens": 250},
]


async def begin_on(fleet: Fleet, name: str) -> list[asyncio.Task[Answer]]:
    """Streams that one engine generates, since the others are drained."""
    for other in OTHERS:
        assert (await ask(fleet, "POST", f"/engines/{other}/drain"))[0] == 200
    streams = [asyncio.create_task(read(fleet.url, body)) for body in STREAMS]
    await until(
        fleet,
        lambda found: (
            len(found) == len(STREAMS) and all((each["state"], each["engine"]) == ("running", name) for each in found)
        ),
    )
    return streams


async def undrain(fleet: Fleet) -> None:
    for other in OTHERS:
        assert (await ask(fleet, "DELETE", f"/engines/{other}/drain"))[0] == 200


async def ended(place: EnginePlace) -> int:
    """The exit code of the engine that was started there."""
    guard = place._guard  # pyright: ignore[reportPrivateUsage]
    assert isinstance(guard, subprocess.Popen)
    return await asyncio.to_thread(guard.wait, 120)


async def test_an_engine_that_is_told_to_stop_is_emptied_first(breakable: Fleet) -> None:
    calm = await asyncio.gather(*(read(breakable.url, body) for body in STREAMS))
    streams = await begin_on(breakable, LEAVING)
    await undrain(breakable)
    place = breakable.places[LEAVING]
    server = processes_of(place.url)[:1]
    send_signal(server, signal.SIGTERM)
    assert await ended(place) == 0
    _, running = await ask(breakable, "GET", "/sequences")
    assert [(each["attempt"], each["moves"]) for each in running] == [(0, 1)] * len(STREAMS), "they run on, elsewhere"
    assert [await stream for stream in streams] == calm
    breakable.mend()
    assert not breakable.engine(LEAVING)["stopping"]
    assert await read(breakable.url, BODIES[0]) == await read(breakable.url, BODIES[0])


async def test_told_again_it_stops_at_once(breakable: Fleet) -> None:
    streams = await begin_on(breakable, LEAVING)
    try:
        place = breakable.places[LEAVING]
        server = processes_of(place.url)[:1]
        send_signal(server, signal.SIGTERM)
        async with asyncio.timeout(60):
            while not breakable.engine(LEAVING)["stopping"]:
                await asyncio.sleep(0.05)
        _, running = await ask(breakable, "GET", "/sequences")
        assert [each["engine"] for each in running] == [LEAVING] * len(STREAMS), "there is nowhere to go"
        send_signal(server, signal.SIGTERM)
        assert await ended(place) == 0
    finally:
        await undrain(breakable)
    for stream in streams:  # they were lost with their engine, and went on
        assert (await stream).completion_tokens == 250
