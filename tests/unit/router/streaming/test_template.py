from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from tercet.router.streaming.template import template_of


class Choice(BaseModel):
    index: int = 0
    text: str
    logprobs: None = None
    finish_reason: None = None


class Chunk(BaseModel):
    id: str
    created: int = 1
    model: str
    choices: list[Choice]


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
LIKE_A_CHUNK = st.sampled_from(['"text":""', '\\"text\\":"a"', '{"choices":[{"text":"x"}]}', "\n\n", "data: "])


def event(text: str, model: str) -> str:
    return f"data: {Chunk(id='cmpl-1', model=model, choices=[Choice(text=text)]).model_dump_json()}\n\n"


@given(first=TEXT | LIKE_A_CHUNK, then=TEXT | LIKE_A_CHUNK, model=TEXT | LIKE_A_CHUNK)
def test_a_template_writes_what_pydantic_would(first: str, then: str, model: str) -> None:
    template = template_of(event(first, model))
    assert template is not None
    body = event(then, model).encode()
    assert template.frame(then) == f"{len(body):x}\r\n".encode() + body + b"\r\n"


CHAT = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}


def chat(**choice: object) -> str:
    return f"data: {json.dumps({**CHAT, 'choices': [{'index': 0, **choice}]}, separators=(',', ':'))}\n\n"


def test_a_chat_chunk_is_a_template_unless_it_says_more() -> None:
    assert template_of(chat(delta={"content": "x"}, logprobs=None, finish_reason=None)) is not None
    assert template_of(chat(delta={"role": "assistant", "content": ""})) is None
    assert template_of(chat(delta={"content": "x", "reasoning": "y"})) is None
    assert template_of(chat(delta={"content": None})) is None
    assert template_of(chat(delta={"content": "x"}, finish_reason="stop")) is None
    assert template_of(chat(delta={"content": "x"}, logprobs={"content": []})) is None
    assert template_of(chat(delta={"content": "x"}, token_ids=[1])) is None


@pytest.mark.parametrize(
    "other",
    [
        "data: [DONE]\n\n",
        ": keep-alive\n\n",
        "data: {\n\n",
        "data: []\n\n",
        'data: {"error":{"message":"x"}}\n\n',
        'data: {"id":"c","choices":[]}\n\n',
        'data: {"id":"c","choices":[1]}\n\n',
        'data: {"id":"c","choices":[{"text":"a"},{"text":"b"}]}\n\n',
        'data: {"id":"c","choices":[{"text":"a"}],"usage":{"total_tokens":1}}\n\n',
        'data: {"id":"c","choices":[{"index":0}]}\n\n',
    ],
)
def test_other_events_are_no_templates(other: str) -> None:
    assert template_of(other) is None


def test_a_chats_first_chunk_which_says_who_speaks_is_none() -> None:
    assert template_of(chat(delta={"role": "assistant", "content": ""})) is None
    assert template_of(chat(delta={"content": ""})) is not None
