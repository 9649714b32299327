"""Running requests go from one engine to the other and back, again and again, and answer as if they had stayed."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from .conftest import Fleet
from .prompts import complete, prompt_of

pytestmark = pytest.mark.usefixtures("nothing_leaks")

ENGINES = ("prefill-0", "decode-0")
TEXT = "The sea is wide and the wind is cold, and the old sailor tells the children of the ships he saw. " * 8
LONG: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
CASES: dict[str, dict[str, Any]] = {
    "greedy": LONG,
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2, **LONG},
    "at least": {"min_tokens": 40, "stop_token_ids": list(range(2000)), "max_tokens": 60},
    "stop string": {"stop": ["sailor tells"], "max_tokens": 200, "min_tokens": 30},
    "logprobs": {"logprobs": 3, **LONG},
    "seeded": {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "seed": 3, **LONG},
    "several choices": {"n": 3, "temperature": 0.8, "seed": 11, **LONG},
    "structured": {"structured_outputs": {"regex": "[a-c]{40,60}"}, "max_tokens": 80},
    "logit bias": {"logit_bias": {"1000": 5}, **LONG},
}


async def ask(fleet: Fleet, method: str, path: str, **options: Any) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, f"{fleet.url}/tercet/v1{path}", **options) as answer,
    ):
        return answer.status, await answer.json()


@asynccontextmanager
async def moving(fleet: Fleet) -> AsyncGenerator[list[Any]]:
    """While entered, every sequence with tokens is moved to the other engine, over and over; the moves."""
    moved = list[Any]()

    async def move(sequence: dict[str, Any]) -> None:
        other = next(name for name in ENGINES if name != sequence["engine"])
        path = f"/sequences/{sequence['seq_id']}/move"
        status, answer = await ask(fleet, "POST", path, json={"destination": other})
        assert status in (200, 404, 409, 503), answer  # it may have ended meanwhile, or be one too many
        if status == 200:
            moved.append(answer)

    async def again_and_again() -> None:
        while True:
            _, running = await ask(fleet, "GET", "/sequences")
            await asyncio.gather(*(move(each) for each in running if each["state"] == "running"))
            await asyncio.sleep(0.02)

    task = asyncio.create_task(again_and_again())
    try:
        yield moved
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def answer_of(answer: dict[str, Any]) -> list[Any]:
    return [(choice["text"], choice["token_ids"], choice["finish_reason"]) for choice in answer["choices"]]


def logprobs_of(answer: dict[str, Any]) -> list[float]:
    return [
        value for choice in answer["choices"] if choice["logprobs"] for value in choice["logprobs"]["token_logprobs"]
    ]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("program", ["data_parallel", "disaggregated"])
async def test_answers_are_those_of_requests_that_stay(fleet: Fleet, case: str, program: str) -> None:
    prompt: Any = TEXT if case in ("stop string", "structured") else prompt_of(300, seed=len(case))
    headers = {"x-tercet-program": program}
    calm = await complete(fleet.url, prompt, headers, **CASES[case])
    async with moving(fleet) as moved:
        answer = await complete(fleet.url, prompt, headers, **CASES[case])
    assert answer_of(answer) == answer_of(calm)
    assert logprobs_of(answer) == pytest.approx(logprobs_of(calm), abs=1e-3)  # rows of another batch round otherwise
    assert len(moved) >= 3


async def test_many_requests_move_at_once(fleet: Fleet) -> None:
    prompts = [prompt_of(150 + 20 * index, seed=index) for index in range(6)]
    calm = [await complete(fleet.url, prompt, **LONG) for prompt in prompts]
    async with moving(fleet) as moved:
        answers = await asyncio.gather(*(complete(fleet.url, prompt, **LONG) for prompt in prompts))
    assert [answer_of(answer) for answer in answers] == [answer_of(answer) for answer in calm]
    assert len(moved) >= 6
    assert statistics.mean(move["recomputed"] for move in moved) < 16


async def test_the_first_move_brings_the_whole_context_and_nothing_is_computed_but_the_tail(fleet: Fleet) -> None:
    prompt = prompt_of(700, seed=99)
    request = asyncio.create_task(complete(fleet.url, prompt, {"x-tercet-program": "data_parallel"}, **LONG))
    while True:
        _, running = await ask(fleet, "GET", "/sequences")
        if running and running[0]["tokens"] > 5:
            break
        await asyncio.sleep(0.01)
    other = next(name for name in ENGINES if name != running[0]["engine"])
    status, move = await ask(fleet, "POST", f"/sequences/{running[0]['seq_id']}/move", json={"destination": other})
    assert status == 200, move
    assert move["stages"][0]["begin"] == 0
    assert move["stages"][-1]["end"] > len(prompt)
    assert move["bytes"] > 0
    assert move["recomputed"] <= 16
    assert move["pause"] > 0
    await request
    _, moves = await ask(fleet, "GET", f"/moves?since={move['number'] - 1}")
    assert moves == [move]


async def test_a_drained_engine_is_emptied_while_requests_run(fleet: Fleet) -> None:
    prompts = [prompt_of(200 + 10 * index, seed=50 + index) for index in range(4)]
    fields = {**LONG, "max_tokens": 150}
    headers = {"x-tercet-program": "data_parallel"}
    calm = [await complete(fleet.url, prompt, headers, **fields) for prompt in prompts]
    asked = [asyncio.create_task(complete(fleet.url, prompt, headers, **fields)) for prompt in prompts]
    await until(fleet, lambda running: len(running) == 4 and all(each["state"] == "running" for each in running))
    status, _ = await ask(fleet, "POST", "/engines/decode-0/drain")
    assert status == 200
    try:
        await until(fleet, lambda running: all(each["engine"] == "prefill-0" for each in running))
        _, engines = await ask(fleet, "GET", "/engines")
        assert {each["name"]: each["in_flight"] for each in engines}["decode-0"] == 0
        answers = await asyncio.gather(*asked)
    finally:
        await ask(fleet, "DELETE", "/engines/decode-0/drain")
    assert [answer_of(answer) for answer in answers] == [answer_of(answer) for answer in calm]
    _, moves = await ask(fleet, "GET", "/moves")
    assert [each["reason"] for each in moves if each["outcome"] == "moved"].count("drain") >= 1


async def until(fleet: Fleet, holds: Callable[[list[dict[str, Any]]], bool]) -> None:
    """Return once that is true of what runs; the test's own time limit bounds it."""
    while True:
        _, running = await ask(fleet, "GET", "/sequences")
        if holds(running):
            return
        await asyncio.sleep(0.05)
