"""Moves while a model thinks: a grammar begins behind the reasoning, wherever that is computed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.long_runs import in_full

from .conftest import Fleet, start_fleet
from .moving import moving
from .prompts import chat

ONE_ENGINE = {"x-tercet-program": "data_parallel"}
pytestmark = pytest.mark.timeout(900)

PARSER = Path(__file__).with_name("thinking_parser.py")


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two engines whose model thinks until its first full stop."""
    parser = ("--reasoning-parser", "until-full-stop", "--reasoning-parser-plugin", str(PARSER))
    fleet = start_fleet(tmp_path_factory.mktemp("thinking"), "--", "--max-model-len", "2048", *parser)
    yield fleet
    fleet.stop()


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


@pytest.mark.parametrize("form", ["regex", pytest.param("json schema", marks=in_full)])
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
