"""Running requests go from one engine to the other and back, again and again, and answer as if they had stayed."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterable
from typing import Any

import pytest

from tercet.protocol import UnknownSequence
from tercet.wire.client import HttpEngine
from tests.longest_wait import LONGEST_WAIT_S

from .conftest import Fleet
from .moving import ENGINES, answer_of, ask, logprobs_of, moving, until
from .prompts import complete, prompt_of

pytestmark = [pytest.mark.usefixtures("nothing_leaks"), pytest.mark.verifies("moves of running requests")]

TEXT = "The sea is wide and the wind is cold, and the old sailor tells the children of the ships he saw. " * 8
LONG: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 12, "maxLength": 40},
        "ships": {"type": "array", "items": {"type": "integer"}, "minItems": 6, "maxItems": 8},
    },
    "required": ["name", "ships"],
    "additionalProperties": False,
}
CASES: dict[str, dict[str, Any]] = {
    "greedy": LONG,
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2, **LONG},
    "at least": {"min_tokens": 40, "stop_token_ids": list(range(2000)), "max_tokens": 60},
    "stop string": {"stop": ["Representatives Pneum"], "max_tokens": 200, "min_tokens": 30},
    "logprobs": {"logprobs": 3, **LONG},
    "seeded": {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "seed": 3, **LONG},
    "several choices": {"n": 3, "temperature": 0.8, "seed": 11, **LONG},
    "structured": {"structured_outputs": {"regex": "[a-c]{40,60}"}, "max_tokens": 80},
    "logit bias": {"logit_bias": {"1000": 5}, **LONG},
    "at most": {"max_tokens": 41, "ignore_eos": True},
    "stop token": {
        "stop_token_ids": [35466, 41052],
        "min_tokens": 25,
        "max_tokens": 120,
        "include_stop_str_in_output": True,
    },
    "log probabilities of several choices": {"n": 2, "logprobs": 2, "temperature": 0.9, "seed": 5, **LONG},
    "penalties of several choices": {"n": 2, "temperature": 0.7, "seed": 6, "presence_penalty": 1.5, **LONG},
    "log probabilities of the prompt": {"prompt_logprobs": 1, **LONG},
    "json": {"structured_outputs": {"json": SCHEMA}, "max_tokens": 120},
    "seeded json": {"structured_outputs": {"json": SCHEMA}, "max_tokens": 120, "temperature": 1.0, "seed": 8},
    "bad words": {"bad_words": ["dolphin", "travels"], **LONG},
}
OF_TEXT = ("stop string", "structured", "json", "seeded json", "bad words", "stop token")


AT_ONCE = 4
"""Sequences that run beside each other: as many as move at a time by default."""
ROUNDS = 5
"""How often cases are asked until each sequence has moved: a short one may end before its turn comes."""
# What is generated does not depend on how it began, so few cases try both ways.
DISAGGREGATED = ("greedy", "logprobs", "structured", "log probabilities of the prompt", "several choices")


def groups(cases: Iterable[str]) -> list[tuple[str, ...]]:
    """The cases, a few at a time; each of several choices is a sequence of its own."""
    found: list[list[str]] = [[]]
    for case in cases:
        if sum(CASES[each].get("n", 1) for each in [*found[-1], case]) > AT_ONCE:
            found.append([])
        found[-1].append(case)
    return [tuple(each) for each in found]


@pytest.mark.parametrize(
    ("program", "cases"),
    [
        *(("data_parallel", each) for each in groups(CASES)),
        *(("disaggregated", each) for each in groups(DISAGGREGATED)),
    ],
    ids=lambda each: each if isinstance(each, str) else "+".join(each).replace(" ", "_"),
)
async def test_answers_are_those_of_requests_that_stay(fleet: Fleet, program: str, cases: tuple[str, ...]) -> None:
    async def answers() -> dict[str, dict[str, Any]]:
        found = await asyncio.gather(*(asked(case) for case in cases))
        return dict(zip(cases, found, strict=True))

    async def asked(case: str) -> dict[str, Any]:
        prompt: Any = TEXT if case in OF_TEXT else prompt_of(300, seed=len(case))
        return await complete(fleet.url, prompt, {"x-tercet-program": program}, **CASES[case])

    sequences = sum(CASES[case].get("n", 1) for case in cases)
    calm = await answers()
    for _ in range(ROUNDS):
        async with moving(fleet) as moves:
            found = await answers()
        for case in cases:
            assert answer_of(found[case]) == answer_of(calm[case]), case
            # Rows of another batch round otherwise.
            assert logprobs_of(found[case]) == pytest.approx(logprobs_of(calm[case]), abs=1e-3), case
        if len({each["seq_id"] for each in moves}) == sequences and len(moves) >= 2 * sequences:
            return
    pytest.fail(f"in none of {ROUNDS} rounds each of the {sequences} sequences moved, and twice on average")


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
    headers = {"x-tercet-program": "data_parallel", "x-tercet-trace": "1"}
    request = asyncio.create_task(complete(fleet.url, prompt, headers, **LONG))
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
    trace = (await request)["tercet"]["events"]
    _, moves = await ask(fleet, "GET", f"/moves?since={move['number'] - 1}")
    assert moves == [move]
    assert trace[-1]["verb"] == "move"
    assert (trace[-1]["to"], trace[-1]["number"], trace[-1]["pause"]) == (other, move["number"], move["pause"])
    there = [event for event in trace if event["verb"] == "start_generate"][-1]
    assert (there["engine"], there["computed"]) == (other, move["recomputed"] + 1)
    assert there["received"] + there.get("cached", 0) + there["computed"] == there["end"]


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

        async def in_flight() -> int:
            _, engines = await ask(fleet, "GET", "/engines")
            return {each["name"]: each["in_flight"] for each in engines}["decode-0"]

        # The copies of its contexts, which count as in flight, may end after the moves.
        async with asyncio.timeout(LONGEST_WAIT_S):
            while await in_flight():
                await asyncio.sleep(0.05)
        answers = await asyncio.gather(*asked)
    finally:
        await ask(fleet, "DELETE", "/engines/decode-0/drain")
    assert [answer_of(answer) for answer in answers] == [answer_of(answer) for answer in calm]
    _, moves = await ask(fleet, "GET", "/moves")
    assert [each["reason"] for each in moves if each["outcome"] == "moved"].count("drain") >= 1


async def test_an_engine_passes_a_proposal_on_to_the_router(fleet: Fleet) -> None:
    prompt, fields = prompt_of(200, seed=77), dict[str, Any](LONG, max_tokens=200)
    calm = await complete(fleet.url, prompt, **fields)
    request = asyncio.create_task(complete(fleet.url, prompt, {"x-tercet-program": "data_parallel"}, **fields))
    await until(fleet, lambda running: bool(running) and running[0]["state"] == "running")
    _, (sequence,) = await ask(fleet, "GET", "/sequences")
    source, first, other = sequence["engine"], sequence["seq_id"], ""
    for count, reason in enumerate(("there", "and back")):
        other = next(name for name in ENGINES if name != source)
        async with HttpEngine(source, fleet.places[source].url) as engine:
            await engine.propose_move(first, other, reason)  # by its client's id, each time
        await until(fleet, lambda running, count=count: running[0]["moves"] == count + 1)
        source = other
    answer = await request
    assert answer_of(answer) == answer_of(calm)
    _, moves = await ask(fleet, "GET", "/moves")
    assert [each["reason"] for each in moves[-2:]] == ["there", "and back"]
    async with HttpEngine(source, fleet.places[source].url) as engine:
        with pytest.raises(UnknownSequence):
            await engine.propose_move(first, other, "late")
