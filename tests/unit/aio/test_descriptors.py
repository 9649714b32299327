"""Servers whose process has no free descriptor: it is said once, costs no CPU, and they accept again afterwards."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress

import grpc
import pytest
import uvicorn
import uvloop
from aiohttp import web

from tercet.aio import files
from tercet.aio.files import descriptors_watched
from tercet.wire.client import StreamListener
from tercet_gateway.proxied_calls import HttpServer
from tests.longest_wait import LONGEST_WAIT_S, until

HOST = "127.0.0.1"
MISSING_S, RETRY_S = 0.2, 0.02
ASKS = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


@asynccontextmanager
async def sidecar() -> AsyncGenerator[int]:
    async def app(*_: object) -> None: ...

    server = HttpServer(app)
    await server.start(HOST, 0)
    try:
        yield server.port
    finally:
        await server.close()


@asynccontextmanager
async def token_streams() -> AsyncGenerator[int]:
    async with StreamListener() as listener:
        yield int((await listener.address_for(f"http://{HOST}:1")).rpartition(":")[2])


@asynccontextmanager
async def aiohttp_server() -> AsyncGenerator[int]:
    runner = web.AppRunner(web.Application())
    await runner.setup()
    await web.TCPSite(runner, HOST, 0).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@asynccontextmanager
async def uvicorn_server() -> AsyncGenerator[int]:
    async def app(scope: object, receive: object, send: Callable[..., object]) -> None:
        raise ValueError("not needed")

    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
    with socket.create_server((HOST, 0)) as sock:
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup([sock])
        try:
            yield sock.getsockname()[1]
        finally:
            await server.shutdown([sock])


@asynccontextmanager
async def picker() -> AsyncGenerator[int]:
    server = grpc.aio.server()
    port = server.add_insecure_port(f"{HOST}:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


@contextmanager
def no_descriptor() -> Generator[None]:
    """Let this process have no free descriptor while entered."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 2, limits[1]))
        with suppress(OSError):
            while True:
                held.append(os.dup(1))
        yield
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@asynccontextmanager
async def last_tries() -> AsyncGenerator[None]:
    """At the end, let asyncio make the tries to accept that it has planned for listeners that are closed by now."""
    yield
    await asyncio.sleep(5 * RETRY_S)


async def answered(client: socket.socket, port: int) -> bytes:
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(LONGEST_WAIT_S):
        await loop.sock_connect(client, (HOST, port))
        await loop.sock_sendall(client, ASKS)
        return await loop.sock_recv(client, 9)


@pytest.mark.parametrize(
    ("serving", "new_loop"),
    [
        (sidecar, uvloop.new_event_loop),
        (token_streams, uvloop.new_event_loop),  # of routers
        (token_streams, asyncio.new_event_loop),  # of pickers in tests
        (aiohttp_server, uvloop.new_event_loop),  # of simulated engines
        (aiohttp_server, asyncio.new_event_loop),  # of `tercet up`, for `tercet scale`
        (uvicorn_server, uvloop.new_event_loop),
        (picker, uvloop.new_event_loop),
    ],
)
def test_a_listener_accepts_again_when_descriptors_are_free(
    serving: Callable[[], AbstractAsyncContextManager[int]], new_loop: Callable[[], asyncio.AbstractEventLoop],
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(files, "LOOK_INTERVAL_S", 0.01)
    monkeypatch.setattr("asyncio.constants.ACCEPT_RETRY_DELAY", RETRY_S)

    async def run() -> None:
        with socket.socket() as early, socket.socket() as late:
            async with descriptors_watched(), last_tries(), serving() as port:
                with no_descriptor():
                    cpu = time.process_time()
                    with suppress(BlockingIOError):
                        early.setblocking(False)
                        early.connect((HOST, port))
                    await asyncio.sleep(MISSING_S)
                    assert time.process_time() - cpu < MISSING_S / 2
                found = await answered(late, port)
                assert found or serving in (token_streams, sidecar), "these two close what is not answered"
                await until(lambda: "descriptors are free again, and" in caplog.text)

    with caplog.at_level(logging.WARNING), asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())
    said = [each.getMessage() for each in caplog.records if each.name in ("asyncio", "tercet.descriptors")]
    assert [each.partition(" ")[0] for each in said] == ["all", "descriptors"]
