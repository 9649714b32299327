"""A planner for a live router's fleet: it asks the router for its traffic, plans in a thread, and acts or advises.

Its last plans are reported to the router, and Prometheus gets its metrics.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol
from urllib.parse import quote

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from tercet.aio.tasks import keep_running, run_in_thread
from tercet.cli.which_fleet import is_at
from tercet.cluster.detached_fleets import running_fleets
from tercet.cluster.scaling.decide import ScaleCall
from tercet.cluster.scaling.kubernetes import KubernetesFleet
from tercet.cluster.scaling.scaler import scale_fleet, scaling_of
from tercet.decisions.planning import (
    FleetPlan,
    Observed,
    ObservedEngine,
    ObservedRequest,
    PlanLimits,
    PlannerReport,
    Policy,
    ReportedPlan,
    WantedPlan,
)
from tercet.decisions.roles import WINDOW_S
from tercet.fleet.kubernetes_api import from_kubeconfig, in_cluster
from tercet.logs import log_to_stderr
from tercet.protocol import BadRequest, EngineUnreachable, Role, TercetError
from tercet.protocol.wire import UNREADABLE
from tercet.settings.fleet_settings import Objectives
from tercet.settings.process_settings import KeyFile
from tercet.wire.client.bounded_answers import ask_router
from tercet_lab.advice import ProfileCapacity
from tercet_lab.sim import EngineOptions, load_profile
from tercet_lab.sim.step_times import StepModel
from tercet_planner.forecast import Forecast
from tercet_planner.planner import FleetChange, Planner, change_to
from tercet_planner.planner_settings import PlannerConfig
from tercet_planner.policies import FleetSimulator, NamedProgram, ProgramTrials, load_policy

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


DRAIN_S = 60.0
"""Most seconds to drain an engine that is given up; no other change is made meanwhile."""
AT_ONCE = 16
"""Most changes of roles that are requested at the same time."""

Ask = Callable[[str, str, Any], Awaitable[Any]]
"""A function from method, path and body of a request to the router's answer."""


@dataclass(frozen=True)
class ProvisioningState:
    """The state of the last change: its ``number``, True while it is ``under_way``, and the cause if it failed."""

    number: int = 0
    under_way: bool = False
    failure: str = ""


class EngineProvisioner(Protocol):
    """An executor that changes a fleet to a plan; ``resizes`` is True if it can start and stop engines."""

    resizes: bool

    async def state(self) -> ProvisioningState:
        """Return the state of the last change; a planner waits while it is under way."""
        ...

    async def change(self, plan: FleetPlan, change: FleetChange) -> None:
        """Begin ``change``, which gives ``plan``. Raises :class:`~tercet.protocol.TercetError` if it cannot begin."""
        ...


class RoleProvisioner:
    """An executor that only changes roles, by the router; implements :class:`EngineProvisioner`."""

    resizes = False

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def state(self) -> ProvisioningState:
        """Return a state that is never under way: roles change at once."""
        return ProvisioningState()

    async def change(self, plan: FleetPlan, change: FleetChange) -> None:
        """Send a request for each engine, several at a time; try all of them, then raise the first error."""
        if change.starts or change.stops:
            raise BadRequest(f"act: {plan} needs engines that start or stop; plan with --act scale", "act")
        turns = asyncio.Semaphore(AT_ONCE)

        async def flip(name: str, role: Role) -> None:
            async with turns:
                await self._ask("PUT", f"/engines/{quote(name, safe='')}/role", {"role": role})

        found = await asyncio.gather(*(flip(*each) for each in change.flips), return_exceptions=True)
        failed = next((each for each in found if each is not None), None)
        if failed is not None:
            raise failed


class ScaleProvisioner:
    """An executor that asks the owner of a fleet, ``tercet up`` here or on Ray, to scale it.

    It implements :class:`EngineProvisioner`.
    """

    resizes = True

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    async def state(self) -> ProvisioningState:
        """Return the state of the last change, as the owner reports it."""
        record = await scaling_of(self._socket)
        return ProvisioningState(record.number, record.state == "under_way", record.why)

    async def change(self, plan: FleetPlan, change: FleetChange) -> None:
        """Ask the owner to scale; it chooses the engines: roles change first, then engines start, then others drain."""
        await scale_fleet(self._socket, ScaleCall(prefill=plan.prefill, decode=plan.decode, drain_seconds=DRAIN_S))


