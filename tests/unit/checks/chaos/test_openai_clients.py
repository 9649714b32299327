"""What clients of a real router write down, whatever the router does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from tercet.protocol import EngineUnreachable
from tercet_checks.chaos.arena import Arrival, ClientLoad, LoadShape, Question, arrivals, questions_of
from tercet_checks.chaos.chaos_report import ClientRecord
from tercet_checks.chaos.real_arena import NAME, OpenAIClients
from tests.longest_wait import LONGEST_WAIT_S
from tests.servers import served

Answer = Callable[[web.StreamResponse], Coroutine[Any, Any, None]]
ARRIVAL = Arrival(0.0, "r7", Question(0, (1, 2, 3), 4), "data_parallel", None)


def event(text: str, reason: str | None = None) -> bytes:
    return b"data: " + msgspec.json.encode({"choices": [{"text": text, "finish_reason": reason}]}) + b"\n\n"


@asynccontextmanager
async def router(answer: Answer, status: int = 200) -> AsyncGenerator[tuple[OpenAIClients, list[Any]]]:
    asked: list[Any] = []

    async def completions(request: web.Request) -> web.StreamResponse:
        asked.append((await request.json(), request.headers))
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        await answer(response)
        return response

    app = web.Application()
    app.add_routes([web.post("/v1/completions", completions)])
    async with served(app) as url, aiohttp.ClientSession() as session, asyncio.timeout(LONGEST_WAIT_S):
        yield OpenAIClients(session, url, "m"), asked


async def asked_of(answer: Answer, status: int = 200, leaves_after: int | None = None) -> ClientRecord:
    arrival = msgspec.structs.replace(ARRIVAL, leaves_after=leaves_after)
    async with router(answer, status) as (clients, _):
        load = ClientLoad(clients.ask, lambda: 1.0, pytest.fail)
        await load.run(iter([arrival]), lambda _: asyncio.sleep(0))
        await load.settle(30)
    (record,) = load.records
    return record


async def whole(response: web.StreamResponse) -> None:
    await response.write(event(" one") + event(" two"))
    await response.write(event("", "length") + b"data: [DONE]\n\n")


async def test_a_whole_answer() -> None:
    record = await asked_of(whole)
    assert (record.outcome, record.answer, record.ended) == ("answered", (" one two",), 1.0)


async def test_what_is_asked() -> None:
    async with router(whole) as (clients, asked):
        assert [piece async for piece in clients.ask(ARRIVAL)] == [(" one",), (" two",)]
    ((body, headers),) = asked
    assert (body["prompt"], body["max_tokens"], body["temperature"], body["stream"]) == ([1, 2, 3], 4, 0, True)
    assert (headers["x-tercet-program"], headers["x-request-id"]) == ("data_parallel", "r7")


async def test_a_client_that_leaves() -> None:
    assert (await asked_of(whole, leaves_after=1)).outcome == "left"


async def test_an_error_in_the_stream_and_one_in_its_place() -> None:
    async def fails(response: web.StreamResponse) -> None:
        error = EngineUnreachable("gone").to_wire()
        await response.write(event(" one") + b"data: " + msgspec.json.encode(error) + b"\n\n")

    async def refuses(response: web.StreamResponse) -> None:
        await response.write(msgspec.json.encode(EngineUnreachable("none left").to_wire()))

    record = await asked_of(fails)
    assert (record.outcome, record.error, record.answer) == ("failed", "engine_unreachable", (" one",))
    assert (await asked_of(refuses, 503)).error == "engine_unreachable"


async def test_an_answer_without_an_end() -> None:
    async def ends(response: web.StreamResponse) -> None:
        await response.write(event(" one"))

    async def aborts(response: web.StreamResponse) -> None:
        await response.write(event(" one", "abort"))

    async def drops(response: web.StreamResponse) -> None:
        await response.write(event(" one"))
        raise ConnectionResetError

    assert (await asked_of(ends)).error == "answer_broken_off"
    assert (await asked_of(aborts)).error == "answer_broken_off"
    assert (await asked_of(drops)).outcome == "failed"


@pytest.mark.parametrize("seq_id", ["cmpl-r12-0-8c1f", "cmpl-r12-0", "r12", "r12-1"])
def test_a_request_is_known_by_its_sequence(seq_id: str) -> None:
    found = NAME.search(seq_id)
    assert found is not None
    assert found[1] == "r12"


def test_questions_and_arrivals_follow_from_the_seed() -> None:
    shape = LoadShape(
        rate=5.0, questions=10, shortest_prompt=20, longest_prompt=50, shortest_answer=1, longest_answer=9, leaving=0.5
    )
    questions = questions_of(shape, 3)
    assert questions == questions_of(shape, 3)
    assert all(20 <= len(each.prompt) <= 50 and 1 <= each.max_tokens <= 9 for each in questions)
    assert len({each.prompt[:10] for each in questions}) < 10  # some begin alike
    wanted = list(arrivals(shape, questions, 3, 60.0))
    assert wanted == list(arrivals(shape, questions, 3, 60.0))
    assert 200 < len(wanted) < 400
    assert len({each.name for each in wanted}) == len(wanted)
    assert 0.3 < sum(each.leaves_after is not None for each in wanted) / len(wanted) < 0.7
