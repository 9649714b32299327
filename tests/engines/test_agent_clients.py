"""Messages and Responses as public clients of agents read them: the same verdicts as of a lone vLLM server.

The clients check each event and answer against the schema of its API.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import anthropic
import openai
import pytest

from tests.long_runs import in_full

from .conftest import ENGINE_ARGS, Fleet, router_over, running_engine
from .moving import moving

pytestmark = pytest.mark.verifies("OpenAI's and Anthropic's API")

TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
SCHEMA = {
    "type": "object", "properties": {"colour": {"enum": ["red", "blue", "gr\u00fcn"]}}, "required": ["colour"],
    "additionalProperties": False,
}  # fmt: skip
TEXT = "Tell me about the ships that an old sailor saw."
PAINT = {"name": "paint", "description": "It paints.", "input_schema": SCHEMA}
FUNCTION = {"type": "function", "name": "paint", "description": "It paints.", "parameters": SCHEMA, "strict": True}
CALL = {"colour": "gr\u00fcn"}
MESSAGES: dict[str, dict[str, Any]] = {
    "text": {},
    "system": {"system": "Be brief.", "max_tokens": 5},
    "stop": {"stop_sequences": ["e"]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}] * 2}]},
    "a tool, not called": {"tools": [PAINT]},
    "any tool": {"tools": [PAINT], "tool_choice": {"type": "any"}},
    "one tool": {"tools": [PAINT], "tool_choice": {"type": "tool", "name": "paint"}},
    "no tool": {"tools": [PAINT], "tool_choice": {"type": "none"}},
    "a tool's result": {
        "tools": [PAINT],
        "messages": [
            {"role": "user", "content": TEXT},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "paint", "input": CALL}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "It is."}]},
        ],
    },
    "another model": {"model": "another"},
    "no messages": {"messages": []},
    "temperature": {"extra_body": {"temperature": -1.0}},
    "too long": {"messages": [{"role": "user", "content": TEXT * 400}]},
}
RESPONSES: dict[str, dict[str, Any]] = {
    "text": {},
    "instructions": {"instructions": "Be brief.", "max_output_tokens": 5},
    "messages": {"input": [{"role": "user", "content": [{"type": "input_text", "text": TEXT}]}]},
    "a function, not called": {"tools": [FUNCTION]},
    "any function": {"tools": [FUNCTION], "tool_choice": "required"},
    "one function": {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "paint"}},
    "no function": {"tools": [FUNCTION], "tool_choice": "none"},
    "a function's result": {
        "tools": [FUNCTION],
        "input": [
            {"role": "user", "content": TEXT},
            {"type": "function_call", "call_id": "call_1", "name": "paint", "arguments": '{"colour": "red"}'},
            {"type": "function_call_output", "call_id": "call_1", "output": "It is."},
        ],
    },
    "json schema": {"text": {"format": {"type": "json_schema", "name": "p", "schema": SCHEMA, "strict": True}}},
    "another model": {"model": "another"},
    "temperature": {"temperature": -1.0},
    "too long": {"input": TEXT * 400},
}
# Random, or of the moment.
VOLATILE = {"id", "item_id", "call_id", "created_at", "completed_at", "signature", "request_id"}

# The kind of Anthropic's events that say more of an open block; OpenAI's end with ``.delta``.
MORE = "content_block_delta"


class Clients(NamedTuple):
    """Public clients of one server, which raise what is not in the schema of its API."""

    messages: anthropic.AsyncAnthropic
    responses: openai.AsyncOpenAI


@asynccontextmanager
async def clients_of(url: str) -> AsyncGenerator[Clients]:
    async with (
        anthropic.AsyncAnthropic(
            base_url=url, api_key="none", max_retries=0, _strict_response_validation=True
        ) as messages,
        openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
        ) as responses,
    ):  # fmt: skip
        yield Clients(messages, responses)


class Servers(NamedTuple):
    """A lone vLLM server, and a router whose program takes a request through two others."""

    lone: str
    pair: Fleet


@pytest.fixture(scope="module")
def servers(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """With the same model and parser of tools."""
    flags = ("--program", "disaggregated", "--program-arg", "min_send=1", "--", *TOOLS)
    tmp = tmp_path_factory.mktemp("agent-clients")
    with (
        running_engine(tmp, "lone-0", *ENGINE_ARGS, *TOOLS) as lone,
        router_over(fleet.engine_urls(), tmp, *flags) as url,
    ):
        yield Servers(lone, Fleet(url, fleet.places))


# ---- what a client sees --------------------------------------------------------------------------------------


def lasting(value: Any) -> Any:
    """Without what differs each time."""
    if isinstance(value, dict):
        return {key: lasting(item) for key, item in value.items() if key not in VOLATILE}
    return [lasting(item) for item in value] if isinstance(value, list) else value


def once(kinds: list[str]) -> list[str]:
    """The kinds of events, those of more of the same once: how many tokens are in one is not the API's matter."""
    found, since = list[str](), set[str]()
    for kind in kinds:
        if kind in since:
            continue
        if kind == MORE or kind.endswith(".delta"):
            since.add(kind)
        else:
            since.clear()
        found.append(kind)
    return found


