"""The OpenAI endpoint: the same answers as an engine's own, and nothing left behind by clients that leave."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest

from tercet.wire.client import HttpEngine
from tests.long_runs import FULL

from .conftest import Fleet, get_json, settled
from .prompts import calls_of, complete, prompt_of, tokens_of

pytestmark = pytest.mark.usefixtures("nothing_leaks")
QUESTION: list[Any] = [{"role": "user", "content": "Write one sentence about the sea. " * 12}]
TRACE = {"x-tercet-trace": "true"}
CLIENTS = 200 if FULL else 80


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture
async def router(fleet: Fleet) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(fleet.url) as client:
        yield client


@pytest.fixture
async def lone(fleet: Fleet) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(fleet.engine_url("prefill")) as client:
        yield client


async def chat(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    fields = {"model": "smollm2", "messages": QUESTION, "temperature": 0, "max_tokens": 20, **fields}
    return await client.chat.completions.create(**fields)


async def test_chat_is_what_an_engine_says(router: openai.AsyncOpenAI, lone: openai.AsyncOpenAI) -> None:
    ours, theirs = await chat(router), await chat(lone)
    assert ours.choices[0].message.content == theirs.choices[0].message.content
    assert ours.choices[0].finish_reason == theirs.choices[0].finish_reason
    assert ours.usage.total_tokens == theirs.usage.total_tokens


async def test_a_stream_is_the_answer_in_pieces(router: openai.AsyncOpenAI) -> None:
    whole = await chat(router)
    text, usage = "", None
    async for chunk in await chat(router, stream=True, stream_options={"include_usage": True}):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
async def test_stop_strings(router: openai.AsyncOpenAI, lone: openai.AsyncOpenAI, several: bool) -> None:
    said = (await chat(lone, max_tokens=60)).choices[0].message.content
    middle = said[len(said) // 2 :][:6]
    stop = ["is not said", middle] if several else middle
    ours, theirs = await chat(router, stop=stop, max_tokens=60), await chat(lone, stop=stop, max_tokens=60)
    assert ours.choices[0].message.content == theirs.choices[0].message.content
    assert ours.choices[0].finish_reason == theirs.choices[0].finish_reason == "stop"


async def test_several_choices(router: openai.AsyncOpenAI, lone: openai.AsyncOpenAI) -> None:
    fields = {"n": 3, "temperature": 0.9, "seed": 5}
    ours, theirs = await chat(router, **fields), await chat(lone, **fields)
    assert [c.message.content for c in ours.choices] == [c.message.content for c in theirs.choices]


async def test_structured_output(router: openai.AsyncOpenAI) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    answer = await chat(
        router, response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}, max_tokens=40
    )
    assert answer.choices[0].message.content.lstrip().startswith("{")


async def test_prompt_logprobs_come_from_one_engine(fleet: Fleet) -> None:
    prompt = prompt_of(60)
    fields: dict[str, Any] = {"prompt_logprobs": 2, "max_tokens": 3}
    ours = await complete(fleet.url, prompt, TRACE, **fields)
    theirs = await complete(fleet.engine_url("prefill"), prompt, **fields)
    assert ours["tercet"]["program"] == "data_parallel"
    got, want = (answer["choices"][0]["prompt_logprobs"] for answer in (ours, theirs))
    assert len(got) == len(want) == len(prompt)
    for mine, other in zip(got[1:], want[1:], strict=True):
        assert set(mine) == set(other)


async def test_the_header_picks_the_program(fleet: Fleet) -> None:
    answer = await complete(fleet.url, prompt_of(200), {**TRACE, "x-tercet-program": "data_parallel"})
    assert answer["tercet"]["program"] == "data_parallel"
    assert calls_of(answer) == ["start_generate"]


@pytest.mark.parametrize(
    ("fields", "headers", "status"),
    [
        ({"model": "another"}, {}, 404),
        ({"max_tokens": -1}, {}, 400),
        ({"temperature": -3}, {}, 400),
        ({"prompt": [1] * 5000}, {}, 400),
        ({"prompt": []}, {}, 400),
        ({}, {"x-tercet-program": "nonsense"}, 400),
        ({}, {"x-tercet-program": "/etc/passwd:main"}, 400),
        ({"structured_outputs": {"regex": "("}}, {}, 400),
    ],
)
async def test_bad_requests_get_openai_errors(fleet: Fleet, fields: dict, headers: dict, status: int) -> None:
    body = {"model": "smollm2", "prompt": [5, 6, 7], "max_tokens": 4, **fields}
    for stream in (False, True):
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{fleet.url}/v1/completions", json={**body, "stream": stream}, headers=headers) as response,
        ):
            text = await response.text()
        # vLLM answers a stream's head before it checks some of the parameters; the refusal is then an event of it.
        assert response.status == status or (stream and not headers and '"error"' in text), text


async def test_what_the_router_tells(fleet: Fleet) -> None:
    engines = get_json(f"{fleet.url}/tercet/v1/engines")
    assert [(engine["name"], engine["role"], engine["reachable"]) for engine in engines] == [
        ("prefill-0", "prefill", True),
        ("decode-0", "decode", True),
    ]
    program = get_json(f"{fleet.url}/tercet/v1/program")
    assert (program["version"], program["program"], program["args"]) == (1, "disaggregated", {"min_send": "1"})
    assert (program["previous"], program["returned"], program["failures_in_a_row"]) == (None, None, {})
    assert [model["id"] for model in get_json(f"{fleet.url}/v1/models")["data"]] == ["smollm2"]
    async with aiohttp.ClientSession() as session, session.get(f"{fleet.url}/metrics") as response:
        metrics = await response.text()
    for name in ("tercet_sequences_total", "tercet_ttft_seconds_bucket", "tercet_kv_sent_bytes_total"):
        assert name in metrics


async def read_pieces(url: str, pieces: int, **fields: Any) -> None:
    """Read so many pieces of a stream, and leave."""
    body = {"model": "smollm2", "temperature": 0, "stream": True, **fields}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=body) as response,
    ):
        async for line in response.content:
            pieces -= line.startswith(b"data: ")
            if not pieces:
                return
    pytest.fail("the stream ended before its client left")


async def test_clients_of_whom_many_leave(fleet: Fleet, prefill: HttpEngine, decode: HttpEngine) -> None:
    rng = random.Random(1)
    fields: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
    expected: dict[int, list[int]] = {}
    for seed in range(4):
        answer = await complete(fleet.url, prompt_of(150 + 60 * seed, seed), cache_salt="kept", **fields)
        expected[seed] = tokens_of(answer)
    statuses: list[str] = []

    async def one(number: int) -> None:
        """Some stay, some leave after a while, and some in the middle of the stream."""
        seed, salt = number % 4, uuid.uuid4().hex
        prompt, leaves = prompt_of(150 + 60 * seed, seed), rng.choice(["never", "soon", "in the stream"])
        if leaves == "in the stream":
            await read_pieces(fleet.url, rng.randrange(1, 30), prompt=prompt, cache_salt=salt, **fields)
            statuses.append("left")
            return
        try:
            async with asyncio.timeout(rng.uniform(0, 1) if leaves == "soon" else None):
                answer = await complete(fleet.url, prompt, cache_salt=salt, **fields)
        except TimeoutError:
            statuses.append("left")
        else:
            assert tokens_of(answer) == expected[seed]
            statuses.append("served")

    at_once = asyncio.Semaphore(16)

    async def queued(number: int) -> None:
        async with at_once:
            await one(number)

    await asyncio.gather(*(queued(number) for number in range(CLIENTS)))
    assert len(statuses) == CLIENTS
    assert statuses.count("served") > CLIENTS / 10
    assert statuses.count("left") > CLIENTS / 10
    await settled(prefill)
    await settled(decode)
    assert [engine["in_flight"] for engine in get_json(f"{fleet.url}/tercet/v1/engines")] == [0, 0]
