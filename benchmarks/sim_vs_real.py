"""The simulator against a real fleet: the same requests at the same times, mean TTFT, TPOT and JCT side by side.

Start a fleet of one prefill and one decode engine (``tercet up``), leave the machine alone, and run

``python benchmarks/sim_vs_real.py --url http://127.0.0.1:8000 --profile mine.json``

The profile is measured first on the fleet's own engines (``tercet profile measure``) unless the file is there. Nothing
is fitted to the workloads: they are held out. The simulator is given what the client sent and when, and how long each
answer was, and that both engines share a host; the rest is prediction.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import aiohttp

from tercet.bench.config import ServeConfig
from tercet.bench.experiment import Cell, Contender, Experiment, prepare
from tercet.bench.records import RequestRecord
from tercet.bench.result import Point
from tercet.bench.simulated import parse_fleet, point_of, run_requests
from tercet.cluster.model import resolve_model
from tercet.programs import load_program
from tercet.protocol import Request, TercetError
from tercet.sim import EngineOptions

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


def main() -> None:
    """Run it; exits with 1 if an error is larger than allowed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the fleet's front door")
    parser.add_argument("--profile", type=Path, required=True, help="a profile's file; measured if it is not there")
    parser.add_argument("--requests", type=int, default=80, help="requests of each run")
    parser.add_argument("--max-step-tokens", type=int, default=512, help="the engines' --max-num-batched-tokens")
    given = parser.parse_args()
    try:
        if not given.profile.exists():
            measure(given.url, asyncio.run(engines_of(given.url)), given.profile, given.max_step_tokens)
        errors = compare(given.url, str(given.profile), given.requests, given.max_step_tokens)
    except (TercetError, aiohttp.ClientError, OSError) as error:
        sys.exit(f"sim_vs_real: {error}")
    print(f"\nlargest error {max(errors):.1%}, allowed {ALLOWED:.0%}")
    sys.exit(max(errors) > ALLOWED)


async def engines_of(url: str) -> list[str]:
    """The URLs of a prefill and a decode engine behind a front door."""
    async with aiohttp.ClientSession() as http, http.get(f"{url}/tercet/v1/engines") as response:
        return [engine["url"] for engine in await response.json()][:2]


def measure(url: str, engines: Sequence[str], profile: Path, max_step_tokens: int) -> None:
    """``tercet profile measure``, as one would run it."""
    flags = ["--front-door", url, *(part for engine in engines for part in ("--engine", engine))]
    command = [sys.executable, "-m", "tercet.cli", "profile", "measure", *flags]
    subprocess.run([*command, "--max-step-tokens", str(max_step_tokens), "-o", str(profile)], check=True)


def compare(url: str, profile: str, requests: int, max_step_tokens: int) -> list[float]:
    """Print a row for each workload, program and metric; returns the relative errors, without their signs."""
    print(
        "| workload | program | metric | real, ms | simulated, ms | error |\n| --- | --- | --- | ---: | ---: | ---: |"
    )
    errors = list[float]()
    for name, (rate, workload) in WORKLOADS.items():
        for program in PROGRAMS:
            real = asyncio.run(run_real(url, program, rate, workload, requests))
            simulated = simulate(program, profile, real.records, max_step_tokens)
            for metric, key in METRICS.items():
                theirs, ours = real.metrics[key], simulated[key]
                if theirs is None or ours is None:
                    raise TercetError(f"{name}, {program}: no {metric}; {real.errors or 'the simulation has none'}")
                errors.append(abs(ours / theirs - 1))
                numbers = f"{theirs:.1f} | {ours:.1f} | {ours / theirs - 1:+.1%}"
                print(f"| {name} | {program} | {metric} | {numbers} |", flush=True)
    return errors


async def run_real(url: str, program: str, rate: float, workload: str, requests: int) -> Point:
    """One point of ``tercet bench serve``."""
    config = ServeConfig(
        base_url=url, program=program, request_rate=(rate,), workload=(workload,), num_prompts=requests, num_warmups=3
    )
    contender = Contender(program, url, program)
    bench = await prepare(config, [contender], resolve_model)
    (point,) = await Experiment(bench, [Cell(contender, config.loads[0])], _ignore).run()
    return point


def _ignore(*_: object) -> None:
    """The table has every point."""


def simulate(
    program: str, profile: str, records: Iterable[RequestRecord], max_step_tokens: int
) -> dict[str, float | int | None]:
    """The same requests through the same program on simulated engines."""
    # Warm-up comes first, and fills caches there as here.
    sent = sorted(records, key=lambda record: (not record.warmup, record.sent))
    warm_up = sum(record.warmup for record in sent)
    options = EngineOptions(max_num_batched_tokens=max_step_tokens)
    arrivals = list(requests_like(sent))
    outcome = run_requests(load_program(program), parse_fleet("1P1D@here"), profile, options, arrivals, warm_up)
    return point_of(0.0, outcome, None).summary.flat()


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
