"""An engine whose core stands still: what it was generating goes on elsewhere, with its KV, which nobody asks it for.

Its API server and its agents run. What the core published before it stopped tells where the KV lies.
"""

from __future__ import annotations

import asyncio
import random
import urllib.request
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.long_runs import FULL
from tests.longest_wait import LONGEST_WAIT_S

from .conftest import Fleet, get_json
from .moving import answer_of, ask, until
from .processes import part_of, stopped
from .prompts import complete, prompt_of

pytestmark = [pytest.mark.usefixtures("nothing_leaks"), pytest.mark.verifies("failures of engines")]

SOURCE, OTHER = "decode-0", "prefill-0"
HERE = {"x-tercet-program": "data_parallel"}
LONG: dict[str, Any] = {"max_tokens": 150, "ignore_eos": True}
BYPASSED = "tercet_sends_bypassing_core_total"


def bypassed(fleet: Fleet) -> float:
    """How many sends the source has made without its core."""
    with urllib.request.urlopen(f"{fleet.places[SOURCE].url}/metrics", timeout=LONGEST_WAIT_S) as response:
        lines = response.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(BYPASSED))


@asynccontextmanager
async def generating(fleet: Fleet, prompts: list[list[int]]) -> AsyncGenerator[list[asyncio.Task[dict[str, Any]]]]:
    """While entered, the source generates for these prompts, and each has some tokens."""
    await ask(fleet, "POST", f"/engines/{OTHER}/drain")
    try:
        # Nobody has cached anything of these.
        salted = [complete(fleet.url, prompt, HERE, cache_salt=uuid.uuid4().hex, **LONG) for prompt in prompts]
        asked = [asyncio.create_task(each) for each in salted]
        await until(fleet, lambda running: len(running) == len(prompts) and all(begun(each) for each in running))
    finally:
        await ask(fleet, "DELETE", f"/engines/{OTHER}/drain")
    try:
        yield asked
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


def begun(sequence: dict[str, Any]) -> bool:
    return sequence["state"] == "running" and sequence["engine"] == SOURCE and sequence["tokens"] > 3


async def move_all(fleet: Fleet) -> list[tuple[int, Any]]:
    """Have all that runs at the source moved; the answers."""
    two = asyncio.Semaphore(2)  # at a time to or from one engine

    async def move(seq_id: str) -> tuple[int, Any]:
        async with two:
            return await ask(fleet, "POST", f"/sequences/{seq_id}/move", json={"destination": OTHER})

    _, running = await ask(fleet, "GET", "/sequences")
    return await asyncio.gather(*(move(each["seq_id"]) for each in running if each["engine"] == SOURCE))


