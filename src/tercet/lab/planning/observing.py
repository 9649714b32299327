"""A fleet as a router describes it at ``GET /tercet/v1/traffic``, put together from the answers of its processes."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

import msgspec

from tercet.decisions.planning import FleetPlan, Observed, ObservedRequest, PlanLimits
from tercet.decisions.roles import ObservedEngine
from tercet.decisions.roles.observed import WINDOW_S
from tercet.lab.sim.step_times import StepModel
from tercet.protocol import EngineUnreachable
from tercet.protocol.wire import UNREADABLE
from tercet.settings.role_settings import Objectives

LOOK_S = 1.0
"""Seconds between two looks of the guard."""
ENOUGH_FOR_GUARD = 400
"""Arrivals in which chance is small enough for the guard."""
FEWEST_STEPS = 8
"""Step times of engines that must have been reported before a profile is corrected by them."""
MOST_STEPS = 200


class TrafficEngine(msgspec.Struct, frozen=True):
    """An engine of the answer; see :class:`~tercet.decisions.roles.ObservedEngine`."""

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
        """For a policy."""
        fields = msgspec.structs.asdict(self)
        del fields["draining"]
        return ObservedEngine(**fields)


class ReportedObjectives(msgspec.Struct, frozen=True):
    """The router's objectives, and the requests that ended and met them."""

    ttft: float | None
    tpot: float | None
    share: float
    requests: int
    met: int


class TrafficReport(msgspec.Struct, frozen=True):
    """One answer; see the route."""

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
    """Read a router's answer; raises :class:`~tercet.protocol.EngineUnreachable` for another shape."""
    try:
        return msgspec.convert(answer, TrafficReport)
    except UNREADABLE as error:
        raise EngineUnreachable(f"no router of this version answers there: {error}", "url") from error


class TrafficView:
    """What the processes of a router have said; times become those of the process that answered last.

    Processes of one machine share a clock. A router of several processes answers by whichever takes the connection:
    until each has answered once, the requests of those that have stand for all.
    """

    def __init__(self) -> None:
        self._reports: dict[int, TrafficReport] = {}
        self._compared: tuple[int, int] | None = None
        self._ratios: list[float] = []

    def heard(self, report: TrafficReport) -> None:
        """One process answered."""
        self._reports.pop(report.pid, None)
        self._reports[report.pid] = report
        while len(self._reports) > max(1, report.processes):
            del self._reports[next(iter(self._reports))]

    @property
    def newest(self) -> TrafficReport:
        """The last answer; there must have been one."""
        return self._reports[next(reversed(self._reports))]

    def observed(self, limits: PlanLimits | None = None, to_plan: bool = True) -> Observed:
        """For a policy; without ``limits`` the engines are as many as there are.

        If it is not ``to_plan``, but for the guard, the arrivals are those of the seconds that the guard looks at.
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
        # The others are taken to have the same: each request stands for its share of theirs.
        copies = self.newest.processes / len(self._reports)
        return tuple(each for index, each in enumerate(found)
                     for _ in range(int((index + 1) * copies) - int(index * copies)))  # fmt: skip

    def _came(self) -> float | None:
        now = self.newest.objectives
        before, self._compared = self._compared, (now.requests, now.met)
        ended = 0 if before is None else now.requests - before[0]
        return (now.met - before[1]) / ended if before is not None and ended > 0 else None

    def decode_scale(self, steps: StepModel) -> float:
        """By what factor engines' steps of decodes take longer than in a profile; 1 while too few are known."""
        for each in self.newest.engines:
            if each.running and each.step_s and not each.waiting_s:
                predicted = steps.step(0, 0.0, each.running, each.contexts)
                self._ratios.append(each.step_s / predicted)
        del self._ratios[:-MOST_STEPS]
        return median(self._ratios) if len(self._ratios) >= FEWEST_STEPS else 1.0


def guarded_s(report: TrafficReport) -> float:
    """Seconds of arrivals to ask for at the guard's next look: fewer where many come, since it looks often."""
    came = sum(report.now - each[0] <= LOOK_S for each in report.arrivals)
    return min(WINDOW_S, max(LOOK_S, LOOK_S * ENOUGH_FOR_GUARD / max(1, came)))


def rounded(scale: float) -> float:
    """To 5%: simulations of one load should not differ for noise."""
    return max(0.05, round(scale * 20) / 20)
