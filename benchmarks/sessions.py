"""The effect of ``--sessions`` on sessions of agents during a drain, a kill and with a full KV cache, in virtual time.

    python -m benchmarks.sessions [--requests 800] [--rate 6]

Four simulated engines serve sessions of eight turns; three quarters of the turns come after a tool. `hit` is the share
of prompt tokens that engines did not compute. TTFT is over all turns, and over the turns in the 30 s after the event.
The last lines have an eighth of the KV cache, so that turns of other sessions evict contexts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from benchmarks.command_line import run

from tercet.cli.terminal import show_table
from tercet.decisions.scheduling import load_scheduling
from tercet.programs import load_program
from tercet.settings.fleet_settings import SessionSettings
from tercet_lab.bench.simulated import MovingSettings, PlannedWorkload
from tercet_lab.bench.simulated.scenario import EngineGroup, Fault, FleetSpec
from tercet_lab.bench.simulated.virtual_run import Outcome, run_once
from tercet_lab.sim import EngineOptions

PROFILE = "llama-3.1-8b-h100-tp1"
SESSIONS = (
    "sessions,turns=8,system_len=1000,input_len=600,output_len=150,think_time=20,tool_share=0.75,tool_time=3"
)  # fmt: skip
AT, AFTER = 50.0, 30.0
EVENTS: dict[str, tuple[Fault, ...]] = {
    "none": (),
    "drain": (Fault(engine="both-0", at=AT, kind="drain"),),
    "kill": (Fault(engine="both-0", at=AT, down=30.0),),
}
PREFIXES = Path(__file__).parent / "cache_aware.yaml"


def simulated(
    pick: str, sessions: SessionSettings, faults: tuple[Fault, ...], workload: PlannedWorkload, blocks: int | None
) -> Outcome:
    """Simulate one run and return its outcome."""
    fleet = FleetSpec(engines=(EngineGroup(role="both", count=4),), faults=faults)
    scheduling = load_scheduling(PREFIXES) if pick == "scheduled" else None
    options = EngineOptions(total_blocks=blocks)
    moving = MovingSettings(sessions=sessions)
    return run_once(
        load_program("data_parallel", {"pick": pick}), fleet, PROFILE, options, workload, 0, scheduling, moving
    )


def row(way: str, event: str, outcome: Outcome) -> list[str]:
    """Return the row of a run: way, event and results."""
    sent, ttft = (
        np.array(outcome.requests["sent"]),
        (np.array(outcome.requests["first_token"]) - np.array(outcome.requests["sent"])) * 1e3,
    )
    after = ttft[(sent >= AT) & (sent < AT + AFTER)]
    hit = 1 - outcome.counts["prefill_tokens"] / sum(outcome.requests["input_tokens"])
    counts = outcome.counts
    ends = [f"{counts.get(f'session_moves_{end}', 0)}" for end in ("moved", "absent", "failed")]
    return [
        way, event, f"{hit:.1%}", f"{np.nanmean(ttft):.0f}", f"{np.nanpercentile(ttft, 99):.0f}",
        f"{np.nanmean(after):.0f}", f"{np.nanpercentile(after, 99):.0f}", "/".join(ends),
        str(sum(outcome.failures.values())),
    ]  # fmt: skip


def sessions(
    requests: Annotated[int, typer.Option("--requests", help="Number of requests of each run.")] = 800,
    rate: Annotated[float, typer.Option("--rate", help="Requests per second.")] = 6.0,
    blocks: Annotated[
        int, typer.Option("--blocks", help="Number of KV blocks of each engine in the last lines.")
    ] = 2500,
) -> None:
    """Print a line for each way of picking and each event."""
    workload = PlannedWorkload(workload=(SESSIONS,), rate=rate, requests=requests)
    off, on = SessionSettings(), SessionSettings(together="on")
    rows = list[list[str]]()
    for event, faults in EVENTS.items():
        for way, pick, settings in (
            ("least loaded", "least_loaded", off),
            ("prefix-cache-scorer", "scheduled", off),
            ("--sessions", "least_loaded", on),
        ):
            rows.append(row(way, event, simulated(pick, settings, faults, workload, None)))
    for keep in ("none", "tools", "all"):
        settings = SessionSettings(together="on", keep=keep)
        outcome = simulated("least_loaded", settings, (), workload, blocks)
        rows.append(row(f"--session-keep {keep}", f"{blocks} blocks", outcome))
    headings = ["way", "event", "hit", "TTFT, ms", "P99", "TTFT after it", "P99", "moved/absent/failed", "failed"]
    show_table("sessions", headings, rows)


if __name__ == "__main__":
    run(sessions, "benchmarks.sessions")
