"""The memory of a server process while clients send long names in every field and header that can name something.

``python -m benchmarks.long_names --url http://127.0.0.1:8400 --model NAME --pid PID`` sends rounds of requests to a
router on this machine, whose process is ``PID``. Each request has other names, of 64 KiB in a body and as long as the
server accepts in the head, in another field. After these come requests with names of 4 MiB. It prints the resident
memory of the process before and after each round. The first two rounds fill what is bounded (traces, sessions); after
that, memory must stay as it is, so that the last lines show the same number.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import typer
from benchmarks.command_line import run

from tercet.protocol import BadRequest
from tercet.protocol.headers import (
    AGENT_HEADERS,
    OTHER_SESSION_HEADERS,
    PROGRAM_HEADER,
    REQUEST_ID_HEADER,
    SESSION_FINAL_HEADER,
    SESSION_HEADER,
    SUBAGENT_HEADER,
)
from tercet.settings import require_url
from tercet_checks.chaos.adversary import CHAT, COMPLETIONS, LAST, MESSAGES, NAMES, RESPONSES, TURN

BODY_NAME, HUGE_NAME, HEAD_NAME = 64 * 1024, 4 * 1024 * 1024, 60_000
HEADERS = (
    REQUEST_ID_HEADER, SESSION_HEADER, *OTHER_SESSION_HEADERS, *AGENT_HEADERS, SUBAGENT_HEADER, SESSION_FINAL_HEADER,
    PROGRAM_HEADER, "traceparent", "baggage", "user-agent",
)  # fmt: skip


def named_tool(name: str) -> dict[str, Any]:
    """Return a function of this name."""
    return {"type": "function", "function": {"name": name, "parameters": {}}}


OF_CHATS: tuple[Callable[[str], Mapping[str, Any]], ...] = (
    lambda name: {"metadata": {name: name}},
    lambda name: {"safety_identifier": name},
    lambda name: {"prompt_cache_key": name},
    lambda name: {"chat_template_kwargs": {name: name}},
    lambda name: {"kv_transfer_params": {"remote_engine_id": name}},
    lambda name: {"vllm_xargs": {name: name}},
    lambda name: {"tools": [named_tool(name)]},
    lambda name: {"tools": [named_tool("f")], "tool_choice": {"type": "function", "function": {"name": name}}},
    lambda name: {"messages": [{**TURN, "name": name}]},
    lambda name: {"messages": [{"role": name, "content": "x"}]},
    lambda name: {"response_format": {"type": "json_schema", "json_schema": {"name": name, "schema": {}}}},
    lambda name: {name: name},
)  # fmt: skip
OF_RESPONSES: tuple[Callable[[str], Mapping[str, Any]], ...] = (
    lambda name: {"previous_response_id": name},
    lambda name: {"metadata": {"a": name}, "store": True},
    lambda name: {"prompt_cache_key": name, "safety_identifier": name},
    lambda name: {"user": name, "truncation": name},
)
BODIES: tuple[tuple[str, Callable[[str], Mapping[str, Any]]], ...] = (
    *((COMPLETIONS, lambda name, field=field: {"prompt": "x", **LAST, **field(name)}) for _, field in NAMES),
    *((CHAT, lambda name, field=field: {"messages": [TURN], **LAST, **field(name)}) for field in OF_CHATS),
    *((RESPONSES, lambda name, field=field: {"input": "x", "max_output_tokens": 2, **field(name)})
      for field in OF_RESPONSES),
    (MESSAGES, lambda name: {"messages": [TURN], **LAST, "metadata": {"user_id": name}}),
)  # fmt: skip


class Names:
    """Requests with names that are all different, to a server at ``url``; ``statuses`` counts the answers."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self.statuses = Counter[int]()
        self._session, self._url, self._model = session, url, model
        self._numbers = count()

    async def asks(self, requests: int, longest: int, at_once: int) -> None:
        """Send ``requests``, each with names of ``longest`` characters in its body; some have one in the head, too."""
        left = iter(range(requests))

        async def client() -> None:
            for _ in left:
                await self._ask(next(self._numbers), longest)

        await asyncio.gather(*(client() for _ in range(at_once)))

    async def _ask(self, number: int, longest: int) -> None:
        route, body = BODIES[number % len(BODIES)]
        name = f"{number}-".ljust(longest, "n")
        header = HEADERS[number // 2 % len(HEADERS)]
        headers = {header: name[:HEAD_NAME]} if number % 2 else {}
        content = json.dumps({"model": self._model, **body(name)}).encode()
        headers |= {"content-type": "application/json"}
        async with self._session.post(self._url + route, data=content, headers=headers) as answer:
            await answer.read()
            self.statuses[answer.status] += 1


def resident_mb(pid: int) -> float:
    """Return the resident memory of a process, in megabytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def measure(url: str, model: str, pid: int, rounds: int, requests: int, huge: int) -> None:
    """Print the memory of the process ``pid`` after each round."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:
        names = Names(session, url, model)

        def told(what: str, began: float) -> None:
            said = ", ".join(f"{number} x {status}" for status, number in sorted(names.statuses.items()))
            print(f"{what:40} {resident_mb(pid):8.1f} MB, {time.monotonic() - began:4.0f} s, {said}", flush=True)
            names.statuses.clear()

        began = time.monotonic()
        await names.asks(len(BODIES) * len(HEADERS), 16, 8)
        told("short names", began)
        for number in range(1, rounds + 1):
            began = time.monotonic()
            await names.asks(requests, BODY_NAME, 16)
            told(f"round {number}: {requests} of 64 KiB", began)
            began = time.monotonic()
            await names.asks(huge, HUGE_NAME, 2)
            told(f"round {number}: {huge} of 4 MiB", began)


def long_names(
    url: Annotated[str, typer.Option("--url", help="URL of the server.")] = "http://127.0.0.1:8400",
    model: Annotated[str, typer.Option("--model", help="Model in requests.")] = "smollm2",
    pid: Annotated[
        int, typer.Option("--pid", help="Process id of the server, on this machine.", show_default=False)
    ] = 0,
    rounds: Annotated[int, typer.Option(help="Number of rounds.", min=1)] = 3,
    requests: Annotated[int, typer.Option(help="Requests of each round with names of 64 KiB.", min=1)] = 10_000,
    huge: Annotated[int, typer.Option(help="Requests of each round with names of 4 MiB.", min=0)] = 200,
) -> None:
    """Measure the memory of a running server while clients send long names."""
    require_url(url, "--url")
    if not Path(f"/proc/{pid}/statm").exists():
        raise BadRequest(f"--pid: no process {pid} runs on this machine", "--pid")
    try:
        asyncio.run(measure(url.rstrip("/"), model, pid, rounds, requests, huge))
    except aiohttp.ClientError as error:
        raise BadRequest(f"--url: {url} does not answer: {error}", "--url") from error


if __name__ == "__main__":
    run(long_names, "benchmarks.long_names")
