"""The cost of a model router: its CPU time per streamed token, with a server that writes one token every 10 ms.

    python -m benchmarks.model_router [STREAMS [TOKENS]]

Server and clients are in this process, the model router is in another one. Its CPU time (user and system) is divided by
the number of tokens that passed through it. The output has one line for each of three rounds.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import ExitStack

import aiohttp
import psutil
from aiohttp import web
from benchmarks.front_door import free_port, process
from benchmarks.token_source import EVENT
from tests.servers import served

STEP, ROUNDS = 0.01, 3
CHAT = "/v1/chat/completions"


async def main(streams: int, tokens: int) -> None:
    """Run all rounds and print their results."""

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m"}]})

    async def chat(request: web.Request) -> web.StreamResponse:
        await request.read()
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        for _ in range(tokens):
            await answer.write(EVENT)
            await asyncio.sleep(STEP)
        return answer

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post(CHAT, chat)])
    port, connector = free_port(), aiohttp.TCPConnector(limit=0)
    async with served(app) as url, aiohttp.ClientSession(connector=connector) as session:
        with ExitStack() as stack:
            command = ("-m", "tercet.cli", "model-router", "--router", url, "--port", str(port))
            pid = await asyncio.to_thread(stack.enter_context, process(*command, port=port))

            async def stream() -> None:
                body = {"model": "m", "messages": [{"role": "user", "content": "Say hello."}]}
                async with session.post(f"http://127.0.0.1:{port}{CHAT}", json=body) as answer:
                    assert (await answer.read()).count(EVENT) == tokens

            for _ in range(ROUNDS):
                before = _cpu_seconds(pid)
                await asyncio.gather(*(stream() for _ in range(streams)))
                used = (_cpu_seconds(pid) - before) / (streams * tokens)
                print(f"{streams} streams of {tokens} tokens: {used * 1e6:.0f} us of CPU per token")
            await asyncio.to_thread(stack.close)


def _cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    streams, tokens = (int(given) for given in (*sys.argv[1:], *("40", "400")[len(sys.argv) - 1 :]))
    asyncio.run(main(streams, tokens))
