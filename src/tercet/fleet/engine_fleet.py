"""The engines of a fleet by role: programs get engines only from here."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from random import Random

from tercet.decisions.cost import Costs, Targets
from tercet.decisions.scheduling import Scheduling
from tercet.decisions.sessions import SessionTable
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
    TercetError,
    WithoutRole,
    kv_obstacle,
    may_exchange_kv,
)
from tercet.protocol.spans import FALLBACK, PickEvent, TraceEvent, current_span

# Number of engines whose scores a trace records.
SCORES_TOLD = 5
# A trace's name for the way of a pick that the request's session decided.
SESSION = "session"


class FleetView:
    """A fleet as one request sees it: the :class:`~tercet.protocol.Fleet` that its program gets.

    Members and counts are shared with all other views, so a running program sees a change of membership. The trace and
    the failures belong to the request: an engine that failed it is not picked for it again while there are others.
    """

    __slots__ = ("began", "explains", "failed", "fleet", "on_generate", "request", "span", "trace")

    def __init__(
        self,
        fleet: EngineFleet,
        trace: Trace | None = None,
        on_generate: Callable[[Generation], object] = lambda _: None,
        request: Request | None = None,
    ) -> None:
        self.fleet = fleet
        self.trace = trace or Trace()
        self.explains = trace is not None  # whether picks are recorded with their scores
        self.on_generate = on_generate
        self.request = request  # only engines with its adapter offer a role
        self.began = fleet.costs.clock()
        self.span = current_span()
        self.failed: dict[str, TercetError] = {}  # by engine, the latest failure last

    @property
    def members(self) -> Sequence[Member]:
        return self.fleet.members

    @contextmanager
    def pick(
        self,
        role: Role = "both",
        by: str = "round_robin",
        other_than: Engine | None = None,
        request: Request | None = None,
    ) -> Generator[Engine]:
        """Pick an engine, see :meth:`tercet.protocol.Fleet.pick`; ``by`` may name a scheduling profile."""
        partner = None if other_than is None else other_than.name
        member = self.fleet.picking.pick(role, by, self._without(other_than), request, partner)
        if not member.can(role):
            why = f"{role} -> {member.role}: {self.fleet.picking.why_without(role, partner)}"
            at = self.fleet.costs.clock() - self.began
            self.trace.events.append(TraceEvent(FALLBACK, member.name, reason=why, at=at))
        if self.explains:
            self._note_pick(role, by, member.name, request)
        with self._counted(member, request) as engine:
            yield engine

    def _note_pick(self, role: Role, by: str, name: str, request: Request | None) -> None:
        by = SESSION if self.fleet.picking.is_by_session else by
        pick = PickEvent(self.fleet.costs.clock() - self.began, role, by, name)
        explanation = self.fleet.picking.explanation
        if explanation is not None:
            profile, decision, row = explanation
            pick.scores, pick.parts, pick.candidates = profile.explained(decision, row, SCORES_TOLD)
        if request is not None:
            pick.predicted = self.fleet.picking.believed.get((request.seq_id, name))
        self.trace.picks.append(pick)

    @contextmanager
    def engine(self, name: str) -> Generator[Engine]:
        """Count a sequence on the engine ``name`` while entered, and yield that engine.

        Raises :class:`~tercet.protocol.UnknownEngine` for an unknown name.
        """
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
        serving = self.fleet.picking.serving(request, self.fleet.roster.open)
        able = [member for member in serving if member.reachable] or serving
        able = [member for member in able if member.name not in self.failed] or able
        if not able:
            raise self.fleet.picking.no_engine_error()
        matched = self.fleet.picking.matched(request, able)
        names = [member.name for member in able]
        decision = self.fleet.costs.decide(request, names, matched, targets, explore, self.fleet.may_pair)
        self.trace.decision, chosen = decision, decision.chosen
        with ExitStack() as stack:
            stack.enter_context(self.fleet.costs.promised(request, decision, matched))
            predicted = matched.get(chosen.decode, 0)
            decode = stack.enter_context(self._counted(self.fleet.member(chosen.decode), request, predicted))
            prefill = None
            if chosen.prefill:
                predicted = matched.get(chosen.prefill, 0)
                prefill = stack.enter_context(self._counted(self.fleet.member(chosen.prefill), request, predicted))
            self.fleet.picking.note_routed(request, [chosen.decode, chosen.prefill])
            yield Route(decode, prefill, chosen.split)

    @contextmanager
    def _counted(self, member: Member, request: Request | None, predicted: int | None = None) -> Generator[Engine]:
        counted = Counted(member, request.num_tokens if request is not None else 0)
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
        able = (member for member in self.fleet.roster.open if role == "both" or member.role in (role, "both"))
        if self.request is not None and self.request.adapter is not None:
            wanted = wanted_by(self.request, self.fleet.adapters)
            able = (member for member in able if has(member.adapters, wanted))
        return any(member.reachable and member.name not in self.failed for member in able)

    def note_failure(self, name: str, error: TercetError) -> None:
        """Record that an engine failed the request; one that does not answer is lost for all requests."""
        member = self.fleet.roster.get(name)
        if member is not None and isinstance(error, EngineUnreachable):
            self.fleet.health.lost(member, error)
        if not isinstance(error, BadRequest):
            self.failed.pop(name, None)
            self.failed[name] = error

    def at_fault(self, error: BaseException) -> str:
        """Return the name of the engine that caused ``error``; empty if none did."""
        return next((name for name, found in self.failed.items() if found is error), "")

    def disaggregates(self, request: Request, decode: Engine, by: str | PrefillRule | None = None) -> bool:
        return self.fleet.picking.disaggregates(request, decode.name, by)

    def _without(self, other_than: Engine | None) -> Sequence[str]:
        """Return the names to avoid while there are other engines; the last one matters least."""
        return tuple(self.failed) if other_than is None else (other_than.name, *self.failed)


class EngineFleet:
    """The engines of this process, which programs see as :meth:`traced` or, without a request, as this object itself.

    ``scheduling`` has the profiles that picks may name. ``clock`` is monotonic, in seconds. An engine's report older
    than ``stale_after`` seconds counts as unknown, and an engine without progress for ``stuck_after_s`` is stuck.
    ``seed`` makes random picks repeatable.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        scheduling: Scheduling | None = None,
        clock: Callable[[], float] = time.monotonic,
        stale_after: float = STALE_AFTER,
        stuck_after_s: float = STUCK_AFTER_S,
        seed: int | None = None,
    ) -> None:
        random = Random(seed)
        # Gets each move that an engine proposes, with the engine's name.
        self.on_proposal: Callable[[str, MoveProposal], object] = lambda engine, proposal: None
        # Gets each report of an engine.
        self.on_report: Callable[[str, EngineLoad], object] = lambda engine, load: None
        self.knowledge = FleetKnowledge(clock, stale_after)  # engines' reports and events, from their connections
        self.costs = Costs(clock, random)  # the observed cost of serving, and the work in flight
        self.hits = PrefixHits()
        self.liveness = Liveness(stuck_after_s)
        self.picking = Picking[Member](self.knowledge, random, scheduling or Scheduling())
        self.roster = Roster(members, self.knowledge, self.picking)
        self.health = EngineHealth(self.roster, self.liveness, self.knowledge, self.picking, clock)
        self.adapters = self.picking.adapters = AgreedAdapters(self.roster)

    # ---- members -------------------------------------------------------------------------------------------------

    @property
    def members(self) -> Sequence[Member]:
        """All engines, including drained ones."""
        return self.roster.members

    @property
    def open(self) -> Sequence[Member]:
        """Engines that may be picked now; the list changes later, so do not keep it."""
        return self.roster.open

    def member(self, name: str) -> Member:
        """Return the engine of that name; raises :class:`~tercet.protocol.UnknownEngine`."""
        return self.roster.member(name)

    def add(self, member: Member) -> None:
        """Add an engine, which may be picked at once; raises :class:`~tercet.protocol.Conflict` for a name in use."""
        self.roster.add(member)

    def remove(self, name: str) -> Member:
        """Remove an engine and return it; ``in_flight`` of the returned member counts programs that still use it."""
        member = self.roster.remove(name)
        self.health.forget(name)
        self.costs.forget(name)
        self.hits.forget(name)
        self.adapters.agree()
        return member

    def drain(self, name: str, draining: bool = True) -> None:
        """Stop or resume picking an engine, whose sequences continue.

        Raises :class:`~tercet.protocol.UnknownEngine` for an unknown name.
        """
        self.roster.drain(name, draining)

    def when_reopened(self, call: Callable[[], object]) -> None:
        """Set the function that is called each time the set of engines that may be picked changes."""
        self.roster.when_reopened = call

    # ---- engines' reports ----------------------------------------------------------------------------------------

    def report(self, name: str, load: EngineLoad) -> None:
        """Record an engine's load report; a report of an engine that is not a member is ignored."""
        self.knowledge.loads.report(name, load)
        self.health.heard(name, load.stalled_s)
        member = self.roster.get(name)
        if member is not None:
            self.health.note_stopping(member, load.stopping)
            self.health.note_paused(member, load.paused)
            if load.adapters is not None:
                member.reported_stamp = load.adapters.stamp
        self.on_report(name, load)

    def proposed(self, name: str, proposal: MoveProposal) -> None:
        """Pass on an engine's proposal to move a sequence that it generates."""
        self.on_proposal(name, proposal)

    def serves(self, model: str) -> bool:
        """True if an engine has reported this name of a model, or if it is the name of an adapter of this fleet."""
        return model in self.adapters or any(member.model == model for member in self.roster.members)

    @property
    def model_dtype(self) -> str:
        """The dtype in which the engines compute, as they report it; empty if they differ or none has reported."""
        said = {member.model_dtype for member in self.roster.members if member.model_dtype}
        return said.pop() if len(said) == 1 else ""

    # ---- views ---------------------------------------------------------------------------------------------------

    def traced(
        self,
        trace: Trace,
        on_generate: Callable[[Generation], object] = lambda _: None,
        request: Request | None = None,
    ) -> FleetView:
        """Return the view of ``request``, whose picks and calls are recorded in ``trace``.

        ``on_generate`` is called with each generation that begins on an engine.
        """
        return FleetView(self, trace, on_generate, request)

    # A program that runs by itself, without a router's service, may use the fleet directly; nothing is recorded then.

    def pick(
        self,
        role: Role = "both",
        by: str = "round_robin",
        other_than: Engine | None = None,
        request: Request | None = None,
    ) -> AbstractContextManager[Engine]:
        return FleetView(self).pick(role, by, other_than, request)

    def engine(self, name: str) -> AbstractContextManager[Engine]:
        return FleetView(self).engine(name)

    def route(
        self, request: Request, ttft: float | None = None, tpot: float | None = None, explore: float = 0.01
    ) -> AbstractContextManager[Route]:
        return FleetView(self).route(request, ttft, tpot, explore)

    def offers(self, role: Role) -> bool:
        return FleetView(self).offers(role)

    def disaggregates(self, request: Request, decode: Engine, by: str | PrefillRule | None = None) -> bool:
        return self.picking.disaggregates(request, decode.name, by)

    # ---- how engines are picked ----------------------------------------------------------------------------------

    @property
    def scheduling(self) -> Scheduling:
        """Profiles that picks may name; assign to change them for later picks."""
        return self.picking.scheduling

    @scheduling.setter
    def scheduling(self, scheduling: Scheduling) -> None:
        self.picking.scheduling = scheduling
        self.picking.forget_candidates()

    @property
    def without_role(self) -> WithoutRole:
        """The rule for picks while no engine of their role answers: serve by another role, or refuse."""
        return self.picking.without_role

    @without_role.setter
    def without_role(self, without_role: WithoutRole) -> None:
        self.picking.without_role = without_role

    @property
    def sessions(self) -> SessionTable | None:
        """Table of the sessions that each stay on one engine, for all kinds of picks; None if sessions are not used."""
        return self.picking.sessions

    @sessions.setter
    def sessions(self, sessions: SessionTable | None) -> None:
        self.picking.sessions = sessions

    def ranked(
        self,
        role: Role,
        request: Request,
        most: int = 1,
        among: Collection[str] | None = None,
        other_than: str | None = None,
    ) -> tuple[list[Member], int]:
        """Return at most ``most`` engines in the order to try them, by the profile of the role.

        No sequence is counted on them. The second value is the estimated number of the prompt's tokens in the cache of
        the first engine. Plugins count the first engine as picked; the others are alternatives if it fails. ``among``
        are the names that may be picked, None for all; ``other_than`` is the partner of the picked engine, which is
        avoided while there are others.

        Raises :class:`~tercet.protocol.EngineUnreachable` if no engine that answers may be picked,
        :class:`~tercet.protocol.RoleUnavailable`, and :class:`~tercet.protocol.BadRequest` without a profile.
        """
        without = () if other_than is None else (other_than,)
        return self.picking.ranked(role, request, most, among, without, other_than)

    def destination(self, generation: Generation, name: str) -> TracedEngine:
        """Return the engine ``name`` as destination of a running sequence, with the sequence's trace and counts."""
        return generation.engine.instead(self.member(name))

    def require_exchange(self, sender: str, receiver: str) -> None:
        """Raise :class:`~tercet.protocol.LayoutMismatch` if these members must not exchange KV.

        Engines check this as well; here it is checked before any KV is reserved.
        """
        here, there = self.roster.get(sender), self.roster.get(receiver)
        if here is not None and there is not None and (why := kv_obstacle(here.revision, there.revision)):
            raise LayoutMismatch(f"{sender} and {receiver} must not exchange KV: {why}")

    def may_pair(self, one: str, other: str) -> bool:
        """True if these members may exchange KV."""
        return may_exchange_kv(self.member(one).revision, self.member(other).revision)

    def calls_of(self, name: str) -> CallsInFlight:
        """Return the calls in flight of an engine."""
        member = self.roster.get(name)
        return member.calls if member is not None else CallsInFlight()  # the engine was removed, and is not watched

    def splits(
        self,
        request: Request,
        decode: str,
        cached: int,
        among: Collection[str] | None = None,
        by: PrefillRule | None = None,
    ) -> bool:
        """True if another engine ``among`` these should prefill, by the scheduling's decider or the rule ``by``.

        ``cached`` is the estimated number of the prompt's tokens in the cache of ``decode``.
        """
        return self.picking.disaggregates(request, decode, by, cached, among)