class KubernetesProvisioner:
    """An executor that sets the number of pods of each role; implements :class:`EngineProvisioner`."""

    resizes = True

    def __init__(self, fleet: KubernetesFleet) -> None:
        self._fleet = fleet
        self._number = 0
        self._task: asyncio.Task[object] | None = None

    async def state(self) -> ProvisioningState:
        """Return the state: under way until all pods are ready and those that leave are gone."""
        task = self._task
        if task is None or not task.done():
            return ProvisioningState(self._number, task is not None)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, TercetError):
            raise error
        return ProvisioningState(self._number, failure="" if error is None else error.message)

    async def change(self, plan: FleetPlan, change: FleetChange) -> None:
        """Start to scale the pods of both roles; a changed role is one pod more and one pod fewer."""
        self._number += 1
        call = ScaleCall(prefill=plan.prefill, decode=plan.decode)
        self._task = asyncio.create_task(self._fleet.scale(call, lambda _: None), name="scaling of pods")


def fleet_of_router(url: str) -> Path:
    """Return the socket of the ``tercet up`` process whose router is at ``url``.

    Raises :class:`~tercet.protocol.BadRequest` if none runs on this machine.
    """
    for fleet in running_fleets():
        if fleet.control and is_at(fleet, url):
            return Path(fleet.control)
    raise BadRequest(
        f"act: no fleet of `tercet up` with the router {url} runs on this machine; start the planner there, or name "
        "--planner-namespace for engines that are pods", "act",
    )  # fmt: skip


class PlannerMetrics:
    """The metrics of one planner, served on 127.0.0.1 at ``port``; 0: not served."""

    def __init__(self, port: int = 0) -> None:
        self.registry = registry = CollectorRegistry()
        self._wanted = Gauge(
            "tercet_planner_wanted_engines", "Engines of a role in the last plan.", ["role"], registry=registry
        )
        self._attainment = Gauge(
            "tercet_planner_attainment",
            "Share of the requests within the objectives: expected by the last plan, measured for the plan before.",
            ["kind"],
            registry=registry,
        )
        self._margin = Gauge(
            "tercet_planner_margin",
            "Load beyond the forecast that plans must bear, as a share of it.",
            registry=registry,
        )
        self._plans = Counter("tercet_planner_plans", "Plans made.", registry=registry)
        self._simulations = Gauge("tercet_planner_simulations", "Simulations made.", registry=registry)
        self._cpu = Counter("tercet_planner_cpu_seconds", "Processor time of plans, seconds.", registry=registry)
        self._changes = Counter(
            "tercet_planner_changed_engines", "Engines that were flipped, started or stopped.", ["how"],
            registry=registry,
        )  # fmt: skip
        if port:
            start_http_server(port, "127.0.0.1", registry)

    def planned(self, policy: Policy | Planner, wanted: WantedPlan, cpu_s: float) -> None:
        """Count a plan that took ``cpu_s`` seconds of CPU."""
        self._plans.inc()
        self._cpu.inc(cpu_s)
        self._wanted.labels("prefill").set(wanted.plan.prefill)
        self._wanted.labels("decode").set(wanted.plan.decode)
        if wanted.expected is not None:
            self._attainment.labels("expected").set(wanted.expected.attainment)
        if isinstance(policy, Planner):
            self._margin.set(policy.margin)
            self._simulations.set(policy.simulations)
            came = policy.verdicts[-2].came if len(policy.verdicts) > 1 else None
            if came is not None:
                self._attainment.labels("came").set(came)

    def changed(self, change: FleetChange) -> None:
        """Count the engines of a change that was carried out."""
        for how, count in (("flipped", change.flips), ("started", change.starts), ("stopped", change.stops)):
            self._changes.labels(how).inc(len(count))


KEPT = 40


