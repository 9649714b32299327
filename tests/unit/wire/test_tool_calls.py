"""Answers that call a tool are told from others by their bytes, whatever a model writes."""

from __future__ import annotations

import asyncio
import json

import pytest
from starlette.types import Message

from tercet.wire.serving.answers import ToolCallsSend
from tercet.wire.serving.server_access import RequestContext

CALL = {"index": 0, "id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT = {"choices": [{"message": {"content": None, "tool_calls": [CALL]}, "finish_reason": "tool_calls"}]}
DELTA = {"choices": [{"delta": {"tool_calls": [CALL]}, "finish_reason": None}]}
MESSAGES = {"type": "message_delta", "delta": {"stop_reason": "tool_use"}}
RESPONSE = {"output": [{"type": "function_call", "name": "f", "arguments": "{}"}]}
PLAIN = {"choices": [{"message": {"content": "hello", "tool_calls": []}, "finish_reason": "stop"}]}
ANSWERS = [CHAT, DELTA, MESSAGES, RESPONSE]


def compact(answer: object) -> bytes:
    return json.dumps(answer, separators=(",", ":")).encode()


def noted(*bodies: bytes) -> bool:
    """What the context says after an answer of these parts, all of which are passed on."""
    context, passed = RequestContext(), list[Message]()

    async def send(message: Message) -> None:
        passed.append(message)

    async def answer() -> None:
        watching = ToolCallsSend(send, context)
        await watching({"type": "http.response.start", "status": 200, "headers": []})
        for body in bodies:
            await watching({"type": "http.response.body", "body": body, "more_body": True})

    asyncio.run(answer())
    assert [message.get("body") for message in passed[1:]] == list(bodies)
    return context.calls_tool


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_that_calls_a_tool(answer: object) -> None:
    assert noted(compact(answer))
    assert noted(b"data: " + compact(PLAIN), b"data: " + compact(answer), b"data: [DONE]")


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_whose_text_looks_like_a_call(answer: object) -> None:
    assert not noted(compact(PLAIN))
    assert not noted(compact({"choices": [{"message": {"content": compact(answer).decode()}}]}))
