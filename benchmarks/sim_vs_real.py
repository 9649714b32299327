"""A comparison of the simulator with a real fleet: the same requests at the same times; mean TTFT, TPOT and JCT.

Start a prefill engine, a decode engine and a router on an otherwise idle machine, and run:

    tercet up --port 8000 &
    python benchmarks/sim_vs_real.py --url http://127.0.0.1:8000 --profile mine.json

The profile is measured first on the engines of the fleet (``tercet bench profile --engine``), unless the file exists.
Nothing is fitted to the workloads. The input of the simulator is: the prompts' lengths and send times, the answers'
lengths, and the fact that both engines share a host. All other values are predictions.

The speed of a shared machine changes within minutes. The profile is therefore compared with a few prefills and decode
steps before and after each run, of an engine alone and next to the other one. All of these together give factors for
the profile's times, and its ``sharing``; both are printed. (One such sample is too short to correct a single run.) The
workloads have no effect on this. They run in turns, ``--rounds`` times, and the means over all rounds are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import product
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import aiohttp
import msgspec
from msgspec.structs import replace

from tercet.cluster.model import resolve_model
from tercet.programs import load_program
from tercet.protocol import Request, TercetError
from tercet.wire.client import HttpEngine
from tercet_bench.bench_config import ServeConfig
from tercet_bench.experiment import Cell, Contender, Experiment, prepare
from tercet_bench.step_measurement import (
    BATCH,
    CONTEXT,
    STEPS,
    Neighbour,
    Probe,
    Seconds,
    measure_steps,
    names_from,
    sharing_from,
)
from tercet_lab.bench.results import Point
from tercet_lab.bench.simulated import parse_fleet, point_of, run_requests
from tercet_lab.bench.simulated.virtual_run import Outcome
from tercet_lab.sim import EngineOptions, Profile, StepModel, load_profile
from tercet_lab.sim.step_times import pairs_of
from tercet_lab.tables import RequestRow

PROGRAMS = ("data_parallel", "disaggregated")
SHARED = 512
# By the name in the table: requests per second, and the workload.
WORKLOADS = {
    "256 in, 32 out": (1.0, "random,input_len=256,output_len=32"),
    "512+-128 in, 64+-16 out": (0.5, "random,input_len=512,input_len_std=128,output_len=64,output_len_std=16"),
    "4 prefixes of 512, 64 in, 48 out": (
        0.8,
        f"shared_prefix,prefixes=4,prefix_len={SHARED},input_len=64,output_len=48",
    ),
}
METRICS = {"TTFT": "mean_ttft_ms", "TPOT": "mean_tpot_ms", "JCT": "mean_e2el_ms"}
ALLOWED = 0.15
# Number of tokens of the prefills that measure the machine's speed.
TOKENS = 256


class Run(NamedTuple):
    """One round of a workload under a program: metrics by name, and the share of time in which engines were busy."""

    real: Mapping[str, float]
    simulated: Mapping[str, float]
    busy: float


def main() -> None:
    """Run the comparison. Exit with 1 if an error is larger than allowed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="URL of the fleet's router")
    parser.add_argument(
        "--profile", type=Path, required=True, help="file of the profile; measured if it does not exist"
    )
    parser.add_argument("--num-prompts", type=int, default=40, help="number of requests of each run")
    parser.add_argument("--rounds", type=int, default=2, help="number of runs of each workload under each program")
    parser.add_argument("--max-step-tokens", type=int, default=512, help="--max-num-batched-tokens of the engines")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions of each measurement for the profile")
    given = parser.parse_args()
    try:
        if not given.profile.exists():
            sizes = ["--max-step-tokens", str(given.max_step_tokens), "--repeats", str(given.repeats)]
            measure(given.url, asyncio.run(engines_of(given.url)), given.profile, sizes)
        plan = Comparison(given.url, str(given.profile), given.num_prompts, given.max_step_tokens)
        errors = plan.compare(given.rounds)
    except (TercetError, aiohttp.ClientError, OSError) as error:
        sys.exit(f"sim_vs_real: {error}")
    print(f"\nlargest error {max(errors):.1%}, allowed {ALLOWED:.0%}")
    sys.exit(max(errors) > ALLOWED)


async def engines_of(url: str) -> list[str]:
    """Return the URLs of the prefill and the decode engine of a router."""
    async with aiohttp.ClientSession() as http, http.get(f"{url}/tercet/v1/engines") as response:
        return [engine["url"] for engine in await response.json()][:2]


def measure(url: str, engines: Sequence[str], profile: Path, sizes: Sequence[str]) -> None:
    """Run ``tercet bench profile --engine`` for these engines."""
    flags = ["--router", url, *(part for engine in engines for part in ("--engine", engine))]
    command = [sys.executable, "-m", "tercet.cli", "bench", "profile", *flags]
    subprocess.run([*command, *sizes, "-o", str(profile)], check=True)


