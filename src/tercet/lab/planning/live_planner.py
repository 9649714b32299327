"""A planner of a live router's fleet: it asks what happens, plans in a thread, and acts or advises."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from pathlib import Path
from typing import Any

from tercet.aio import run_in_thread
from tercet.cluster.scaling.kubernetes import KubernetesFleet
from tercet.decisions.planning import FleetPlan, Forecast, Observed, PlanLimits, Planner, Policy, WantedPlan
from tercet.decisions.planning.acting import FleetChange, change_to
from tercet.fleet.discovery.api_access import from_kubeconfig, in_cluster
from tercet.lab.planning.crystal import FleetSimulator, ProfileCapacity
from tercet.lab.planning.hands import Ask, KubernetesHands, PlannerHands, RoleHands, ScaleHands, fleet_of_router
from tercet.lab.planning.journal import PlanJournal, steps_of
from tercet.lab.planning.observing import LOOK_S, TrafficReport, TrafficView, guarded_s, read_traffic, rounded
from tercet.lab.planning.planner_metrics import PlannerMetrics
from tercet.lab.planning.policies import load_policy
from tercet.lab.planning.program_trials import NamedProgram, ProgramTrials
from tercet.lab.sim import EngineOptions, load_profile
from tercet.lab.sim.step_times import StepModel
from tercet.protocol import BadRequest, TercetError
from tercet.settings.key_files import KeyFile
from tercet.settings.log_lines import log_to_stderr
from tercet.settings.planner_config import PlannerConfig
from tercet.wire.client.ask_router import ask_router

logger = logging.getLogger("tercet.planner")
NICENESS = 10
"""How much lower than others' the priority of this process is, as ``nice`` counts."""
FAILED_REST_S = 120.0
"""Seconds after an engine did not start in which no other is started."""
PROCESSES_ASKED = 4
"""Times that a router of several processes is asked for one plan, so that each may answer."""


