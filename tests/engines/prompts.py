"""Prompts of exact lengths, and what one engine alone answers to them."""

from __future__ import annotations

import random
import uuid
from typing import Any

import aiohttp

BLOCK = 128
# Tests have limits by pytest; aiohttp's limit of 5 minutes is too short for many answers on a busy machine.
ANSWER_TIMEOUT = aiohttp.ClientTimeout(total=3000)
VOCABULARY = range(1000, 40000)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """`length` token ids, the same for the same seed."""
    return random.Random(f"{seed}/{length}").choices(VOCABULARY, k=length)


async def complete(url: str, prompt: list[int], headers: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
    """POST /v1/completions; the parsed answer."""
    body = {
        "model": "smollm2", "prompt": prompt, "max_tokens": 12, "temperature": 0, "return_token_ids": True, **fields
    }  # fmt: skip
    return await _answer(url, "/v1/completions", body, headers)


async def chat(
    url: str, content: str | list[dict[str, Any]], headers: dict[str, str] | None = None, **fields: Any
) -> dict[str, Any]:
    """POST /v1/chat/completions with one message; the parsed answer."""
    body = {
        "model": "smollm2", "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 160,
        "return_token_ids": True, **fields,
    }  # fmt: skip
    return await _answer(url, "/v1/chat/completions", body, headers)


async def _answer(url: str, path: str, body: dict[str, Any], headers: dict[str, str] | None) -> dict[str, Any]:
    async with (
        aiohttp.ClientSession(timeout=ANSWER_TIMEOUT) as session,
        session.post(f"{url}{path}", json=body, headers=headers) as response,
    ):
        answer = await response.json()
        assert response.status == 200, answer
        return answer


def tokens_of(answer: dict[str, Any]) -> list[int]:
    return answer["choices"][0]["token_ids"]


def calls_of(answer: dict[str, Any]) -> list[str]:
    """The verbs that a program has called for an answer, by its trace.

    On a machine that stood still for a while a move may be beside them, as for an engine that did.
    """
    return [event["verb"] for event in answer["tercet"]["events"] if event["verb"] != "move"]


async def alone(engine_url: str, prompt: list[int], **fields: Any) -> list[int]:
    """What a lone engine generates, with a cache of its own so that nothing is found and nothing is left to find."""
    return tokens_of(await complete(engine_url, prompt, cache_salt=uuid.uuid4().hex, **fields))


async def computed_prompt_tokens(url: str) -> float:
    """Prompt tokens that an engine has computed since its start, by its metrics."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as page:
        lines = (await page.text()).splitlines()
    named, computed = "vllm:prompt_tokens_by_source_total{", 'source="local_compute"'
    (found,) = [line for line in lines if line.startswith(named) and computed in line]
    return float(found.rpartition(" ")[2])
