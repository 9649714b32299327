"""The view of a fleet from ``GET /tercet/v1/traffic``, combined from the answers of a router's processes."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

import msgspec

from tercet.decisions.planning import FleetPlan, Observed, ObservedRequest, PlanLimits
from tercet.decisions.roles import WINDOW_S, ObservedEngine
from tercet.protocol import EngineUnreachable
from tercet.protocol.wire import UNREADABLE
from tercet.settings.role_settings import Objectives
from tercet_lab.sim.step_times import StepModel

LOOK_S = 1.0
"""Seconds between two looks of the guard."""
ENOUGH_FOR_GUARD = 400
"""Number of arrivals that are enough for the guard: their deviation by chance is small."""
FEWEST_STEPS = 8
"""Step times that engines must have reported before they correct the profile."""
MOST_STEPS = 200


class TrafficEngine(msgspec.Struct, frozen=True):
    """One engine in the answer; :class:`~tercet.decisions.roles.ObservedEngine` describes the fields."""

    name: str
    role: Any
    able: bool
    waiting_s: float
    busy_s: float
    running: int
    queued: int
    contexts: int
    step_s: float | None
    kv_usage: float
    draining: bool

    def observed(self) -> ObservedEngine:
        """Return the engine as policies see it."""
        fields = msgspec.structs.asdict(self)
        del fields["draining"]
        return ObservedEngine(**fields)


class ReportedObjectives(msgspec.Struct, frozen=True):
    """The router's objectives (times in seconds), and the numbers of requests that ended and that met them."""

    ttft: float | None
    tpot: float | None
    share: float
    requests: int
    met: int


class TrafficReport(msgspec.Struct, frozen=True):
    """The answer of one process of a router to ``GET /tercet/v1/traffic``; its times are of that process's clock."""

    pid: int
    processes: int
    now: float
    since: float
    objectives: ReportedObjectives
    program: str | None
    args: dict[str, str]
    arrivals: list[tuple[float, int, int, bool, tuple[int, ...], int, bool | None]]
    engines: list[TrafficEngine]


def read_traffic(answer: Any) -> TrafficReport:
    """Return a router's answer as a report; raise :class:`~tercet.protocol.EngineUnreachable` for another shape."""
    try:
        return msgspec.convert(answer, TrafficReport)
    except UNREADABLE as error:
        raise EngineUnreachable(f"no router of this version answers there: {error}", "url") from error


class TrafficView:
    """The reports of a router's processes, combined; times are by the clock of the process that answered last.

    Processes of one machine share a clock. The process that accepts the connection answers: until each has answered
    once, the requests of the processes that have answered represent those of the others.
    """

    def __init__(self) -> None:
        self._reports: dict[int, TrafficReport] = {}
        self._compared: tuple[int, int] | None = None
        self._ratios: list[float] = []

    def heard(self, report: TrafficReport) -> None:
        """Store the report of one process in place of its earlier one; drop the oldest if there are too many."""
        self._reports.pop(report.pid, None)
        self._reports[report.pid] = report
        while len(self._reports) > max(1, report.processes):
            del self._reports[next(iter(self._reports))]

    @property
    def newest(self) -> TrafficReport:
        """The last report; there must be at least one."""
        return self._reports[next(reversed(self._reports))]

    def observed(self, limits: PlanLimits | None = None, to_plan: bool = True) -> Observed:
        """Return the fleet as policies see it; without ``limits``, the number of engines is fixed.

        Without ``to_plan``, the view is for the guard: ``arrivals`` are those of the last ``WINDOW_S`` seconds, and
        ``came`` is None.
        """
        report = self.newest
        engines = tuple(each.observed() for each in report.engines if not each.draining)
        plan = FleetPlan(
            sum(each.role == "prefill" for each in engines), sum(each.role == "decode" for each in engines)
        )
        wanted = report.objectives
        return Observed(
            now=report.now,
            since=max(each.since for each in self._reports.values()),
            plan=plan,
            arrivals=self._arrivals(math.inf if to_plan else WINDOW_S),
            engines=engines,
            objectives=Objectives(ttft=wanted.ttft, tpot=wanted.tpot, share=wanted.share),
            limits=limits or PlanLimits(max(2, plan.engines), max(2, plan.engines)),
            came=self._came() if to_plan else None,
        )

    def _arrivals(self, newest_s: float) -> tuple[ObservedRequest, ...]:
        now = self.newest.now
        found = sorted((ObservedRequest(*each) for report in self._reports.values() for each in report.arrivals
                        if now - each[0] <= newest_s), key=lambda each: each.at)  # fmt: skip
        silent = self.newest.processes - len(self._reports)
        if silent <= 0 or not found:
            return tuple(found)
        # The other processes are assumed to have similar requests: each request is repeated to represent them.
        copies = self.newest.processes / len(self._reports)
        return tuple(each for index, each in enumerate(found)
                     for _ in range(int((index + 1) * copies) - int(index * copies)))  # fmt: skip

    def _came(self) -> float | None:
        now = self.newest.objectives
        before, self._compared = self._compared, (now.requests, now.met)
        ended = 0 if before is None else now.requests - before[0]
        return (now.met - before[1]) / ended if before is not None and ended > 0 else None

    def decode_scale(self, steps: StepModel) -> float:
        """Return the factor by which measured decode steps take longer than in the profile; 1 with too few of them."""
        for each in self.newest.engines:
            if each.running and each.step_s and not each.waiting_s:
                predicted = steps.step(0, 0.0, each.running, each.contexts)
                self._ratios.append(each.step_s / predicted)
        del self._ratios[:-MOST_STEPS]
        return median(self._ratios) if len(self._ratios) >= FEWEST_STEPS else 1.0


def guarded_s(report: TrafficReport) -> float:
    """Return the seconds of arrivals to ask for at the guard's next look: fewer if many came, since it looks often."""
    came = sum(report.now - each[0] <= LOOK_S for each in report.arrivals)
    return min(WINDOW_S, max(LOOK_S, LOOK_S * ENOUGH_FOR_GUARD / max(1, came)))


def rounded(scale: float) -> float:
    """Return ``scale`` rounded to 0.05, and at least 0.05, so that simulations of one load do not differ by noise."""
    return max(0.05, round(scale * 20) / 20)
