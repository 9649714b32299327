"""Moves while a model thinks: a grammar begins behind the reasoning, and agents call their tools, wherever that is."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.long_runs import in_full

from .conftest import MODEL, Fleet, router_over, start_fleet
from .moving import moving
from .prompts import chat

ONE_ENGINE = {"x-tercet-program": "data_parallel"}
pytestmark = [pytest.mark.timeout(900), pytest.mark.verifies("reasoning with grammars")]

PARSER = Path(__file__).with_name("thinking_parser.py")


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two engines whose model thinks until its first full stop."""
    fleet = start_fleet(tmp_path_factory.mktemp("thinking"), "--", "--max-model-len", "2048", *THINKS)
    yield fleet
    fleet.stop()


THINKS = ("--reasoning-parser", "until-full-stop", "--reasoning-parser-plugin", str(PARSER))
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
FORMATS: dict[str, dict[str, Any]] = {
    "regex": {"structured_outputs": {"regex": "[a-c]{60,70}"}},
    "json schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "ships",
                "schema": {
                    "type": "object",
                    "properties": {"ships": {"type": "array", "items": {"type": "integer"}, "minItems": 9}},
                    "required": ["ships"],
                },
            },
        }
    },
}
ROUNDS = 5
"""How often it is asked until it moved where it should: moves and steps take what time the machine leaves them."""
BEHIND = {"regex": "[a-c]{60,70}$", "json schema": r"\s*\{\s*\"ships\"\s*:\s*\["}


@pytest.mark.parametrize("form", ["regex", pytest.param("json schema", marks=in_full("with a regular expression"))])
async def test_a_grammar_begins_behind_the_reasoning_wherever_that_is_computed(thinking: Fleet, form: str) -> None:
    text = "Tell me about the ships that an old sailor saw."
    calm = await chat(thinking.url, text, ONE_ENGINE, **FORMATS[form])
    for _ in range(ROUNDS):
        async with moving(thinking) as moved:
            answer = await chat(thinking.url, text, ONE_ENGINE, **FORMATS[form])
        (choice,), (calm_choice,) = answer["choices"], calm["choices"]
        assert choice["token_ids"] == calm_choice["token_ids"]
        assert choice["message"] == calm_choice["message"]
        # The parser tells the engines where the reasoning ends, which is all that matters; it does not take it out.
        reasoning, _, structured = choice["message"]["content"].partition(".")
        assert reasoning, "nothing was thought, so nothing was tested"
        assert re.match(BEHIND[form], structured)
        thought = answer["usage"]["prompt_tokens"] + choice["token_ids"].index(30)
        if any(each["tokens"] < thought for each in moved) and any(each["tokens"] > thought for each in moved):
            return
    pytest.fail(f"in none of {ROUNDS} rounds it moved both before and behind the end of the reasoning")


# ---- agents --------------------------------------------------------------------------------------------------

PAINT: Any = {
    "type": "function",
    "function": {
        "name": "paint", "strict": True,
        "parameters": {
            "type": "object", "properties": {"colour": {"enum": ["red", "blue", "gr\u00fcn"]}}, "required": ["colour"],
            "additionalProperties": False,
        },
    },
}  # fmt: skip
TASKS = ("Tell me about the ships that an old sailor saw.", "What colour has the sea?", "Say who painted the house.")
TURNS = 2


async def agent(client: openai.AsyncOpenAI, task: str, headers: dict[str, str]) -> list[Any]:
    """What a model says to a client that runs its tools and asks again; ids of calls are random."""
    messages: list[Any] = [{"role": "user", "content": task}]
    said: list[Any] = []
    for _ in range(TURNS):
        reason, content, name, arguments, call_id = "", "", "", "", ""
        stream: Any = await client.chat.completions.create(
            model="smollm2", messages=messages, tools=[PAINT], temperature=0, max_tokens=120, stream=True,
            tool_choice={"type": "function", "function": {"name": "paint"}}, extra_headers=headers,
        )  # fmt: skip
        async for chunk in stream:
            for choice in chunk.choices:
                reason = choice.finish_reason or reason
                content += (choice.delta.content or "") + (getattr(choice.delta, "reasoning", None) or "")
                for call in choice.delta.tool_calls or ():
                    call_id, name = call.id or call_id, call.function.name or name
                    arguments += call.function.arguments or ""
        said.append((reason, content, name, arguments))
        if not name or reason == "length":
            return said
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        messages.append({"role": "assistant", "content": content, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call_id, "content": f"It is painted: {arguments}"})
    return said


async def agents(url: str, headers: dict[str, str]) -> list[list[Any]]:
    """Several of them at once."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        return await asyncio.gather(*(agent(client, task, headers) for task in TASKS))


@in_full("test_odd_outputs and test_agent_streams; tool calls over a pair in test_openai")
async def test_agents_in_loops_are_told_the_same_by_a_pair_and_while_they_move(thinking: Fleet, tmp_path: Path) -> None:
    flags = ("--program", "disaggregated", "--program-arg", "min_send=1", "--", *THINKS, *TOOLS)
    with router_over(thinking.engine_urls(), tmp_path, *flags, model=MODEL) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            alone = [await agent(client, task, ONE_ENGINE) for task in TASKS]
        assert any(name == "paint" and "colour" in arguments for said in alone for _, _, name, arguments in said), alone
        assert await agents(url, {}) == alone
        async with moving(Fleet(url, thinking.places)) as moved:
            assert await agents(url, {}) == alone
        assert moved
