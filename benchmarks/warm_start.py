"""An engine restarts under 8 streams: the time to first token of its first requests, with and without a warm start.

    python -m benchmarks.warm_start [--streams 8] [--prefix 512]

Two engines (`tercet up`, float32) serve streams without a pause; the prompts of a stream have one beginning and new
tokens after it. One engine gets SIGTERM, and `tercet up` starts it again. The first requests that it then serves, one
or more of each stream, are compared; so are the tokens of equal requests of both runs.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any, NamedTuple

import aiohttp
import msgspec
import psutil
import typer
from benchmarks.command_line import run

from tercet.cli.terminal import show_table
from tercet.cluster.ports import free_ports
from tercet.protocol.sse import read_answer

NEW, OUTPUT = 17, 8
START_SECONDS = 600
RESTARTED = "engine-1"


class Served(NamedTuple):
    """One request of a stream; times in seconds, ``reused`` are tokens that its engine did not compute."""

    stream: int
    number: int
    engine: str
    sent: float
    ttft: float
    reused: int
    tokens: tuple[int, ...]


def prompt_of(stream: int, number: int, prefix: int) -> list[int]:
    """Return the prompt of a request: the stream's beginning, and new tokens."""
    begins, new = random.Random(stream), random.Random(1000 * stream + number + 1000)
    return [begins.randrange(1000, 40_000) for _ in range(prefix)] + [new.randrange(1000, 40_000) for _ in range(NEW)]


async def ask(session: aiohttp.ClientSession, url: str, stream: int, number: int, prefix: int) -> Served:
    """Send one request, and read its stream to the end."""
    body = {
        "model": "smollm2", "prompt": prompt_of(stream, number, prefix), "max_tokens": OUTPUT, "temperature": 0,
        "ignore_eos": True, "stream": True, "return_token_ids": True,
    }  # fmt: skip
    sent, first, tokens, trace = time.perf_counter(), 0.0, list[int](), dict[str, Any]()
    headers = {"x-tercet-trace": "true"}
    async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
        response.raise_for_status()
        async for data in read_answer(response.content.iter_any()):
            event: dict[str, Any] = msgspec.json.decode(data)
            for choice in event.get("choices", ()):
                first = first or time.perf_counter()
                tokens += choice.get("token_ids") or ()
            trace = event.get("tercet") or trace
    generated = next(each for each in reversed(trace["events"]) if each["verb"] == "start_generate")
    reused = generated.get("cached", 0) + generated.get("received", 0)
    return Served(stream, number, generated["engine"], sent, first - sent, reused, tuple(tokens))


async def engine(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """Return what the router says about the engine that restarts."""
    async with session.get(f"{url}/tercet/v1/engines") as response:
        found: dict[str, dict[str, Any]] = {each["name"]: each for each in await response.json()}
        return found.get(RESTARTED, {})


async def until_up(session: aiohttp.ClientSession, url: str, up: subprocess.Popen[bytes]) -> None:
    """Wait until both engines serve. Raise ``RuntimeError`` if they do not."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and up.poll() is None:
        with suppress(aiohttp.ClientError):
            if (await engine(session, url)).get("reachable"):
                return
        await asyncio.sleep(0.5)
    raise RuntimeError("tercet up has not started; its log is in the folder of this run")


def server_at(url: str) -> int:
    """Return the process that listens at a URL."""
    port = int(url.rpartition(":")[2])
    listening = (each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN)
    return next(each.pid for each in listening if each.pid and each.laddr and each.laddr[1] == port)


async def measure(url: str, up: subprocess.Popen[bytes], streams: int, prefix: int) -> list[Served]:
    """Return the requests of the run, and one with the number -1 from which on the engine has been stopped."""
    served, restarted = list[Served](), asyncio.Event()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        await until_up(session, url, up)

        async def stream(index: int) -> None:
            number, after = 0, 0
            while not restarted.is_set() or after < 3:
                served.append(await ask(session, url, index, number, prefix))
                after += restarted.is_set()
                number += 1

        running = [asyncio.ensure_future(stream(index)) for index in range(streams)]
        while len({(each.stream, each.engine) for each in served}) < 2 * streams:  # noqa: ASYNC110 - each on both
            await asyncio.sleep(0.5)
        os.kill(server_at((await engine(session, url))["url"]), signal.SIGTERM)
        await asyncio.sleep(1)
        served.append(Served(-1, -1, "", time.perf_counter(), 0.0, 0, ()))
        while sum(each.engine == RESTARTED for each in later(served)) < streams:  # noqa: ASYNC110 - its new start
            await asyncio.sleep(0.2)
        restarted.set()
        await asyncio.gather(*running)
    return served


def later(served: list[Served]) -> list[Served]:
    """Return the requests that were sent after the engine was stopped."""
    at = next((each.sent for each in served if each.number < 0), float("inf"))
    return [each for each in served if each.sent > at]


def one_run(seconds: float, streams: int, prefix: int, folder: Path) -> list[Served]:
    """Start a fleet with this ``--warm-start``, measure, and end it."""
    (port,) = free_ports("127.0.0.1", 1)
    command = [
        sys.executable, "-m", "tercet.cli", "up", "--prefill", "0", "--decode", "0", "--both", "2", "--port", str(port),
        "--program", "data_parallel", "--program-arg", "pick=least_loaded", "--warm-start", str(seconds),
        "--dtype", "float32", "--client-traces", "--log-dir", str(folder / f"logs-{seconds:g}"), "--",
        "--max-num-seqs", str(2 * streams),
    ]  # fmt: skip
    with (folder / f"up-{seconds:g}.log").open("wb") as log:
        up = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        return asyncio.run(measure(f"http://127.0.0.1:{port}", up, streams, prefix))
    finally:
        up.send_signal(signal.SIGTERM)
        up.wait(timeout=120)


def warm_start(
    streams: Annotated[int, typer.Option("--streams", help="Number of streams.")] = 8,
    prefix: Annotated[int, typer.Option("--prefix", help="Tokens of the beginning of a stream's prompts.")] = 512,
    seconds: Annotated[float, typer.Option("--warm-start", help="Bound of the warm start, in seconds.")] = 5.0,
) -> None:
    """Print a line for each run: of the first requests that the restarted engine serves, one for each stream."""
    folder = Path(tempfile.mkdtemp(prefix="tercet-warm-start-"))
    runs = {f"--warm-start {each:g}": one_run(each, streams, prefix, folder) for each in (0.0, seconds)}
    rows = list[list[str]]()
    for name, served in runs.items():
        ttfts = [each.ttft for each in served if each.number >= 0 and each not in later(served)]
        first = [each for each in later(served) if each.engine == RESTARTED][:streams]
        rows.append(
            [
                name, f"{mean(each.ttft for each in first):.2f}", f"{max(each.ttft for each in first):.2f}",
                f"{sum(each.reused for each in first)} of {streams * (prefix + NEW)}", f"{median(ttfts):.2f}",
            ]
        )  # fmt: skip
    show_table("warm start", ["run", "mean TTFT, s", "longest", "reused tokens", "median before"], rows)
    tokens = [
        {(each.stream, each.number): each.tokens for each in served if each.number >= 0} for served in runs.values()
    ]
    both = tokens[0].keys() & tokens[1].keys()
    print(
        f"equal tokens: {sum(tokens[0][each] == tokens[1][each] for each in both)} of {len(both)} requests of both runs"
    )


if __name__ == "__main__":
    run(warm_start, "benchmarks.warm_start")
