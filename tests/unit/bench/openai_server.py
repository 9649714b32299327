"""A small OpenAI server that answers, stalls and breaks as its requests ask it to; no model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from tests.servers import served

MODEL = "words"
DONE = b"data: [DONE]\n\n"


def sse(fields: Any) -> bytes:
    """One event."""
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


class FakeServer:
    """Serves ``/v1/models``, completions. What is in a body's ``behave`` decides how it answers:

    ``status``: an error instead, with these bytes if there is a ``body``; ``gap``: seconds between tokens; ``at_once``:
    tokens per event, with their ids; ``cut``: closes the connection after so many tokens; ``error``: sends an error
    after so many; ``hang``: says nothing after so many, until its client goes; ``silent``: an answer without a token;
    ``raw``: these bytes as an event after the first token; ``finish``: the last reason. ``root`` is where its tokenizer
    is.
    ``programs`` are those that it knows, as a router does; None for a server that knows nothing of programs.
    """

    def __init__(self, root: str = "") -> None:
        self.root = root
        self.url = ""
        self.programs: set[str] | None = None
        self.behave: dict[str, Any] = {}
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_once = 0
        self.under_way = 0
        self.hung = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[FakeServer]:
        """Listens on a free port while inside."""
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        async with served(app) as self.url:
            yield self

    async def _models(self, request: web.Request) -> web.Response:
        asked = request.headers.get("x-tercet-program")
        if self.programs is not None and asked is not None and asked not in self.programs:
            why = f"x-tercet-program: there is no program {asked!r}; choose {', '.join(sorted(self.programs))}"
            return web.json_response({"error": {"message": why}}, status=400)
        return web.json_response({"data": [{"id": MODEL, "root": self.root, "max_model_len": 4096}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.under_way += 1
        self.most_at_once = max(self.most_at_once, self.under_way)
        try:
            return await self._answer(request, body, {**self.behave, **body.get("behave", {})})
        finally:
            self.under_way -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any], how: dict[str, Any]) -> web.StreamResponse:
        if "status" in how:
            if "body" in how:
                return web.Response(body=bytes.fromhex(how["body"]), status=how["status"])
            return web.json_response({"error": {"message": "no\nroom"}}, status=how["status"])
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        wanted = body["max_tokens"]
        total = 0 if how.get("silent") else wanted
        for first in range(0, total, how.get("at_once", 1)):
            if first == how.get("hang"):
                self.hung.set()
                await asyncio.Event().wait()
            if first == how.get("cut"):
                assert request.transport is not None
                request.transport.abort()
                return response
            if first == how.get("error"):
                await response.write(sse({"error": {"message": "out of blocks", "code": 500}}))
                return response
            if how.get("gap"):
                await asyncio.sleep(how["gap"])
            tokens = list(range(first, min(first + how.get("at_once", 1), total)))
            await response.write(sse({"choices": [self._choice(tokens, tokens[-1] + 1 == wanted, how)]}))
            if "raw" in how and not first:
                await response.write(bytes.fromhex(how["raw"]))
        usage = {"prompt_tokens": prompt_length(body), "completion_tokens": total}
        await response.write(sse({"choices": [], "usage": usage}))
        await response.write(DONE)
        return response

    def _choice(self, tokens: list[int], last: bool, how: dict[str, Any]) -> dict[str, Any]:
        said = "".join(f"w{token} " for token in tokens)
        choice = {"text": said, "finish_reason": how.get("finish", "length") if last else None}
        return choice | ({"token_ids": tokens} if "at_once" in how else {})


def prompt_length(body: dict[str, Any]) -> int:
    """Ids of a prompt, or words of a text."""
    prompt = body["prompt"]
    return len(prompt) if isinstance(prompt, list) else len(prompt.split())
