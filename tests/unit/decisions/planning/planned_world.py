"""A fleet in formulas, for a planner to plan: traffic that arrives by chance, and engines of a known capacity."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from tercet.decisions.planning import (
    EngineDemand,
    Expected,
    FleetPlan,
    Observed,
    ObservedRequest,
    PlanLimits,
    WantedPlan,
    demand_of,
)
from tercet.settings.fleet_settings import Objectives
from tercet_planner.forecast import Forecast
from tercet_planner.planner import Planner

OBJECTIVES = Objectives(ttft=1.0, tpot=0.025, share=0.99)
WINDOW_S, INTERVAL_S = 180.0, 15.0


@dataclass(frozen=True)
class Traffic:
    """Requests per second, and their mean lengths in tokens."""

    rate: float
    prompt: int = 1000
    output: int = 100


class Engine:
    """5,000 prompt tokens per second; 10 decodes at any TPOT."""

    def prefill_s(self, tokens: int) -> float:
        return tokens / 5_000

    def decodes(self, context: float, tpot: float) -> int:
        return 10


def evaluated(plan: FleetPlan, forecast: Forecast) -> Expected:
    """All is well up to 90% of what the busier role can do; beyond it, as much more is late as comes."""
    attainment = attained(plan, demand_of(forecast.sample, forecast.rate, Engine(), OBJECTIVES))
    return Expected(attainment, 0.1 if attainment == 1 else 5.0, forecast.rate)


def attained(plan: FleetPlan, demand: EngineDemand) -> float:
    share = demand.share(plan)
    return 1.0 if share <= 0.9 else 0.9 / share * 0.9


def _at(arrival: ObservedRequest) -> float:
    return arrival.at


class PlannedWorld:
    """Advances in the planner's intervals; a plan is carried out at once. ``changes`` have their time."""

    def __init__(self, plan: FleetPlan, limits: PlanLimits, planner: Planner | None = None, seed: int = 0) -> None:
        self.planner = planner or Planner(evaluated, Engine())
        self.plan, self.limits = plan, limits
        self.now = 0.0
        self.changes: list[tuple[float, WantedPlan]] = []
        self.answers: list[WantedPlan] = []
        self._arrivals: list[ObservedRequest] = []
        self._chance = random.Random(seed)
        self.demands: list[tuple[int, EngineDemand]] = []
        self._served = plan
        self._met = self._engine_s = 0.0

    @property
    def share(self) -> float:
        """Of the requests, those within the objectives; an engine that starts serves from the next interval on."""
        return self._met / max(1, len(self._arrivals))

    def fixed(self, plan: FleetPlan) -> tuple[float, float]:
        """Share and requests per engine-hour of a fleet that does not change, under the same requests."""
        met = sum(count * attained(plan, demand) for count, demand in self.demands)
        return met / len(self._arrivals), met / (plan.engines * len(self.demands) * INTERVAL_S / 3600)

    @property
    def per_engine_hour(self) -> float:
        return self._met / (self._engine_s / 3600)

    def run(self, seconds: float, traffic: Callable[[float], Traffic] | Traffic, came: float | None = 1.0) -> None:
        end = self.now + seconds
        while self.now < end:
            before = len(self._arrivals)
            self._arrive(traffic)
            self.now += INTERVAL_S
            self._serve(self._arrivals[before:])
            seen = tuple(self._arrivals[bisect_right(self._arrivals, self.now - WINDOW_S, key=_at) :])
            observed = Observed(self.now, 0.0, self.plan, seen, (), OBJECTIVES, self.limits, came=came)
            wanted = self.planner.plan(observed)
            self.answers.append(wanted)
            if wanted.plan != self.plan:
                self.changes.append((self.now, wanted))
                self.plan = wanted.plan

    def _serve(self, new: list[ObservedRequest]) -> None:
        served = FleetPlan(min(self.plan.prefill, self._served.prefill), min(self.plan.decode, self._served.decode))
        demand = demand_of(new, len(new) / INTERVAL_S, Engine(), OBJECTIVES)
        self.demands.append((len(new), demand))
        self._met += len(new) * attained(served, demand)
        self._engine_s += self.plan.engines * INTERVAL_S
        self._served = self.plan

    def _arrive(self, traffic: Callable[[float], Traffic] | Traffic) -> None:
        at, end = self.now, self.now + INTERVAL_S
        while True:
            now = traffic if isinstance(traffic, Traffic) else traffic(at)
            if now.rate <= 0:
                return
            at += self._chance.expovariate(now.rate)
            if at >= end:
                return
            prompt, output = (max(1, round(self._chance.gauss(mean, mean / 5))) for mean in (now.prompt, now.output))
            self._arrivals.append(ObservedRequest(at, prompt, output, True))
