"""The time to first token of interactive requests with and without a batch that fills the rest, in interleaved rounds.

    tercet up --simulate llama-3.1-8b-h100-tp1 --prefill 0 --both 2 --program data_parallel --batches /tmp/batches --port 8000
    python benchmarks/batches.py http://127.0.0.1:8000 --rate 4

The fleet has three engines, since `--decode` is 1 by default. In every other round a batch of more requests than a round
can serve runs. Printed are TTFT over all rounds of a kind, the ratio with the bounds of a bootstrap over rounds, the median
of the rounds' ratios (other work of this host makes some rounds slow), and the tokens per second of both kinds of requests.

Engines on CPUs share the machine's cores and memory with each other, this process and the router. `--other-work` adds a
third kind of rounds, in which a process for each core copies memory at the lowest priority (nice 19) instead of a batch:
what these rounds cost is not the batch's, but that of a machine without idle cores.
"""  # noqa: E501 - a command

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import aiohttp
import numpy as np

from tercet.protocol.sse import read_answer

CHAT = "/v1/chat/completions"
RESAMPLES = 1000


@dataclass
class Round:
    """What was measured in one round: TTFT of interactive requests (s), and tokens of both kinds."""

    ttft: list[float] = field(default_factory=list[float])
    tokens: int = 0
    batch_tokens: int = 0
    seconds: float = 0.0


def words(random_: random.Random, number: int) -> str:
    """Return a text of about ``number`` tokens that no earlier text begins with."""
    return " ".join(random_.choices(["river", "stone", "green", "light", "seven", "paper", "cloud", "north"], k=number))


async def interactive(session: aiohttp.ClientSession, url: str, prompt: str, tokens: int, into: Round) -> None:
    """Stream one chat, and note its first token."""
    body = {"model": "smollm2", "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens,
            "ignore_eos": True, "stream": True}  # fmt: skip
    began, first = time.perf_counter(), None
    async with session.post(f"{url}{CHAT}", json=body) as response:
        response.raise_for_status()
        async for _ in read_answer(response.content.iter_any()):
            if first is None:
                first = time.perf_counter() - began
                into.ttft.append(first)
            into.tokens += 1


async def one_round(
    session: aiohttp.ClientSession, url: str, options: argparse.Namespace, seed: int, kind: str
) -> Round:
    """Send interactive requests for ``options.seconds`` at their rate, by a Poisson process.

    Rounds of one seed have the same arrivals, and other prompts: those of an earlier round would be cached.
    """
    found, draw, texts = Round(), random.Random(seed), random.Random(f"{seed} {kind}")
    began = time.perf_counter()
    before = await batch_requests(session, url)
    async with asyncio.TaskGroup() as group:
        while time.perf_counter() - began < options.seconds:
            prompt = words(texts, options.prompt)
            group.create_task(interactive(session, url, prompt, options.tokens, found))
            await asyncio.sleep(draw.expovariate(options.rate))
    found.seconds = time.perf_counter() - began
    found.batch_tokens = int((await batch_requests(session, url) - before) * options.tokens)
    return found


@contextmanager
def other_work() -> Generator[None]:
    """Keep every core busy with copies of memory, at the lowest priority, while entered."""
    begin = multiprocessing.get_context("spawn")
    processes = [begin.Process(target=copy_memory, daemon=True) for _ in range(len(os.sched_getaffinity(0)))]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def copy_memory() -> None:
    """Copy memory until killed."""
    os.nice(19)
    source, target = np.ones(8 * 2**20), np.ones(8 * 2**20)
    while True:
        np.copyto(target, source)


async def batch_requests(session: aiohttp.ClientSession, url: str) -> float:
    """Return how many requests of batches have succeeded so far."""
    async with session.get(f"{url}/metrics") as response:
        text = await response.text()
    return sum(
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith('tercet_batch_requests_total{result="completed"')
    )


async def begin_batch(session: aiohttp.ClientSession, url: str, options: argparse.Namespace, seed: int) -> str:
    """Upload a file of requests and begin its batch; return its id once it runs."""
    draw = random.Random(seed)
    lines = [
        {"custom_id": f"r{number}", "method": "POST", "url": CHAT,
         "body": {"model": "smollm2", "messages": [{"role": "user", "content": words(draw, options.prompt)}],
                  "max_tokens": options.tokens, "ignore_eos": True}}
        for number in range(options.requests)
    ]  # fmt: skip
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", "\n".join(json.dumps(line) for line in lines), filename="in.jsonl")
    async with session.post(f"{url}/v1/files", data=form) as response:
        file = await response.json()
    asked = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    async with session.post(f"{url}/v1/batches", json=asked) as response:
        batch_id: str = (await response.json())["id"]
    await until(session, url, batch_id, {"in_progress"})
    return batch_id


