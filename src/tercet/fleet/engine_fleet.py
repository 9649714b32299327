"""The engines of a fleet by role: programs get engines only from here."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from random import Random

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tercet.decisions.cost import Costs, Pull, Targets
from tercet.decisions.scheduling import Scheduling
from tercet.decisions.scheduling.plugin import DEVICE
from tercet.fleet.adapters import AgreedAdapters, has, wanted_by
from tercet.fleet.engine_health import STUCK_AFTER_S, EngineHealth, Liveness
from tercet.fleet.knowledge import STALE_AFTER, FleetKnowledge
from tercet.fleet.members import CallsInFlight, Counted, Member, Roster
from tercet.fleet.picking import Picking
from tercet.fleet.trace import Generation, PrefixHits, Trace, TracedEngine
from tercet.protocol import (
    BadRequest,
    Engine,
    EngineLoad,
    EngineUnreachable,
    LayoutMismatch,
    MoveProposal,
    PrefillRule,
    Request,
    Role,
    Route,
    Source,
    TercetError,
    kv_obstacle,
    may_exchange_kv,
)
from tercet.protocol.spans import FALLBACK, PickEvent, TraceEvent, current_span

MOST_SCORES = 5  # number of engines whose scores a trace records
SESSION = "session"  # in a trace: the request's session decided the pick


def _ignored(_: Generation) -> None: ...


class FleetView:
    """A fleet as one request sees it: the :class:`~tercet.protocol.Fleet` that its program gets.

    Members and counts are shared with all other views, so a running program sees a change of membership. The trace and
    the failures belong to the request: an engine that failed it is not picked for it again while there are others.
    Picks and calls are recorded in ``trace``; without one, the view is that of a program that runs by itself.
    ``on_generate`` is called with each generation that begins on an engine.
    """

    __slots__ = ("answered", "began", "explains", "failed", "fleet", "on_generate", "request", "span", "trace")

    def __init__(
        self, fleet: EngineFleet, trace: Trace | None = None,
        on_generate: Callable[[Generation], object] = _ignored, request: Request | None = None,
    ) -> None:  # fmt: skip
        self.fleet = fleet
        self.trace = trace or Trace()
        self.explains = trace is not None  # whether picks are recorded with their scores
        self.on_generate = on_generate
        self.answered = False  # an engine has sent output of a generation
        self.request = request  # only engines with its adapter offer a role
        self.began = fleet.costs.clock()
        self.span = current_span()
        self.failed: dict[str, TercetError] = {}  # by engine, the latest failure last

    def close(self) -> None:
        """Note no further generation, since the request has ended.

        ``on_generate`` refers to the sequence, and the sequence by its generation to this view: such a cycle would keep
        the request, with its prompt, until the garbage collector runs.
        """
        self.on_generate = _ignored

    @property
    def members(self) -> Sequence[Member]:
        return self.fleet.members

    @contextmanager
    def pick(
        self, role: Role = "both", by: str = "round_robin", other_than: Engine | None = None,
        request: Request | None = None,
    ) -> Generator[Engine]:  # fmt: skip
        member = self._picked((), role, by, other_than, request)
        with self._counted(member, request) as engine:
            yield engine

    @contextmanager
    def pick_several(
        self, count: int, role: Role = "both", by: str = "round_robin", other_than: Engine | None = None,
        request: Request | None = None,
    ) -> Generator[Sequence[Engine]]:  # fmt: skip
        if count < 1:
            raise BadRequest(f"count: is {count}, and must be at least 1", "count")
        picking, partner = self.fleet.picking, None if other_than is None else other_than.name
        with ExitStack() as stack:
            engines = [stack.enter_context(self.pick(role, by, other_than, request))]
            # A session has one engine of each role: a further pick would bind it to another one.
            while len(engines) < count and not picking.is_by_session:
                names = {partner, *(engine.name for engine in engines)}
                if all(each.name in names for each in picking.candidates(role, request=request, partner=partner)):
                    break
                member = self._picked([engine.name for engine in engines], role, by, other_than, request)
                engines.append(stack.enter_context(self._counted(member, request)))
            yield engines

    def _picked(
        self, besides: Sequence[str], role: Role, by: str, other_than: Engine | None, request: Request | None
    ) -> Member:
        """Pick an engine, if possible none of those named ``besides``, and record the pick in the trace."""
        partner = None if other_than is None else other_than.name
        # Names to avoid while there are other engines; the last one matters least.
        without = (*besides, *(() if partner is None else (partner,)), *self.failed)
        member = self.fleet.picking.pick(role, by, without, request, partner)
        if not member.can(role):
            why = f"{role} -> {member.role}: {self.fleet.picking.why_without(role, partner)}"
            at = self.fleet.costs.clock() - self.began
            self.trace.events.append(TraceEvent(FALLBACK, member.name, reason=why, at=at))
        if self.explains:
            picking = self.fleet.picking
            pick = PickEvent(
                self.fleet.costs.clock() - self.began, role, SESSION if picking.is_by_session else by, member.name
            )
            if picking.explanation is not None:
                profile, decision, row = picking.explanation
                pick.scores, pick.parts, pick.candidates = profile.explained(decision, row, MOST_SCORES)
                tiers = {tier: int(tokens[row]) for tier, tokens in decision.tiers.items() if tokens[row]}
                if tiers.keys() - {DEVICE}:  # the usual case, all of it on the device, needs no list
                    pick.tiers = tiers
            if request is not None:
                pick.predicted = picking.believed.get((request.seq_id, member.name))
            self.trace.picks.append(pick)
        return member

    @contextmanager
    def engine(self, name: str) -> Generator[Engine]:
        with self._counted(self.fleet.member(name), None) as engine:
            yield engine

    @contextmanager
    def route(
        self, request: Request, ttft: float | None = None, tpot: float | None = None, explore: float = 0.01
    ) -> Generator[Route]:
        """Choose a route as :meth:`tercet.protocol.Fleet.route` says, and record the decision in the trace."""
        targets = Targets(ttft, tpot)
        if not 0 <= explore <= 1:
            raise BadRequest(f"explore: is {explore}, and must be between 0 and 1", "explore")
        serving = self.fleet.picking.serving(request, self.fleet.open)
        able = [member for member in serving if member.reachable] or serving
        able = [member for member in able if member.name not in self.failed] or able
        # Every engine may be drained, or without the adapter: the error says which.
        if not able:
            raise self.fleet.picking.no_engine_error()
        if request.background:  # costs are those of clients: the background is spread, and never on two engines
            able = [min(able, key=lambda member: member.in_flight)]
        matched = self.fleet.picking.matched(request, able)
        names = [member.name for member in able]
        loads = {member.name: float(member.in_flight) for member in able}
        stores = [store for store in self.fleet.stores if store.reachable and store.name not in self.failed]
        stored = self.fleet.picking.matched(request, stores) if stores else {}
        decision = self.fleet.costs.decide(
            request, names, matched, targets, explore, self.fleet.may_pair, loads, stored
        )  # fmt: skip
        self.trace.decision, chosen = decision, decision.chosen
        with ExitStack() as stack:
            stack.enter_context(self.fleet.costs.promised(request, decision, matched))
            predicted = matched.get(chosen.decode, 0)
            decode = stack.enter_context(self._counted(self.fleet.member(chosen.decode), request, predicted))
            prefill = None
            if chosen.prefill:
                predicted = matched.get(chosen.prefill, 0)
                prefill = stack.enter_context(self._counted(self.fleet.member(chosen.prefill), request, predicted))
            # Now and not at the end: the next request with this prefix should go to the same engines.
            self.fleet.picking.note_routed(request, [chosen.decode, chosen.prefill])
            source = None if chosen.pull is None else self._source(chosen.pull)
            yield Route(decode, prefill, chosen.split, source)

    def source(self, request: Request, engine: Engine) -> Source | None:
        fleet = self.fleet
        if fleet.get(engine.name) is None:  # it was removed after its pick
            return None
        able = [member for member in fleet.members if member.reachable and member.name not in self.failed]
        matched = fleet.picking.matched(request, able, by_reports=True)
        loads = {member.name: float(member.in_flight) for member in able}
        stores = [store.name for store in fleet.stores]
        pull = fleet.costs.pull(request, engine.name, matched, loads, fleet.may_pair, stores)
        fleet.picking.note_routed(request, [engine.name])
        return None if pull is None else self._source(pull)

    def _source(self, pull: Pull) -> Source:
        """Return the source of a pull. No sequence is counted there, since the engine computes nothing."""
        member = self.fleet.member(pull.source)
        counted = Counted(member, None)
        counted.end()
        return Source(TracedEngine(member, counted, self, pull.end, pull.patience), pull.end)

    @contextmanager
    def _counted(self, member: Member, request: Request | None, predicted: int | None = None) -> Generator[Engine]:
        counted = Counted(member, request)
        if predicted is None and request is not None:
            predicted = self.fleet.picking.believed.get((request.seq_id, member.name))
        try:
            yield TracedEngine(member, counted, self, predicted)
        finally:
            counted.end()
            if request is not None:
                self.fleet.picking.believed.pop((request.seq_id, member.name), None)

    def offers(self, role: Role) -> bool:
        """True if an engine for the role answers and has not failed this view's request."""
        able = (member for member in self.fleet.open if role == "both" or member.role in (role, "both"))
        if self.request is not None and self.request.adapter is not None:
            wanted = wanted_by(self.request, self.fleet.adapters)
            able = (member for member in able if has(member.adapters, wanted))
        return any(member.reachable and member.name not in self.failed for member in able)

    def note_failure(self, name: str, error: TercetError) -> None:
        """Record that an engine failed the request; one that does not answer is lost for all requests."""
        member = self.fleet.get(name)
        if member is not None and isinstance(error, EngineUnreachable):
            self.fleet.health.lost(member, error)
        if not isinstance(error, BadRequest):
            # The order is that of the failures: the latest one is avoided last.
            self.failed.pop(name, None)
            self.failed[name] = error

    def disaggregates(self, request: Request, decode: Engine, by: str | PrefillRule | None = None) -> bool:
        return self.fleet.picking.disaggregates(request, decode.name, by)


class EngineFleet(Roster):
    """The engines of this process, of which programs see a :class:`FleetView`."""

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
