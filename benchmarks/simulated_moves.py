"""The pauses of moves between two simulated engines; `python -m benchmarks.migration` measures them on real engines.

    python benchmarks/simulated_moves.py [--profile smollm2-135m-cpu] [--lengths 256,1024,1900]

A sequence is moved after its 30th token: live, and by recomputing all its KV. The pause is the longest gap between two
tokens from then on, minus the median gap before.
"""

from __future__ import annotations

import argparse
import asyncio
from itertools import pairwise
from statistics import median

from tercet.decisions.migration import migrate
from tercet.fleet import EngineFleet, FleetView, Member, RunningSequence
from tercet.fleet.fleet_view import Trace
from tercet.fleet.sequences import MovingSequence
from tercet.protocol import Output, Request
from tercet.settings import MoveSettings, RetryBudget
from tercet_lab.sim import EngineOptions, Network, SimEngine, load_profile, run_virtual

BEFORE, AFTER = 30, 70
Measured = tuple[float, float, int]


async def moved(profile: str, length: int, live: bool) -> Measured:
    """Move a sequence once. Return the pause and the median gap before it, in seconds, and the bytes of KV sent."""
    loop, network = asyncio.get_running_loop(), Network()
    options = EngineOptions(stream_every=1, max_num_batched_tokens=512)
    engines = [SimEngine(name, load_profile(profile), network, options) for name in ("source", "destination")]
    fleet = EngineFleet([Member(each.name, "", "both", each) for each in engines], clock=loop.time)
    params = {"max_tokens": BEFORE + AFTER}
    request = Request(seq_id="s", prompt=tuple(range(length)), sampling_params=params)
    sequence, times = RunningSequence(request, "", RetryBudget(), 0.0), list[float]()
    with FleetView(fleet, Trace(), sequence.generates).engine("source") as source:
        enough = asyncio.Event()

        def note(output: Output) -> None:
            times.extend([loop.time()] * len(output.token_ids))
            if len(times) >= BEFORE:
                enough.set()

        reading = asyncio.create_task(source.start_generate(request).run(note))
        await enough.wait()
        moving = MovingSequence(sequence)
        to = fleet.destination(moving.generation, "destination")
        if live:
            await migrate(moving, to, MoveSettings(), [])
        else:
            await moving.cut_over(to, 0)
        await reading
    gaps = [after - before for before, after in pairwise(times)]
    step = median(gaps[: BEFORE - 1])
    return max(gaps[BEFORE - 1 :]) - step, step, network.bytes_sent


def main() -> None:
    """Print a line for each length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="smollm2-135m-cpu", help="profile of both engines")
    parser.add_argument(
        "--lengths", default="256,1024,1900", help="lengths of the prompts in tokens, separated by commas"
    )
    given = parser.parse_args()
    for length in (int(each) for each in given.lengths.split(",")):
        pause, step, sent = run_virtual(moved(given.profile, length, live=True))
        recomputed, _, _ = run_virtual(moved(given.profile, length, live=False))
        live = f"live {pause * 1e3:.0f} ms ({pause / step:.1f} steps), {sent / 1e6:.1f} MB"
        print(f"{length} tokens: {live}; recompute {recomputed * 1e3:.0f} ms ({recomputed / step:.1f} steps)")


if __name__ == "__main__":
    main()
