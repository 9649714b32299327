"""Processes that are killed in mid-stream: nobody waits for them, and nothing runs on for them."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tercet.cluster.ports import free_ports, url_of
from tercet.fleet import EngineFleet, FleetView, Member
from tercet.programs import load_program, outputs_of
from tercet.protocol import EngineUnreachable, Output
from tercet.wire.client import HttpEngine, StreamListener
from tercet_lab.sim import SimEngine
from tercet_lab.sim.sim_server import ServerConfig, serving
from tests.longest_wait import until

from .models import is_empty, profile_of, request_of

pytestmark = pytest.mark.processes

HOST = "127.0.0.1"
ROOT = Path(__file__).resolve().parents[4]
# Ten seconds of tokens: far more than any test waits for.
MANY = 1000
SECONDS = 30

ENGINE = """
import sys
from tercet_lab.sim.sim_server import serve
from tests.unit.lab.sim.test_stream_kills import config_of
serve(config_of("child", int(sys.argv[1])))
"""
ROUTER = """
import asyncio, sys
from tests.unit.lab.sim.test_stream_kills import stream_forever
asyncio.run(stream_forever(sys.argv[1], int(sys.argv[2])))
"""


def config_of(name: str, port: int) -> ServerConfig:
    return ServerConfig(name=name, profile=profile_of(), port=port, url=url_of(HOST, port), model="m")


async def stream_forever(url: str, count: int) -> None:
    """A router in a process of its own: says on standard output that every sequence has begun, and goes on."""
    async with StreamListener() as listener, HttpEngine("e", url, listener=listener) as engine:
        streams = [engine.start_generate(request_of(f"s{index}", 100, MANY)) for index in range(count)]
        await asyncio.gather(*(anext(stream) for stream in streams))
        print("begun", flush=True)
        await asyncio.gather(*(_exhaust(stream) for stream in streams))


async def _exhaust(stream: AsyncIterator[Output]) -> None:
    async for _ in stream:
        pass


@asynccontextmanager
async def child(code: str, *args: object) -> AsyncGenerator[Process]:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, *map(str, args), stdout=PIPE, cwd=ROOT)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def up(url: str) -> None:
    async with asyncio.timeout(SECONDS), HttpEngine("probe", url) as engine:
        while True:
            try:
                await engine.status()
                return
            except EngineUnreachable:
                await asyncio.sleep(0.05)


async def settled(engine: SimEngine) -> None:
    await until(lambda: is_empty(engine), seconds=SECONDS)


async def test_the_router_is_killed_and_the_engine_stops() -> None:
    (port,) = free_ports(HOST, 1)
    async with serving(config_of("e", port)) as engine, child(ROUTER, url_of(HOST, port), 5) as router:
        assert router.stdout is not None
        assert await asyncio.wait_for(router.stdout.readline(), SECONDS) == b"begun\n"
        assert engine.load().running == 5
        router.kill()
        await settled(engine)


async def test_the_engine_is_killed_and_every_caller_hears_of_it_at_once() -> None:
    (port,) = free_ports(HOST, 1)
    url = url_of(HOST, port)
    async with child(ENGINE, port) as process, StreamListener() as listener:
        await up(url)
        async with HttpEngine("e", url, listener=listener) as engine:
            streams = [engine.start_generate(request_of(f"s{index}", 100, MANY)) for index in range(5)]
            await asyncio.gather(*(anext(stream) for stream in streams))
            process.kill()
            async with asyncio.timeout(SECONDS):
                for stream in streams:
                    with pytest.raises(EngineUnreachable):
                        await _exhaust(stream)
            with pytest.raises(EngineUnreachable):
                await anext(engine.start_generate(request_of("late", 100, 5)))


async def test_an_engine_that_comes_back_streams_again() -> None:
    (port,) = free_ports(HOST, 1)
    url = url_of(HOST, port)
    async with StreamListener() as listener, HttpEngine("e", url, listener=listener) as engine:
        for name in ("first", "second"):
            async with serving(config_of(name, port)):
                await up(url)
                found = [output async for output in engine.start_generate(request_of(name, 100, 5))]
                assert found[-1].finished


@pytest.mark.parametrize("moment", [0.0, 0.001, 0.003, 0.01, 0.03, 0.1])
@pytest.mark.parametrize("program", ["data_parallel", "disaggregated"])
async def test_a_program_that_is_cancelled_at_any_moment_leaves_nothing(program: str, moment: float) -> None:
    ports = free_ports(HOST, 2)
    serve = load_program(program)
    async with (
        serving(config_of("p", ports[0])) as p,
        serving(config_of("d", ports[1])) as d,
        StreamListener() as listener,
        HttpEngine("p", url_of(HOST, ports[0]), listener=listener) as prefill,
        HttpEngine("d", url_of(HOST, ports[1]), listener=listener) as decode,
    ):
        fleet = EngineFleet([Member("p", prefill.url, "prefill", prefill), Member("d", decode.url, "decode", decode)])

        async def run(name: str) -> None:
            async for _ in outputs_of(serve(request_of(name, 100, MANY), FleetView(fleet))):
                pass

        tasks = [asyncio.create_task(run(f"{name}")) for name in range(4)]
        await asyncio.sleep(moment)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await asyncio.gather(settled(p), settled(d))
        assert [member.in_flight for member in fleet.members] == [0, 0]
