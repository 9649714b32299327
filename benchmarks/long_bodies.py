"""How long a stream stands still while another client sends the longest bodies that are taken, field by field.

``python benchmarks/long_bodies.py --url http://127.0.0.1:8400 --model NAME`` streams from a running front door, sends
each body, and prints the longest gap between two events of the stream meanwhile, and without anybody else.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

import aiohttp

TURN: dict[str, Any] = {"role": "user", "content": "x"}
PART: dict[str, Any] = {"type": "text", "text": "x"}
INPUT_PART: dict[str, Any] = {"type": "input_text", "text": "x"}
FUNCTION: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL: dict[str, Any] = {"name": "f", "input_schema": {}}
LAST = {"max_tokens": 2}


def bodies(items: int, sequences: int) -> list[tuple[str, str, dict[str, Any]]]:
    """Route, field and body of each case: just below what is refused."""
    few, words = items // 8 - 8, [f"a{number}" for number in range(items * 2 - 100)]
    schema = {"type": "object", "properties": {word: {"type": "string"} for word in words[: items - 100]}}
    completions, chat, messages, responses = "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    tool = {"type": "function", **TOOL}
    return [
        (completions, "n", {"prompt": "x", "n": sequences, "temperature": 1, **LAST}),
        (completions, "prompt", {"prompt": ["x"] * sequences, **LAST}),
        (completions, "prompt: ids", {"prompt": [5] * 1_000_000, **LAST}),
        (completions, "prompt: text", {"prompt": "a b " * 500_000, **LAST}),
        (completions, "stop", {"prompt": "x", "stop": words, **LAST}),
        (completions, "choice", {"prompt": "x", "structured_outputs": {"choice": words}, **LAST}),
        (completions, "logit_bias", {"prompt": "x", "logit_bias": {str(at): 1 for at in range(len(words))}, **LAST}),
        (chat, "messages", {"messages": [TURN] * (items - 8), **LAST}),
        (chat, "content", {"messages": [{"role": "user", "content": [PART] * (items - 8)}], **LAST}),
        (chat, "tools", {"messages": [TURN], "tools": [FUNCTION] * (items // 3 - 8), **LAST}),
        (chat, "tool_calls", {"messages": [{"role": "assistant", "tool_calls": [CALL] * (items // 2 - 8)}], **LAST}),
        (chat, "response_format", {"messages": [TURN], "response_format": form, **LAST}),
        (messages, "messages", {"messages": [TURN] * (items - 8), **LAST}),
        (messages, "content", {"messages": [{"role": "user", "content": [PART] * (items - 8)}], **LAST}),
        (messages, "tools", {"messages": [TURN], "tools": [TOOL] * (items // 2 - 8), **LAST}),
        (responses, "input", {"input": [TURN] * few, "max_output_tokens": 2}),
        (responses, "content", {"input": [{"role": "user", "content": [INPUT_PART] * few}], "max_output_tokens": 2}),
        (responses, "tools", {"input": "x", "tools": [tool] * (items // 32), "max_output_tokens": 2}),
    ]  # fmt: skip


class Bystander:
    """A stream that wants its tokens; ``longest`` is the longest gap since somebody looked."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def run(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        """Stream for ever."""
        body = {"model": model, "prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
        while True:
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                last = None
                async for _ in answer.content:
                    now = time.monotonic()
                    self.longest = max(self.longest, now - (last or now))
                    last = now

    async def during(self, work: Any) -> tuple[float, Any]:
        """The longest gap while ``work`` goes on, and what that comes to."""
        self.longest = 0.0
        found = await work
        return self.longest, found


async def measure(url: str, model: str, items: int, sequences: int) -> None:
    """Print a line for each case."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        bystander = Bystander()
        streaming = asyncio.create_task(bystander.run(session, url, model))
        gap, _ = await bystander.during(asyncio.sleep(3))
        print(f"{'nobody else':40} {gap * 1000:8.1f} ms")

        async def asked(route: str, body: dict[str, Any]) -> int:
            async with session.post(url + route, json={"model": model, **body}) as answer:
                await answer.read()
                return answer.status

        for route, field, body in bodies(items, sequences):
            gap, status = await bystander.during(asked(route, body))
            print(f"{route + ' ' + field:40} {gap * 1000:8.1f} ms, {status}", flush=True)
        streaming.cancel()


def main() -> None:
    """Measure a running front door."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8400")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--max-request-items", type=int, default=8192)
    parser.add_argument("--max-sequences", type=int, default=512)
    given = parser.parse_args()
    asyncio.run(measure(given.url, given.model, given.max_request_items, given.max_sequences))


if __name__ == "__main__":
    main()
