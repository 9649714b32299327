"""A comparison of `vllm bench serve` and `tercet bench serve`: one endpoint, the same traffic, interleaved rounds.

    tercet engine --port 8001 -- --max-num-seqs 16
    python benchmarks/agreement.py http://127.0.0.1:8001 --tokenizer smollm2

Both tools send random prompts of one length as text, greedy, with `ignore_eos`: at a constant rate
(`--request-rate 2`), with Poisson arrivals (`--poisson`) or from a closed loop (`--concurrency 4`). Each tool draws its
own arrivals, so a constant rate and a closed loop have the least variation. Each tool goes first in every second round.

The output has the results of each tool and the ratio of Tercet's to vLLM's, with 95 % bootstrap intervals over rounds
and requests. The tools agree within noise if the interval of the ratio contains 1.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tercet.cluster.model import resolve_model
from tercet_bench.experiment import STATISTICS, Floats, ratio_interval
from tercet_lab.bench.results import load_result
from tercet_lab.tables import Requests

# The `vllm` command needs a distribution named `vllm`, which the CPU build does not have. Its module does not need it.
VLLM = (
    "from vllm.utils.argparse_utils import FlexibleArgumentParser as Parser; from vllm.benchmarks import serve; "
    "parser = Parser(); serve.add_cli_args(parser); serve.main(parser.parse_args())"
)
METRICS = ("ttft", "tpot", "e2el")
RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Run:
    """The results of one tool in one round: latencies per request, in seconds, and throughput, in requests/s."""

    ttft: Floats
    tpot: Floats
    e2el: Floats
    throughput: Floats


@dataclass(frozen=True)
class Traffic:
    """The traffic of both tools: ``rate`` in requests per second, or ``users`` of a closed loop; lengths in tokens."""

    url: str
    model: str
    tokenizer: str
    count: int
    input_len: int
    output_len: int
    rate: float | None
    users: int | None
    poisson: bool


def vllm_bench(traffic: Traffic, seed: int, file: Path) -> Run:
    """Run ``vllm bench serve`` once. Return the results from its record of every request."""
    load = ["--request-rate", "inf" if traffic.rate is None else str(traffic.rate)]
    load += ["--burstiness", "1" if traffic.poisson or traffic.rate is None else "inf"]
    load += [] if traffic.users is None else ["--max-concurrency", str(traffic.users)]
    execute(
        "-c", VLLM, "--backend", "openai", "--base-url", traffic.url, "--model", traffic.tokenizer,
        "--served-model-name", traffic.model, "--dataset-name", "random", "--random-input-len", str(traffic.input_len),
        "--random-output-len", str(traffic.output_len), "--num-prompts", str(traffic.count), "--ignore-eos",
        "--temperature", "0", "--seed", str(seed), "--ready-check-timeout-sec", "0", "--disable-tqdm", "--save-result",
        "--save-detailed", "--result-dir", str(file.parent), "--result-filename", file.name, *load,
    )  # fmt: skip
    found = json.loads(file.read_text())
    if found["failed"]:
        raise SystemExit(f"vllm bench serve: {found['failed']} of {traffic.count} requests failed")
    ttft, e2el = np.array(found["ttfts"]), np.array(found["latencies"])
    tpot = (e2el - ttft) / (np.array(found["output_lens"]) - 1)
    return Run(ttft, tpot, e2el, throughput(np.array(found["start_times"]), e2el))


def tercet_bench(traffic: Traffic, seed: int, file: Path) -> Run:
    """Run ``tercet bench serve`` once. Return the results from its records."""
    closed = ["--arrival", "closed", "--concurrency", str(traffic.users)]
    opened = ["--arrival", "poisson" if traffic.poisson else "constant", "--request-rate", str(traffic.rate)]
    execute(
        "-m", "tercet.cli", "bench", "serve", "--base-url", traffic.url, "--model", traffic.model, "--tokenizer",
        traffic.tokenizer, "--workload", f"random,input_len={traffic.input_len},output_len={traffic.output_len}",
        "--prompt-as", "text", "--num-prompts", str(traffic.count), "--seed", str(seed), "--result-filename", str(file),
        *(opened if traffic.users is None else closed),
    )  # fmt: skip
    (point,) = load_result(file).points
    if point.metrics["failed"]:
        raise SystemExit(f"tercet bench serve: {point.metrics['failed']} of {traffic.count} requests failed")
    samples = Requests.of_rows(point.records)
    return Run(samples.ttft, samples.tpot, samples.e2el, throughput(samples["sent"], samples.e2el))


def throughput(sent: Floats, e2el: Floats) -> Floats:
    """Return the requests per second from the first send to the last end.

    (The durations that the tools report begin at different moments.)
    """
    return np.array([sent.size / ((sent + e2el).max() - sent.min())])


def execute(*arguments: str) -> None:
    """Run Python with ``arguments``. Exit with its output if it fails."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments[:4])} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def measure(traffic: Traffic, rounds: int, seed: int) -> dict[str, list[Run]]:
    """Run every tool once per round. The first round warms up the target, and its results are dropped."""
    tools: dict[str, Callable[[Traffic, int, Path], Run]] = {"vllm": vllm_bench, "tercet": tercet_bench}
    found: dict[str, list[Run]] = {name: [] for name in tools}
    with tempfile.TemporaryDirectory() as directory:
        for number in range(rounds + 1):
            for name in sorted(tools, reverse=bool(number % 2)):
                # All seeds differ, so that no run finds another run's prompts in the prefix cache.
                run = tools[name](
                    traffic, seed + 2 * number + (name == "vllm"), Path(directory, f"{name}-{number}.json")
                )
                if number:
                    found[name].append(run)
            print(f"round {number} of {rounds}", file=sys.stderr)
    return found