class PlanLog:
    """The plan log of one planner: its last :data:`KEPT` plans."""

    def __init__(self, config: PlannerConfig) -> None:
        self._config = config
        self._plans: deque[ReportedPlan] = deque(maxlen=KEPT)

    def came(self, share: float | None) -> None:
        """Record the share of requests within the objectives since the last plan; None (no request ended): ignored."""
        if self._plans and share is not None:
            self._plans[-1] = msgspec.structs.replace(self._plans[-1], came=share)

    def note(
        self, at: float, fleet: FleetPlan, wanted: WantedPlan, change: FleetChange, proposal: str = ""
    ) -> None:  # fmt: skip
        """Record a plan made at the Unix time ``at`` for ``fleet``; ``proposal`` is a command for another program."""
        expected = wanted.expected
        self._plans.append(
            ReportedPlan(
                at=at,
                fleet=str(fleet),
                wanted=str(wanted.plan),
                reason=wanted.reason,
                expected=None if expected is None else expected.attainment,
                ttft_p99=None if expected is None else expected.ttft_p99,
                steps=tuple(steps_of(change)),
                proposal=proposal,
            )
        )

    def report(self, margin: float | None) -> PlannerReport:
        """Return the report of the recorded plans; ``margin`` is the planner's present margin, None if unknown."""
        config = self._config
        return PlannerReport(
            act=config.act, planner=config.planner, interval=config.planning.interval_s, margin=margin,
            plans=tuple(self._plans),
        )  # fmt: skip


def steps_of(change: FleetChange) -> list[str]:
    """Return the steps of a change as text: commands that a person can type, and engines to start and stop."""
    flips = [f"tercet engines role {name} {role}" for name, role in change.flips]
    stops = [f"stop {name}" for name in change.stops]
    return [*flips, *(f"start one to {role}" for role in change.starts), *stops]


logger = logging.getLogger("tercet.planner")
NICENESS = 10
"""Increment of this process's niceness, as by ``nice``."""
FAILED_REST_S = 120.0
"""Seconds after a failed change in which no engine is started."""
PROCESSES_ASKED = 4
"""Number of requests for one plan to a router of several processes, so that each process may answer."""


