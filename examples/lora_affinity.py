"""Picks with and without ``lora-affinity-scorer``, on simulated engines with more LoRA adapters than a batch may use.

    python examples/lora_affinity.py [--engines 8] [--adapters 32] [--max-loras 4] [--lora-load 0.2] [--seeds 3]

A few adapters are asked for often and most seldom (Zipf). An adapter that is not in an engine's batch waits for a place
there, and then for ``--lora-load`` seconds. Both ways pick by queue, running requests and free KV; the second one by
the scorer, too.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from tercet.decisions.scheduling import load_scheduling
from tercet.fleet import EngineFleet, FleetView, Member
from tercet.programs import data_parallel, outputs_of
from tercet.protocol import Request
from tercet_lab.bench.simulated.moving_fleet import EngineObserver
from tercet_lab.sim import EngineOptions, Network, SimEngine, load_profile, run_virtual

PROMPT, OUTPUT = 512, 128
# Weights as in llm-d's own example; the last scorer is there or not.
SCORERS = (("queue-scorer", 2), ("running-requests-size-scorer", 1), ("kv-cache-utilization-scorer", 2))
AFFINITY = ("lora-affinity-scorer", 3)


class Setting(NamedTuple):
    """One run; ``rate`` in requests per second for each engine, ``lora_load`` in seconds."""

    engines: int
    adapters: int
    max_loras: int
    lora_load: float
    rate: float
    requests: int
    profile: str = "llama-3.1-8b-h100-tp1"


class Figures(NamedTuple):
    """Seconds to the first token, and how often an adapter was put into a batch for each request."""

    ttft: float
    ttft_p99: float
    loads: float


def scheduling_file(scorers: Sequence[tuple[str, int]]) -> str:
    """A scheduling file whose one profile has these scorers."""
    plugins = "\n".join(f"- {{type: {name}}}" for name, _ in (*scorers, ("max-score-picker", 0)))
    uses = "\n".join(f"  - {{pluginRef: {name}, weight: {weight}}}" for name, weight in scorers)
    uses += "\n  - {pluginRef: max-score-picker}\n"
    return f"plugins:\n{plugins}\nschedulingProfiles:\n- name: default\n  plugins:\n{uses}"


async def run(setting: Setting, scorers: Sequence[tuple[str, int]], seed: int) -> Figures:
    """One run in virtual time."""
    loop, drawn, network = asyncio.get_running_loop(), random.Random(seed), Network()
    names = [f"adapter-{number}" for number in range(setting.adapters)]
    options = EngineOptions(adapters=",".join(names), max_loras=setting.max_loras, lora_load=setting.lora_load)
    profile = load_profile(setting.profile)
    engines = [SimEngine(f"engine-{at}", profile, network, options, seed) for at in range(setting.engines)]
    members = [Member(engine.name, f"sim://{engine.name}", "both", engine) for engine in engines]
    fleet = EngineFleet(members, clock=loop.time, stale_after=math.inf, seed=seed)
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "scheduling.yaml"
        file.write_text(scheduling_file(scorers))
        fleet.scheduling = load_scheduling(file)
    for engine, member in zip(engines, members, strict=True):
        engine.observe(EngineObserver(fleet.knowledge, engine.name, profile.block_size))
        fleet.adapters.reported(member, await engine.status())
    waits: list[float] = []

    async def one(number: int) -> None:
        adapter = drawn.choices(names, [1 / (rank + 1) for rank in range(len(names))])[0]
        prompt = tuple(drawn.randrange(32_000) for _ in range(PROMPT))
        params = {"max_tokens": OUTPUT}
        request = Request(seq_id=f"r{number}", prompt=prompt, adapter=adapter, sampling_params=params)
        arrived = loop.time()
        first = True
        async for _ in outputs_of(data_parallel(request, FleetView(fleet), pick="default")):
            if first:
                waits.append(loop.time() - arrived)
            first = False

    async with asyncio.TaskGroup() as group:
        for number in range(setting.requests):
            group.create_task(one(number))
            await asyncio.sleep(drawn.expovariate(setting.rate * setting.engines))
    loads = sum([(await engine.status()).counters["adapter_loads"] for engine in engines])
    network.close()
    waits.sort()
    return Figures(fmean(waits), waits[int(len(waits) * 0.99)], loads / setting.requests)


def compare(setting: Setting, seeds: int) -> dict[str, Figures]:
    """Means over seeds, without and with the scorer."""
    ways = {"without": SCORERS, "with lora-affinity": (*SCORERS, AFFINITY)}
    found = {way: [run_virtual(run(setting, scorers, seed)) for seed in range(seeds)] for way, scorers in ways.items()}
    return {way: Figures(*map(fmean, zip(*runs, strict=True))) for way, runs in found.items()}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--max-loras", type=int, default=4)
    parser.add_argument("--lora-load", type=float, default=0.2)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--rates", default="2,4,6,8")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    print(f"{'requests/s, engine':>20} {'':20} {'TTFT, ms':>10} {'P99, ms':>10} {'loads/request':>14}")
    for rate in map(float, args.rates.split(",")):
        setting = Setting(args.engines, args.adapters, args.max_loras, args.lora_load, rate, args.requests)
        for way, figures in compare(setting, args.seeds).items():
            ttft, p99 = (f"{seconds * 1000:.0f}" for seconds in figures[:2])
            print(f"{rate:20g} {way:20} {ttft:>10} {p99:>10} {figures.loads:14.2f}")


if __name__ == "__main__":
    main()