async def message(clients: Clients, asked: dict[str, Any], *, stream: bool) -> Any:
    """A message, and the kinds of a stream's events."""
    given: dict[str, Any] = {
        "model": "smollm2", "max_tokens": 60, "messages": [{"role": "user", "content": TEXT}],
        "extra_body": {"temperature": 0.0}, **asked,
    }  # fmt: skip
    if not stream:
        return lasting((await clients.messages.messages.create(**given)).model_dump())
    kinds, said = list[str](), list[Any]()
    async for event in await clients.messages.messages.create(stream=True, **given):
        kinds.append(event.type)
        if event.type == "content_block_delta":
            said[-1] += "".join(lasting(event.delta.model_dump(exclude={"type"})).values())
        elif event.type == "content_block_start":
            said += [lasting(event.content_block.model_dump()), ""]
        elif event.type == "message_delta":
            said.append(event.model_dump())
    return once(kinds), said


async def response(clients: Clients, asked: dict[str, Any], *, stream: bool) -> Any:
    """A response, and the kinds of a stream's events, whose numbers have no gap."""
    given: dict[str, Any] = {"model": "smollm2", "max_output_tokens": 60, "temperature": 0.0, "input": TEXT, **asked}
    if not stream:
        return lasting((await clients.responses.responses.create(**given)).model_dump())
    kinds, numbers, final = list[str](), list[int](), None
    async for event in await clients.responses.responses.create(stream=True, **given):
        kinds.append(event.type)
        numbers.append(event.sequence_number)
        final = getattr(event, "response", final)
    assert numbers == [*range(len(numbers))]
    assert final is not None
    return once(kinds), lasting(final.model_dump())


async def verdict(seen: Awaitable[Any]) -> Any:
    """What a client says of an answer: itself, or what it raises."""
    try:
        return await seen
    except (anthropic.APIStatusError, openai.APIStatusError) as error:
        # The names of errors differ: a router's are those of the API.
        body: Any = error.body
        return type(error).__name__, error.status_code, body.get("error", body)["message"]
    except (anthropic.APIError, openai.APIError) as error:
        return type(error).__name__, str(error)


Ask = Callable[..., Awaitable[Any]]
CASES: list[tuple[Ask, dict[str, Any]]] = [
    *((message, asked) for asked in MESSAGES.values()), *((response, asked) for asked in RESPONSES.values())
]  # fmt: skip
NAMES = [f"{api}: {name}" for api, cases in (("messages", MESSAGES), ("responses", RESPONSES)) for name in cases]


@pytest.mark.parametrize(
    "stream", [pytest.param(False, marks=in_full("streams"), id="whole"), pytest.param(True, id="streamed")]
)
@pytest.mark.parametrize(("ask", "asked"), CASES, ids=NAMES)
async def test_a_pair_has_the_verdict_of_a_lone_server(
    servers: Servers, ask: Ask, asked: dict[str, Any], stream: bool
) -> None:
    async with clients_of(servers.lone) as lone, clients_of(servers.pair.url) as pair:
        expected = await verdict(ask(lone, asked, stream=stream))
        assert await verdict(ask(pair, asked, stream=stream)) == expected


# ---- moves ---------------------------------------------------------------------------------------------------

ROUNDS = 5
"""How often they are asked until they moved: it takes what time the machine leaves."""
MOVED: list[tuple[Ask, dict[str, Any]]] = [
    (message, {"max_tokens": 150}),
    (message, {"max_tokens": 150, **MESSAGES["any tool"]}),
    (response, {"max_output_tokens": 150}),
    (response, {"max_output_tokens": 150, **RESPONSES["any function"]}),
]


async def test_the_verdicts_stay_the_same_while_the_answers_move(servers: Servers) -> None:
    async with clients_of(servers.lone) as lone, clients_of(servers.pair.url) as pair:
        expected = [await verdict(ask(lone, asked, stream=True)) for ask, asked in MOVED]
        for _ in range(ROUNDS):
            async with moving(servers.pair) as moved:
                found = await asyncio.gather(*(verdict(ask(pair, asked, stream=True)) for ask, asked in MOVED))
            assert found == expected
            if moved:
                return
    pytest.fail(f"in none of {ROUNDS} rounds anything moved")
