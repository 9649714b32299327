"""Engines with ready-made tokens for `front_door.py`: one for Tercet's router, one for vLLM's API server.

There is also a server that only writes, which shows the cost of the kernel and the event loop alone.

python benchmarks/token_source.py source PORT
python benchmarks/token_source.py core INPUTS OUTPUTS                     (ZeroMQ addresses of the peer's sockets)
python benchmarks/token_source.py peer PORT MODEL_DIRECTORY INPUTS OUTPUTS [FLAG...]           (flags of vLLM's server)
python benchmarks/token_source.py writer PORT TOKENS

`TOKEN_SOURCE_STEP` is the time between two tokens of a stream, in seconds. `TOKEN_SOURCE_SCRIPTS` is a JSON object: a
request whose `seed` (or, without one, `top_k`) is a key of it gets the tokens of that key, repeatedly. Other requests
get arbitrary tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any, cast

import msgspec

STEP = float(os.environ.get("TOKEN_SOURCE_STEP", "0.02"))
SCRIPTS: dict[str, list[int]] = msgspec.json.decode(os.environ.get("TOKEN_SOURCE_SCRIPTS", "{}"))
MODEL_NAME = "m"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1700000000,"model":"m",'
    b'"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null,"stop_reason":null}],"usage":null}\n\n'
)
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
LAST = b"0\r\n\r\n"


def tokens_of(seed: int | None, top_k: int | None) -> list[int]:
    """Return the tokens that a request with these parameters gets, in order."""
    return SCRIPTS.get(str(top_k if seed is None else seed)) or [1000, *range(1999, 1000, -1)]


# ---- the token source ----------------------------------------------------------------------------------------


async def source(port: int) -> None:
    """Serve as an engine for the router. It answers immediately, and sends one token per stream and step."""
    from aiohttp import web

    from tercet.protocol import EngineStatus, Output, TokenLogprob, Usage
    from tercet.protocol.wire import API_PREFIX, ConnectCall, StartGenerateCall, decode_call
    from tercet.wire.streams import RouterConnection, RouterConnections, SequenceSender

    running: dict[SequenceSender, Iterator[Output]] = {}

    def outputs_of(tokens: list[int], most: int, top: int | None, prompt: int) -> Iterator[Output]:
        for at in range(most):
            token = tokens[at % len(tokens)]
            logprobs = None
            if top is not None:
                others = [TokenLogprob(1000 + rank, -1.5 * rank, rank) for rank in range(2, top + 1)]
                logprobs = ((TokenLogprob(token, -0.25, 1), *others),)
            usage = None if at else Usage(computed=prompt)
            yield Output((token,), "length" if at == most - 1 else None, logprobs=logprobs, usage=usage)

    async def connect(http: web.Request) -> web.Response:
        router = decode_call(await http.read(), ConnectCall).router
        await router_connections.connect(router.address, router.key)
        return web.json_response({"connected": True})

    async def start_generate(call: StartGenerateCall, link: RouterConnection, number: int) -> None:
        sender = link.sender(number, 0, lambda: running.pop(sender, None))
        params = call.sampling_params
        tokens, most = tokens_of(params.get("seed"), params.get("top_k")), params.get("max_tokens", 16)
        running[sender] = outputs = outputs_of(tokens, most, params.get("logprobs"), len(call.prompt))
        sender.send(next(outputs))

    router_connections = RouterConnections("source", "", lambda: None, start_generate)

    async def status(_: web.Request) -> web.Response:
        found = EngineStatus(
            engine="source", model=MODEL_NAME, version="0", vllm_version="0", block_size=16, total_blocks=1000,
            free_blocks=1000, running=len(running), waiting=0, kv_cache_usage=0.0, max_model_len=2048, leases=0,
            sends=0,
        )  # fmt: skip
        return web.Response(body=msgspec.json.encode(found), content_type="application/json")

    app = web.Application()
    app.add_routes([web.post(f"{API_PREFIX}/connect", connect)])
    app.add_routes([web.get(f"{API_PREFIX}/status", status)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    async for _ in _steps():
        for sender, outputs in list(running.items()):
            output = next(outputs)
            if output.finished:
                running.pop(sender, None)
            sender.send(output)


async def _steps() -> AsyncGenerator[None, None]:
    due = time.monotonic()
    while True:
        due = max(due + STEP, time.monotonic())
        await asyncio.sleep(due - time.monotonic())
        yield


# ---- the peer ------------------------------------------------------------------------------------------------


async def core(inputs: str, outputs: str) -> None:
    """Serve as an engine core in vLLM's protocol: the same tokens at the same steps, one message per step."""
    import numpy as np
    import zmq
    import zmq.asyncio
    from vllm.v1.engine import (
        EngineCoreOutput,
        EngineCoreOutputs,
        EngineCoreRequest,
        EngineCoreRequestType,
        FinishReason,
        UtilityOutput,
    )
    from vllm.v1.metrics.stats import PrefillStats
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

    context: Any = zmq.asyncio.Context()
    requests, answers = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
    requests.setsockopt(zmq.IDENTITY, bytes(2))  # the engine of rank 0
    requests.connect(inputs)
    answers.connect(outputs)
    decoder, encoder = MsgpackDecoder(EngineCoreRequest), MsgpackEncoder()
    running: dict[str, Iterator[EngineCoreOutput]] = {}

    async def say(found: list[EngineCoreOutput]) -> None:
        await answers.send_multipart(encoder.encode(EngineCoreOutputs(outputs=found)), copy=False)

    def outputs_of(request: EngineCoreRequest) -> Iterator[EngineCoreOutput]:
        params = request.sampling_params
        assert params is not None
        tokens, most = tokens_of(params.seed, params.top_k), params.max_tokens or 16
        for at in range(most):
            token = tokens[at % len(tokens)]
            stats = None if at else PrefillStats()
            if stats is not None:
                stats.set(len(request.prompt_token_ids or ()), 0, 0)
            yield EngineCoreOutput(
                request_id=request.request_id, new_token_ids=[token], prefill_stats=stats,
                new_logprobs=None if params.logprobs is None else logprobs_of(token, params.logprobs),
                finish_reason=FinishReason.LENGTH if at == most - 1 else None,
            )  # fmt: skip

    def logprobs_of(token: int, top: int) -> LogprobsLists:
        ids = np.array([[token, token, *(1000 + rank for rank in range(2, top + 1))][: top + 1]])
        values = np.array([[-0.25, -0.25, *(-1.5 * rank for rank in range(2, top + 1))][: top + 1]], dtype=np.float32)
        return LogprobsLists(ids, values, np.array([1]))

    def following(name: str, outputs: Iterator[EngineCoreOutput]) -> EngineCoreOutput:
        output = next(outputs)
        if output.finish_reason is not None:
            running.pop(name, None)
        return output

    async def listen() -> None:
        while True:
            kind, *frames = await requests.recv_multipart(copy=False)
            if kind.bytes == EngineCoreRequestType.ADD.value:
                request: EngineCoreRequest = decoder.decode(frames)
                running[request.request_id] = outputs = outputs_of(request)
                await say([next(outputs)])
            elif kind.bytes == EngineCoreRequestType.ABORT.value:
                for name in msgspec.msgpack.decode(frames[0].buffer):
                    running.pop(name, None)
            elif kind.bytes == EngineCoreRequestType.UTILITY.value:
                _, call, method, _ = MsgpackDecoder().decode(frames)
                result = UtilityResult(("generate",) if method == "get_supported_tasks" else None)
                found = EngineCoreOutputs(utility_output=UtilityOutput(call, result=result))
                await answers.send_multipart(encoder.encode(found))

    await requests.send(b"")  # it is ready
    listening = asyncio.create_task(listen())
    async for _ in _steps():
        if listening.done():
            listening.result()
        if running:
            await say([following(name, outputs) for name, outputs in list(running.items())])


