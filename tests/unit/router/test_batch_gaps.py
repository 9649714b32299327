"""Batches next to interactive traffic in virtual time: what they cost its first tokens, and what they get done.

    python -m tests.unit.router.test_batch_gaps 300 20 fetch

prints both for a length in seconds, clients per second, and a program.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

import pytest

from tercet.decisions.gaps import Gaps
from tercet.fleet import Trace
from tercet.programs import load_program
from tercet.protocol import Output, Request
from tercet.protocol.headers import CHAT
from tercet.router.batches.batch_files import BatchFiles
from tercet.router.batches.batch_runner import BatchRunner
from tercet.router.serve.service import Service
from tercet_lab.bench.simulated.moving_fleet import build_fleet
from tercet_lab.bench.simulated.scenario import parse_fleet
from tercet_lab.planner_settings import MovingSettings
from tercet_lab.sim import EngineOptions, SimEngine, run_virtual

pytestmark = pytest.mark.slow
H100 = "llama-3.1-8b-h100-tp1"


@dataclass
class Arrivals:
    """Interactive requests: a Poisson process, with prompts and answers of a fixed length, which lines have, too."""

    rate: float = 20.0
    prompt: int = 500
    tokens: int = 100
    seconds: float = 60.0
    begin: float = 10.0  # what a router learns, it learns before


@dataclass
class Seen:
    """What was measured: seconds to first tokens, and tokens of batches while there were interactive requests."""

    ttft: list[float] = field(default_factory=list[float])
    tpot: list[float] = field(default_factory=list[float])
    batch_tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.batch_tokens / self.seconds

    def percentile(self, share: float) -> float:
        return sorted(self.ttft)[math.ceil(share * len(self.ttft)) - 1]


class Mixture:
    """Two simulated engines, their service, and a runner of one batch that does not end."""

    def __init__(self, gaps: Gaps | None, folder: Path, traffic: Arrivals, program: str = "data_parallel") -> None:
        self.gaps, self.folder, self.traffic, self.program = gaps, folder, traffic, program
        self.seen, self.numbers = Seen(), itertools.count()
        self.clients_wait = False
        self.is_measured = False

    def request(self, background: bool) -> Request:
        number, most = next(self.numbers), self.traffic.tokens
        begin = tuple(number // 30_000**place % 30_000 for place in range(2))
        prompt = (*begin, *range(self.traffic.prompt - 2))
        return Request(seq_id=f"{number}", prompt=prompt, sampling_params={"max_tokens": most}, background=background)

    async def client(self) -> None:
        loop = asyncio.get_running_loop()
        began, first = loop.time(), list[float]()

        def take(_: Output) -> None:
            first.append(loop.time() - began)

        await self.service.run(self.request(background=False), Trace()).run(take)
        self.seen.ttft.append(first[0])
        self.seen.tpot.append((loop.time() - began - first[0]) / (self.traffic.tokens - 1))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one line, as the router's layers do."""
        await receive()

        def take(output: Output) -> None:
            if self.is_measured:
                self.seen.batch_tokens += len(output.token_ids)

        await self.service.run(self.request(background=True), Trace()).run(take)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def run(self) -> Seen:
        built = build_fleet(
            load_program(self.program), parse_fleet("both=2"), H100, EngineOptions(stream_every=1), 0, MovingSettings()
        )
        self.service: Service = built.service
        fleet, loop = built.service.fleet, asyncio.get_running_loop()
        fleet.costs.watch()
        fleet.knowledge.start_reports()
        tasks = [loop.create_task(self.report(built.engines))]
        if self.gaps is not None:
            gate: Any = self
            tasks.append(loop.create_task(BatchRunner(self.files(), self, gate, fleet, built.metrics, self.gaps).run()))
        draw = Random(7)
        if self.traffic.rate:
            await asyncio.sleep(self.traffic.begin)
            await self.send(draw, self.traffic.begin)
            self.seen.ttft.clear()
            self.seen.tpot.clear()
        else:
            await asyncio.sleep(self.traffic.begin)
        self.is_measured = True
        began = loop.time()
        await self.send(draw, self.traffic.seconds)
        self.seen.seconds = loop.time() - began
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return self.seen

    async def send(self, draw: Random, seconds: float) -> None:
        loop, clients = asyncio.get_running_loop(), list[asyncio.Task[None]]()
        end, rate = loop.time() + seconds, self.traffic.rate
        while (when := loop.time() + (draw.expovariate(rate) if rate else math.inf)) < end:
            await asyncio.sleep(when - loop.time())
            clients.append(loop.create_task(self.client()))
        await asyncio.sleep(end - loop.time())
        await asyncio.gather(*clients)

    async def report(self, engines: dict[str, SimEngine]) -> None:
        """Report loads as real engines do: simulated ones report nothing during a run of steps."""
        while True:
            for name, engine in engines.items():
                self.service.fleet.report(name, engine.load())
            await asyncio.sleep(0.1)

    def files(self) -> BatchFiles:
        files = BatchFiles(self.folder, 10**9)
        lines = ({"custom_id": str(n), "method": "POST", "url": CHAT, "body": {}} for n in range(30_000))
        record = files.add_file("", "in.jsonl", b"".join(json.dumps(each).encode() + b"\n" for each in lines))
        files.add_batch("", record.id, CHAT, ("24h", 86400.0), None)
        return files


