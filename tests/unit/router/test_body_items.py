"""What makes a body long for the event loop is bounded, whichever field it is in; long texts are not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tercet.protocol import BadRequest
from tercet.router.limits import received_bodies
from tercet.router.limits.received_bodies import require_few_items, require_readable, require_small_structures

TURN = {"role": "user", "content": "x"}
PART = {"type": "text", "text": "x"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MOST = 64


async def asked(path: str, value: Any) -> None:
    await require_few_items(path, json.dumps(value).encode(), value, MOST)


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/v1/chat/completions", {"messages": [TURN] * 65}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [PART] * 65}]}, "messages"),
        ("/v1/chat/completions", {"messages": [TURN], "tools": [CALL] * 40}, "tools"),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [CALL] * 40}]}, "messages"),
        ("/v1/chat/completions", {"response_format": {"schema": {str(n): {} for n in range(65)}}}, "response_format"),
        ("/v1/completions", {"structured_outputs": {"choice": ["x"] * 200}}, "structured_outputs"),
        ("/v1/completions", {"stop": ["x"] * 200}, "stop"),
        ("/v1/completions", {"prompt": list(range(10_000))}, "prompt"),
        ("/v1/completions", {"prompt": [[1, 2]] * 60 + [[1] * 7000]}, "prompt"),
        ("/v1/completions", {"allowed_token_ids": [1.5] * 2100}, "allowed_token_ids"),
        ("/v1/completions", {"stop_token_ids": [5] * 130}, "stop_token_ids"),
        ("/detokenize", {"tokens": [5] * 2100}, "tokens"),
        ("/v1/completions", {"logit_bias": {str(n): 1 for n in range(200)}}, "logit_bias"),
        ("/v1/messages", {"system": [PART] * 65}, "system"),
        ("/v1/messages", {"tools": [{"name": "f", "input_schema": {}}] * 40}, "tools"),
        ("/v1/responses", {"input": [TURN] * 9}, "input"),
        ("/v1/responses", {"input": "x", "tools": [{}] * 3}, "tools"),
        ("/tokenize", {"messages": [TURN] * 65}, "messages"),
        ("/v1/chat/completions", {"nobody_reads_this": [[]] * 65}, "nobody_reads_this"),
    ],
)
async def test_too_many_are_refused_by_their_field(path: str, fields: Any, named: str) -> None:
    with pytest.raises(BadRequest, match="max-request-items") as refused:
        await asked(path, fields)
    assert refused.value.param == named


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": list(range(6000))}),
        ("/v1/completions", {"prompt": "1, " * 10_000, "allowed_token_ids": [5] * 2000}),
        ("/v1/completions", {"prompt": "[{" * 1000}),
        ("/v1/completions", {"prompt": '"a": ' * 1000}),
        ("/v1/chat/completions", {"messages": [TURN] * 60}),
        ("/v1/responses", {"input": [TURN] * 4, "tools": [{}] * 2}),
    ],
)
async def test_long_texts_and_token_ids_are_no_items(path: str, fields: Any) -> None:
    await asked(path, fields)


def test_what_takes_too_long_to_read_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(received_bodies, "MOST_SEPARATORS", 100)
    require_readable(json.dumps(list(range(90))).encode())
    with pytest.raises(BadRequest, match="100 values"):
        require_readable(json.dumps(list(range(110))).encode())


SCHEMA = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(2000)}}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"structured_outputs": {"choice": ["x"] * 6000}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "x" * 1_000_000}}, "structured_outputs.regex"),
        (
            {"sampling_params": {"structured_outputs": {"regex": "x" * 1_000_000}}},
            "sampling_params.structured_outputs.regex",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "response_format"),
        ({"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "text.format"),
        ({"output_config": {"format": {"schema": SCHEMA}}}, "output_config.format"),
    ],
)
async def test_structures_are_refused_before_anybody_reads_all_of_them(fields: Any, named: str) -> None:
    with pytest.raises(BadRequest) as refused:
        await require_small_structures(json.dumps(fields).encode(), fields)
    assert refused.value.param == named
    assert refused.value.message.startswith(named)


async def test_structures_that_are_none_are_not_looked_at() -> None:
    for fields in ({}, {"structured_outputs": 7, "response_format": "x", "text": []}, {"text": {"format": None}}):
        await require_small_structures(b"{}", fields)