class Comparison:
    """The comparison of the fleet at ``url`` with simulated engines of a profile."""

    def __init__(self, url: str, profile: str, requests: int, max_step_tokens: int) -> None:
        self._url = url
        self._name = profile
        self._profile = load_profile(profile)
        self._requests = requests
        self._max_step_tokens = max_step_tokens

    def compare(self, rounds: int) -> list[float]:
        """Print a row for each workload, program and metric. Return the absolute relative errors."""
        found: dict[tuple[str, str], list[Point]] = {}
        seen = asyncio.run(self.look())
        for seed in range(rounds):
            for name, program in product(WORKLOADS, PROGRAMS):
                point = asyncio.run(run_real(self._url, program, *WORKLOADS[name], self._requests, seed))
                found.setdefault((name, program), []).append(point)
                for neighbour, seconds in asyncio.run(self.look()).items():
                    seen[neighbour] += seconds
        profile, scales = self.profile_of(seen), self.scales_of(seen["sleep"])
        print(f"scales {scales[0]:.2f}, {scales[1]:.2f}; {profile.sharing}", file=sys.stderr)
        runs = {
            (name, program): [self.run(program, point, profile, scales) for point in points]
            for (name, program), points in found.items()
        }
        return list(rows_of(runs))

    def run(self, program: str, real: Point, profile: Profile, scales: tuple[float, float]) -> Run:
        """Simulate the requests of a measured point. Return both results."""
        options = EngineOptions(
            max_num_batched_tokens=self._max_step_tokens, prefill_scale=scales[0], decode_scale=scales[1]
        )
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            file.write(msgspec.json.encode(profile))
            file.flush()
            outcome = simulate(program, file.name, real.records, options)
        simulated = point_of(0.0, outcome, None).summary.flat()
        return Run(chosen(real.metrics, real.errors), chosen(simulated, {}), outcome.busy)

    async def look(self) -> dict[Neighbour, list[Seconds]]:
        """Measure the present step times of one engine, by the activity of the other one."""
        chance = random.Random(time.time_ns())
        names = names_from(chance)
        async with AsyncExitStack() as stack:
            engines = [HttpEngine(f"engine-{index}", url) for index, url in enumerate(await engines_of(self._url))]
            one, other = [Probe(await stack.enter_async_context(engine), chance, names) for engine in engines]
            return await measure_steps(one, other, TOKENS, 1, _ignore)

    def scales_of(self, alone: Sequence[Seconds]) -> tuple[float, float]:
        """Return the factors of prefill and decode times compared with the profile, while the other engine sleeps."""
        steps = StepModel(self._profile.steps)
        prefill = self._profile.call + steps.step(TOKENS, pairs_of(0, TOKENS), 0, 0)
        decode = steps.step(0, 0, BATCH, BATCH * (CONTEXT + STEPS // 2))
        return mean(each[0] for each in alone) / prefill, mean(each[1] for each in alone) / decode

    def profile_of(self, seen: Mapping[Neighbour, Sequence[Seconds]]) -> Profile:
        """Return the profile with the ``sharing`` that was measured during this comparison."""
        if self._profile.sharing is None:
            raise TercetError(
                f"{self._profile.name} has no data on engines that share a host; measure the profile with two engines"
            )
        return replace(self._profile, sharing=sharing_from(seen, self._profile.sharing.linger))


def rows_of(runs: Mapping[tuple[str, str], Sequence[Run]]) -> Iterable[float]:
    """Print the table and yield its errors."""
    print("| workload | program | busy | metric | real, ms | simulated, ms | error |")
    print("| --- | --- | ---: | --- | ---: | ---: | ---: |")
    for (name, program), found in runs.items():
        busy = mean(run.busy for run in found)
        for metric in METRICS:
            real, simulated = mean(run.real[metric] for run in found), mean(run.simulated[metric] for run in found)
            error = simulated / real - 1
            print(f"| {name} | {program} | {busy:.0%} | {metric} | {real:.1f} | {simulated:.1f} | {error:+.1%} |")
            yield abs(error)


def chosen(metrics: Mapping[str, float | int | None], errors: Mapping[str, object]) -> dict[str, float]:
    """Return the metrics of the table. Raise ``TercetError`` if one is missing."""
    found = {metric: metrics[key] for metric, key in METRICS.items()}
    missing = [metric for metric, value in found.items() if value is None]
    if missing:
        raise TercetError(f"{missing[0]} is missing: {errors or 'no request was answered'}")
    return {metric: float(value) for metric, value in found.items() if value is not None}


async def run_real(url: str, program: str, rate: float, workload: str, requests: int, seed: int) -> Point:
    """Measure one point as ``tercet bench serve`` does. Runs with different seeds share no prefixes."""
    config = ServeConfig(
        base_url=url,
        program=program,
        request_rate=(rate,),
        workload=(workload,),
        num_prompts=requests,
        num_warmups=3,
        seed=seed,
    )
    contender = Contender(program, url, program)
    bench = await prepare(config, [contender], resolve_model)
    (point,) = await Experiment(bench, [Cell(contender, config.loads[0])], _ignore).run()
    return point


def _ignore(*_: object) -> None:
    """Ignore progress messages: the table has all points."""


def simulate(program: str, profile: str, records: Iterable[RequestRow], options: EngineOptions) -> Outcome:
    """Run the same requests through the same program on simulated engines."""
    # Warm-up requests come first, and fill the caches as in the real run.
    sent = sorted(records, key=lambda record: (not record.warmup, record.sent))
    warm_up = sum(record.warmup for record in sent)
    arrivals = list(requests_like(sent))
    return run_requests(load_program(program), parse_fleet("1P1D@here"), profile, options, arrivals, warm_up)


def requests_like(sent: Sequence[RequestRow]) -> Iterable[tuple[float, Request]]:
    """Yield requests with the same lengths and times as those that were sent. Only groups share a prefix."""
    chance = random.Random(0)
    prefixes: dict[str | None, tuple[int, ...]] = {}
    for record in sent:
        prefix = () if record.session is None else prefixes.setdefault(record.session, fresh(chance, SHARED))
        prompt = prefix + fresh(chance, record.input_tokens - len(prefix))
        yield (
            record.sent - sent[0].sent,
            Request(seq_id=f"r{record.id}", prompt=prompt, sampling_params={"max_tokens": record.output_tokens}),
        )


def fresh(chance: random.Random, tokens: int) -> tuple[int, ...]:
    """Return random tokens that no other prompt has."""
    return tuple(chance.choices(range(1 << 40), k=tokens))


if __name__ == "__main__":
    main()
