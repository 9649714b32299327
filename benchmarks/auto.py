"""A comparison of `auto` with the static programs: mean JCT over rates and prompt mixes. One mix changes half-way.

    python benchmarks/auto.py --simulate smollm2-135m-cpu [--fleet both=2] [--seeds 3]
    python benchmarks/auto.py --simulate mine.json --fleet both=2@here --max-num-batched-tokens 512
    python benchmarks/auto.py --url http://127.0.0.1:8000 [--mix short,documents] [--rounds 2] [--num-prompts 20]

With ``--simulate``, programs run on simulated engines in virtual time. With ``--url``, they take turns on a running
fleet, in the interleaved rounds of ``tercet bench compare``. The router keeps its engines and its cost model; the plan
that this script sets stays in the router. For ``cache_aware``, start the router with
``--scheduling benchmarks/cache_aware.yaml``; simulated runs load that file themselves. With your own profile
(`tercet bench profile --engine`), mixes and rates are those for a running fleet.

The last column is the mean JCT of ``auto`` divided by that of the best static program. On a running fleet it has a 95 %
bootstrap interval over rounds and requests; arrivals and lengths are the same for every program.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from tercet.decisions.scheduling import load_scheduling
from tercet.programs import load_program
from tercet.protocol import BadRequest, Request
from tercet_bench.experiment import STATISTICS, Floats, ratio_interval
from tercet_lab.bench.results import load_result
from tercet_lab.bench.simulated.scenario import SyntheticWorkload, parse_fleet, requests_of
from tercet_lab.bench.simulated.virtual_run import run_requests
from tercet_lab.sim import EngineOptions
from tercet_lab.tables import Requests

WARM_UP = 40
ALLOWED = 1.05
RESAMPLES = 2000


class Phase(NamedTuple):
    """The requests of a phase, with lengths in tokens.

    A prompt begins with one of ``prefixes`` texts of ``prefix`` tokens; with 0, prompts share nothing.
    """

    prompt: int
    answer: int
    prefixes: int = 0
    prefix: int = 0

    def __str__(self) -> str:
        shared = f" ({self.prefix} of them one of {self.prefixes} texts)" if self.prefixes else ""
        return f"{self.prompt} in{shared}, {self.answer} out"

    def simulated(self, rate: float, requests: int) -> SyntheticWorkload:
        """Return a simulated workload of ``requests`` requests of this phase."""
        return SyntheticWorkload(
            rate=rate,
            requests=requests,
            input_mean=self.prompt,
            input_dev=(self.prompt - self.prefix) / 10,
            output_mean=self.answer,
            output_dev=self.answer / 10,
            prefixes=self.prefixes,
            prefix=self.prefix,
        )

    def workload(self) -> str:
        """Return the phase as a workload of ``tercet bench``."""
        lengths = f"input_len={self.prompt - self.prefix},output_len={self.answer}"
        if not self.prefixes:
            return f"random,{lengths}"
        return f"shared_prefix,prefixes={self.prefixes},prefix_len={self.prefix},{lengths}"


class Mix(NamedTuple):
    """A mix of phases, one after the other, with the rates to measure, in requests per second."""

    phases: tuple[Phase, ...]
    rates: tuple[float, ...]


PROGRAMS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "data_parallel": ("data_parallel", {}),
    "least_loaded": ("data_parallel", {"pick": "least_loaded"}),
    "cache_aware": ("data_parallel", {"pick": "scheduled"}),
    "disaggregated": ("disaggregated", {}),
    "balanced": ("balanced", {}),
    "auto": ("auto", {}),
}
SCHEDULING = Path(__file__).parent / "cache_aware.yaml"
CPU = {
    "short": Mix((Phase(64, 200),), (0.3, 0.8, 1.5, 2.5)),
    "long": Mix((Phase(1500, 16),), (0.1, 0.3, 0.45)),
    "change": Mix((Phase(64, 200), Phase(1500, 16)), (0.1, 0.3, 0.45)),
    "documents": Mix((Phase(1000, 32, prefixes=40, prefix=896), Phase(64, 100)), (0.5, 0.8, 1.1)),
}
ACCELERATOR = {
    "short": Mix((Phase(200, 400),), (2, 8, 16)),
    "long": Mix((Phase(3000, 50),), (2, 6, 10)),
    "change": Mix((Phase(200, 400), Phase(3000, 50)), (2, 6, 10)),
}
MEASURED = {
    "short": Mix((Phase(64, 100),), (0.4, 0.8, 1.2)),
    "long": Mix((Phase(1000, 16),), (0.2, 0.45)),
    "change": Mix((Phase(64, 100), Phase(1000, 16)), (0.3, 0.5)),
    "documents": Mix((Phase(576, 16, prefixes=5, prefix=512), Phase(64, 50)), (0.4, 0.7)),
}


def main() -> None:
    """Run the comparison. Exit with 1 if `auto` is too slow at any rate of any mix."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--simulate", metavar="PROFILE")
    where.add_argument("--url", help="URL of a router")
    parser.add_argument("--fleet", default="both=2", help="simulated engines, as in tercet sim")
    parser.add_argument("--mix", default="short,long,change")
    parser.add_argument(
        "--request-rate", type=_floats, help="requests per second, instead of each mix's rates: 0.4,0.8"
    )
    parser.add_argument(
        "--programs", type=_programs, default=list(PROGRAMS), help="auto and at least one static program"
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of simulated runs per mean")
    parser.add_argument("--num-prompts", type=int, help="number of requests per run")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each program on a running fleet")
    parser.add_argument("--max-num-batched-tokens", type=int, help="maximum of tokens in a step of simulated engines")
    given = parser.parse_args()
    try:
        worst = max(_report(given, mix) for mix in given.mix.split(","))
    except (BadRequest, OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"auto: {error}")
    print(f"\nauto at worst: {worst:.3f} of the best static program")
    sys.exit(worst > ALLOWED)


def _floats(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _programs(text: str) -> list[str]:
    names = text.split(",")
    if not {"auto"} < set(names) <= set(PROGRAMS):
        raise argparse.ArgumentTypeError(f"give auto and at least one more of {', '.join(PROGRAMS)}")
    return names


def _report(given: argparse.Namespace, name: str) -> float:
    """Print the table of a mix. Return the worst ratio of `auto` to the best static program."""
    mixes = _mixes(given)
    if name not in mixes:
        raise BadRequest(f"--mix: {name!r} is not a mix; choose from {', '.join(mixes)}", "--mix")
    mix, ratios = mixes[name], list[float]()
    phases = ", then ".join(map(str, mix.phases))
    print(f"\n{name}: {phases}; mean JCT, s\n\n| rate | {' | '.join(given.programs)} | auto / best |")
    print("| ---: |" + " ---: |" * (len(given.programs) + 1))
    for rate in given.request_rate or mix.rates:
        found = _measured(given, mix, rate) if given.url else _simulated(given, mix, rate)
        means = {label: float(np.concatenate(rounds).mean()) for label, rounds in found.items()}
        best = min((label for label in means if label != "auto"), key=means.__getitem__)
        ratios.append(means["auto"] / means[best])
        within = _interval(found["auto"], found[best]) if given.url else ""
        cells = " | ".join(f"{means[label]:.3f}" for label in given.programs)
        print(f"| {rate:g} | {cells} | {ratios[-1]:.3f}{within} |", flush=True)
    return max(ratios)


def _mixes(given: argparse.Namespace) -> Mapping[str, Mix]:
    if given.url or given.simulate.endswith(".json"):
        return MEASURED
    return CPU if "cpu" in given.simulate else ACCELERATOR


def _interval(auto: list[Floats], best: list[Floats]) -> str:
    found = ratio_interval(auto, best, STATISTICS["mean"], RESAMPLES, 0.95, 0)
    return "" if found is None else f" ({found.low:.2f} to {found.high:.2f})"


# ---- in simulation -------------------------------------------------------------------------------------------


def _simulated(given: argparse.Namespace, mix: Mix, rate: float) -> dict[str, list[Floats]]:
    """Simulate a mix at a rate. Return the JCTs in seconds, by program and run."""
    tokens = given.max_num_batched_tokens or (512 if "cpu" in given.simulate else 8192)
    options, fleet = EngineOptions(max_num_batched_tokens=tokens), parse_fleet(given.fleet)
    found: dict[str, list[Floats]] = {label: [] for label in given.programs}
    for label in given.programs:
        program, args = PROGRAMS[label]
        for seed in range(given.seeds):
            arrivals = _arrivals(mix, rate, given.num_prompts or 600, seed)
            outcome = run_requests(
                load_program(program, args),
                fleet,
                given.simulate,
                options,
                arrivals,
                WARM_UP,
                seed,
                load_scheduling(SCHEDULING),
            )
            if outcome.failures:
                raise BadRequest(
                    f"{label}: {outcome.failures.total()} requests failed; the first error: {outcome.first_error}"
                )
            found[label].append(np.array(outcome.requests["ended"]) - np.array(outcome.requests["sent"]))
    return found


def _arrivals(mix: Mix, rate: float, requests: int, seed: int) -> Iterator[tuple[float, Request]]:
    began = when = 0.0
    for number, phase in enumerate(mix.phases):
        workload = phase.simulated(rate, requests // len(mix.phases))
        for after, request in requests_of(workload, 100 * seed + number):
            when = began + after
            yield when, msgspec.structs.replace(request, seq_id=f"{number}-{request.seq_id}")
        began = when


# ---- on a running fleet --------------------------------------------------------------------------------------


def _measured(given: argparse.Namespace, mix: Mix, rate: float) -> dict[str, list[Floats]]:
    """Measure a mix at a rate on a running fleet. Return the JCTs in seconds, by program and round."""
    _plan(given.url, given.programs)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        line = [
            sys.executable,
            "-m",
            "tercet.cli",
            "bench",
            "compare",
            "--base-url",
            given.url,
            "--result-filename",
            str(result),
        ]
        line += ["--request-rate", str(rate), "--rounds", str(given.rounds), "--num-warmups", "4"]
        line += ["--num-prompts", str(given.num_prompts or 20)]
        line += [item for label in given.programs for item in ("--program", label)]
        line += [item for phase in mix.phases for item in ("--workload", phase.workload())]
        subprocess.run(line, check=True, stdout=sys.stderr)
        points = load_result(result).points
    if any(point.errors for point in points):
        raise BadRequest("some requests failed")
    return {
        label: [Requests.of_rows(point.records).e2el for point in points if point.label == label]
        for label in given.programs
    }


def _plan(url: str, labels: Sequence[str]) -> None:
    """Set a plan in the router that has these programs by their labels, for requests that name them."""
    rules = [
        {"header": "x-benchmark", "value": label, "program": program, "args": args, "name": label}
        for label, (program, args) in ((label, PROGRAMS[label]) for label in labels)
    ]
    body = json.dumps({"program": "auto", "rules": rules}).encode()
    request = urllib.request.Request(
        f"{url}/tercet/v1/program", body, {"content-type": "application/json"}, method="PUT"
    )
    with urllib.request.urlopen(request, timeout=30):
        pass


if __name__ == "__main__":
    main()
