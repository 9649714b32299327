"""Wrong calls of the verbs, one after the other, to a real engine: it refuses them, keeps nothing, and serves on."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections import Counter
from random import Random

import aiohttp
import pytest

from tercet.protocol import Request, UnknownAdapter
from tercet.protocol.wire import API_PREFIX
from tercet.wire.client import HttpEngine
from tests.abort import abort
from tests.fuzz.mutation import Mutator, Named
from tests.fuzz.verb_calls import VERBS, seeds

from .conftest import settled
from .prompts import alone, prompt_of

pytestmark = pytest.mark.verifies("verbs")

CALLS = int(os.environ.get("TERCET_TEST_WRONG_CALLS", "150"))
SECONDS = float(os.environ.get("TERCET_TEST_WRONG_SECONDS", "120"))
SEED = 20261122
ANSWER = aiohttp.ClientTimeout(total=20.0)


async def test_an_engine_outlives_wrong_calls(decode: HttpEngine) -> None:
    before = await settled(decode)
    prompt = prompt_of(60)
    expected = await alone(decode.url, prompt, max_tokens=4)
    mutator, answers = Mutator(Random(SEED), seeds(), Named()), Counter[str]()
    made, deadline = 0, time.monotonic() + SECONDS
    async with aiohttp.ClientSession(timeout=ANSWER) as session:
        while made < CALLS and time.monotonic() < deadline:
            case = mutator.case()
            for item in case:
                verb, status, text = await call(session, decode.url, item)
                assert status != 500, (item[:2000], text)
                answers[f"{verb} {status}"] += 1
            made += len(case)
        for seq_id in ("s", "a", "g", "d"):
            await abort(decode, seq_id)
    print(f"{made} calls of {CALLS}: {sorted(answers.items())}")
    assert (await asyncio.wait_for(settled(decode, 90.0), 100.0)).total_blocks == before.total_blocks
    assert await alone(decode.url, prompt, max_tokens=4) == expected


async def call(session: aiohttp.ClientSession, url: str, item: bytes) -> tuple[str, int, str]:
    """The verb that an item names, or another one, the status and what was answered."""
    head, _, body = item.partition(b" ")
    verb = head.decode("latin-1")
    if verb not in VERBS:
        verb = VERBS[len(item) % len(VERBS)]
    method = "GET" if verb == "status" else "POST"
    try:
        async with session.request(method, f"{url}{API_PREFIX}/{verb}", data=body) as answer:
            return verb, answer.status, (await answer.read())[:1000].decode(errors="replace")
    except TimeoutError:  # a generation without end, which leaving ends
        return verb, 0, "left"


async def test_an_adapter_that_the_engine_lacks_is_refused(decode: HttpEngine, nothing_leaks: None) -> None:
    request = Request(seq_id=uuid.uuid4().hex, prompt=tuple(range(1000, 1040)), adapter="sql")
    with pytest.raises(UnknownAdapter, match="--enable-lora"):
        async with decode.prep_recv(request):
            pass
    with pytest.raises(UnknownAdapter):
        async for _ in decode.start_generate(request):
            pass
