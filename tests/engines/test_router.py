"""The OpenAI endpoint: the same answers as an engine's own, and nothing left behind by clients that leave."""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import openai
import psutil
import pytest

from tercet.wire.client import HttpEngine
from tercet_checks.chaos.real_fleet import GRAMMARS_TITLE
from tests.long_runs import FULL
from tests.longest_wait import LONGEST_WAIT_S

from .conftest import Fleet, get_json, settled
from .processes import part_of, processes_of
from .prompts import calls_of, complete, prompt_of, tokens_of

pytestmark = [pytest.mark.usefixtures("nothing_leaks"), pytest.mark.verifies("OpenAI's and Anthropic's API")]
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
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as response:
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


_RULES = "\n".join(f'r{number} ::= "a{number}" [a-z]+ r{number + 1}' for number in range(20_000))
TAG = json.dumps({"type": "structural_tag", "format": {"type": "grammar", "grammar": f"root ::= r0\n{_RULES}"}})
TOO_MUCH_TO_COMPILE: dict[str, dict[str, Any]] = {
    "counts": {"regex": "([^a]{0,1000}b){0,1000}"},
    "enum": {"json": {"enum": [f"{number} " + "ab c" * 1000 for number in range(100)]}},
    "tag": {"structural_tag": TAG},
}
NO_TEXT = {"grammar": 'root ::= root "a"'}  # only the core's process finds this one out


async def structured(session: aiohttp.ClientSession, url: str, structure: dict[str, Any], **more: Any) -> Any:
    """Status, headers and text of a completion."""
    body = {"model": "smollm2", "prompt": "x", "max_tokens": 8, "structured_outputs": structure, **more}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        return response.status, response.headers, await response.text()


async def test_expensive_structures_are_refused_with_the_reason_and_cost_an_innocent_client_nothing(
    fleet: Fleet,
) -> None:
    cores = [core for place in fleet.places.values() for core in part_of(place.url, "core")]
    grammars = [each for place in fleet.places.values() for each in processes_of(place.url)
                if any(GRAMMARS_TITLE in word for word in each.cmdline())]  # fmt: skip
    assert len(grammars) == len(cores) == 2
    before = [core.memory_info().rss for core in cores]
    poisons = [*TOO_MUCH_TO_COMPILE.values(), NO_TEXT]
    word = uuid.uuid4().hex[:6]
    async with aiohttp.ClientSession() as session:
        sent = [structured(session, fleet.url, each, stream=stream) for each in poisons for stream in (False, True)]
        *refused, (status, _, text) = await asyncio.gather(
            *sent, structured(session, fleet.url, {"choice": [f"yes {word}", f"no {word}"]}, max_tokens=40)
        )
        direct = await structured(session, fleet.engine_url("decode"), NO_TEXT)
    assert status == 200, text
    assert msgspec.json.decode(text)["choices"][0]["text"] in (f"yes {word}", f"no {word}")
    *refused, streamed = refused
    assert streamed[0] == 200  # the stream had begun
    assert '"code":"bad_request"' in streamed[2]
    for each in (*refused, direct):
        assert 400 <= each[0] < 500, each[2]
        assert "structured_outputs" in each[2]
    said = [each[2] for each in (*refused, streamed)]
    assert all("at most 20000 are accepted" in each for each in said[:2])
    assert all("takes too long to compile" in each for each in said[2:6])
    assert all("no text matches this structure" in each for each in (*said[6:], direct[2]))

    async def spent() -> float:
        """CPU seconds of the cores and their processes in a second."""
        earlier = [each.cpu_times() for each in (*cores, *grammars)]
        await asyncio.sleep(1)
        now = [each.cpu_times() for each in (*cores, *grammars)]
        return sum(b.user + b.system - a.user - a.system for a, b in zip(earlier, now, strict=True))

    async with asyncio.timeout(LONGEST_WAIT_S):
        while await spent() > 0.1:
            pass
    tries = [child for each in grammars for child in each.children()]
    assert all(child.status() == psutil.STATUS_ZOMBIE for child in tries)
    grown = [core.memory_info().rss - earlier for core, earlier in zip(cores, before, strict=True)]
    assert max(grown) < 150 * 2**20