async def at_once(function: Callable[..., Any], *given: Any) -> Any:
    """Stand in for ``asyncio.to_thread``: virtual time waits for no thread."""
    return function(*given)


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Seen]:
    monkeypatch.setattr(asyncio, "to_thread", at_once)
    runs = itertools.count()

    def run(gaps: Gaps | None, traffic: Arrivals, program: str = "data_parallel") -> Seen:
        return run_virtual(Mixture(gaps, tmp_path / str(next(runs)), traffic, program).run())

    return run


# By turns, by the work on each engine, and by price: the background's does not count.
@pytest.mark.parametrize("program", ["data_parallel", "fetch", "auto"])
def test_first_tokens_of_clients_come_as_without_a_batch_and_the_batch_goes_on(
    measure: Callable[..., Seen], program: str
) -> None:
    alone, both = measure(None, Arrivals(), program), measure(Gaps(32), Arrivals(), program)
    assert len(alone.ttft) == len(both.ttft) > 1000
    # Of 1,200 requests, a P99 is known to some 8%.
    for share, most in ((0.5, 1.05), (0.9, 1.05), (0.99, 1.1)):
        assert both.percentile(share) <= most * alone.percentile(share)
    assert both.rate > 1000


def test_a_batch_on_engines_of_two_roles_goes_on(measure: Callable[..., Seen]) -> None:
    traffic = Arrivals(rate=5, seconds=20)
    alone, both = measure(None, traffic, "disaggregated"), measure(Gaps(32), traffic, "disaggregated")
    assert both.percentile(0.5) <= 1.1 * alone.percentile(0.5)
    assert both.rate > 300


def main(seconds: float, rate: float, program: str = "data_parallel") -> None:
    asyncio.to_thread = at_once
    found = list[Seen]()
    for gaps, clients in ((None, rate), (Gaps(32), rate), (Gaps(32), 0.0)):
        with tempfile.TemporaryDirectory() as folder:
            traffic = Arrivals(rate=clients, seconds=seconds if clients else 20.0, begin=10.0 if clients else 80.0)
            found.append(run_virtual(Mixture(gaps, Path(folder), traffic, program).run()))
    alone, both, by_itself = found
    for name, share in (("P50", 0.5), ("P90", 0.9), ("P99", 0.99)):
        times = [each.percentile(share) for each in (alone, both)]
        print(f"TTFT {name}: {times[0] * 1e3:.1f} and {times[1] * 1e3:.1f} ms, {times[1] / times[0]:.3f} times")
    print(f"TPOT: {mean(alone.tpot) * 1e3:.2f} and {mean(both.tpot) * 1e3:.2f} ms; {len(alone.ttft)} requests")
    print(f"batch: {both.rate:.0f} tokens/s, {both.rate / by_itself.rate:.0%} of what it gets without clients")


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:])
