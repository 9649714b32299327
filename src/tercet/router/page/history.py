"""The last fifteen minutes of a router: a point every five seconds, kept also while no page is open.

Points end at whole multiples of five seconds, so that those of several workers belong together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from tercet.fleet import RunningSequence, Trace
from tercet.router.observe.request_traces import SharedTraces
from tercet.router.page.records import RUNNING, WAITING, FleetPoint, LoadSource, ProgramCounts
from tercet.router.page.watch import added, refusals_of
from tercet.router.serve.service import Outcome, Service

SECONDS, KEPT = 5.0, 180
POINTS = msgspec.json.Decoder(list[FleetPoint])


class History:
    """The points of this process. ``unix_time`` returns the time now; :meth:`begin` starts a timer of the event loop.

    A point costs one pass over the running sequences; a request costs its share of the counts.
    """

    def __init__(self, service: Service, loads: LoadSource, unix_time: Callable[[], float]) -> None:
        self._service = service
        self._loads = loads
        self._time = unix_time
        self._counts = ProgramCounts(service.sequences)
        self._failed = 0
        self._refused = refusals_of(service.metrics)
        self._last = unix_time()
        self._points: deque[FleetPoint] = deque(maxlen=KEPT)

    def begin(self) -> None:
        """Take points until the event loop ends."""
        self._service.observers.append(self)
        self._wait()

    def _wait(self) -> None:
        now = self._time()
        asyncio.get_running_loop().call_later(SECONDS - now % SECONDS, self._tick)

    def _tick(self) -> None:
        try:
            self.take()
        finally:
            self._wait()

    # ---- notices of the service ------------------------------------------------------------------------------

    def begins(self, sequence: RunningSequence, trace: Trace) -> None:
        """Nothing: a request counts when it ends, and its tokens when they are there."""

    def ends(self, sequence: RunningSequence, trace: Trace, outcome: Outcome) -> None:
        self._counts.ends(sequence, trace)
        self._failed += outcome == "failed"

    # ---- points ----------------------------------------------------------------------------------------------

    def take(self) -> None:
        """Add the point of the time since the last one."""
        now, refused = self._time(), refusals_of(self._service.metrics)
        table = self._loads.table(list(self._service.fleet.members))
        running, waiting = map(int, np.rint(np.nan_to_num(table[:, (RUNNING, WAITING)])).sum(axis=0))
        self._points.append(
            FleetPoint(
                round(now, 3), round(now - self._last, 3), running, waiting, self._counts.take(self._service.sequences),
                self._failed, refused - self._refused,
            )
        )  # fmt: skip
        self._last, self._failed, self._refused = now, 0, refused

    def points(self) -> list[FleetPoint]:
        return list(self._points)


# Points of the rates that commands show: of the last ten seconds.
RECENT = 2


class RecentRates(msgspec.Struct, frozen=True):
    """What a router did in the last ``seconds``: rates per second, and the median TTFT in seconds, None if unknown."""

    seconds: float
    requests: float
    tokens: float
    failures: float
    refusals: float
    ttft_p50: float | None


def rates_of(points: Sequence[FleetPoint]) -> RecentRates | None:
    """Return the rates of the last points; None without one."""
    last = points[-RECENT:]
    seconds = sum(point.seconds for point in last)
    if not seconds:
        return None
    programs = [program for point in last for program in point.programs.values()]
    times = [(program.ttft_p50, program.done) for program in programs if program.ttft_p50 is not None and program.done]
    requests = sum(done for _, done in times)
    ttft = sum(time * done for time, done in times) / requests / 1e3 if requests else None
    rates = (
        sum(program.done for program in programs), sum(program.tokens for program in programs),
        sum(point.failed for point in last), sum(point.refused for point in last),
    )  # fmt: skip
    done, tokens, failed, refused = (round(count / seconds, 3) for count in rates)
    return RecentRates(round(seconds, 3), done, tokens, failed, refused, None if ttft is None else round(ttft, 5))


async def recent_rates(traces: SharedTraces) -> RecentRates | None:
    """Return the rates of this router's processes together; None if this one keeps no history."""
    if traces.history is None:
        return None
    return rates_of(joined([traces.history(), *await traces.histories(POINTS)]))


def joined(workers: Sequence[Sequence[FleetPoint]]) -> list[FleetPoint]:
    """Return the points of several workers as those of one router, the oldest first.

    Engines report to every worker, so their load is not summed. A worker has one point for each time; a late one
    may fall into the next time, and counts there.
    """
    slots: dict[int, list[FleetPoint]] = {}
    for points in workers:
        for point in points:
            slots.setdefault(round(point.t / SECONDS), []).append(point)
    return [
        FleetPoint(
            max(point.t for point in found), max(point.seconds for point in found),
            max(point.running for point in found), max(point.waiting for point in found),
            added(found[0], found[1:]), sum(point.failed for point in found), sum(point.refused for point in found),
        )
        for _, found in sorted(slots.items())
    ][-KEPT:]  # fmt: skip
