"""The decode engine is killed while clients read its tokens: they get the answer that they would have got.

It breaks its fleet, so it has one of its own.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import msgspec
import pytest

from .conftest import ENGINE_ARGS, Fleet, get_json, start_fleet
from .prompts import prompt_of
from .test_failures import processes_of, send_signal

TOKENS = 60
BODIES: list[dict[str, Any]] = [
    {"prompt": prompt_of(300, seed=1), "temperature": 0},
    {"prompt": prompt_of(40, seed=2), "temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"prompt": prompt_of(150, seed=3), "temperature": 0.9, "seed": 17},
    {"prompt": prompt_of(90, seed=4), "temperature": 0, "structured_outputs": {"regex": "(a|b)( (a|b)){50}"}},
    {"prompt": prompt_of(70, seed=5), "temperature": 0, "logprobs": 1},
]


@pytest.fixture
def breakable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    running = start_fleet(tmp_path_factory.mktemp("killed"), "--program-arg", "min_send=1", "--", *ENGINE_ARGS)
    yield running
    running.stop()


async def read(url: str, body: dict[str, Any], on_chunk: Callable[[], None] = lambda: None) -> tuple[str, str, Any]:
    """Text, finish reason and usage of a stream."""
    text, reason, usage = "", "", None
    fields = {
        "model": "smollm2", "max_tokens": TOKENS, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, **body,
    }  # fmt: skip
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=fields) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = msgspec.json.decode(line[len(b"data: ") :])
                assert "error" not in event, event
                for choice in event["choices"]:
                    text += choice["text"]
                    reason = choice["finish_reason"] or reason
                usage = event.get("usage") or usage
                on_chunk()
    return text, reason, usage


async def test_streams_survive_their_decode_engine(breakable: Fleet) -> None:
    expected = [await read(breakable.engine_url("prefill"), body) for body in BODIES]
    decode = processes_of(breakable.engine_url("decode"))
    chunks = [0] * len(BODIES)

    def count(index: int) -> None:
        chunks[index] += 1
        # All have tokens of the decode engine, and none has all of its own.
        if decode and min(chunks) >= 5:
            send_signal(decode, signal.SIGKILL)
            decode.clear()

    found = await asyncio.gather(
        *(read(breakable.url, body, lambda index=index: count(index)) for index, body in enumerate(BODIES))
    )
    assert not decode, f"it was never killed; chunks: {chunks}"
    for (text, reason, usage), (wanted, wanted_reason, wanted_usage) in zip(found, expected, strict=True):
        assert text == wanted
        assert reason == wanted_reason
        assert usage["completion_tokens"] == wanted_usage["completion_tokens"]
    # New requests are served by who is left.
    assert (await read(breakable.url, BODIES[0]))[0] == expected[0][0]
    engines = {engine["role"]: engine for engine in get_json(f"{breakable.url}/tercet/v1/engines")}
    assert engines["prefill"]["in_flight"] == engines["decode"]["in_flight"] == 0
    assert engines["decode"]["reachable"] is False