async def settles(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not await asyncio.to_thread(true):
            await asyncio.sleep(0.05)


def router_is_idle(fleet: Fleet) -> bool:
    engines = get_json(f"{fleet.url}/tercet/v1/engines")
    return all(each["reachable"] and not each["in_flight"] for each in engines)


async def last_move(fleet: Fleet) -> int:
    _, record = await ask(fleet, "GET", "/moves")
    return max((move["number"] for move in record), default=0)


async def moved_since(fleet: Fleet, last: int) -> list[dict[str, Any]]:
    _, record = await ask(fleet, "GET", f"/moves?since={last}")
    moved = [move for move in record if move["outcome"] == "moved"]
    print([(move["reason"], move["bytes"], move["recomputed"], round(move["pause"], 2)) for move in moved])
    return moved


async def test_sequences_leave_a_stopped_core_with_their_kv(fleet: Fleet) -> None:
    prompts = [prompt_of(250 + 30 * index, seed=70 + index) for index in range(4)]
    calm = [await complete(fleet.url, prompt, HERE, **LONG) for prompt in prompts]
    before = bypassed(fleet)
    last = await last_move(fleet)
    source = part_of(fleet.places[SOURCE].url, "core")
    async with generating(fleet, prompts) as asked:
        with stopped(source):
            moves = await move_all(fleet)
            answers = await asyncio.gather(*asked)
    assert [answer_of(answer) for answer in answers] == [answer_of(answer) for answer in calm]
    assert {status for status, _ in moves} <= {200, 409}, moves  # 409: a policy has begun to move it already
    moved = await moved_since(fleet, last)
    assert len({move["seq_id"] for move in moved}) == len(prompts), moved
    assert all(move["bytes"] > 0 and move["recomputed"] <= 2 for move in moved)
    assert bypassed(fleet) - before == len(prompts)
    await settles(lambda: router_is_idle(fleet))


async def test_a_policy_moves_them_before_the_engine_is_given_up(fleet: Fleet) -> None:
    prompt = prompt_of(300, seed=79)
    calm = await complete(fleet.url, prompt, HERE, **LONG)
    last = await last_move(fleet)
    source = part_of(fleet.places[SOURCE].url, "worker")  # a core waits for its workers, and answers nobody meanwhile
    async with generating(fleet, [prompt]) as asked:
        with stopped(source):
            answers = await asyncio.gather(*asked)
    assert answer_of(answers[0]) == answer_of(calm)
    moved = await moved_since(fleet, last)
    assert [move["reason"] for move in moved] == ["failover"], moved
    assert moved[0]["bytes"] > 0
    await settles(lambda: router_is_idle(fleet))


async def test_with_its_agent_stopped_too_all_is_computed_anew(fleet: Fleet) -> None:
    prompt = prompt_of(300, seed=80)
    calm = await complete(fleet.url, prompt, HERE, **LONG)
    place = fleet.places[SOURCE].url
    source = [*part_of(place, "core"), *part_of(place, "agent")]
    async with generating(fleet, [prompt]) as asked:
        with stopped(source):
            moves = await move_all(fleet)
            answers = await asyncio.gather(*asked)
    assert answer_of(answers[0]) == answer_of(calm)
    assert not any(status == 200 for status, _ in moves), moves
    await settles(lambda: router_is_idle(fleet))


LARGE = [prompt_of(600, seed=90 + index) for index in range(2)]
SMALL = [prompt_of(40, seed=200 + index) for index in range(3)]
SHORT: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def calm(fleet: Fleet) -> list[list[Any]]:
    """What `LARGE` and `SMALL` are answered while all is well."""
    return asyncio.run(calm_answers(fleet))


async def calm_answers(fleet: Fleet) -> list[list[Any]]:
    large = [await complete(fleet.url, prompt, HERE, **LONG) for prompt in LARGE]
    return [answer_of(answer) for answer in [*large, *await small_ones(fleet)]]


async def small_ones(fleet: Fleet) -> list[dict[str, Any]]:
    return [await complete(fleet.url, prompt, HERE, cache_salt=uuid.uuid4().hex, **SHORT) for prompt in SMALL]


@pytest.mark.parametrize("seed", range(12 if FULL else 2))
async def test_a_core_that_goes_on_in_the_middle_of_a_send_spoils_nothing(
    fleet: Fleet, calm: list[list[Any]], seed: int
) -> None:
    """Whatever comes of the move, the answers are those of a calm run, and what was held is given back."""
    choose = random.Random(seed)
    before = bypassed(fleet)
    source = part_of(fleet.places[SOURCE].url, "core")
    async with generating(fleet, LARGE) as asked:
        await asyncio.sleep(choose.uniform(0, 0.2))
        with stopped(source):
            moving = asyncio.create_task(move_all(fleet))
            if seed % 3:  # about when the engine loses patience with its core
                await asyncio.sleep(choose.uniform(0.95, 1.25))
            else:
                await settles(lambda: bypassed(fleet) > before)
        # What the source does next wants blocks.
        again = await small_ones(fleet)
        ends = [(status, answer.get("outcome"), answer.get("error")) for status, answer in await moving]
        print(f"{seed}: {bypassed(fleet) - before:.0f} sends without the core: {ends}")
        answers = await asyncio.gather(*asked)
    assert [answer_of(answer) for answer in [*answers, *again]] == calm
    await settles(lambda: router_is_idle(fleet))
