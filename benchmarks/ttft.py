"""The time to first token of one engine alone and of `disaggregated` through the router, in interleaved rounds.

Then the time of `prep_recv` alone, over HTTP on the idle decode engine.

    tercet up --port 8000 --program-arg min_send=1
    python benchmarks/ttft.py http://127.0.0.1:8000

The output has medians over the rounds, in milliseconds. The first round is a warm-up and does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
import uuid
from dataclasses import dataclass

import aiohttp

from tercet.protocol.sse import read_answer


@dataclass(frozen=True)
class Timing:
    """The times of one streamed request, in milliseconds: first token, gap to the second, mean of the later gaps."""

    ttft: float
    second: float
    step: float


async def measure(session: aiohttp.ClientSession, url: str, program: str | None, length: int) -> Timing:
    """Stream one completion of a new random prompt of ``length`` tokens. Return its times."""
    body = {
        "model": "smollm2", "prompt": random.choices(range(1000, 40000), k=length), "max_tokens": 8,
        "temperature": 0, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    headers = {"x-tercet-program": program} if program else {}
    began, times = time.perf_counter(), list[float]()
    async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
        async for _ in read_answer(response.content.iter_any()):
            times.append((time.perf_counter() - began) * 1e3)
    return Timing(times[0], times[1] - times[0], (times[-1] - times[1]) / max(1, len(times) - 2))


async def measure_prep_recv(session: aiohttp.ClientSession, engine: str, length: int) -> float:
    """Reserve blocks for a new random prompt, and release them. Return the time of the reservation in milliseconds."""
    body = {"seq_id": uuid.uuid4().hex, "prompt": random.choices(range(1000, 40000), k=length)}
    began = time.perf_counter()
    async with session.post(f"{engine}/tercet/v1/prep_recv", json=body) as response:
        answer = await response.json()
    took = (time.perf_counter() - began) * 1e3
    async with session.post(f"{engine}/tercet/v1/release", json={"lease": answer["kv_addr_info"]["lease"]}) as response:
        response.raise_for_status()
    return took


async def run(router: str, length: int, rounds: int) -> None:
    """Measure both ways in turn, and print the medians."""
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{router}/tercet/v1/engines") as response:
            engines = {engine["role"]: engine["url"] for engine in await response.json()}
        lone = engines["prefill"]
        ways = {"lone engine": (lone, None), "disaggregated": (router, "disaggregated")}
        found: dict[str, list[Timing]] = {way: [] for way in ways}
        for number in range(rounds + 1):
            for way, (url, program) in ways.items():
                timing = await measure(session, url, program, length)
                if number:
                    found[way].append(timing)
        await asyncio.sleep(2)  # until the engines' workers no longer spin after their last step
        reservations = [await measure_prep_recv(session, engines["decode"], length) for _ in range(rounds + 1)][1:]
    base = statistics.median(timing.ttft for timing in found["lone engine"])
    print(f"{'':15}{'TTFT':>8}{'ratio':>8}{'second':>8}{'step':>8}")
    for way, timings in found.items():
        ttft, second, step = (
            statistics.median(getattr(timing, name) for timing in timings) for name in ("ttft", "second", "step")
        )
        print(f"{way:15}{ttft:8.1f}{ttft / base:8.3f}{second:8.1f}{step:8.1f}")
    print(f"prep_recv {statistics.median(reservations):.1f}")


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("router", nargs="?", default="http://127.0.0.1:8000")
    parser.add_argument("--length", type=int, default=512, help="prompt length in tokens")
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    try:
        asyncio.run(run(args.router, args.length, args.rounds))
    except aiohttp.ClientConnectorError as error:
        parser.error(f"cannot connect to {error.host}:{error.port}: start a fleet first, for example with `tercet up`")


if __name__ == "__main__":
    main()