async def peer(port: int, model: str, inputs: str, outputs: str, *more: str) -> None:
    """Run vLLM's unchanged API server for an engine core that connects to its sockets ``inputs`` and ``outputs``."""
    from vllm import AsyncEngineArgs
    from vllm.config import VllmConfig
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.launcher import serve_http, setup_server
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor import Executor

    from tercet.vllm_plugin.differences import cli_args

    argv = ["--model", model, "--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--max-model-len", "2048", "--disable-uvicorn-access-log", *more]
    args = cast(argparse.Namespace, cli_args().make_arg_parser(FlexibleArgumentParser()).parse_args(argv))
    _, sock = setup_server(args, reuse_port=False)
    config = VllmConfig(model_config=AsyncEngineArgs.from_cli_args(args).create_model_config())
    addresses = {"input_address": inputs, "output_address": outputs}
    engine = AsyncLLM(
        config, executor_class=Executor, log_stats=True, log_requests=False, client_addresses=addresses
    )  # fmt: skip
    app = build_app(args, ("generate",), engine.model_config)
    await init_app_state(engine, app.state, args, ("generate",))
    await (await serve_http(app, sock=sock, host="127.0.0.1", port=port, log_level="warning", access_log=False))


# ---- the floor -----------------------------------------------------------------------------------------------


class Writing(asyncio.Protocol):
    """The connection of one client. Each request starts an answer of ``tokens`` ready-made chunks."""

    def __init__(self, running: dict[Writing, int], tokens: int) -> None:
        self._running = running
        self._tokens = tokens

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(HEAD + CHUNK)
        if data.startswith(b"POST"):
            self._running[self] = self._tokens - 1

    def step(self) -> None:
        left = self._running[self]
        if left == 1:
            del self._running[self]
            self._transport.write(CHUNK + LAST)
        else:
            self._running[self] = left - 1
            self._transport.write(CHUNK)

    def connection_lost(self, exc: Exception | None) -> None:
        self._running.pop(self, None)


async def writer(port: int, tokens: int) -> None:
    """Serve ready-made answers: one write per stream and step, without parsing, rendering or detokenising."""
    running: dict[Writing, int] = {}
    loop = asyncio.get_running_loop()
    await loop.create_server(lambda: Writing(running, tokens), "127.0.0.1", port)
    async for _ in _steps():
        for stream in list(running):
            stream.step()


def main() -> None:
    """Serve until killed."""
    import uvloop

    part, *rest = sys.argv[1:]
    if part == "source":
        uvloop.run(source(int(rest[0])))
    elif part == "core":
        uvloop.run(core(*rest))
    elif part == "writer":
        uvloop.run(writer(int(rest[0]), int(rest[1])))
    else:
        uvloop.run(peer(int(rest[0]), *rest[1:]))


if __name__ == "__main__":
    main()
