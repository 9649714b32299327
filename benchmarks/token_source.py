"""Engines with ready-made tokens, for `front_door.py`: one for Tercet's router, one for vLLM's API server.

And a server that only writes: what the kernel and the event loop cost by themselves.

python benchmarks/token_source.py source PORT
python benchmarks/token_source.py core INPUTS OUTPUTS                     (ZeroMQ addresses, of the peer's sockets)
python benchmarks/token_source.py peer PORT MODEL_DIRECTORY INPUTS OUTPUTS
python benchmarks/token_source.py writer PORT TOKENS

`TOKEN_SOURCE_STEP` is the time from one token of a stream to its next, in seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import AsyncGenerator
from typing import Any, cast

import msgspec

STEP = float(os.environ.get("TOKEN_SOURCE_STEP", "0.02"))
MODEL_NAME = "m"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1700000000,"model":"m",'
    b'"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null,"stop_reason":null}],"usage":null}\n\n'
)
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
LAST = b"0\r\n\r\n"


# ---- the token source ----------------------------------------------------------------------------------------


async def source(port: int) -> None:
    """An engine for the router: answers at once and says one token per stream and step."""
    from aiohttp import web

    from tercet.protocol import EngineStatus, Output, Usage
    from tercet.protocol.wire import API_PREFIX, ConnectCall, StartGenerateCall, StreamDestination, decode_call
    from tercet.wire.streams import RouterConnections, SequenceSender

    running: dict[SequenceSender, int] = {}
    outputs = [Output((token,)) for token in range(1000, 2000)]

    async def connect(http: web.Request) -> web.Response:
        router = decode_call(await http.read(), ConnectCall).router
        await router_connections.connect(router.address, router.key)
        return web.json_response({"connected": True})

    async def start_generate(call: StartGenerateCall, router: StreamDestination) -> None:
        connection = await router_connections.connect(router.address, router.key)
        sender = connection.sender(router.number, 0, lambda: running.pop(sender, None))
        running[sender] = call.sampling_params.get("max_tokens", 16) - 1
        sender.send(Output((1000,), usage=Usage(computed=len(call.prompt))))

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
        for sender, left in list(running.items()):
            if left == 1:
                del running[sender]
                sender.send(Output((1000,), "length"))
            else:
                running[sender] = left - 1
                sender.send(outputs[left % 1000])


async def _steps() -> AsyncGenerator[None, None]:
    due = time.monotonic()
    while True:
        due = max(due + STEP, time.monotonic())
        await asyncio.sleep(due - time.monotonic())
        yield


# ---- the peer ------------------------------------------------------------------------------------------------


async def core(inputs: str, outputs: str) -> None:
    """An engine core in the words of vLLM's own: the same tokens at the same steps, one message for each step."""
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
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

    context: Any = zmq.asyncio.Context()
    requests, answers = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
    requests.setsockopt(zmq.IDENTITY, bytes(2))  # the engine of rank 0
    requests.connect(inputs)
    answers.connect(outputs)
    decoder, encoder = MsgpackDecoder(EngineCoreRequest), MsgpackEncoder()
    running: dict[str, int] = {}

    async def say(found: list[EngineCoreOutput]) -> None:
        await answers.send_multipart(encoder.encode(EngineCoreOutputs(outputs=found)), copy=False)

    def following(name: str, left: int) -> EngineCoreOutput:
        if left == 1:
            del running[name]
        else:
            running[name] = left - 1
        last = FinishReason.LENGTH if left == 1 else None
        return EngineCoreOutput(request_id=name, new_token_ids=[1000 + left % 1000], finish_reason=last)

    async def listen() -> None:
        while True:
            kind, *frames = await requests.recv_multipart(copy=False)
            if kind.bytes == EngineCoreRequestType.ADD.value:
                request: EngineCoreRequest = decoder.decode(frames)
                assert request.sampling_params is not None
                running[request.request_id] = (request.sampling_params.max_tokens or 16) - 1
                stats = PrefillStats()
                stats.set(len(request.prompt_token_ids or ()), 0, 0)
                await say([EngineCoreOutput(request_id=request.request_id, new_token_ids=[1000], prefill_stats=stats)])
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
            await say([following(name, left) for name, left in list(running.items())])


async def peer(port: int, model: str, inputs: str, outputs: str) -> None:
    """vLLM's API server as it is, for an engine core that listens there."""
    from vllm import AsyncEngineArgs
    from vllm.config import VllmConfig
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.launchers.launcher import serve_http, setup_server
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor import Executor

    argv = ["--model", model, "--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--max-model-len", "2048", "--disable-uvicorn-access-log"]
    args = cast(argparse.Namespace, make_arg_parser(FlexibleArgumentParser()).parse_args(argv))
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
    """One client's connection: each of its requests begins an answer of ``tokens`` ready-made chunks."""

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
    """A server that knows its answers: one write per stream and step, nothing parsed, rendered or detokenised."""
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
