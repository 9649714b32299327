"""Roles by themselves on real engines: they follow a flip of the mix of requests, and no request fails."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from .conftest import Fleet, get_json, router_over
from .prompts import alone, complete, prompt_of, tokens_of

logger = logging.getLogger(__name__)
SECONDS = 240.0
"""Generous: a loaded machine follows later. The log has the seconds that it took (``--log-cli-level INFO``)."""
LONG, SHORT = 1500, 16
PROMPTS_AT_ONCE, ANSWERS_AT_ONCE = 12, 64
ANSWER = 300
FEW = 2


class Pace(NamedTuple):
    """Seconds of a long prompt alone, and of a step of few and of many sequences."""

    prompt_s: float
    few_s: float
    many_s: float


async def timed(url: str, requests: int, tokens: int, length: int, seed: int) -> float:
    """Seconds in which an engine answers so many requests at once."""
    began = time.monotonic()
    await asyncio.gather(
        *(complete(url, prompt_of(length, seed + n), max_tokens=tokens, ignore_eos=True) for n in range(requests))
    )
    return time.monotonic() - began


async def pace_of(url: str) -> Pace:
    await timed(url, 1, 2, LONG, 10_000)  # the first ones are slower
    prompt_s = await timed(url, 3, 1, LONG, 20_000) / 3
    few_s = await timed(url, FEW, 60, SHORT, 30_000) / 60
    return Pace(prompt_s, few_s, await timed(url, ANSWERS_AT_ONCE, 60, SHORT, 40_000) / 60)


class Clients:
    """Clients that ask again and again; each answer must be whole. ``answers`` counts them."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._seeds = itertools.count(100_000)
        self.answers = 0

    @asynccontextmanager
    async def asking(self, clients: int, length: int, tokens: int) -> AsyncGenerator[None]:
        """While entered, so many clients ask; at the end their last answers are read to the end."""
        over = asyncio.Event()

        async def ask() -> None:
            while not over.is_set():
                prompt = prompt_of(length, next(self._seeds))
                answer = await complete(self._url, prompt, max_tokens=tokens, ignore_eos=True)
                assert len(tokens_of(answer)) == tokens
                self.answers += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(ask())
            try:
                yield
            finally:
                over.set()


async def seconds_until(is_so: Callable[[], bool]) -> float:
    began = time.monotonic()
    while not await asyncio.to_thread(is_so):
        assert time.monotonic() - began < SECONDS, "roles have not followed"
        await asyncio.sleep(0.2)
    return time.monotonic() - began


async def test_roles_follow_a_flip_of_the_mix_and_no_request_fails(breakable: Fleet, tmp_path: Path) -> None:
    pace = await pace_of(breakable.places["decode-0"].url)
    # A line of as many long prompts is too long, and a step of as many answers too slow, for what one engine does.
    objectives = f"--objective-ttft={4 * pace.prompt_s}", f"--objective-tpot={math.sqrt(pace.few_s * pace.many_s)}"
    urls = breakable.engine_urls()
    with router_over(urls, tmp_path, "--program-arg", "min_send=1", "--roles", "auto", *objectives) as url:

        def prefilling() -> int:
            return sum(role == "prefill" for role in get_json(f"{url}/tercet/v1/roles")["engines"].values())

        assert prefilling() == 1
        clients = Clients(url)
        async with clients.asking(FEW, SHORT, ANSWER):  # these move when their engine begins to prefill
            async with clients.asking(PROMPTS_AT_ONCE, LONG, 2):
                logger.info("prompts: followed in %.1f s", await seconds_until(lambda: prefilling() == 2))
            async with clients.asking(ANSWERS_AT_ONCE, SHORT, ANSWER):
                logger.info("answers: followed in %.1f s", await seconds_until(lambda: prefilling() == 1))
        assert clients.answers >= PROMPTS_AT_ONCE + ANSWERS_AT_ONCE + FEW
        prompt = prompt_of(SHORT, seed=1)
        after = tokens_of(await complete(url, prompt))
    assert after == await alone(urls["prefill-0"], prompt)
