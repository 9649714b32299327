"""What Prometheus can know of a planner."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from tercet.decisions.planning import Planner, Policy, WantedPlan
from tercet.decisions.planning.acting import FleetChange


class PlannerMetrics:
    """Metrics of one planner, served on 127.0.0.1 if there is a ``port``."""

    def __init__(self, port: int = 0) -> None:
        self.registry = registry = CollectorRegistry()
        self._wanted = Gauge(
            "tercet_planner_wanted_engines", "Engines of a role in the last plan.", ["role"], registry=registry
        )
        self._attainment = Gauge(
            "tercet_planner_attainment",
            "Share of the requests within the objectives: expected of the last plan, and what came of the one before.",
            ["kind"],
            registry=registry,
        )
        self._margin = Gauge(
            "tercet_planner_margin", "Share of load beyond the forecast that plans must bear.", registry=registry
        )
        self._plans = Counter("tercet_planner_plans", "Plans that were made.", registry=registry)
        self._simulations = Gauge("tercet_planner_simulations", "Simulations that were made.", registry=registry)
        self._cpu = Counter("tercet_planner_cpu_seconds", "Processor time of plans.", registry=registry)
        self._changes = Counter(
            "tercet_planner_changed_engines", "Engines that were changed, by how.", ["how"], registry=registry
        )
        if port:
            start_http_server(port, "127.0.0.1", registry)

    def planned(self, policy: Policy | Planner, wanted: WantedPlan, cpu_s: float) -> None:
        """A plan was made in ``cpu_s`` seconds."""
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
        """A change was carried out."""
        for how, count in (("flipped", change.flips), ("started", change.starts), ("stopped", change.stops)):
            self._changes.labels(how).inc(len(count))
