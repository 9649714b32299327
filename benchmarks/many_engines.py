"""A run of many simulated engines in real time behind a real router that changes roles, or next to a planner.

    python -m benchmarks.many_engines --by auto
    python -m benchmarks.many_engines --by planner --engines 64 --processes 2 --seconds 240

The engines share a few processes, and are slow, so that a machine with two cores can run them: a prompt of 1,000 tokens
takes 3 s, and a decode step takes 0.25 s and 20 ms for each sequence. In the first half of the run, requests have long
prompts and short answers; in the second half, short prompts and long answers. `tercet bench serve` sends them.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
import psutil
import typer
from benchmarks.command_line import run

from tercet.aio.tasks import signals_to
from tercet.cli.terminal import note, show_table
from tercet.cluster.model import resolve_tokenizer
from tercet.cluster.ports import free_ports, url_of
from tercet.protocol import EngineError, TercetError
from tercet.wire.client.bounded_answers import ask_router
from tercet_lab.bench.results import load_result
from tercet_lab.sim import Profile, load_profile
from tercet_lab.sim.sim_server import ServerConfig, serving
from tercet_lab.sim.step_times import StepTimes
from tercet_lab.tables import RequestRow, Requests

HOST, MODEL = "127.0.0.1", "smollm2"
TTFT_S, TPOT_S = 10.0, 0.45
SLOW = StepTimes(
    knots=((1, 0.25), (32, 0.25), (256, 0.8), (1024, 3.0), (2048, 6.0), (8192, 24.0)), pair=0.0, context=0.0,
    sequence=0.02,
)  # fmt: skip
RATE_FOR_ENGINE = 10 / 64
"""Requests per second for each engine of the fleet."""
LONG_PROMPTS, LONG_ANSWERS = (1000, 8), (100, 64)
"""Mean tokens of prompts and of answers, in the first and the second half."""
READY_S = 300.0
Deciding = Literal["auto", "planner"]


def slow_profile() -> Profile:
    """Return the profile of an engine that a fiftieth of a core simulates in real time."""
    known = load_profile("llama-3.1-8b-h100-tp1")
    return msgspec.structs.replace(known, name="slow", steps=SLOW, max_model_len=8192)


def write_trace(file: Path, seconds: float, rate: float, seed: int) -> None:
    """Write a trace in Mooncake's form: Poisson arrivals, and lengths with a standard deviation of 20% of the mean."""
    chance, at, block, lines = random.Random(seed), 0.0, 0, list[bytes]()
    while (at := at + chance.expovariate(rate)) < seconds:
        means = LONG_PROMPTS if at < seconds / 2 else LONG_ANSWERS
        prompt, answer = (max(2, round(chance.gauss(mean, mean / 5))) for mean in means)
        blocks = list(range(block, block := block + -(-prompt // 512)))
        lines.append(msgspec.json.encode({"timestamp": round(at * 1e3), "input_length": prompt,
                                          "output_length": answer, "hash_ids": blocks}))  # fmt: skip
    file.write_bytes(b"\n".join(lines) + b"\n")


def serve_engines(configs: Sequence[ServerConfig]) -> None:
    """Serve all these engines in this process until SIGTERM."""
    import uvloop

    async def serve() -> None:
        stopped = asyncio.Event()
        with signals_to(stopped.set, stopped.set):
            async with AsyncExitStack() as stack:
                for config in configs:
                    await stack.enter_async_context(serving(config))
                await stopped.wait()

    uvloop.run(serve())


class Change(NamedTuple):
    """The numbers of engines by role from the second ``at`` of the run on."""

    at: float
    prefill: int
    decode: int


class Watched(NamedTuple):
    """The results of a run: its changes of roles, its requests, and the seconds of CPU by process."""

    changes: list[Change]
    records: tuple[RequestRow, ...]
    cpu: dict[str, float]

    def met(self, begin: float, end: float) -> str:
        """Return the share of the requests sent in these seconds that met the objectives, and their number, as text."""
        found = Requests.of_rows(each for each in self.records if begin <= each.scheduled < end)
        met = int((found["ok"] & (found.ttft <= TTFT_S) & ~(found.tpot > TPOT_S)).sum())
        return f"{met / max(1, len(found)):.1%} of {len(found)}"


@contextmanager
def command(log: Path, *words: str) -> Generator[subprocess.Popen[bytes]]:
    """Run a ``tercet`` process while entered; its output goes to ``log``."""
    with log.open("wb") as written:
        process = subprocess.Popen([sys.executable, "-m", "tercet.cli", *words], stdout=written, stderr=written)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


@contextmanager
def fleet(folder: Path, engines: int, prefill: int, processes: int) -> Generator[tuple[list[str], list[int]]]:
    """Run engines in a few processes while entered; yield the router's flags for them and the ids of the processes."""
    ports, profile = free_ports(HOST, engines), slow_profile()
    root = resolve_tokenizer(MODEL)
    configs = [
        ServerConfig(name=f"e{each}", profile=profile, port=port, url=url_of(HOST, port), model=MODEL, root=root)
        for each, port in enumerate(ports)
    ]
    started = [
        multiprocessing.get_context("spawn").Process(target=serve_engines, args=(configs[each::processes],))
        for each in range(processes)
    ]
    for each in started:
        each.start()
    flags = [
        f"--engine={config.url},role={'prefill' if each < prefill else 'decode'},name={config.name}"
        for each, config in enumerate(configs)
    ]
    try:
        yield flags, [each.pid or 0 for each in started]
    finally:
        for each in started:
            each.terminate()
            each.join(60)


async def roles_of(url: str) -> Counter[str]:
    """Return the numbers of reachable engines by role, from the router; empty if it does not answer."""
    try:
        answer = await ask_router(url, "GET", "/engines", None)
    except TercetError:
        return Counter()
    return Counter(each["role"] for each in answer if each["reachable"])


async def until_ready(url: str, engines: int) -> None:
    """Wait until all engines are reachable; raise :class:`~tercet.protocol.EngineError` after :data:`READY_S`."""
    deadline = time.monotonic() + READY_S
    while (found := await roles_of(url)).total() < engines:
        if time.monotonic() > deadline:
            raise EngineError(f"only {found.total()} of {engines} engines are ready after {READY_S:g} s")
        await asyncio.sleep(1.0)


async def watch(url: str, folder: Path, pids: dict[str, list[int]]) -> Watched:
    """Send the trace, and record the roles until all requests are answered."""
    result = folder / "result.json"
    words = ["bench", "serve", "--base-url", url, "--model", MODEL, "--tokenizer", MODEL, "--arrival", "trace"]
    words += ["--workload", f"mooncake,path={folder / 'trace.jsonl'}", "--result-filename", str(result)]
    changes, before = list[Change](), {name: cpu_of(each) for name, each in pids.items()}
    with (folder / "bench.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tercet.cli", *words, stdout=log, stderr=log, env={**os.environ}
        )
        sent = asyncio.create_task(process.wait())
        began: float | None = None
        while not sent.done():
            if began is None and await has_traffic(url):
                began = time.monotonic()
            found = await roles_of(url)
            now = Change(time.monotonic() - (began or time.monotonic()), found["prefill"], found["decode"])
            if not changes or changes[-1][1:] != now[1:]:
                changes.append(now)
            await asyncio.wait([sent], timeout=0.5)
    if process.returncode:
        raise EngineError(f"tercet bench failed: {(folder / 'bench.log').read_text()[-500:]}")
    cpu = {name: cpu_of(each) - before[name] for name, each in pids.items()}
    return Watched(changes, load_result(result).points[0].records, cpu)


async def has_traffic(url: str) -> bool:
    """True if an engine serves a request."""
    answer = await ask_router(url, "GET", "/engines", None)
    return any(each["in_flight"] for each in answer)


def cpu_of(pids: Sequence[int]) -> float:
    """Return the seconds of CPU that these processes and their children have used."""
    total = 0.0
    for pid in pids:
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            times = each.cpu_times()
            total += times.user + times.system
    return total


def many_engines(
    by: Annotated[
        Deciding, typer.Option("--by", help="Process that changes roles: router (auto) or planner.")
    ] = "auto",
    engines: Annotated[int, typer.Option("--engines", min=4, help="Number of engines.")] = 64,
    prefill: Annotated[
        int | None, typer.Option("--prefill", help="Number of engines that prefill at first.", show_default="a quarter")
    ] = None,
    processes: Annotated[int, typer.Option("--processes", min=1, help="Number of processes that run the engines.")] = 2,
    seconds: Annotated[
        float, typer.Option("--seconds", min=60, help="Length of the traffic, seconds; the mix changes half-way.")
    ] = 240,
    seed: Annotated[int, typer.Option("--seed", help="Random seed of the traffic.")] = 0,
    logs: Annotated[
        Path | None, typer.Option("--logs", help="Folder for logs and the result.", show_default="a temporary folder")
    ] = None,
) -> None:
    """Print the changes of roles, the share of requests within the objectives, and the CPU of each process."""
    with ExitStack() as stack:
        folder = logs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "slow.json").write_bytes(msgspec.json.encode(slow_profile()))
        write_trace(folder / "trace.jsonl", seconds, RATE_FOR_ENGINE * engines, seed)
        flags, pids = stack.enter_context(fleet(folder, engines, prefill or engines // 4, processes))
        (port,) = free_ports(HOST, 1)
        url = url_of(HOST, port)
        router = ["router", *flags, "--port", str(port), "--openai-layer", "small", "--model", MODEL]
        router += ["--program", "disaggregated", "--objective-ttft", f"{TTFT_S:g}", "--objective-tpot", f"{TPOT_S:g}"]
        router += ["--roles", "auto"] if by == "auto" else []
        seen = {"engines": pids, "router": [stack.enter_context(command(folder / "router.log", *router)).pid]}
        asyncio.run(until_ready(url, engines))
        note(f"{engines} engines in {processes} processes are ready")
        if by == "planner":
            words = ["planner", "--url", url, "--act", "roles", "--profile", str(folder / "slow.json")]
            seen["planner"] = [stack.enter_context(command(folder / "planner.log", *words)).pid]
        found = asyncio.run(watch(url, folder, seen))
    failed = sum(not each.ok for each in found.records)
    show_table("roles", ["second", "prefill", "decode"], [[f"{at:.0f}", str(p), str(d)] for at, p, d in found.changes])
    half = seconds / 2
    show_table(
        f"{engines} engines, roles by {by}: {len(found.records)} requests, {failed} failed",
        ["seconds", f"TTFT {TTFT_S:g} s and TPOT {TPOT_S:g} s met"],
        [[f"{begin:.0f} to {end:.0f}", found.met(begin, end)]
         for begin, end in ((0, 30), (30, half), (half, half + 30), (half + 30, seconds))],
    )  # fmt: skip
    show_table("", ["process", "CPU, s"], [[name, f"{cpu:.0f}"] for name, cpu in found.cpu.items()])


if __name__ == "__main__":
    run(many_engines, "benchmarks.many_engines")
