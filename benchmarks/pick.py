"""The time of one pick, by size of the fleet and profile. The last column is its ratio to ``least_loaded``.

``python benchmarks/pick.py [SIZE ...]`` prints medians over prompts, in microseconds. Prompts have 8192 tokens and
share a quarter of them. Every engine has reported its load, and has requests in flight.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import cast

from tercet.decisions.scheduling import Scheduling, load_scheduling
from tercet.fleet import EngineFleet, FleetView, Member
from tercet.protocol import Engine, EngineLoad, Request

PROMPT, SHARED, GROUPS = 8192, 2048, 50
FILE = """
plugins:
- type: health-filter
- type: saturation-filter
- type: queue-scorer
- type: running-requests-size-scorer
- type: kv-cache-utilization-scorer
- type: load-aware-scorer
- type: active-request-scorer
- type: token-load-scorer
- type: session-affinity-scorer
- type: no-hit-lru-scorer
- type: prefix-cache-scorer
- type: precise-prefix-cache-scorer
- type: max-score-picker
- type: power-of-two-picker
schedulingProfiles:
- name: load
  plugins: [{pluginRef: queue-scorer}, {pluginRef: kv-cache-utilization-scorer}]
- name: prefix
  plugins: [{pluginRef: prefix-cache-scorer, weight: 2}, {pluginRef: active-request-scorer}]
- name: everything
  plugins:
  - pluginRef: health-filter
  - pluginRef: saturation-filter
  - pluginRef: queue-scorer
  - pluginRef: running-requests-size-scorer
  - pluginRef: kv-cache-utilization-scorer
  - pluginRef: load-aware-scorer
  - pluginRef: active-request-scorer
  - pluginRef: token-load-scorer
  - pluginRef: session-affinity-scorer
  - pluginRef: no-hit-lru-scorer
  - pluginRef: prefix-cache-scorer
    weight: 2
  - pluginRef: precise-prefix-cache-scorer
    weight: 2
  - pluginRef: max-score-picker
"""


def scheduling() -> Scheduling:
    """Return the profiles to measure."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "scheduling.yaml")
        file.write_text(FILE)
        return load_scheduling(file)


def fleet_of(size: int, plan: Scheduling) -> EngineFleet:
    """Return a fleet of ``size`` engines under load. Its engines are never called."""
    fleet = EngineFleet([Member(f"e{n}", "", "both", cast("Engine", _Named(f"e{n}"))) for n in range(size)], seed=0)
    fleet.scheduling = plan
    report(fleet)
    return fleet


def report(fleet: EngineFleet) -> None:
    """Let every engine report a random load."""
    chance = Random(1)
    for member in fleet.members:
        member.in_flight = chance.randrange(20)
        load = EngineLoad(waiting=chance.randrange(5), running=chance.randrange(20), kv_usage=0.7 * chance.random())
        fleet.report(member.name, load)


def requests(count: int) -> list[Request]:
    """Return requests of several groups. The prompts of a group share a prefix."""
    chance = Random(2)
    shared = [tuple(chance.randrange(50_000) for _ in range(SHARED)) for _ in range(GROUPS)]
    rest = tuple(chance.randrange(50_000) for _ in range(PROMPT - SHARED))
    return [
        Request(seq_id=f"s{n}", prompt=shared[n % GROUPS] + rest[n:] + rest[:n], headers={"x-session-token": f"u{n}"})
        for n in range(count)
    ]


def pick_micros(fleet: EngineFleet, by: str, prompts: list[Request]) -> float:
    """Return the median time of a pick over the prompts, in microseconds."""
    took: list[float] = []
    for request in prompts:
        began = time.perf_counter()
        with FleetView(fleet).pick(by=by, request=request):
            took.append(time.perf_counter() - began)
    return median(took) * 1e6


class _Named:
    """The part of an engine that a pick needs: its name."""

    def __init__(self, name: str) -> None:
        self.name = name


def main(sizes: list[int]) -> None:
    """Print the table."""
    plan, prompts = scheduling(), requests(400)
    print(f"{'engines':>8} {'by':>12} {'us':>8} {'x least_loaded':>15}")
    for size in sizes:
        fleet = fleet_of(size, plan)
        base = pick_micros(fleet, "least_loaded", prompts)
        for by in ("round_robin", "least_loaded", *plan.profiles):
            report(fleet)
            pick_micros(fleet, by, prompts[:100])  # warm up, and fill the history of prefixes
            report(fleet)
            micros = pick_micros(fleet, by, prompts[100:])
            print(f"{size:>8} {by:>12} {micros:>8.1f} {micros / base:>15.1f}")


if __name__ == "__main__":
    main([int(size) for size in sys.argv[1:]] or [2, 10, 100, 1000])
