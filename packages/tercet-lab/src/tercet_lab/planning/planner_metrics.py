"""Metrics of a planner for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from tercet.decisions.planning import Policy, WantedPlan
from tercet_lab.planning.acting import FleetChange
from tercet_lab.planning.planner import Planner


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
