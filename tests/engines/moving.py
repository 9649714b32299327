"""Moves of running requests over HTTP: one, all of them over and over, and what must be the same afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from .conftest import Fleet

ENGINES = ("prefill-0", "decode-0")
# It may have ended meanwhile, be on its way or not generated at the moment, or be one too many.
MAY_BE_REFUSED = (404, 409, 503)


async def ask(fleet: Fleet, method: str, path: str, **options: Any) -> tuple[int, Any]:
    """One call of the router's own routes; its status and answer."""
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, f"{fleet.url}/tercet/v1{path}", **options) as answer,
    ):
        return answer.status, await answer.json()


async def move(fleet: Fleet, sequence: dict[str, Any]) -> dict[str, Any] | None:
    """Move what runs to the other engine; the move, None if it did not come to that."""
    other = next(name for name in ENGINES if name != sequence["engine"])
    path = f"/sequences/{sequence['seq_id']}/move"
    status, answer = await ask(fleet, "POST", path, json={"destination": other})
    # Its program, or another move, may have brought it there since it was listed.
    is_there = status == 400 and "already generates" in answer["error"]["message"]
    assert status == 200 or status in MAY_BE_REFUSED or is_there, answer
    return answer if status == 200 else None


@asynccontextmanager
async def moving(fleet: Fleet) -> AsyncGenerator[list[Any]]:
    """While entered, every sequence with tokens is moved to the other engine, over and over; the moves."""
    moved = list[Any]()

    async def again_and_again() -> None:
        while True:
            _, running = await ask(fleet, "GET", "/sequences")
            # Of many only so many move at a time: who has moved least comes first.
            running.sort(key=lambda each: [move["seq_id"] for move in moved].count(each["seq_id"]))
            found = await asyncio.gather(*(move(fleet, each) for each in running if each["state"] == "running"))
            moved.extend(each for each in found if each is not None)
            await asyncio.sleep(0.02)

    task = asyncio.create_task(again_and_again())
    try:
        yield moved
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(fleet: Fleet, holds: Callable[[list[dict[str, Any]]], bool]) -> None:
    """Return once that is true of what runs; the test's own time limit bounds it."""
    while True:
        _, running = await ask(fleet, "GET", "/sequences")
        if holds(running):
            return
        await asyncio.sleep(0.05)


def answer_of(answer: dict[str, Any]) -> list[Any]:
    """What must be the same, token by token."""
    return [(choice["text"], choice["token_ids"], choice["finish_reason"]) for choice in answer["choices"]]


def logprobs_of(answer: dict[str, Any]) -> list[float]:
    """The log probabilities of all tokens; rows of another batch round otherwise, so these are near the same only."""
    return [
        value for choice in answer["choices"] if choice["logprobs"] for value in choice["logprobs"]["token_logprobs"]
    ]
