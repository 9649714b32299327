"""The planner in ``tercet sim``: its engines that do not run at first, its simulator, and its results.

It watches a simulated fleet in virtual time, changes roles, and starts and stops engines at a cost.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from tercet.decisions.planning import FleetPlan, Observed, ObservedEngine, PlanLimits, Policy, WantedPlan
from tercet.decisions.roles import WINDOW_S
from tercet.fleet.policy_views import SeenRequests, observed_engines
from tercet.protocol import BadRequest
from tercet.router.serve.service import Service
from tercet.settings.fleet_settings import Objectives
from tercet_lab.advice import ProfileCapacity
from tercet_lab.bench.simulated.experiment import Experiment
from tercet_lab.bench.simulated.scenario import (
    EngineGroup,
    FleetSpec,
    PlannedTraffic,
    SyntheticWorkload,
    names_of,
    requests_of,
)
from tercet_lab.bench.simulated.virtual_run import FleetSample, PaidTime, PlannedChange, PlannedRun
from tercet_lab.planner_settings import PlannerSettings
from tercet_lab.sim import EngineOptions, SimEngine, load_profile, options_from
from tercet_planner.planner import FleetChange, Planner, change_to
from tercet_planner.policies import FleetSimulator, load_policy

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
        spare: Sequence[str], service: Service, engines: Mapping[str, SimEngine], paid: PaidTime,
    ) -> None:  # fmt: skip
        self._policy, self._settings = policy, settings
        self._objectives, self._limits = objectives, limits
        self._fleet, self._engines, self._paid = service.fleet, engines, paid
        self._seen = service.remember(SeenRequests(settings.window_s, objectives, service.fleet.costs.clock))
        self._compared, self._sampled = (0, 0), (0, 0, 0)
        self._state: dict[str, State] = dict.fromkeys(engines, "serving")
        self._plans: list[PlannedChange] = []
        self._samples: list[FleetSample] = []
        self._decisions = 0
        self._plan_at = policy.pause_s(settings.interval_s) if isinstance(policy, Planner) else settings.interval_s
        self.cpu_s = 0.0
        self._fleet.costs.watch()
        self._fleet.knowledge.start_reports()
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
        policy, pause, observed = self._policy, self._settings.interval_s, self._observed(to_plan=True)
        self._plans = self._compared_with(observed.plan, observed.came)
        self._compared = (self._seen.ended, self._seen.met)
        if isinstance(policy, Planner):
            self._carry_out(policy.plan(observed))
            pause = policy.pause_s(pause)
        else:
            self._carry_out(policy(observed))
        self._plan_at += pause

    def _compared_with(self, present: FleetPlan, came: float | None) -> list[PlannedChange]:
        """Return the plans, the last one with the share that came, if it is the ``present`` one."""
        if not self._plans or self._plans[-1].plan != str(present):
            return self._plans
        return [*self._plans[:-1], msgspec.structs.replace(self._plans[-1], came=came)]

    def _observed(self, to_plan: bool) -> Observed:
        now, engines = self._now(), self._present()
        return Observed(
            now=now, since=0.0, plan=_counted(engines), engines=tuple(engines), objectives=self._objectives,
            arrivals=self._seen.arrivals(now, math.inf if to_plan else WINDOW_S), limits=self._limits,
            starting=sum(state == "starting" for state in self._state.values()), came=self._came() if to_plan else None,
        )  # fmt: skip

    def _came(self) -> float | None:
        """Return the share of requests within the objectives since the last plan; None if no request ended."""
        ended, met = self._seen.ended - self._compared[0], self._seen.met - self._compared[1]
        return met / ended if ended else None

    def _present(self) -> list[ObservedEngine]:
        """Return the engines that serve or start."""
        return [each for each in observed_engines(self._fleet) if self._state[each.name] in ("serving", "starting")]

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # ---- acting ----------------------------------------------------------------------------------------------

    def _carry_out(self, wanted: WantedPlan) -> None:
        change = change_to(wanted.plan, self._present())
        if not self._limits.allow(wanted.plan):
            change = FleetChange()
        for name, role in change.flips:
            self._fleet.member(name).role = role
        off = [name for name, state in self._state.items() if state == "off"]
        started = list(zip(off, change.starts, strict=False))
        for name, role in started:
            self._fleet.member(name).role = role
            self._state[name] = "starting"
            self._paid.begin(name, self._now())
            asyncio.get_running_loop().call_later(self._settings.start_s, partial(self._started, name))
        for name in change.stops:
            self._stop(name)
        done = len(change.flips), len(started), len(change.stops)
        expected = None if wanted.expected is None else wanted.expected.attainment
        self._plans.append(PlannedChange(self._now(), str(wanted.plan), *done, wanted.reason, expected))

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
        self._paid.end(name, self._now())
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
        return PlannedRun(
            plans=tuple(self._compared_with(_counted(self._present()), self._came())),
            samples=tuple(self._samples),
            engine_seconds=self._paid.seconds(end),
            decisions=self._decisions,
            simulations=self._policy.simulations if isinstance(self._policy, Planner) else 0,
            simulated_requests=simulated_requests,
        )


def _counted(engines: Sequence[ObservedEngine]) -> FleetPlan:
    return FleetPlan(sum(each.role == "prefill" for each in engines), sum(each.role == "decode" for each in engines))


class SimulatedPlanning:
    """The planner of one run."""

    def __init__(self, experiment: Experiment) -> None:
        moving, fleet, seed = experiment.settings, experiment.fleet, experiment.seed
        settings, options = moving.planning, options_from(EngineOptions(), fleet.options)
        self._settings, self._objectives = settings, moving.objectives
        self._limits = _limits(fleet.spec, settings)
        self._spare = max(0, self._limits.most - len(names_of(fleet.spec)))
        self._simulator = FleetSimulator(
            experiment.program, fleet.profile, options, moving.objectives, experiment.args, seed
        )
        if isinstance(experiment.work, SyntheticWorkload):
            trace = requests_of(experiment.work, seed)
        else:
            trace = PlannedTraffic(experiment.work, seed).arrivals()
        capacity = ProfileCapacity(load_profile(fleet.profile), options)
        self._policy = load_policy(experiment.policy, settings, self._simulator, capacity, trace)
        self._planner: VirtualPlanner | None = None

    def with_spare(self, spec: FleetSpec) -> FleetSpec:
        """Return the fleet with the engines that the planner may start added."""
        if not self._spare:
            return spec
        return msgspec.structs.replace(spec, engines=(*spec.engines, EngineGroup(role="decode", count=self._spare)))

    def companion(
        self, service: Service, engines: Mapping[str, SimEngine], paid: PaidTime
    ) -> Coroutine[Any, Any, None]:
        """Return the planner's task for a run; see :data:`~tercet_lab.bench.simulated.virtual_run.Companion`."""
        spare = list(engines)[len(engines) - self._spare :]
        self._planner = VirtualPlanner(
            self._policy, self._settings, self._objectives, self._limits, spare, service, engines, paid
        )
        return self._planner.run()

    def result(self, end: float) -> PlannedRun:
        """Return the planner's changes and samples of a run that ended at the second ``end``."""
        if self._planner is None:
            return PlannedRun()
        return self._planner.result(end, self._simulator.requests)

    def said(self, metrics: Mapping[str, float | int | None]) -> list[str]:
        """Return lines for the terminal: each change, and the cost of the run and of the planner."""
        if self._planner is None:
            return []
        found = self._planner.result(0.0)
        lines = [
            f"{each.at:.1f} s: {each.plan}: {each.flipped} flipped, {each.started} started, {each.stopped} stopped: "
            f"{each.reason}"
            for each in found.changes
        ]
        hours, good = metrics["engine_hours"], metrics["goodput_per_engine_hour"]
        lines.append(
            f"planner: {len(found.changes)} changes, {hours:.2f} engine-hours, {good:.0f} requests within the SLO per "
            f"engine-hour; {found.decisions} decisions with {found.simulations} simulations of "
            f"{self._simulator.requests} requests took {self._planner.cpu_s:.1f} s of CPU"
        )
        return lines


def _limits(spec: FleetSpec, settings: PlannerSettings) -> PlanLimits:
    if any(group.role == "both" or group.profile or group.options or group.host for group in spec.engines):
        raise BadRequest("fleet: a planner needs equal engines of the roles prefill and decode, such as 2P2D", "fleet")
    engines = len(names_of(spec))
    fewest = min(engines, settings.most or engines) if settings.fewest is None else settings.fewest
    limits = PlanLimits(fewest, max(engines, fewest) if settings.most is None else settings.most)
    if not limits.fewest <= engines <= limits.most:
        raise BadRequest(
            f"fleet: has {engines} engines; planner-min-engines and planner-max-engines allow {limits.fewest} to "
            f"{limits.most}", "fleet",
        )  # fmt: skip
    return limits
