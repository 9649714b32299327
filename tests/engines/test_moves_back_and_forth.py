"""Many requests at a time, each moved back and forth many times, and no output changes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.long_runs import FULL

from .conftest import Fleet, start_fleet
from .moving import answer_of, ask, move
from .prompts import complete, prompt_of

REQUESTS, TIMES = (64, 20) if FULL else (8, 4)
LEAST = TIMES if FULL else 2
"""There and back at the least: how many moves fit into a short answer is the machine's to say."""
MOST_TOKENS = 900 if FULL else 300
HEADERS = {"x-tercet-program": "data_parallel"}

pytestmark = [pytest.mark.timeout(3600), pytest.mark.verifies("moves of running requests")]


@pytest.fixture(scope="module")
def roomy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two engines that hold all requests at a time, each of them."""
    if not FULL:
        yield request.getfixturevalue("fleet")
        return
    limits = ("--max-moves", "32", "--max-moves-per-engine", "8")
    fleet = start_fleet(tmp_path_factory.mktemp("roomy"), "--kv-cache-gib", "4", *limits)
    yield fleet
    fleet.stop()


def fields_of(index: int) -> dict[str, Any]:
    """Half of them greedy, half with a seed."""
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": index} if index % 2 else {"temperature": 0}
    return {"max_tokens": MOST_TOKENS, "ignore_eos": True, **sampling}


async def test_no_output_changes(roomy: Fleet) -> None:
    prompts = [prompt_of(32 + 4 * index, seed=index) for index in range(REQUESTS)]

    async def all_of_them() -> list[dict[str, Any]]:
        asked = (complete(roomy.url, prompt, HEADERS, **fields_of(at)) for at, prompt in enumerate(prompts))
        return await asyncio.gather(*asked)

    async def move_them_while(answering: asyncio.Task[Any]) -> None:
        """Whoever was moved less often goes first, until each was as often as is wanted or all have ended."""
        times: dict[str, int] = {}
        while not answering.done() and (len(times) < REQUESTS or min(times.values()) < TIMES):
            _, running = await ask(roomy, "GET", "/sequences")
            due = [each for each in running if each["state"] == "running" and times.get(each["seq_id"], 0) < TIMES]
            due.sort(key=lambda each: times.get(each["seq_id"], 0))
            found = await asyncio.gather(*(move(roomy, each) for each in due[:16]))
            for each in found:
                if each is not None:
                    times[each["seq_id"]] = times.get(each["seq_id"], 0) + 1
            await asyncio.sleep(0.01)
        moved = sorted(times.values())
        assert len(moved) == REQUESTS, f"only {len(moved)} of {REQUESTS} answers were moved at all"
        assert moved[0] >= LEAST, f"answers ended before they had moved {LEAST} times: {moved}"

    calm = await all_of_them()
    answering = asyncio.create_task(all_of_them())
    await move_them_while(answering)
    answers = await answering
    changed = [at for at in range(REQUESTS) if answer_of(answers[at]) != answer_of(calm[at])]
    assert changed == []
    _, moves = await ask(roomy, "GET", "/moves")
    pauses = sorted(each["pause"] for each in moves if each["outcome"] == "moved")
    print(f"{len(moves)} moves on record, pauses {pauses[len(pauses) // 2]:.3f} s (median), {pauses[-1]:.3f} s (most)")