class LivePlanner:
    """A planner that looks, plans and acts until cancelled, and asks again if the router does not answer.

    Without ``provisioner`` it only advises. ``ask`` sends a request to the router.
    """

    def __init__(
        self, config: PlannerConfig, ask: Ask, provisioner: EngineProvisioner | None, metrics: PlannerMetrics
    ) -> None:
        self._config, self._ask, self._provisioner, self._metrics = config, ask, provisioner, metrics
        self._view = TrafficView()
        profile = load_profile(config.profile)
        self._profile, self._steps = profile, StepModel(profile.steps)
        self._simulated: FleetSimulator | None = None
        self._policy: Policy | Planner | None = None
        self._plan_at = 0.0
        self._guarded_s = LOOK_S
        self._plan_log = PlanLog(config)
        self._trials = ProgramTrials(config.programs, self._simulator_of)
        self._proposal = ""
        self._advised = ""
        self._answers = True
        self._failed_change: int = 0
        self._failed_at = -math.inf

    async def run(self) -> None:
        """Look every :data:`LOOK_S` seconds until cancelled; log when the router stops and starts to answer."""
        await keep_running(self._look_on, "planner")

    async def _look_on(self) -> None:
        while True:
            began = time.monotonic()
            try:
                await self.look(began)
                self._note_answer(None)
            except TercetError as error:
                self._note_answer(error)
            await asyncio.sleep(max(0.0, began + LOOK_S - time.monotonic()))

    async def look(self, now: float) -> None:
        """Ask the router, run the guard, and plan if it is time; ``now`` is in seconds of a monotonic clock.

        Raises :class:`~tercet.protocol.TercetError` if the router does not answer or its fleet cannot be planned.
        """
        report = await self._heard(self._guarded_s)
        self._guarded_s = guarded_s(report)
        if self._provisioner is not None:
            state = await self._provisioner.state()
            if state.failure and state.number != self._failed_change:  # it is logged once, and stops growth for a time
                self._failed_change, self._failed_at = state.number, now
                said = "the last change failed: %s; no engine is started for %.0f s"
                logger.error(said, state.failure, FAILED_REST_S)
            if state.under_way:
                return
        policy, limits = self._prepared(report), self._limits(report, now)
        if not await self._guarded(policy, limits) and now >= self._plan_at:
            await self._plan(policy, limits, now)

    async def _guarded(self, policy: Policy | Planner, limits: PlanLimits) -> bool:
        """Run the guard; return True if it changed the fleet."""
        urgent = policy.guard(self._view.observed(limits, to_plan=False)) if isinstance(policy, Planner) else None
        if urgent is not None:
            await self._carry_out(urgent, limits, is_plan=False)
        return urgent is not None

    async def _decided(self, policy: Policy | Planner, observed: Observed) -> WantedPlan | None:
        """Return the fleet that the policy wants, or None if the guard, which looks meanwhile, changed the fleet."""
        decide = policy.decide if isinstance(policy, Planner) else policy
        deciding, is_void = asyncio.ensure_future(run_in_thread(decide, observed)), False
        try:
            while not (await asyncio.wait([deciding], timeout=LOOK_S))[0]:
                try:
                    if not is_void:
                        await self._heard(self._guarded_s)
                        is_void = await self._guarded(policy, observed.limits)
                except TercetError as error:  # a router that does not answer does not end the plan
                    self._note_answer(error)
            wanted = await deciding
        finally:
            deciding.cancel()
        if is_void:
            return None
        return policy.adopt(observed, wanted) if isinstance(policy, Planner) else wanted

    async def _plan(self, policy: Policy | Planner, limits: PlanLimits, now: float) -> None:
        for _ in range(PROCESSES_ASKED if self._view.newest.processes > 1 else 1):
            await self._heard(self._config.planning.window_s)
        observed = self._view.observed(limits)
        cpu = time.process_time()
        wanted = await self._decided(policy, observed)
        if wanted is None:
            logger.info("a plan is void: the guard changed the fleet meanwhile")
            return
        if isinstance(policy, Planner) and policy.forecast is not None:
            await run_in_thread(self._try_program, observed.plan, policy.forecast)
        took = time.process_time() - cpu
        # The next plan waits until the share of CPU for plans has paid for this one.
        interval = self._config.planning.interval_s
        pause = policy.pause_s(interval) if isinstance(policy, Planner) else interval
        self._plan_at = now + max(pause, took / self._config.planner_cpu)
        self._metrics.planned(policy, wanted, took)
        line = f"{wanted.plan}: {wanted.reason}"
        if (will := wanted.expected) is not None:
            line += f"; expected: {will.attainment:.1%} within the objectives, P99 TTFT {will.ttft_p99:.2f} s"
        logger.info("%s; %.1f s of CPU", line, took)
        if isinstance(policy, Planner) and len(policy.verdicts) > 1 and policy.verdicts[-2].came is not None:
            before = policy.verdicts[-2]
            expected = "not known" if before.expected is None else f"{before.expected.attainment:.1%}"
            logger.info("the plan before: expected %s within the objectives, measured %.1f%%", expected,
                        100 * (before.came or 0))  # fmt: skip
        self._plan_log.came(observed.came)
        await self._carry_out(wanted, limits)

    def _try_program(self, plan: FleetPlan, forecast: Forecast) -> None:
        report = self._view.newest
        found = self._trials.look(NamedProgram(report.program or "", report.args), plan, forecast)
        self._proposal = "" if found is None else str(found[0])
        if found is not None:
            logger.warning("advice: %s: %s would meet the objectives for %.1f%% with the same load and engines",
                           found[0], found[0].program, 100 * found[1].attainment)  # fmt: skip

    def _simulator_of(self, named: NamedProgram) -> FleetSimulator:
        """Return a simulator of another program, with the present engines and objectives."""
        options = EngineOptions(decode_scale=rounded(self._view.decode_scale(self._steps)))
        objectives = self._view.observed(to_plan=False).objectives
        return FleetSimulator(named.program, self._config.profile, options, objectives, named.args)

    # ---- inputs of a plan ------------------------------------------------------------------------------------

    async def _heard(self, window_s: float) -> TrafficReport:
        report = read_traffic(await self._ask("GET", f"/traffic?window={window_s:g}", None))
        self._view.heard(report)
        return report

    def _prepared(self, report: TrafficReport) -> Policy | Planner:
        """Return the policy, with its simulator set to the present router and engines.

        Raises :class:`~tercet.protocol.BadRequest` for a router or a fleet that cannot be planned.
        """
        wanted = report.objectives
        if wanted.ttft is None or wanted.tpot is None:
            raise BadRequest(
                "objectives: are missing; start the router with --objective-ttft and --objective-tpot", "objective-ttft"
            )
        if report.program is None:
            raise BadRequest("program: the router uses a split of several programs; use one program", "program")
        if any(each.role == "both" for each in report.engines):
            raise BadRequest(
                "engines: have the role both; give each prefill or decode with `tercet engines role`", "engines"
            )
        options = EngineOptions(decode_scale=rounded(self._view.decode_scale(self._steps)))
        objectives = self._view.observed(to_plan=False).objectives
        if self._simulated is None:
            self._simulated = FleetSimulator(report.program, self._config.profile, options, objectives, report.args)
            capacity = ProfileCapacity(self._profile, options)
            self._policy = load_policy(self._config.planner, self._config.planning, self._simulated, capacity)
        self._simulated.become(report.program, report.args, options, objectives)
        assert self._policy is not None
        return self._policy

    def _limits(self, report: TrafficReport, now: float) -> PlanLimits:
        """Return the bounds of the number of engines: fixed if engines cannot start or stop.

        After a failed change, the number does not grow for :data:`FAILED_REST_S` seconds.
        """
        engines, planning = max(2, sum(not each.draining for each in report.engines)), self._config.planning
        if self._provisioner is not None and not self._provisioner.resizes:
            return PlanLimits(engines, engines)
        most = max(planning.most or engines, planning.fewest or 2)
        if now - self._failed_at < FAILED_REST_S:
            most = min(most, engines)
        fewest = min(planning.fewest or engines, most)
        return PlanLimits(max(2, fewest), max(2, fewest, most))

    # ---- acting ----------------------------------------------------------------------------------------------

    async def _carry_out(self, wanted: WantedPlan, limits: PlanLimits, is_plan: bool = True) -> None:
        observed = self._view.observed(limits, to_plan=False)
        change = change_to(wanted.plan, observed.engines)
        steps = ", ".join(steps_of(change))
        if is_plan or steps != self._advised:  # the guard repeats its advice until the fleet changes
            self._plan_log.note(time.time(), observed.plan, wanted, change, self._proposal)
            margin = self._policy.margin if isinstance(self._policy, Planner) else None
            await self._ask("PUT", "/planner", self._plan_log.report(margin))  # which shows the last plans to people
        if not change:
            return
        said = f"{observed.plan} -> {wanted.plan}: {wanted.reason}"
        if self._provisioner is None:
            if steps != self._advised:
                logger.warning("advice: %s: %s", steps, said)
            self._advised = steps
            return
        await self._provisioner.change(wanted.plan, change)
        self._metrics.changed(change)
        logger.warning("%s: %s", steps, said)

    def _note_answer(self, error: TercetError | None) -> None:
        """Log once that planning fails, and once that it works again; ``error`` is None if it works."""
        if error is not None and self._answers:
            logger.error("planning stopped: %s", error.message)
        if error is None and not self._answers:
            logger.warning("planning for %s continues", self._config.url)
        self._answers = error is None


