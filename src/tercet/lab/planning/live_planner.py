"""A planner of a live router's fleet: it asks what happens, plans in a thread, and acts or advises."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol
from urllib.parse import quote

from tercet.aio import run_in_thread
from tercet.decisions.planning import Observed, PlanLimits, Planner, Policy, WantedPlan
from tercet.decisions.planning.acting import FleetChange, change_to
from tercet.lab.planning.crystal import FleetSimulator, ProfileCapacity
from tercet.lab.planning.journal import PlanJournal, steps_of
from tercet.lab.planning.observing import TrafficReport, TrafficView, read_traffic, rounded
from tercet.lab.planning.planner_metrics import PlannerMetrics
from tercet.lab.planning.policies import load_policy
from tercet.lab.sim import EngineOptions, load_profile
from tercet.lab.sim.step_times import StepModel
from tercet.protocol import BadRequest, Role, TercetError
from tercet.settings.key_files import KeyFile
from tercet.settings.log_lines import log_to_stderr
from tercet.settings.planner_config import PlannerConfig
from tercet.wire.client.ask_router import ask_router

logger = logging.getLogger("tercet.planner")
LOOK_S = 1.0
"""Seconds between two looks of the guard."""
NICENESS = 10
"""How much lower than others' the priority of this process is, as ``nice`` counts."""
PROCESSES_ASKED = 4
"""Times that a router of several processes is asked for one plan, so that each may answer."""

Ask = Callable[[str, str, Any], Awaitable[Any]]
"""Method, path and body to the router's answer."""


class EngineNumber(Protocol):
    """The hands that start and stop engines."""

    async def bounds(self) -> tuple[int, int] | None:
        """Fewest and most engines that it can have; None where their number is not its to change."""
        ...

    async def scale(self, starts: Sequence[Role], stops: Sequence[str]) -> None:
        """Start engines of these roles, and empty and stop those of these names."""
        ...


class FixedNumber:
    """The engines stay as many as they are; implements :class:`EngineNumber`."""

    async def bounds(self) -> tuple[int, int] | None:
        """None: there is nothing to choose."""
        return None

    async def scale(self, starts: Sequence[Role], stops: Sequence[str]) -> None:
        """Raises :class:`~tercet.protocol.BadRequest`: a plan within the bounds starts and stops nothing."""
        raise BadRequest(
            f"scale: nothing here starts or stops engines: {len(starts)} starts, {len(stops)} stops", "act"
        )


class LivePlanner:
    """Looks, plans and acts until it is cancelled; a router that does not answer is asked again."""

    def __init__(self, config: PlannerConfig, ask: Ask, scaler: EngineNumber, metrics: PlannerMetrics) -> None:
        self._config, self._ask, self._scaler, self._metrics = config, ask, scaler, metrics
        self._view = TrafficView()
        profile = load_profile(config.profile)
        self._profile, self._steps = profile, StepModel(profile.steps)
        self._simulated: FleetSimulator | None = None
        self._policy: Policy | Planner | None = None
        self._plan_at = 0.0
        self._journal = PlanJournal(config)
        self._advised = ""
        self._answers = True

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
        report = await self._heard()
        policy, limits = self._prepared(report), await self._limits(report)
        if isinstance(policy, Planner):
            urgent = policy.guard(self._view.observed(limits, with_arrivals=False))
            if urgent is not None:
                await self._carry_out(urgent, limits, is_plan=False)
                return
        if now >= self._plan_at:
            await self._plan(policy, limits, now)

    async def _plan(self, policy: Policy | Planner, limits: PlanLimits, now: float) -> None:
        for _ in range(PROCESSES_ASKED if self._view.newest.processes > 1 else 0):
            await self._heard()
        observed = self._view.observed(limits)
        plan = policy.plan if isinstance(policy, Planner) else policy
        cpu = time.process_time()
        wanted = await run_in_thread(plan, observed)
        took = time.process_time() - cpu
        # The next plan waits until this one is paid for.
        self._plan_at = now + max(self._config.planning.interval_s, took / self._config.planner_cpu)
        self._metrics.planned(policy, wanted, took)
        logger.info("%s; %.1f s of CPU", _in_words(wanted), took)
        if isinstance(policy, Planner) and len(policy.verdicts) > 1 and policy.verdicts[-2].came is not None:
            before = policy.verdicts[-2]
            expected = "not known" if before.expected is None else f"{before.expected.attainment:.1%}"
            logger.info("of the plan before: within the objectives expected %s, came %.1f%%", expected,
                        100 * (before.came or 0))  # fmt: skip
        self._journal.came(observed.came)
        await self._carry_out(wanted, limits)

    # ---- what is planned with --------------------------------------------------------------------------------

    async def _heard(self) -> TrafficReport:
        report = read_traffic(await self._ask("GET", f"/traffic?window={self._config.planning.window_s:g}", None))
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
        objectives = self._view.observed(with_arrivals=False).objectives
        if self._simulated is None:
            self._simulated = FleetSimulator(report.program, self._config.profile, options, objectives, report.args)
            capacity = ProfileCapacity(self._profile, options)
            self._policy = load_policy(self._config.planner, self._config.planning, self._simulated, capacity)
        self._simulated.become(report.program, report.args, options, objectives)
        assert self._policy is not None
        return self._policy

    async def _limits(self, report: TrafficReport) -> PlanLimits:
        bounds = await self._scaler.bounds()
        engines = max(2, sum(not each.draining for each in report.engines))
        planning = self._config.planning
        if bounds is None and self._config.act != "advise":
            return PlanLimits(engines, engines)
        fewest, most = bounds or (engines, engines)
        return PlanLimits(max(2, planning.fewest or fewest), max(planning.most or most, planning.fewest or fewest))

    # ---- acting ----------------------------------------------------------------------------------------------

    async def _carry_out(self, wanted: WantedPlan, limits: PlanLimits, is_plan: bool = True) -> None:
        observed = self._view.observed(limits, with_arrivals=False)
        change = change_to(wanted.plan, observed.engines)
        steps = ", ".join(steps_of(change))
        if is_plan or steps != self._advised:  # a guard repeats itself until it is heard
            await self._report(observed, wanted, change)
        if not change:
            return
        said = f"{observed.plan} -> {wanted.plan}: {wanted.reason}"
        if self._config.act == "advise":
            if steps != self._advised:
                logger.warning("advice: %s: %s", steps, said)
            self._advised = steps
            return
        for name, role in change.flips:
            await self._ask("PUT", f"/engines/{quote(name, safe='')}/role", {"role": role})
        if change.starts or change.stops:
            await self._scaler.scale(change.starts, change.stops)
        self._metrics.changed(change)
        logger.warning("%s: %s", steps, said)

    async def _report(self, observed: Observed, wanted: WantedPlan, change: FleetChange) -> None:
        """The router shows the last plans to people."""
        self._journal.note(time.time(), observed.plan, wanted, change)
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

    planner = LivePlanner(config, ask, FixedNumber(), PlannerMetrics(config.metrics_port))
    await planner.look(time.monotonic())
    doing = "advises only" if config.act == "advise" else "changes roles"
    logger.info("plans for %s every %g s, %s", config.url, config.planning.interval_s, doing)
    await planner.run()


def _key_of(config: PlannerConfig) -> str:
    if config.admin_key or config.admin_key_file is None:
        return config.admin_key
    return KeyFile(config.admin_key_file, "admin-key-file").first()[0]
