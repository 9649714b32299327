"""The simulator against a real fleet: the same requests at the same times, mean TTFT, TPOT and JCT side by side.

Start a prefill and a decode engine and a router, leave the machine alone, and run it:

    tercet up --port 8000 &
    python benchmarks/sim_vs_real.py --url http://127.0.0.1:8000 --profile mine.json

The profile is measured first on the fleet's own engines (``tercet profile --engine``) unless the file is there. Nothing
is fitted to the workloads: they are held out. The simulator is given what the client sent and when, and how long each
answer was, and that both engines share a host; the rest is prediction.

Where machines are shared, their speed changes within minutes. So the profile is compared with a few prefills and decode
steps before and after each run, of an engine alone and beside the other one: its times are scaled by what all of these
took more or less than it says, and its ``sharing`` is what they show (both are printed). One such look is too short to
tell one run's minutes from another's. The workloads take no part in that, either. They are run in turns, ``--rounds``
times, and the means over all rounds are compared.
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
from tercet.lab.bench.bench_config import ServeConfig
from tercet.lab.bench.experiment import Cell, Contender, Experiment, prepare
from tercet.lab.bench.profiles.engine_probe import (
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
from tercet.lab.bench.results import Point, RequestRecord
from tercet.lab.bench.simulated import parse_fleet, point_of, run_requests
from tercet.lab.bench.simulated.virtual_run import Outcome
from tercet.lab.sim import EngineOptions, Profile, StepModel, load_profile
from tercet.lab.sim.step_times import pairs_of
from tercet.programs import load_program
from tercet.protocol import Request, TercetError
from tercet.wire.client import HttpEngine

PROGRAMS = ("data_parallel", "disaggregated")
SHARED = 512
# Requests per second, and what they are; each run has the second that it names in the table.
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
# Of the prefills that show how fast the machine is.
TOKENS = 256


class Run(NamedTuple):
    """A workload under a program in one round: metrics by their names, and the share of time that engines were busy."""

    real: Mapping[str, float]
    simulated: Mapping[str, float]
    busy: float


def main() -> None:
    """Run it; exits with 1 if an error is larger than allowed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the fleet's router")
    parser.add_argument("--profile", type=Path, required=True, help="a profile's file; measured if it is not there")
    parser.add_argument("--num-prompts", type=int, default=40, help="requests of each run")
    parser.add_argument("--rounds", type=int, default=2, help="how often each workload runs under each program")
    parser.add_argument("--max-step-tokens", type=int, default=512, help="the engines' --max-num-batched-tokens")
    parser.add_argument("--repeats", type=int, default=3, help="of the profile's measurements")
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
    """The URLs of a prefill and a decode engine behind a router."""
    async with aiohttp.ClientSession() as http, http.get(f"{url}/tercet/v1/engines") as response:
        return [engine["url"] for engine in await response.json()][:2]


def measure(url: str, engines: Sequence[str], profile: Path, sizes: Sequence[str]) -> None:
    """``tercet profile --engine``, as one would run it."""
    flags = ["--router", url, *(part for engine in engines for part in ("--engine", engine))]
    command = [sys.executable, "-m", "tercet.cli", "profile", *flags]
    subprocess.run([*command, *sizes, "-o", str(profile)], check=True)


class Comparison:
    """Runs workloads on the fleet at ``url`` and on simulated engines of a profile."""

    def __init__(self, url: str, profile: str, requests: int, max_step_tokens: int) -> None:
        self._url = url
        self._name = profile
        self._profile = load_profile(profile)
        self._requests = requests
        self._max_step_tokens = max_step_tokens

    def compare(self, rounds: int) -> list[float]:
        """Print a row for each workload, program and metric; returns the relative errors, without their signs."""
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
        """What was measured, beside a simulation of the same requests."""
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
        """How long steps of one engine take now, by what the other one does."""
        chance = random.Random(time.time_ns())
        names = names_from(chance)
        async with AsyncExitStack() as stack:
            engines = [HttpEngine(f"engine-{index}", url) for index, url in enumerate(await engines_of(self._url))]
            one, other = [Probe(await stack.enter_async_context(engine), chance, names) for engine in engines]
            return await measure_steps(one, other, TOKENS, 1, _ignore)

    def scales_of(self, alone: Sequence[Seconds]) -> tuple[float, float]:
        """How many times as long as the profile says prefills and decode steps took beside an engine that sleeps."""
        steps = StepModel(self._profile.steps)
        prefill = self._profile.call + steps.step(TOKENS, pairs_of(0, TOKENS), 0, 0)
        decode = steps.step(0, 0, BATCH, BATCH * (CONTEXT + STEPS // 2))
        return mean(each[0] for each in alone) / prefill, mean(each[1] for each in alone) / decode

    def profile_of(self, seen: Mapping[Neighbour, Sequence[Seconds]]) -> Profile:
        """The profile with what engines did to one another in these minutes."""
        if self._profile.sharing is None:
            raise TercetError(f"{self._profile.name} does not say what engines of one host do to one another")
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
    """The metrics of the table; raises ``TercetError`` if one is missing."""
    found = {metric: metrics[key] for metric, key in METRICS.items()}
    missing = [metric for metric, value in found.items() if value is None]
    if missing:
        raise TercetError(f"no {missing[0]}; {errors or 'no request was answered'}")
    return {metric: float(value) for metric, value in found.items() if value is not None}


async def run_real(url: str, program: str, rate: float, workload: str, requests: int, seed: int) -> Point:
    """One point of ``tercet bench serve``; with another seed it finds nothing of itself in the engines' caches."""
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
    """The table has every point."""


def simulate(program: str, profile: str, records: Iterable[RequestRecord], options: EngineOptions) -> Outcome:
    """The same requests through the same program on simulated engines."""
    # Warm-up comes first, and fills caches there as here.
    sent = sorted(records, key=lambda record: (not record.warmup, record.sent))
    warm_up = sum(record.warmup for record in sent)
    arrivals = list(requests_like(sent))
    return run_requests(load_program(program), parse_fleet("1P1D@here"), profile, options, arrivals, warm_up)


def requests_like(sent: Sequence[RequestRecord]) -> Iterable[tuple[float, Request]]:
    """Requests as long as those that were sent, at the same times; groups share a prefix, nothing else is shared."""
    chance = random.Random(0)
    prefixes: dict[str | None, tuple[int, ...]] = {}
    for record in sent:
        prefix = () if record.group is None else prefixes.setdefault(record.group, fresh(chance, SHARED))
        prompt = prefix + fresh(chance, record.input_tokens - len(prefix))
        yield (
            record.sent - sent[0].sent,
            Request(seq_id=f"r{record.index}", prompt=prompt, sampling_params={"max_tokens": record.output_tokens}),
        )


def fresh(chance: random.Random, tokens: int) -> tuple[int, ...]:
    """Tokens that nobody else has."""
    return tuple(chance.choices(range(1 << 40), k=tokens))


if __name__ == "__main__":
    main()
