"""Rescheduling on an uneven workload: lengths with a long tail, in bursts, on engines whose KV is scarce.

    python examples/rebalancing.py [--engines 16,64] [--per-engine 14] [--seeds 1]

Requests are given out by turns, and to the engine with the fewest; each without and with ``--reschedule neutral_load``,
which moves running requests from engines that are full to such as are not. The last table holds what rescheduling does
against the targets that ai-dynamo/dynamo#12060 names: P95 of the imbalance of KV usage at least 20% lower, throughput
at least 98%, P99 TTFT at most 105%. Its figures are means over the seeds of the ratio to the same seed without moves,
with 95% intervals.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from tercet.settings import Source, decode_settings
from tercet_lab.bench.simulated import Experiment, Fleet, MovingSettings, SimulatedPoint, SyntheticWorkload
from tercet_lab.bench.simulated.grid import Estimate

PICKS = ("round_robin", "least_loaded")
PER_ENGINE = 190
# Of the gamma arrivals that sixteen engines see: gaps with a coefficient of variation of 3, whose square grows with the
# fleet, so that bursts are as large for each engine.
BURSTINESS = 1 / 9


class Figures(NamedTuple):
    """Means over seeds; times in seconds, ``throughput`` in output tokens per second."""

    ttft_p50: float
    ttft_p99: float
    tpot_p99: float
    jct_p99: float
    preemptions: float
    imbalance_p95: float
    throughput: float
    moved: float
    pause_p99: float
    cpu: float

    @classmethod
    def of(cls, point: SimulatedPoint, cpu: float) -> Figures:
        summary, imbalance = point.summary, point.imbalance
        if summary.failed or not (summary.ttft and summary.tpot and summary.e2el and imbalance):
            raise SystemExit(f"{summary.failed} requests failed: {summary.errors}")
        return cls(
            summary.ttft.p50, summary.ttft.p99, summary.tpot.p99, summary.e2el.p99, point.counts["preemptions"],
            imbalance.p95, summary.output_throughput, point.moves.moved, point.moves.pause_p99 or 0.0, cpu,
        )  # fmt: skip


def simulated(engines: int, per_engine: float, pick: str, policies: Sequence[str], seed: int) -> Figures:
    """One run."""
    workload = SyntheticWorkload(
        rate=1, requests=engines * PER_ENGINE, lengths="lognormal", input_mean=512, input_dev=1024, output_mean=256,
        output_dev=512, arrivals="gamma", burstiness=BURSTINESS * 16 / engines,
    )  # fmt: skip
    simulation = Experiment(
        program="data_parallel",
        args={"pick": pick},
        fleet=Fleet(f"both={engines}", profile="llama-3.1-8b-h100-tp1", total_blocks=2000),
        work=workload,
        seed=seed,
        moves=decode_settings(MovingSettings, Source({"reschedule": list(policies)})),
    )
    began = time.process_time()
    point = simulation.point(engines * per_engine)
    return Figures.of(point, time.process_time() - began)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="16,64", help="sizes of fleets")
    parser.add_argument("--per-engine", type=float, default=14.0, help="requests per second for each engine")
    parser.add_argument("--seeds", type=int, default=1, help="runs to average over")
    given = parser.parse_args()
    columns = ["engines", "picks", "rescheduling", "TTFT P50, ms", "P99", "TPOT P99, ms", "JCT P99, s", "preempted"]
    columns += ["imbalance P95", "tokens/s", "moved", "pause P99, ms", "CPU, s"]
    print(f"| {' | '.join(columns)} |\n| {' | '.join('---' for _ in columns)} |")
    found: dict[tuple[int, str, str], list[Figures]] = {}
    for engines in (int(size) for size in given.engines.split(",")):
        for pick in PICKS:
            for policy in ("", "neutral_load"):
                runs = [
                    simulated(engines, given.per_engine, pick, [policy] if policy else [], seed)
                    for seed in range(given.seeds)
                ]
                found[engines, pick, policy] = runs
                print(row(engines, pick, policy, Figures(*map(fmean, zip(*runs, strict=True)))), flush=True)
    print(
        "\n| engines | picks | imbalance P95 | throughput | P99 TTFT | P99 TTFT, of round robin's |\n"
        + "| --- " * 6
        + "|"
    )
    for (engines, pick, policy), ours in found.items():
        if policy:
            without, turns = found[engines, pick, ""], found[engines, "round_robin", ""]
            cells = [shown(ratio(ours, without, name)) for name in ("imbalance_p95", "throughput", "ttft_p99")]
            print(f"| {engines} | {pick} | {' | '.join([*cells, shown(ratio(ours, turns, 'ttft_p99'))])} |")


def ratio(runs: Sequence[Figures], without: Sequence[Figures], name: str) -> Estimate:
    """What a figure is of what it is without moves, seed by seed."""
    pairs = zip(runs, without, strict=True)
    return Estimate.of([getattr(one, name) / getattr(other, name) for one, other in pairs])


def shown(found: Estimate) -> str:
    """A ratio and half of its interval."""
    return f"{found.mean:.1%}" + ("" if found.half is None else f" +- {found.half:.1%}")


def row(engines: int, pick: str, policy: str, found: Figures) -> str:
    """One line of the first table."""
    cells = [str(engines), pick, policy or "-", f"{found.ttft_p50 * 1e3:.0f}", f"{found.ttft_p99 * 1e3:.0f}"]
    cells += [f"{found.tpot_p99 * 1e3:.1f}", f"{found.jct_p99:.1f}", f"{found.preemptions:.0f}"]
    cells += [f"{found.imbalance_p95:.3f}", f"{found.throughput:.0f}", f"{found.moved:.0f}"]
    cells += [f"{found.pause_p99 * 1e3:.0f}" if found.moved else "-", f"{found.cpu:.1f}"]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
