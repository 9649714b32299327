"""The longest gap in a stream while another client sends the longest bodies that a router accepts, for each field.

The last cases are longer bodies under odd header fields, which a router has to refuse.

``python benchmarks/long_bodies.py --url http://127.0.0.1:8400 --model NAME`` streams from a running router, sends each
body, and prints the longest gap between two events of the stream in that time; first without another client.

Then it sends many small bodies at once: for each list of each route, which it finds in the router's ``/openapi.json``,
bodies with 250 items of each wrong shape, and of each right one. It prints a line for each route, with the list of the
longest gap.

With ``--pid PID``, the router's process on this machine, it also prints the CPU time of the router's event loop for the
request and the stream together. On an idle machine, no gap is longer than that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import aiohttp

from tercet_checks.chaos.adversary import list_fields

TURN: dict[str, Any] = {"role": "user", "content": "x"}
PART: dict[str, Any] = {"type": "text", "text": "x"}
INPUT_PART: dict[str, Any] = {"type": "input_text", "text": "x"}
FUNCTION: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL: dict[str, Any] = {"name": "f", "input_schema": {}}
CALL_ITEM: dict[str, Any] = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
LAST = {"max_tokens": 2}
SMALL, AT_ONCE = 250, 20


def bodies(items: int, sequences: int) -> list[tuple[str, str, dict[str, Any]]]:
    """Return route, field and body of each case; most are just below the limits of the router."""
    few, numbers = items // 8 - 8, items * 32
    words = [f"a{number}" for number in range(items * 2 - 100)]
    grammar = "root ::= " + " ".join("[a-z]" for _ in range(3000))
    rules = "".join(f'\nr{number} ::= "a{number}" [a-z]+ r{number + 1}' for number in range(20_000))
    tag = json.dumps({"type": "structural_tag", "format": {"type": "grammar", "grammar": f"root ::= r0{rules}"}})
    counts, enum = "([^a]{0,1000}b){0,1000}", {"enum": [f"{word} " + "ab c" * 1000 for word in words[:100]]}
    completions, chat, messages, responses = "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"

    def form(names: list[str]) -> dict[str, Any]:
        schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
        return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

    tool = {"type": "function", **TOOL}
    return [
        (completions, "n", {"prompt": "x", "n": sequences, "temperature": 1, **LAST}),
        (completions, "prompt", {"prompt": ["x"] * sequences, **LAST}),
        (completions, "prompt: ids", {"prompt": [5] * (numbers * 3), **LAST}),
        (completions, "prompt: lists of ids", {"prompt": [[5] * (numbers * 3 // sequences)] * sequences, **LAST}),
        (completions, "prompt: text", {"prompt": "a b " * 500_000, **LAST}),
        (completions, "stop", {"prompt": "x", "stop": words, **LAST}),
        (completions, "stop_token_ids", {"prompt": "x", "stop_token_ids": list(range(items * 2)), **LAST}),
        (completions, "allowed_token_ids", {"prompt": "x", "allowed_token_ids": [5] * numbers, **LAST}),
        (completions, "bad_words", {"prompt": "x", "bad_words": words, **LAST}),
        (completions, "choice", {"prompt": "x", "structured_outputs": {"choice": words[:4900]}, **LAST}),
        (completions, "choice: too many", {"prompt": "x", "structured_outputs": {"choice": words}, **LAST}),
        (completions, "regex", {"prompt": "x", "structured_outputs": {"regex": "x" * 39_000}, **LAST}),
        (completions, "regex: classes", {"prompt": "x", "structured_outputs": {"regex": "[a-z]" * 3900}, **LAST}),
        (completions, "grammar", {"prompt": "x", "structured_outputs": {"grammar": grammar}, **LAST}),
        (completions, "regex: counts in counts", {"prompt": "x", "structured_outputs": {"regex": counts}, **LAST}),
        (completions, "json: enum of 400 KB", {"prompt": "x", "structured_outputs": {"json": enum}, **LAST}),
        (completions, "structural_tag", {"prompt": "x", "structured_outputs": {"structural_tag": tag}, **LAST}),
        (completions, "unknown", {"prompt": "x", "unknown": [5] * numbers, **LAST}),
        (completions, "user", {"prompt": "x", "user": "a b " * 500_000, **LAST}),
        (completions, "logit_bias", {"prompt": "x", "logit_bias": {str(at): 1 for at in range(len(words))}, **LAST}),
        (chat, "messages", {"messages": [TURN] * (items - 8), **LAST}),
        (chat, "content", {"messages": [{"role": "user", "content": [PART] * (items - 8)}], **LAST}),
        (chat, "tools", {"messages": [TURN], "tools": [FUNCTION] * (items // 3 - 8), **LAST}),
        (chat, "tool_calls", {"messages": [{"role": "assistant", "tool_calls": [CALL] * (items // 2 - 8)}], **LAST}),
        (chat, "response_format", {"messages": [TURN], "response_format": form(words[:600]), **LAST}),
        (chat, "response_format: large", {"messages": [TURN], "response_format": form(words[:3900]), **LAST}),
        (chat, "content: text", {"messages": [{"role": "user", "content": "a b " * 500_000}], **LAST}),
        (chat, "chat_template_kwargs", {"messages": [TURN], "chat_template_kwargs": {"a": words}, **LAST}),
        (messages, "messages", {"messages": [TURN] * (items - 8), **LAST}),
        (messages, "content", {"messages": [{"role": "user", "content": [PART] * (items - 8)}], **LAST}),
        (messages, "tools", {"messages": [TURN], "tools": [TOOL] * (items // 2 - 8), **LAST}),
        (responses, "input", {"input": [TURN] * few, "max_output_tokens": 2}),
        (responses, "content", {"input": [{"role": "user", "content": [INPUT_PART] * few}], "max_output_tokens": 2}),
        (responses, "input: text", {"input": "a b " * 500_000, "max_output_tokens": 2}),
        (responses, "tools", {"input": "x", "tools": [tool] * (items // 32), "max_output_tokens": 2}),
        ("/tokenize", "prompt", {"prompt": "a b " * 65_000}),
        ("/tokenize", "prompt: too many", {"prompt": "a b " * 250_000}),
        ("/tokenize", "messages", {"messages": [TURN] * (items - 8)}),
        ("/detokenize", "tokens", {"tokens": [5] * numbers}),
    ]  # fmt: skip


Labelled = tuple[str, str, dict[str, Any], list[tuple[str, str]]]
JSON: tuple[str, str] = "content-type", "application/json"
LABELS: list[list[tuple[str, str]]] = [
    [JSON, ("content-encoding", "deflate")],
    [JSON, ("content-encoding", "identity, gzip")],
    [JSON, ("content-type", "text/plain")],
    [("content-type", "text/plain"), JSON],
    [],
]


def labelled() -> list[Labelled]:
    """Return route, field, body and header fields of bodies above the limits, which are not said to be plain JSON."""
    found: list[Labelled] = []
    for labels in LABELS:
        said = "; ".join(value for _, value in labels) or "no content-type"
        content = [{"role": "user", "content": [PART] * 80_000}]
        found.append(("/v1/responses", f"input ({said})", {"input": [TURN] * 30_000, "max_output_tokens": 2}, labels))
        found.append(("/v1/chat/completions", f"content ({said})", {"messages": content, **LAST}, labels))
    return found


def small_bodies() -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """Yield route, field and the bodies that are sent at once."""
    for what, item in (("unknown types", {"type": "zzz"}), ("numbers", 1), ("turns", TURN), ("calls", CALL_ITEM)):
        for at_once in (8, AT_ONCE):
            yield (
                "/v1/responses",
                f"{at_once} inputs: {what}",
                [{"input": [item] * SMALL, "max_output_tokens": 2}] * at_once,
            )


def bodies_of_lists(openapi: dict[str, Any]) -> Iterator[tuple[str, str, list[Any]]]:
    """Yield route, field and bodies that are sent at once, for each list: with wrong items, and with right ones."""
    for each in list_fields(openapi):
        for what, items in (("wrong", each.wrong), ("right", each.examples)):
            found = [each.filled([item] * SMALL) for item in items]
            yield each.route, f"{what} {each.field}", (found * AT_ONCE)[: max(AT_ONCE, len(found))]


class Bystander:
    """A client with a stream. ``longest`` is the longest gap, in seconds, since it was last set to 0."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self.longest = 0.0
        self._streaming = asyncio.create_task(self._run(session, url, model))

    async def _run(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        body = {"model": model, "prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
        while True:
            async with session.post(f"{url}/v1/completions", json=body, raise_for_status=True) as answer:
                last = None
                async for _ in answer.content:
                    now = time.monotonic()
                    self.longest = max(self.longest, now - (last or now))
                    last = now

    async def during(self, work: Any) -> tuple[float, Any]:
        """Await ``work``. Return the longest gap in that time, in seconds, and the result of ``work``.

        Raises the stream's error if it has failed.
        """
        self.longest = 0.0
        found = await work
        if self._streaming.done():
            self._streaming.result()
        return self.longest, found

    def end(self) -> None:
        """End the stream."""
        self._streaming.cancel()


def loop_ms(pid: int | None) -> float:
    """Return the CPU time of a process's first thread so far, in milliseconds; 0 without a process."""
    if pid is None:
        return 0.0
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e6


async def measure(url: str, model: str, long: list[Labelled], pid: int | None) -> None:
    """Print a line for each of the ``long`` bodies, and for small ones that are sent at once."""
    # A connection for each request: the router closes idle ones.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:
        bystander = Bystander(session, url, model)
        gap, _ = await bystander.during(asyncio.sleep(3))
        print(f"{'no other client':45} {gap * 1000:8.1f} ms")

        async def asked(route: str, content: bytes, labels: list[tuple[str, str]]) -> int:
            skipped = () if labels else ("content-type",)
            async with session.post(
                url + route, data=content, headers=labels, skip_auto_headers=skipped, allow_redirects=False
            ) as answer:
                await answer.read()
                return answer.status

        def encoded(body: Any) -> bytes:
            return json.dumps(
                {"model": model, **cast("dict[str, Any]", body)} if isinstance(body, dict) else body
            ).encode()

        async def asked_at_once(route: str, bodies: list[Any]) -> list[int]:
            return await asyncio.gather(*(asked(route, encoded(body), [JSON]) for body in bodies))

        for route, field, body, labels in long:
            content = encoded(body)
            before = loop_ms(pid)
            gap, status = await bystander.during(asked(route, content, labels))
            took = "" if pid is None else f", loop {loop_ms(pid) - before:.0f} ms"
            print(f"{route + ' ' + field:45} {gap * 1000:8.1f} ms, {status}{took}", flush=True)
        for route, field, small in small_bodies():
            before = loop_ms(pid)
            gap, statuses = await bystander.during(asked_at_once(route, small))
            took = "" if pid is None else f", loop {loop_ms(pid) - before:.0f} ms"
            print(f"{route + ' ' + field:45} {gap * 1000:8.1f} ms, {statuses[0]}{took}", flush=True)
        async with session.get(f"{url}/openapi.json", raise_for_status=True) as answer:
            lists = list(bodies_of_lists(await answer.json()))
        for route, of_route in groupby(lists, key=lambda each: each[0]):
            gaps: list[tuple[float, str]] = []
            for _, field, small in of_route:
                gap, _ = await bystander.during(asked_at_once(route, small))
                gaps.append((gap, field))
            for gap, field in sorted(gaps, reverse=True)[:3]:
                print(f"{f'{route}, {len(gaps)} times at once':45} {gap * 1000:8.1f} ms, {field}", flush=True)
        bystander.end()


def main() -> None:
    """Measure a running router."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8400")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--max-request-items", type=int, default=4096)
    parser.add_argument("--max-sequences", type=int, default=512)
    parser.add_argument("--pid", type=int)
    parser.add_argument("--small", action="store_true", help="send only the small bodies")
    given = parser.parse_args()
    try:
        plain = [(*each, [JSON]) for each in bodies(given.max_request_items, given.max_sequences)]
        long = [] if given.small else [*plain, *labelled()]
        asyncio.run(measure(given.url, given.model, long, given.pid))
    except aiohttp.ClientError as error:
        parser.error(f"--url: {given.url} does not serve streams of {given.model}: {error}")


if __name__ == "__main__":
    main()
