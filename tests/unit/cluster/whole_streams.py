"""A stream of the completions API that must be whole: read by clients while something happens to the fleet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

import aiohttp
import msgspec

from tests import longest_wait

SECONDS = 240


async def read_whole(
    session: aiohttp.ClientSession, url: str, prompt: str, tokens: int, begun: asyncio.Event | None = None
) -> None:
    """Ask for ``tokens`` tokens, and fail unless all of them come, without an error. ``begun`` is set at the first."""
    body = {
        "model": "smollm2", "prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    async with session.post(f"{url}/v1/completions", json=body) as response:
        first = await response.content.readany()
        if begun is not None:
            begun.set()
        text = (first + await response.content.read()).decode()
    assert response.status == 200, text
    assert '"error"' not in text, text
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert msgspec.json.decode(events[-2])["usage"]["completion_tokens"] == tokens, text


class Streams:
    """Clients that read streams of many lengths until they are told to end; each must be whole."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.over = False
        self.whole = 0

    async def read(self, number: int) -> None:
        timeout = aiohttp.ClientTimeout(total=SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while not self.over:
                tokens = 10 + 50 * (number % 5)
                await read_whole(session, self._url, f"{number}. One two three.", tokens)
                self.whole += 1


@asynccontextmanager
async def streams(url: str, clients: int) -> AsyncGenerator[Streams]:
    reading = Streams(url)
    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(reading.read(number))
        await until(lambda: reading.whole > clients)
        yield reading
        enough = reading.whole + clients
        await until(lambda: reading.whole > enough)
        reading.over = True


until = partial(longest_wait.until, seconds=SECONDS, every=0.02)