def serve_planner(config: PlannerConfig) -> None:
    """Plan until SIGINT or SIGTERM; raise :class:`~tercet.protocol.TercetError` if no router answers at the start."""
    log_to_stderr(config.log_level, config.log_format)
    os.nice(NICENESS)
    asyncio.run(_serve(config))


async def _serve(config: PlannerConfig) -> None:
    async def ask(method: str, path: str, body: Any) -> Any:
        key = config.admin_key
        if not key and config.admin_key_file is not None:
            key = KeyFile(config.admin_key_file, "admin-key-file").first()[0]
        return await ask_router(config.url, method, path, body, key)

    planner = LivePlanner(config, ask, _provisioner_of(config, ask), PlannerMetrics(config.metrics_port))
    await planner.look(time.monotonic())
    logger.info("planning for %s every %g s; --act is %s", config.url, config.planning.interval_s, config.act)
    await planner.run()


def _provisioner_of(config: PlannerConfig, ask: Ask) -> EngineProvisioner | None:
    if config.act == "advise":
        return None
    if config.act == "roles":
        return RoleProvisioner(ask)
    if config.namespace is not None:
        access = in_cluster() if config.kubeconfig is None else from_kubeconfig(Path(config.kubeconfig).expanduser())
        return KubernetesProvisioner(KubernetesFleet(access, config.namespace))
    return ScaleProvisioner(fleet_of_router(config.url))
