"""The cost of the web page in a router: CPU time and bytes of its frames, for a large fleet with constant changes.

``python -m benchmarks.page_cost`` measures the production of frames in this process. Before each frame, the reports of
all engines change, running requests generate tokens, and others begin and end. No viewer is served: all viewers get the
same bytes.
"""

from __future__ import annotations

import argparse
import random
import time
from contextlib import AbstractContextManager
from typing import cast

from tercet.fleet import EngineFleet, Member, RunningSequence, Trace
from tercet.protocol import Engine, EngineLoad, Request
from tercet.protocol.spans import TraceEvent
from tercet.router.page.records import ReportedLoads, encoded
from tercet.router.page.watch import INTERVAL_S, LARGE, LARGE_INTERVAL_S, FleetWatch, about_service
from tercet.router.serve.service import Service
from tercet.settings import RetryBudget
from tercet_lab.bench.simulated.moving_fleet import SimulatedMetrics


class BusyFleet:
    """A service of ``engines`` engines and ``running`` sequences; each frame, ``ended`` of them are replaced."""

    def __init__(self, engines: int, running: int, ended: int) -> None:
        self._random, self._ended, self._number = random.Random(1), ended, 0
        self._now = self._told = 0.0
        names = [f"engine-{number}" for number in range(engines)]
        nobody = cast("Engine", None)  # no verb is called
        members = [Member(name, f"http://{name}", "both", nobody) for name in names]
        self._names = names
        self.fleet = EngineFleet(members, clock=lambda: self._now)
        self.service = Service(self.fleet, "data_parallel", {}, SimulatedMetrics())
        self._running = [self._entered() for _ in range(running)]
        service = self.service
        self.watch = FleetWatch(service, ReportedLoads(self.fleet), lambda: about_service(service, "m"))

    def _entered(self) -> tuple[RunningSequence, Trace, AbstractContextManager[None]]:
        self._number += 1
        request = Request(seq_id=f"cmpl-{self._number}", prompt=(1,) * 500)
        sequence, trace = RunningSequence(request, "data_parallel", RetryBudget(), self._now), Trace()
        context = self.service.sequences.running(sequence)
        context.__enter__()
        for observer in self.service.observers:
            observer.begins(sequence, trace)
        return sequence, trace, context

    def live(self, seconds: float) -> float:
        """Change everything, as in ``seconds`` of a router. Return the CPU seconds of notifications for the page."""
        self._now += seconds
        chance = self._random.random
        for name in self._names:
            load = EngineLoad(
                waiting=int(9 * chance()), running=int(64 * chance()), kv_usage=chance(), step_time=chance()
            )
            self.fleet.report(name, load)
        for sequence, _, _ in self._running:
            sequence.tokens.extend(range(20))
        for _ in range(self._ended):
            sequence, trace, context = self._running.pop(self._random.randrange(len(self._running)))
            for verb in ("prep_recv", "remote_send", "start_generate"):
                trace.events.append(TraceEvent(verb, self._random.choice(self._names), 0.01, end=500))
            trace.program, trace.ttft, trace.tpot, sequence.ended = "data_parallel", chance(), chance() / 10, True
            context.__exit__(None, None, None)
            begun = time.process_time()
            self.watch.ends(sequence, trace, "served")
            self._told += time.process_time() - begun
            self._running.append(self._entered())
        told, self._told = self._told, 0.0
        return told


def main() -> None:
    """Measure and print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--running", type=int, default=2000)
    parser.add_argument("--ended", type=int, default=200, help="number of requests that end before each frame")
    parser.add_argument("--frames", type=int, default=60)
    given = parser.parse_args()
    interval = LARGE_INTERVAL_S if given.engines > LARGE else INTERVAL_S
    busy, cpu, size = BusyFleet(given.engines, given.running, given.ended), 0.0, 0
    busy.watch.frame()
    for _ in range(given.frames):
        cpu += busy.live(interval)
        begun = time.process_time()
        size += len(encoded([busy.watch.frame()]))
        cpu += time.process_time() - begun
    begun = time.process_time()
    whole = len(encoded([busy.watch.whole()]))
    whole_ms = (time.process_time() - begun) * 1e3
    seconds = given.frames * interval
    load = (
        f"{given.engines} engines, {given.running} running requests, {given.ended / interval:.0f} that end each second"
    )
    print(
        f"{load}: {cpu / seconds:.2%} of a core, {size / seconds / 1e3:.0f} kB/s to a viewer; a new one gets "
        f"{whole / 1e3:.0f} kB once ({whole_ms:.1f} ms)"
    )


if __name__ == "__main__":
    main()