def rows(found: dict[str, list[Run]]) -> list[str]:
    """Return one line per metric: each tool's value and the ratio, with their intervals."""
    lines = [f"{'':22}{'vllm bench serve':>34}{'tercet bench serve':>34}{'tercet / vllm':>34}"]
    for metric in METRICS:
        for statistic in ("mean", "median", "p99"):
            cells = comparison(found, metric, statistic, 1000)
            lines.append(f"{f'{statistic} {metric.upper()}, ms':22}" + "".join(f"{cell:>34}" for cell in cells))
    cells = comparison(found, "throughput", "mean", 1)
    return [*lines, f"{'requests/s':22}" + "".join(f"{cell:>34}" for cell in cells)]


def comparison(found: dict[str, list[Run]], metric: str, statistic: str, unit: float) -> list[str]:
    """Return both tools' values, multiplied by ``unit``, and their ratio, each with its interval."""
    theirs, ours = ([unit * getattr(run, metric) for run in found[tool]] for tool in ("vllm", "tercet"))
    # A value equals its ratio to ones: its interval is then computed in the same way.
    alone = [interval_of(values, [np.ones_like(each) for each in values], statistic, 2) for values in (theirs, ours)]
    return [*alone, interval_of(ours, theirs, statistic, 3)]


def interval_of(values: list[Floats], baseline: list[Floats], statistic: str, digits: int) -> str:
    """Return ``value (low to high)`` as text, or ``none`` if the ratio is not defined."""
    found = ratio_interval(values, baseline, STATISTICS[statistic], RESAMPLES, CONFIDENCE, 0)
    if found is None:
        return "none"
    return f"{found.ratio:.{digits}f} ({found.low:.{digits}f} to {found.high:.{digits}f})"


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="URL of the endpoint, without /v1")
    parser.add_argument("--model", default="smollm2", help="name of the model at the endpoint")
    parser.add_argument("--tokenizer", default="smollm2", help="smollm2, the directory of a checkpoint, or a hub id")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--num-prompts", type=int, default=40, help="number of requests per run")
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--request-rate", type=float, default=2.0, help="requests per second")
    load.add_argument("--concurrency", type=int, help="number of users of a closed loop, instead of a rate")
    parser.add_argument("--poisson", action="store_true", help="Poisson arrivals instead of a constant rate")
    args = parser.parse_args()
    traffic = Traffic(
        url=args.url, model=args.model, tokenizer=resolve_model(args.tokenizer), count=args.num_prompts,
        input_len=args.input_len, output_len=args.output_len,
        rate=None if args.concurrency else args.request_rate, users=args.concurrency,
        poisson=args.poisson,
    )  # fmt: skip
    if traffic.rate is not None and not 0 < traffic.rate < math.inf:
        parser.error("--request-rate: must be a positive, finite number")
    print("\n".join(rows(measure(traffic, args.rounds, args.seed))))


if __name__ == "__main__":
    main()
