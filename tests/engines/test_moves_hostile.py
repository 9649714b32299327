"""Moves where the engines' KV is scarce, and sequences end and clients leave in the middle."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from tercet.wire.client import HttpEngine
from tercet_checks.chaos.arena import fill_cache
from tests.long_runs import in_full
from tests.small_llama import WIDE, small_llama

from .conftest import Fleet, settled, start_fleet
from .moving import answer_of, ask, move, moving, until
from .prompts import complete, prompt_of

ONE_ENGINE = {"x-tercet-program": "data_parallel"}
pytestmark = [pytest.mark.timeout(900), pytest.mark.verifies("moves of running requests")]

BLOCKS = 20
"""Of 128 tokens, in each engine: too few for all that runs, enough for the longest request alone."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two engines with little KV."""
    flags = ("--", "--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", "2048")
    fleet = start_fleet(tmp_path_factory.mktemp("small"), *flags, model=str(small_llama(WIDE)))
    yield fleet
    fleet.stop()


@pytest.fixture(autouse=True)
async def nothing_is_left(small: Fleet) -> AsyncIterator[None]:
    """Afterwards blocks, leases and sends are back, and no engine works on a sequence that no router owns."""
    yield
    for name, url in small.engine_urls().items():
        async with HttpEngine(name, url) as engine:
            await settled(engine)
            assert await engine.sequences() == []
    _, running = await ask(small, "GET", "/sequences")
    assert running == []
    _, engines = await ask(small, "GET", "/engines")
    assert {each["name"]: each["in_flight"] for each in engines} == {"prefill-0": 0, "decode-0": 0}


async def preemptions(fleet: Fleet) -> float:
    total = 0.0
    async with aiohttp.ClientSession() as session:
        for url in fleet.engine_urls().values():
            async with session.get(f"{url}/metrics") as answer:
                lines = (await answer.text()).splitlines()
            total += sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_preemptions_total"))
    return total


@in_full("moves on engines without room, in this file; preemption in virtual time")
async def test_requests_that_are_preempted_while_they_move_answer_as_if_alone(small: Fleet) -> None:
    prompts = [prompt_of(200 + 30 * index, seed=index) for index in range(12)]
    fields: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True}
    room = asyncio.Semaphore(3)  # so many fit at a time

    async def undisturbed(prompt: list[int]) -> dict[str, Any]:
        async with room:
            return await complete(small.url, prompt, ONE_ENGINE, **fields)

    calm = await asyncio.gather(*map(undisturbed, prompts))
    before = await preemptions(small)
    async with moving(small) as moved:
        answers = await asyncio.gather(*(complete(small.url, prompt, ONE_ENGINE, **fields) for prompt in prompts))
    assert [answer_of(answer) for answer in answers] == [answer_of(answer) for answer in calm]
    assert await preemptions(small) > before
    assert len(moved) >= 6


@in_full("clients that leave in test_router; moves that are cut in virtual time")
@pytest.mark.parametrize("seed", range(3))
async def test_clients_leave_and_sequences_end_in_the_middle_of_moves(small: Fleet, seed: int) -> None:
    """At any moment of a move: while space is reserved, KV is sent, it is cut over, or has just gone on."""
    chance = random.Random(seed)

    async def client(index: int) -> None:
        prompt = prompt_of(chance.randint(130, 500), seed=100 * seed + index)
        ends = chance.randint(10, 80)
        asked = asyncio.create_task(complete(small.url, prompt, ONE_ENGINE, max_tokens=ends, ignore_eos=True))
        if chance.random() < 0.6:
            await asyncio.wait([asked], timeout=chance.uniform(0.1, 1))
            asked.cancel()
        await asyncio.wait([asked])

    async with moving(small):
        for index in range(0, 24, 4):
            await asyncio.gather(*(client(index + each) for each in range(4)))
    _, moves = await ask(small, "GET", "/moves")
    assert {each["outcome"] for each in moves} <= {"moved", "ended", "failed"}


async def test_a_move_to_an_engine_without_space_leaves_the_sequence_where_it_is(small: Fleet) -> None:
    fields: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}
    prompt = prompt_of(700, seed=7)
    calm = await complete(small.url, prompt, ONE_ENGINE, **fields)
    request = asyncio.create_task(complete(small.url, prompt, ONE_ENGINE, **fields))
    await until(small, lambda running: bool(running) and running[0]["tokens"] > 3)
    _, (sequence,) = await ask(small, "GET", "/sequences")
    other = next(name for name in small.places if name != sequence["engine"])
    async with HttpEngine(other, small.places[other].url) as stranger:
        filling = asyncio.create_task(fill_cache(stranger, 20.0, seed=1))
        while (await stranger.status()).free_blocks >= 6:
            await asyncio.sleep(0.01)
        assert await move(small, sequence) is None
        answer = await request
        filling.cancel()
        await asyncio.wait([filling])
    assert answer_of(answer) == answer_of(calm)
    _, moves = await ask(small, "GET", "/moves")
    assert moves[-1]["outcome"] == "failed"
    assert moves[-1]["error"]
