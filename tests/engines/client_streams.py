"""Clients of a router that read streams of every kind, and what they see."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import aiohttp
import msgspec

from tercet.protocol.sse import DONE, EventReader, read_events

from .prompts import ANSWER_TIMEOUT, prompt_of

TOKENS = 60
BODIES: list[dict[str, Any]] = [
    {"prompt": prompt_of(300, seed=1), "temperature": 0},
    {"prompt": prompt_of(40, seed=2), "temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"prompt": prompt_of(150, seed=3), "temperature": 0.9, "seed": 17},
    {"prompt": prompt_of(90, seed=4), "temperature": 0, "structured_outputs": {"regex": "(a|b)( (a|b)){50}"}},
    {"prompt": prompt_of(70, seed=5), "temperature": 0, "logprobs": 1},
]


class Answer(NamedTuple):
    """A whole stream."""

    text: str
    finish_reason: str
    completion_tokens: int


def said_by(stream: str) -> list[Any]:
    """The events of a whole stream, without its end mark."""
    return [msgspec.json.decode(data) for data in EventReader().read(stream.encode()) if data != DONE]


async def read(url: str, body: dict[str, Any], on_chunk: Callable[[], object] = lambda: None) -> Answer:
    """Read one stream to its end, which must be a good one."""
    text, reason, usage = "", "", None
    fields = {
        "model": "smollm2", "max_tokens": TOKENS, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, **body,
    }  # fmt: skip
    async with (
        aiohttp.ClientSession(timeout=ANSWER_TIMEOUT) as session,
        session.post(f"{url}/v1/completions", json=fields) as response,
    ):
        assert response.status == 200, await response.text()
        async for data in read_events(response.content.iter_any()):
            if data != DONE:
                event = msgspec.json.decode(data)
                assert "error" not in event, event
                for choice in event["choices"]:
                    text += choice["text"]
                    reason = choice["finish_reason"] or reason
                usage = event.get("usage") or usage
                on_chunk()
    assert usage is not None
    return Answer(text, reason, usage["completion_tokens"])


async def read_all(url: str) -> list[Answer]:
    """What each of `BODIES` is answered, one after the other."""
    return [await read(url, body) for body in BODIES]


class Readers:
    """One client for each of `BODIES`, which reads its answer again and again until `over`; each must be as expected.

    `gap` is the longest time between two chunks of one stream, `first` between a request and its first chunk.
    """

    def __init__(self, url: str, expected: list[Answer]) -> None:
        self._url = url
        self._expected = expected
        self._chunks = [0] * len(BODIES)
        self._came = asyncio.Event()
        self.over = False
        self.gap = self.first = 0.0
        self.answers = 0

    def start(self, group: asyncio.TaskGroup) -> None:
        for index in range(len(BODIES)):
            group.create_task(self._read_on(index))

    async def more(self, chunks: int) -> None:
        """Wait until every client has got so many more."""
        wanted = [count + chunks for count in self._chunks]
        while any(count < least for count, least in zip(self._chunks, wanted, strict=True)):
            self._came.clear()
            await self._came.wait()

    async def _read_on(self, index: int) -> None:
        while not self.over:
            found = await read(self._url, BODIES[index], self._counter(index))
            assert found == self._expected[index]
            self.answers += 1

    def _counter(self, index: int) -> Callable[[], None]:
        last, begun = time.monotonic(), False

        def count() -> None:
            nonlocal last, begun
            now = time.monotonic()
            if begun:
                self.gap = max(self.gap, now - last)
            else:
                self.first = max(self.first, now - last)
            last, begun = now, True
            self._chunks[index] += 1
            self._came.set()

        return count