async def until(session: aiohttp.ClientSession, url: str, batch_id: str, statuses: set[str]) -> None:
    """Wait at most a minute until a batch has one of the statuses."""
    async with asyncio.timeout(60):
        while True:
            async with session.get(f"{url}/v1/batches/{batch_id}") as response:
                if (await response.json())["status"] in statuses:
                    return
            await asyncio.sleep(0.2)


def percentile(values: list[float], share: float) -> float:
    """Return a percentile by the nearest rank."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def run(url: str, options: argparse.Namespace) -> None:
    """Measure the kinds of rounds in turn, and print them."""
    kinds: dict[str, list[Round]] = {"alone": [], "with a batch": []}
    if options.other_work:
        kinds["other work"] = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        await one_round(session, url, argparse.Namespace(**{**vars(options), "seconds": 3.0}), 0, "warm-up")
        for number in range(options.rounds):
            for kind, rounds in kinds.items():
                batch = await begin_batch(session, url, options, number) if kind == "with a batch" else None
                with other_work() if kind == "other work" else nullcontext():
                    if kind != "alone":
                        await asyncio.sleep(options.settle)
                    rounds.append(await one_round(session, url, options, 1000 + number, kind))
                if batch is not None:
                    async with session.post(f"{url}/v1/batches/{batch}/cancel"):
                        pass
                    await until(session, url, batch, {"cancelled", "completed"})
                print(f"round {number}, {kind}: {len(rounds[-1].ttft)} requests", flush=True)
    print(f"\n{'':14}{'TTFT P50':>10}{'P99, ms':>10}{'tokens/s':>10}{'of batch':>10}")
    for kind, rounds in kinds.items():
        ttft = [each * 1e3 for one in rounds for each in one.ttft]
        seconds = sum(one.seconds for one in rounds)
        own, others = (sum(getattr(one, name) for one in rounds) / seconds for name in ("tokens", "batch_tokens"))
        print(f"{kind:14}{statistics.median(ttft):>10.1f}{percentile(ttft, 0.99):>10.1f}{own:>10.0f}{others:>10.0f}")
    alone = kinds.pop("alone")
    for kind, rounds in kinds.items():
        for name, share in (("P50", 0.5), ("P99", 0.99)):
            draw, ratios = random.Random(7), list[float]()
            for _ in range(RESAMPLES):
                chosen = draw.choices(range(options.rounds), k=options.rounds)
                ratios.append(ratio([rounds[at] for at in chosen], [alone[at] for at in chosen], share))
            ratios.sort()
            low, high = ratios[RESAMPLES // 40], ratios[-RESAMPLES // 40]
            each = statistics.median(ratio([one], [other], share) for one, other in zip(rounds, alone, strict=True))
            print(
                f"{name} {kind} / alone: {ratio(rounds, alone, share):.3f} ({low:.3f} to {high:.3f}), "
                f"median of rounds {each:.3f}"
            )


def ratio(rounds: list[Round], others: list[Round], share: float) -> float:
    """Return the ratio of a percentile of TTFT in ``rounds`` to that in the ``others``."""
    one, other = (percentile([ttft for each in side for ttft in each.ttft], share) for side in (rounds, others))
    return one / other


def main() -> None:
    """Read the command line, measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("router", help="URL of a router with --batches")
    parser.add_argument("--rate", type=float, default=4.0, help="interactive requests per second")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of each kind")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of a round")
    parser.add_argument("--settle", type=float, default=3.0, help="seconds of a batch before its round")
    parser.add_argument("--prompt", type=int, default=500, help="words of a prompt")
    parser.add_argument("--tokens", type=int, default=100, help="tokens of an answer")
    parser.add_argument("--requests", type=int, default=4000, help="requests of a batch")
    parser.add_argument("--other-work", action="store_true", help="also rounds with busy cores instead of a batch")
    options = parser.parse_args()
    gc.disable()  # a pause of this process would be a request's time
    asyncio.run(run(options.router.rstrip("/"), options))


if __name__ == "__main__":
    main()
