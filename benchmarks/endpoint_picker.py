"""The time of a decision of `tercet epp`, with a pool of simulated engines that report as real ones do.

    python benchmarks/endpoint_picker.py --engines 500 --rate 200 500 --seconds 20

One process runs the engines, one is the picker, which has a core alone, and this process plays Envoy (full-duplex
bodies), with Poisson arrivals. The output has: the picker's histogram of the time from a whole request to its
endpoints; the round trip that Envoy sees, with gRPC and the queues of both processes; and the picker's CPU, idle and
under load. With `--rate 0`, only the idle picker is measured. Prompts are conversations: most of each prompt was sent
before, and `--new` characters of it are new.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import grpc.aio
import msgspec
import psutil
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    ProcessingRequest,
    ProtocolConfiguration,
)
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import ExternalProcessorStub

from tercet_lab.sim import load_profile
from tercet_lab.sim.sim_server import ServerConfig, serving

HOST = "127.0.0.1"
FULL_DUPLEX = 4
CHUNK = 60_000
WORDS = (Path(__file__).parents[1] / "docs" / "scheduling.md").read_text().split()
BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01)


async def pool(engines: int, first_port: int) -> None:
    """Serve ``engines`` simulated engines until killed."""
    profile = load_profile("llama-3.1-8b-h100-tp1")
    async with AsyncExitStack() as stack:
        for number in range(engines):
            port = first_port + number
            config = ServerConfig(
                name=f"e{number}", profile=profile, host=HOST, port=port, url=f"http://{HOST}:{port}", model="m"
            )
            await stack.enter_async_context(serving(config))
        print("ready", flush=True)
        await asyncio.Event().wait()


@asynccontextmanager
async def processes(args: argparse.Namespace) -> AsyncGenerator[psutil.Process]:
    """Run the pool and the picker while the context is open. Yield the picker's process."""
    cores = sorted(os.sched_getaffinity(0))
    others = {cores[-1]} if len(cores) == 2 else set(cores[:-1])
    with Children() as ending, tempfile.TemporaryDirectory() as directory:
        engines = ending.start("--pool", "--engines", str(args.engines), "--first-port", str(args.first_port))
        os.sched_setaffinity(engines.pid, others)
        assert engines.stdout is not None
        await asyncio.to_thread(engines.stdout.readline)
        config = Path(directory) / "epp.yaml"
        urls = [{"url": f"http://{HOST}:{args.first_port + n}", "name": f"e{n}"} for n in range(args.engines)]
        config.write_bytes(msgspec.json.encode({"engines": urls, "port": args.port, "metrics-port": args.port + 1}))
        flags = ["--render-model", args.render_model] if args.render_model else []
        flags += ["--scheduling", args.scheduling] if args.scheduling else []
        picker = ending.start("-m", "tercet.cli", "epp", "--config", str(config), *flags)
        os.sched_setaffinity(picker.pid, {cores[0]})
        os.sched_setaffinity(0, others)
        while not await knows_all(args):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.5)
        await asyncio.sleep(8.0)  # until the first connections and the first queries of caches have ended
        yield psutil.Process(picker.pid)


class Children(list[subprocess.Popen[bytes]]):
    """A list of child processes, which are ended when its context ends."""

    def start(self, *argv: str) -> subprocess.Popen[bytes]:
        """Start a Python process of a module (``-m NAME``) or of this file, and add it."""
        own = () if argv[0] == "-m" else (__file__,)
        self.append(subprocess.Popen([sys.executable, *own, *argv], stdout=subprocess.PIPE))
        return self[-1]

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


async def knows_all(args: argparse.Namespace) -> bool:
    """Return True if every engine is ready at the picker."""
    return (await metrics(args)).get('inference_pool_ready_pods{name="tercet"}') == args.engines


async def metrics(args: argparse.Namespace) -> dict[str, float]:
    """Return the picker's metrics, by name with labels; empty while it does not answer."""
    try:
        async with aiohttp.request("GET", f"http://{HOST}:{args.port + 1}/metrics") as answer:
            lines = [line for line in (await answer.text()).splitlines() if not line.startswith("#")]
    except aiohttp.ClientError:
        return {}
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


class Conversations:
    """The prompts of ``many`` conversations, of about ``characters`` characters, of which ``new`` are new in a turn."""

    def __init__(self, characters: int, new: int, many: int, seed: int = 1) -> None:
        self._random = random.Random(seed)
        self._texts = [self._words(characters) for _ in range(many)]
        self._new = new

    def _words(self, characters: int) -> str:
        count = characters * len(WORDS) // sum(len(word) + 1 for word in WORDS) + 1
        return " ".join(self._random.choices(WORDS, k=count))[:characters]

    def body(self) -> bytes:
        """Return the body of the next turn of a random conversation."""
        at = self._random.randrange(len(self._texts))
        old = self._texts[at]
        self._texts[at] = old[: len(old) - self._new] + self._words(self._new)
        return json.dumps({"model": "m", "prompt": self._texts[at], "max_tokens": 100, "stream": True}).encode()


