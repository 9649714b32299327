"""A planner in virtual time: it watches a simulated fleet, changes roles, and starts and stops engines at a cost."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

from tercet.decisions.planning import FleetPlan, Observed, PlanLimits, Policy, WantedPlan
from tercet.decisions.roles import WINDOW_S, ObservedEngine
from tercet.fleet.policy_views import SeenRequests, observed_engines
from tercet.protocol import Role
from tercet.router.serve.service import Service
from tercet.settings.role_settings import Objectives
from tercet_lab.bench.simulated.moving_fleet import MoveCounts
from tercet_lab.bench.simulated.planned_run import FleetSample, PlannedChange, PlannedRun
from tercet_lab.planning.acting import change_to
from tercet_lab.planning.planner import Planner
from tercet_lab.planning.planner_settings import PlannerSettings
from tercet_lab.sim import SimEngine

GUARD_S = 0.5
SAMPLE_EVERY = 2
"""Looks of the guard per sample of the timeline: one sample is one second."""
State = Literal["serving", "starting", "stopping", "off"]


class VirtualPlanner:
    """A planner that looks at a simulated run at intervals, and carries out the changes that its policy wants.

    The engines named in ``spare`` do not run at first. If ``policy`` is a :class:`Planner`, its guard looks in between.
    ``cpu_s`` is the processor time of decisions in seconds.
    """

    def __init__(
        self, policy: Policy | Planner, settings: PlannerSettings, objectives: Objectives, limits: PlanLimits,
        spare: Sequence[str], service: Service[MoveCounts], engines: Mapping[str, SimEngine],
    ) -> None:  # fmt: skip
        self._policy, self._settings = policy, settings
        self._objectives, self._limits = objectives, limits
        self._fleet, self._engines = service.fleet, engines
        self._seen = service.remember(SeenRequests(settings.window_s, objectives, service.fleet.costs.clock))
        self._compared, self._sampled = (0, 0), (0, 0, 0)
        self._state: dict[str, State] = dict.fromkeys(engines, "serving")
        self._began = dict.fromkeys(engines, 0.0)
        self._changes: list[PlannedChange] = []
        self._samples: list[FleetSample] = []
        self._engine_seconds = 0.0
        self._decisions = 0
        self._plan_at = policy.pause_s(settings.interval_s) if isinstance(policy, Planner) else settings.interval_s
        self.cpu_s = 0.0
        self._fleet.costs.watch()
        self._fleet.knowledge.needed()
        for name in spare:
            self._switch_off(name)

    # ---- watching --------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Look until cancelled: the guard often, the plan at its interval."""
        for looks in itertools.count():
            self._look()
            if looks and looks % SAMPLE_EVERY == 0:
                self._sample()
            await asyncio.sleep(GUARD_S)

    def _look(self) -> None:
        for name, engine in self._engines.items():
            if self._state[name] != "off":
                self._fleet.report(name, engine.load())
            if self._state[name] == "stopping" and not self._fleet.member(name).in_flight:
                self._switch_off(name)
        began = time.process_time()
        if isinstance(self._policy, Planner):
            found = self._policy.guard(self._observed(to_plan=False))
            if found is not None:
                self._carry_out(found)
        if self._now() >= self._plan_at:
            self._plan()
        self.cpu_s += time.process_time() - began

    def _plan(self) -> None:
        self._decisions += 1
        policy, pause = self._policy, self._settings.interval_s
        if isinstance(policy, Planner):
            self._carry_out(policy.plan(self._observed(to_plan=True)))
            pause = policy.pause_s(pause)
        else:
            self._carry_out(policy(self._observed(to_plan=True)))
        self._plan_at += pause

    def _observed(self, to_plan: bool) -> Observed:
        now, engines = self._now(), self._present()
        return Observed(
            now=now,
            since=0.0,
            plan=_counted(engines),
            arrivals=self._seen.arrivals(now, math.inf if to_plan else WINDOW_S),
            engines=tuple(engines),
            objectives=self._objectives,
            limits=self._limits,
            starting=sum(state == "starting" for state in self._state.values()),
            came=self._came() if to_plan else None,
        )

    def _came(self) -> float | None:
        """Return the share of requests within the objectives since the last plan; None if no request ended."""
        before, self._compared = self._compared, (self._seen.ended, self._seen.met)
        ended, met = self._seen.ended - before[0], self._seen.met - before[1]
        return met / ended if ended else None

    def _present(self) -> list[ObservedEngine]:
        """Return the engines that serve or start."""
        return [each for each in observed_engines(self._fleet) if self._state[each.name] in ("serving", "starting")]

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # ---- acting ----------------------------------------------------------------------------------------------

    def _carry_out(self, wanted: WantedPlan) -> None:
        present = self._present()
        change = change_to(wanted.plan, present)
        if not change or not self._limits.allow(wanted.plan):
            return
        for name, role in change.flips:
            self._fleet.member(name).role = role
        off = [name for name, state in self._state.items() if state == "off"]
        started = list(zip(off, change.starts, strict=False))
        for name, role in started:
            self._start(name, role)
        for name in change.stops:
            self._stop(name)
        self._changes.append(PlannedChange(self._now(), str(wanted.plan), len(change.flips), len(started),
                                           len(change.stops), wanted.reason))  # fmt: skip

    def _start(self, name: str, role: Role) -> None:
        self._fleet.member(name).role = role
        self._state[name], self._began[name] = "starting", self._now()
        asyncio.get_running_loop().call_later(self._settings.start_s, partial(self._started, name))

    def _started(self, name: str) -> None:
        if self._state[name] == "starting":
            self._state[name] = "serving"
            self._engines[name].recover()
            self._fleet.member(name).reachable = True
            self._fleet.drain(name, False)

    def _stop(self, name: str) -> None:
        """Drain the engine, to switch it off when it is empty; an engine that still starts is switched off at once."""
        if self._state[name] == "starting":
            self._switch_off(name)
            return
        self._state[name] = "stopping"
        self._fleet.drain(name)

    def _switch_off(self, name: str) -> None:
        self._engine_seconds += self._now() - self._began[name]
        self._state[name] = "off"
        self._fleet.drain(name)
        self._fleet.member(name).reachable = False
        if not self._engines[name].down:
            self._engines[name].fail()

    # ---- results ---------------------------------------------------------------------------------------------

    def _sample(self) -> None:
        serving = [each for each in self._present() if self._state[each.name] == "serving"]
        plan = _counted(serving)
        before, self._sampled = self._sampled, (self._seen.arrived, self._seen.ended, self._seen.met)
        arrived, ended, met = (now - then for now, then in zip(self._sampled, before, strict=True))
        self._samples.append(
            FleetSample(
                self._now(),
                plan.prefill,
                plan.decode,
                sum(state == "starting" for state in self._state.values()),
                arrived / (SAMPLE_EVERY * GUARD_S),
                sum(each.waiting_s for each in serving),
                sum(each.running for each in serving),
                ended,
                met,
            )
        )

    def result(self, end: float, simulated_requests: int = 0) -> PlannedRun:
        """Return the changes, samples and costs of a run that ended at the second ``end``."""
        on = sum(end - self._began[name] for name, state in self._state.items() if state != "off")
        return PlannedRun(
            changes=tuple(self._changes),
            samples=tuple(self._samples),
            engine_seconds=self._engine_seconds + on,
            decisions=self._decisions,
            simulations=self._policy.simulations if isinstance(self._policy, Planner) else 0,
            simulated_requests=simulated_requests,
        )


def _counted(engines: Sequence[ObservedEngine]) -> FleetPlan:
    return FleetPlan(sum(each.role == "prefill" for each in engines), sum(each.role == "decode" for each in engines))
