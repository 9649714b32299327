"""CPU time and memory of a replay of Mooncake's trace on 64 simulated engines, here and in Dynamo's offline replay.

    python benchmarks/replay.py TRACE [--rounds 3] [--dynamo PYTHON]

TRACE is `FAST25-release/traces/conversation_trace.jsonl` of kvcache-ai/Mooncake. Each round runs both simulators in
turn, by round robin and by prefix-aware picks (`benchmarks/cache_aware.yaml`; Dynamo: `kv_router`); engines have 27,158
blocks of 16 tokens. By round robin both must prefill the same number of tokens. Step times and prefix-aware picks
differ.

`--dynamo` is a Python with `ai-dynamo` 1.6.1 (Dynamo's simulator is written in Rust). Without it, a temporary virtual
environment is made; if pip cannot install the package, Tercet runs alone.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import venv
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

ENGINES, BLOCKS, BLOCK_SIZE, TRACE_BLOCK = 64, 27_158, 16, 512
PACKAGES = ("ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1")
WAYS = ("round_robin", "prefix_aware")
DYNAMO = """
import json, resource, sys, time
from dynamo._core import _normalize_mocker_config, run_mocker_trace_replay
trace, way, engines, blocks, block_size, trace_block = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
engine = _normalize_mocker_config({"engine": {"num_gpu_blocks": blocks, "block_size": block_size}})
began = time.process_time()
found = run_mocker_trace_replay(
    [trace], extra_engine_args=engine, num_workers=engines, replay_mode="offline", trace_block_size=trace_block,
    router_mode="round_robin" if way == "round_robin" else "kv_router", capture_planner_details=False,
)
cpu = time.process_time() - began
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps([cpu, memory, found.summary["committed_prefill_tokens"]]))
"""


class Replay(NamedTuple):
    """The cost of one replay: CPU seconds, peak memory of its process in MB, and the prefilled tokens."""

    cpu_s: float
    memory: float
    prefilled: int


def here(trace: str, way: str) -> Replay:
    """Replay the trace in this process."""
    from tercet.decisions.scheduling import load_scheduling
    from tercet.programs import load_program
    from tercet_lab.bench.simulated import PlannedWorkload, parse_fleet, run_once
    from tercet_lab.sim import EngineOptions

    began, rules, args = time.process_time(), None, dict[str, str]()
    if way == "prefix_aware":
        rules, args = load_scheduling(Path(__file__).with_name("cache_aware.yaml")), {"pick": "scheduled"}
    work = PlannedWorkload(workload=(f"mooncake,path={trace}",), arrivals="trace")
    outcome = run_once(
        load_program("data_parallel", args), parse_fleet(f"both={ENGINES}"), "llama-3.1-8b-h100-tp1",
        EngineOptions(total_blocks=BLOCKS), work, 0, rules,
    )  # fmt: skip
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Replay(time.process_time() - began, memory, outcome.counts["prefill_tokens"])


def measured(*command: str) -> Replay:
    """Run a replay in a process, and return its cost."""
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "DYN_LOG": "error"}, check=False)
    if done.returncode:
        raise SystemExit(f"the replay failed: {done.stderr.strip()[-300:]}")
    return Replay(*json.loads(done.stdout.splitlines()[-1]))


@contextmanager
def dynamo(given: str | None) -> Generator[str | None]:
    """Yield a Python with Dynamo: the given one, or that of an environment that is made for the context, or None."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        install = (python, "-m", "pip", "install", "--quiet", "--no-deps", *PACKAGES)
        done = subprocess.run(install, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"pip cannot install {' and '.join(PACKAGES)}, so Tercet runs alone", file=sys.stderr)
        yield None if done.returncode else python


def main() -> None:
    """Print a row for each simulator and way of picking: medians, and the range of CPU times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", metavar="TRACE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dynamo", metavar="PYTHON", help="Python interpreter with ai-dynamo 1.6.1")
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)  # a process of this benchmark
    args = parser.parse_args()
    if not Path(args.trace).is_file():
        parser.error(f"TRACE: there is no file {args.trace}")
    if args.one:
        print(json.dumps(here(args.trace, args.one)))
        return
    found: defaultdict[tuple[str, str], list[Replay]] = defaultdict(list)
    with dynamo(args.dynamo) as python:
        for _ in range(args.rounds):
            for way in WAYS:
                found[way, "Tercet"].append(measured(sys.executable, __file__, args.trace, "--one", way))
                if python is not None:
                    settings = map(str, (ENGINES, BLOCKS, BLOCK_SIZE, TRACE_BLOCK))
                    found[way, "Dynamo"].append(measured(python, "-c", DYNAMO, args.trace, way, *settings))
    for (way, name), runs in found.items():
        cpu = [run.cpu_s for run in runs]
        memory, prefilled = median(run.memory for run in runs), median(run.prefilled for run in runs)
        print(f"{way} {name}: {median(cpu):.1f} s of CPU ({min(cpu):.1f} to {max(cpu):.1f}), {memory:.0f} MB, "
              f"{prefilled:,.0f} tokens prefilled")  # fmt: skip
    if len({runs[0].prefilled for (way, _), runs in found.items() if way == "round_robin"}) > 1:
        raise SystemExit("by round robin, the simulators prefilled different numbers of tokens")


if __name__ == "__main__":
    main()
