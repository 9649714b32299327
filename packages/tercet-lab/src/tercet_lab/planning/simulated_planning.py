"""The planner in ``tercet sim``: its engines that do not run at first, its simulator, and its results."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from tercet.decisions.planning import PlanLimits
from tercet.protocol import BadRequest
from tercet.router.serve.service import Service
from tercet_lab.bench.simulated.moving_fleet import MoveCounts
from tercet_lab.bench.simulated.planned import PlannedTraffic
from tercet_lab.bench.simulated.planned_run import PlannedRun
from tercet_lab.bench.simulated.scenario import (
    EngineGroup,
    FleetSpec,
    SyntheticWorkload,
    names_of,
    parse_fleet,
    requests_of,
)
from tercet_lab.planning.crystal import FleetSimulator, ProfileCapacity
from tercet_lab.planning.policies import load_policy
from tercet_lab.planning.virtual_planner import VirtualPlanner
from tercet_lab.sim import EngineOptions, SimEngine, load_profile, options_from

if TYPE_CHECKING:
    from tercet_lab.bench.simulated.simulation import Simulation


class SimulatedPlanning:
    """The planner of one run."""

    def __init__(self, simulation: Simulation, rate: float | None) -> None:
        moving, spec = simulation.moving, parse_fleet(simulation.fleet)
        settings, options = moving.planning, options_from(EngineOptions(), simulation.options)
        self._settings, self._objectives = settings, moving.objectives
        self._limits = _limits(simulation)
        self._spare = max(0, self._limits.most - len(names_of(spec)))
        self._simulator = FleetSimulator(
            simulation.program, simulation.profile, options, moving.objectives, simulation.program_args, simulation.seed
        )
        workload = msgspec.structs.replace(simulation.workload, rate=rate)
        if isinstance(workload, SyntheticWorkload):
            trace = requests_of(workload, simulation.seed)
        else:
            trace = PlannedTraffic(workload, simulation.seed).arrivals()
        capacity = ProfileCapacity(load_profile(simulation.profile), options)
        self._policy = load_policy(moving.planner, settings, self._simulator, capacity, trace)
        self._planner: VirtualPlanner | None = None

    def with_spare(self, spec: FleetSpec) -> FleetSpec:
        """Return the fleet with the engines that the planner may start added."""
        if not self._spare:
            return spec
        return msgspec.structs.replace(spec, engines=(*spec.engines, EngineGroup(role="decode", count=self._spare)))

    def companion(self, service: Service[MoveCounts], engines: Mapping[str, SimEngine]) -> Coroutine[Any, Any, None]:
        """Return the planner's task for a run; see :data:`~tercet_lab.bench.simulated.virtual_run.Companion`."""
        spare = list(engines)[len(engines) - self._spare :]
        self._planner = VirtualPlanner(
            self._policy, self._settings, self._objectives, self._limits, spare, service, engines
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


def planning_of(simulation: Simulation, rate: float | None) -> SimulatedPlanning:
    """Return the planner of a simulation's settings; raise :class:`~tercet.protocol.BadRequest` for invalid ones."""
    return SimulatedPlanning(simulation, rate)


def _limits(simulation: Simulation) -> PlanLimits:
    spec, settings = parse_fleet(simulation.fleet), simulation.moving.planning
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