class LivePlanner:
    """Looks, plans and acts until it is cancelled; a router that does not answer is asked again.

    Without ``hands`` it advises.
    """

    def __init__(self, config: PlannerConfig, ask: Ask, hands: PlannerHands | None, metrics: PlannerMetrics) -> None:
        self._config, self._ask, self._hands, self._metrics = config, ask, hands, metrics
        self._view = TrafficView()
        profile = load_profile(config.profile)
        self._profile, self._steps = profile, StepModel(profile.steps)
        self._simulated: FleetSimulator | None = None
        self._policy: Policy | Planner | None = None
        self._plan_at = 0.0
        self._guarded_s = LOOK_S
        self._journal = PlanJournal(config)
        self._trials = ProgramTrials(config.programs, self._simulator_of)
        self._proposal = ""
        self._advised = ""
        self._answers = True
        self._failed_change: int = 0
        self._failed_at = -math.inf

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            began = time.monotonic()
            try:
                await self.look(began)
                self._note_answer(None)
            except TercetError as error:
                self._note_answer(error)
            await asyncio.sleep(max(0.0, began + LOOK_S - time.monotonic()))

    async def look(self, now: float) -> None:
        """Ask once; let the guard look, and plan if it is time. Raises :class:`~tercet.protocol.TercetError`."""
        report = await self._heard(self._guarded_s)
        self._guarded_s = guarded_s(report)
        if self._hands is not None and await self._is_changing(self._hands, now):
            return
        policy, limits = self._prepared(report), self._limits(report, now)
        if not await self._guarded(policy, limits) and now >= self._plan_at:
            await self._plan(policy, limits, now)

    async def _guarded(self, policy: Policy | Planner, limits: PlanLimits) -> bool:
        """Whether the guard changed the fleet."""
        urgent = policy.guard(self._view.observed(limits, to_plan=False)) if isinstance(policy, Planner) else None
        if urgent is not None:
            await self._carry_out(urgent, limits, is_plan=False)
        return urgent is not None

    async def _decided(self, policy: Policy | Planner, observed: Observed) -> WantedPlan | None:
        """What the policy wants; the guard looks while it simulates, and None follows from a change that it made."""
        decide = policy.decide if isinstance(policy, Planner) else policy
        deciding, is_void = asyncio.ensure_future(run_in_thread(decide, observed)), False
        try:
            while not (await asyncio.wait([deciding], timeout=LOOK_S))[0]:
                is_void = is_void or await self._guarded_meanwhile(policy, observed.limits)
            wanted = await deciding
        finally:
            deciding.cancel()
        if is_void:
            return None
        return policy.adopt(observed, wanted) if isinstance(policy, Planner) else wanted

    async def _guarded_meanwhile(self, policy: Policy | Planner, limits: PlanLimits) -> bool:
        """The same in the middle of a plan, which a router that does not answer does not end."""
        try:
            await self._heard(self._guarded_s)
            return await self._guarded(policy, limits)
        except TercetError as error:
            self._note_answer(error)
            return False

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
        # The next plan waits until this one is paid for.
        interval = self._config.planning.interval_s
        pause = policy.pause_s(interval) if isinstance(policy, Planner) else interval
        self._plan_at = now + max(pause, took / self._config.planner_cpu)
        self._metrics.planned(policy, wanted, took)
        logger.info("%s; %.1f s of CPU", _in_words(wanted), took)
        if isinstance(policy, Planner) and len(policy.verdicts) > 1 and policy.verdicts[-2].came is not None:
            before = policy.verdicts[-2]
            expected = "not known" if before.expected is None else f"{before.expected.attainment:.1%}"
            logger.info("of the plan before: within the objectives expected %s, came %.1f%%", expected,
                        100 * (before.came or 0))  # fmt: skip
        self._journal.came(observed.came)
        await self._carry_out(wanted, limits)

    def _try_program(self, plan: FleetPlan, forecast: Forecast) -> None:
        report = self._view.newest
        found = self._trials.look(NamedProgram(report.program or "", report.args), plan, forecast)
        self._proposal = "" if found is None else str(found[0])
        if found is not None:
            logger.warning("advice: %s: %s would meet the objectives for %.1f%% with the same load and engines",
                           found[0], found[0].program, 100 * found[1].attainment)  # fmt: skip

    def _simulator_of(self, named: NamedProgram) -> FleetSimulator:
        """Of another program, with the engines and the objectives as they are now."""
        options = EngineOptions(decode_scale=rounded(self._view.decode_scale(self._steps)))
        objectives = self._view.observed(to_plan=False).objectives
        return FleetSimulator(named.program, self._config.profile, options, objectives, named.args)

    # ---- what is planned with --------------------------------------------------------------------------------

    async def _heard(self, window_s: float) -> TrafficReport:
        report = read_traffic(await self._ask("GET", f"/traffic?window={window_s:g}", None))
        self._view.heard(report)
        return report

    def _prepared(self, report: TrafficReport) -> Policy | Planner:
        """The policy, and its simulator as the router and the engines are now. Raises for what cannot be planned."""
        wanted = report.objectives
        if wanted.ttft is None or wanted.tpot is None:
            raise BadRequest(
                "objectives: start the router with --objective-ttft and --objective-tpot", "objective-ttft"
            )
        if report.program is None:
            raise BadRequest("program: a split between several cannot be planned", "program")
        if any(each.role == "both" for each in report.engines):
            raise BadRequest(
                "engines: a planner needs the roles prefill and decode; see tercet engines role", "engines"
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
        """Engines that may be wanted: as many as there are where none can start or stop, or one lately failed to."""
        engines, planning = max(2, sum(not each.draining for each in report.engines)), self._config.planning
        if self._hands is not None and not self._hands.resizes:
            return PlanLimits(engines, engines)
        most = max(planning.most or engines, planning.fewest or 2)
        if now - self._failed_at < FAILED_REST_S:
            most = min(most, engines)
        fewest = min(planning.fewest or engines, most)
        return PlanLimits(max(2, fewest), max(2, fewest, most))

    async def _is_changing(self, hands: PlannerHands, now: float) -> bool:
        """Whether the last change is still under way; one that failed is said once, and nothing grows for a while."""
        state = await hands.state()
        if state.failure and state.number != self._failed_change:
            self._failed_change, self._failed_at = state.number, now
            logger.error("the last change failed: %s; no engine is started for %.0f s", state.failure, FAILED_REST_S)
        return state.under_way

    # ---- acting ----------------------------------------------------------------------------------------------

    async def _carry_out(self, wanted: WantedPlan, limits: PlanLimits, is_plan: bool = True) -> None:
        observed = self._view.observed(limits, to_plan=False)
        change = change_to(wanted.plan, observed.engines)
        steps = ", ".join(steps_of(change))
        if is_plan or steps != self._advised:  # a guard repeats itself until it is heard
            await self._report(observed, wanted, change)
        if not change:
            return
        said = f"{observed.plan} -> {wanted.plan}: {wanted.reason}"
        if self._hands is None:
            if steps != self._advised:
                logger.warning("advice: %s: %s", steps, said)
            self._advised = steps
            return
        await self._hands.change(wanted.plan, change)
        self._metrics.changed(change)
        logger.warning("%s: %s", steps, said)

    async def _report(self, observed: Observed, wanted: WantedPlan, change: FleetChange) -> None:
        """The router shows the last plans to people."""
        self._journal.note(time.time(), observed.plan, wanted, change, self._proposal)
        margin = self._policy.margin if isinstance(self._policy, Planner) else None
        await self._ask("PUT", "/planner", self._journal.report(margin))

    def _note_answer(self, error: TercetError | None) -> None:
        """Say once that there is trouble, and once that it is over."""
        if error is not None and self._answers:
            logger.error("nothing is planned: %s", error.message)
        if error is None and not self._answers:
            logger.warning("%s is planned for again", self._config.url)
        self._answers = error is None


def _in_words(wanted: WantedPlan) -> str:
    expected = wanted.expected
    said = (
        ""
        if expected is None
        else (f"; expected: {expected.attainment:.1%} within the objectives, P99 TTFT {expected.ttft_p99:.2f} s")
    )
    return f"{wanted.plan}: {wanted.reason}{said}"


def serve_planner(config: PlannerConfig) -> None:
    """Plan until SIGINT or SIGTERM. Raises :class:`~tercet.protocol.TercetError` if no router answers at first."""
    log_to_stderr(config.log_level, config.log_format)
    os.nice(NICENESS)
    asyncio.run(_serve(config))


async def _serve(config: PlannerConfig) -> None:
    async def ask(method: str, path: str, body: Any) -> Any:
        return await ask_router(config.url, method, path, body, _key_of(config))

    planner = LivePlanner(config, ask, _hands_of(config, ask), PlannerMetrics(config.metrics_port))
    await planner.look(time.monotonic())
    logger.info("plans for %s every %g s; --act is %s", config.url, config.planning.interval_s, config.act)
    await planner.run()


def _hands_of(config: PlannerConfig, ask: Ask) -> PlannerHands | None:
    if config.act == "advise":
        return None
    if config.act == "roles":
        return RoleHands(ask)
    if config.namespace is not None:
        access = in_cluster() if config.kubeconfig is None else from_kubeconfig(Path(config.kubeconfig).expanduser())
        return KubernetesHands(KubernetesFleet(access, config.namespace))
    return ScaleHands(fleet_of_router(config.url))


def _key_of(config: PlannerConfig) -> str:
    if config.admin_key or config.admin_key_file is None:
        return config.admin_key
    return KeyFile(config.admin_key_file, "admin-key-file").first()[0]
