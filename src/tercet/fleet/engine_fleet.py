"""The engines of this process: their members, loads, health, costs, and how requests pick among them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from random import Random

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tercet.decisions.cost import Costs
from tercet.decisions.scheduling import Scheduling
from tercet.fleet.adapters import AgreedAdapters
from tercet.fleet.engine_health import STUCK_AFTER_S, EngineHealth, Liveness
from tercet.fleet.fleet_view import Generation, TracedEngine
from tercet.fleet.knowledge import STALE_AFTER, FleetKnowledge
from tercet.fleet.members import CallsInFlight, Member, Roster
from tercet.fleet.picking import Picking
from tercet.fleet.prefix_index import PrefixHits
from tercet.protocol import EngineLoad, LayoutMismatch, MoveProposal, kv_obstacle, may_exchange_kv


class EngineFleet(Roster):
    """The engines of this process, of which programs see a :class:`~tercet.fleet.FleetView`."""

    def __init__(
        self,
        members: Sequence[Member],
        *,
        scheduling: Scheduling | None = None,  # the profiles that picks may name
        clock: Callable[[], float] = time.monotonic,  # in seconds
        stale_after: float = STALE_AFTER,  # an older report of an engine counts as unknown
        stuck_after_s: float = STUCK_AFTER_S,  # an engine that makes no progress for this time is stuck
        seed: int | None = None,  # makes random picks repeatable
    ) -> None:
        random = Random(seed)
        # Get each move that an engine proposes and each report, with the engine's name.
        self.on_proposal: Callable[[str, MoveProposal], object] = lambda engine, proposal: None
        self.on_report: Callable[[str, EngineLoad], object] = lambda engine, load: None
        # Each gets the first generation of every request, with its first output.
        self.on_answered = list[Callable[[Generation], object]]()
        self.knowledge = FleetKnowledge(clock, stale_after)  # engines' reports and events, from their connections
        self.costs = Costs(clock, random)  # the observed cost of serving, and the work in flight
        self.hits = PrefixHits()
        self.liveness = Liveness(stuck_after_s)
        scheduling = scheduling or Scheduling()
        self.picking = Picking[Member](self.knowledge, random, scheduling, waiting_on=self.costs.waiting)
        super().__init__(members, self.knowledge, self.picking)
        self.health = EngineHealth(self, self.liveness, self.knowledge, self.picking, clock)
        self.adapters = self.picking.adapters = AgreedAdapters(self)

    def remove(self, name: str) -> Member:
        """Remove an engine and return it; ``in_flight`` of the returned member counts programs that still use it."""
        member = super().remove(name)
        # An engine that comes back under this name is another one: nothing of this one counts for it.
        self.health.forget(name)
        # What it costs was learned from this engine's requests.
        self.costs.forget(name)
        self.hits.forget(name)
        self.adapters.agree()
        return member

    # ---- engines' reports ----------------------------------------------------------------------------------------

    def report(self, name: str, load: EngineLoad) -> None:
        """Record an engine's load report; a report of an engine that is not a member is ignored."""
        self.knowledge.loads.report(name, load)
        self.health.heard(name, load.stalled_s)
        member = self.get(name)
        if member is not None:
            self.health.note_stopping(member, load.stopping)
            self.health.note_paused(member, load.paused)
            if load.adapters is not None:
                member.reported_stamp = load.adapters.stamp
        self.on_report(name, load)

    def proposed(self, name: str, proposal: MoveProposal) -> None:
        self.on_proposal(name, proposal)

    def serves(self, model: str) -> bool:
        """True if an engine has reported this name of a model, or if it is the name of an adapter of this fleet."""
        return model in self.adapters or any(member.model == model for member in self.members)

    @property
    def model_dtype(self) -> str:
        """The dtype in which the engines compute, as they report it; empty if they differ or none has reported."""
        reported = {member.model_dtype for member in self.members if member.model_dtype}
        return reported.pop() if len(reported) == 1 else ""

    # ---- how engines are picked ----------------------------------------------------------------------------------

    @property
    def scheduling(self) -> Scheduling:
        return self.picking.scheduling

    @scheduling.setter
    def scheduling(self, scheduling: Scheduling) -> None:
        self.picking.scheduling = scheduling
        self.picking.forget_candidates()

    def destination(self, generation: Generation, name: str) -> TracedEngine:
        """Return the engine ``name`` as destination of a running sequence, with the sequence's trace and counts."""
        return generation.engine.instead(self.member(name))

    def require_exchange(self, sender: str, receiver: str) -> None:
        """Raise :class:`~tercet.protocol.LayoutMismatch` if these members must not exchange KV.

        Engines check this as well; here it is checked before any KV is reserved.
        """
        here, there = self.get(sender), self.get(receiver)
        if here is not None and there is not None and (why := kv_obstacle(here.revision, there.revision)):
            raise LayoutMismatch(f"{sender} and {receiver} must not exchange KV: {why}")

    def may_pair(self, one: str, other: str) -> bool:
        return may_exchange_kv(self.member(one).revision, self.member(other).revision)

    def calls_of(self, name: str) -> CallsInFlight:
        member = self.get(name)
        return member.calls if member is not None else CallsInFlight()  # the engine was removed, and is not watched


GAUGES = {
    "waiting": ("waiting", "Requests that wait, as the engine last reported."),
    "running": ("running", "Requests that run, as the engine last reported."),
    "kv_usage": ("kv_usage_ratio", "Share of the KV cache in use, as the engine last reported."),
    "tokens": ("tokens", "Tokens still to work on, as the engine last reported."),
    "step_time": ("step_seconds", "Duration of recent steps, as the engine last reported."),
}
"""By field of an :class:`~tercet.protocol.EngineLoad`: the metric's name after ``tercet_engine_``, and its meaning."""


class EngineCollector(Collector):
    """Gauges by engine; an engine without a report, or that does not answer, has only the gauge ``tercet_engine_up``.

    The age of a report is in seconds.
    """

    def __init__(self, fleet: EngineFleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        last = self._fleet.knowledge.loads.last
        up_now = [member.name for member in self._fleet.members if member.reachable]
        reports = {name: report for name in up_now if (report := last(name)) is not None}
        what, at = "Time since the engine's last report.", ["engine"]
        ages = GaugeMetricFamily("tercet_engine_report_age_seconds", what, labels=at)
        for name, (_, age) in reports.items():
            ages.add_metric([name], age)
        yield ages
        what = "1 if the engine answers and makes progress, 0 if not."
        up = GaugeMetricFamily("tercet_engine_up", what, labels=at)
        for member in self._fleet.members:
            up.add_metric([member.name], member.reachable)
        yield up
        for field, (metric, meaning) in GAUGES.items():
            gauge = GaugeMetricFamily(f"tercet_engine_{metric}", meaning, labels=["engine"])
            for name, (load, _) in reports.items():
                value: float | None = getattr(load, field)
                if value is not None:
                    gauge.add_metric([name], value)
            yield gauge

    def describe(self) -> Iterable[Metric]:
        return ()