async def ask(stub: ExternalProcessorStub, body: bytes) -> float:
    """Send one request as Envoy does. Return the seconds from its last byte to the answer with its endpoints."""
    call = stub.Process()
    told = {":method": "POST", ":path": "/v1/completions", "content-type": "application/json"}
    values = [HeaderValue(key=name, raw_value=value.encode()) for name, value in told.items()]
    await call.write(
        ProcessingRequest(
            request_headers=HttpHeaders(headers=HeaderMap(headers=values)),
            protocol_config=ProtocolConfiguration(request_body_mode=FULL_DUPLEX),
        )
    )
    for start in range(0, len(body), CHUNK):
        last = start + CHUNK >= len(body)
        began = time.perf_counter()
        await call.write(ProcessingRequest(request_body=HttpBody(body=body[start : start + CHUNK], end_of_stream=last)))
    first = await call.read()
    seconds = time.perf_counter() - began
    assert first.WhichOneof("response") == "request_headers", first
    while not (await call.read()).request_body.response.body_mutation.streamed_response.end_of_stream:
        pass
    await call.write(ProcessingRequest(response_headers=HttpHeaders()))
    await call.done_writing()
    while await call.read() is not grpc.aio.EOF:
        pass
    return seconds


def told(name: str, values: list[float]) -> None:
    """Print percentiles of times, which are given in seconds."""
    ordered = sorted(values)
    at = {f"P{q:g}": ordered[min(len(ordered) - 1, int(len(ordered) * q / 100))] for q in (50, 95, 99)}
    print(f"{name}: " + ", ".join(f"{key} {1000 * value:.2f} ms" for key, value in at.items()) + f", n {len(ordered)}")


async def cpu_of(picker: psutil.Process, seconds: float) -> float:
    """Return the share of one core that the picker uses during ``seconds``."""
    before, began = sum(picker.cpu_times()[:2]), time.perf_counter()
    await asyncio.sleep(seconds)
    return (sum(picker.cpu_times()[:2]) - before) / (time.perf_counter() - began)


async def load(args: argparse.Namespace, picker: psutil.Process, rate: float) -> None:
    """Play Envoy at ``rate`` requests per second, and print the results."""
    source = Conversations(args.prompt_chars, args.new, args.conversations)
    bodies = [source.body() for _ in range(max(1, int(rate * args.seconds)))]
    arrivals = random.Random(2)
    address = f"{HOST}:{args.port}"
    async with grpc.aio.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)]) as channel:
        stub = ExternalProcessorStub(channel)
        for _ in range(args.warm_up):
            await ask(stub, source.body())
        before, used = await metrics(args), sum(picker.cpu_times()[:2])
        began = at = time.perf_counter()
        asked: list[asyncio.Task[float]] = []
        for body in bodies:
            at += arrivals.expovariate(rate)
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            asked.append(asyncio.create_task(ask(stub, body)))
        round_trips = await asyncio.gather(*asked)
        seconds = time.perf_counter() - began
        cpu = (sum(picker.cpu_times()[:2]) - used) / seconds
    after = await metrics(args)
    name = "inference_extension_scheduler_e2e_duration_seconds"
    count = after[f"{name}_count"] - before[f"{name}_count"]
    mean = (after[f"{name}_sum"] - before[f"{name}_sum"]) / count
    within = {bound: after[k] - before[k] for bound in BOUNDS if (k := f'{name}_bucket{{le="{bound}"}}') in after}
    print(f"{len(bodies) / seconds:.0f} requests/s of {args.prompt_chars} characters, {args.engines} engines")
    print(
        f"decision: mean {1000 * mean:.2f} ms; within "
        + ", ".join(f"{1000 * bound:g} ms {100 * found / count:.2f}%" for bound, found in within.items())
    )
    told("round trip", list(round_trips))
    print(f"CPU of the picker: {100 * cpu:.1f}% of a core, {1000 * cpu * seconds / len(bodies):.2f} ms per request")


async def main(args: argparse.Namespace) -> None:
    """Measure the idle picker, then each rate."""
    async with processes(args) as picker:
        idle = await cpu_of(picker, 10.0)
        print(f"idle with {args.engines} engines: {100 * idle:.1f}% of a core, {picker.memory_info().rss >> 20} MiB")
        for rate in args.rate:
            if rate:
                await load(args, picker, rate)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=500)
    parser.add_argument(
        "--rate", type=float, nargs="+", default=[200.0], help="requests per second; 0: measure only the idle picker"
    )
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--prompt-chars", type=int, default=4000)
    parser.add_argument("--new", type=int, default=400)
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--warm-up", type=int, default=200)
    parser.add_argument("--render-model", default="")
    parser.add_argument("--scheduling", default="")
    parser.add_argument("--port", type=int, default=19002)
    parser.add_argument("--first-port", type=int, default=21000)
    parser.add_argument("--pool", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    asyncio.run(pool(given.engines, given.first_port) if given.pool else main(given))
