"""Engines by role, and the only way for a program to get one."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from random import Random

import msgspec

from tercet.decisions.cost import Costs, Targets
from tercet.decisions.scheduling import Scheduling
from tercet.fleet.adapters import Declared, agreed, differing, has, wanted_by
from tercet.fleet.calls_in_flight import CallsInFlight
from tercet.fleet.knowledge import STALE_AFTER, FleetKnowledge
from tercet.fleet.liveness import STUCK_AFTER_S, Liveness, Stuck
from tercet.fleet.members import COUNTS, Counted, Member
from tercet.fleet.picking import Picking
from tercet.fleet.prefix_hits import PrefixHits
from tercet.fleet.trace import Generation, Trace, TracedEngine, Tracing
from tercet.protocol import (
    AdapterReport,
    BadRequest,
    Conflict,
    Engine,
    EngineError,
    EngineLoad,
    EngineStatus,
    EngineUnreachable,
    MoveProposal,
    PrefillRule,
    Request,
    Role,
    Route,
    TercetError,
    UnknownAdapter,
    UnknownEngine,
    WithoutRole,
)
from tercet.protocol.trace import FALLBACK, TraceEvent
from tercet.settings import log_events


class EngineFleet:
    """The engines of this process, as :class:`~tercet.protocol.Fleet` shows them to programs.

    A fleet handed to a program is a view of the shared one: members and counts are shared, so programs that run already
    see a change of membership. The trace belongs to the request, and so do its failures: an engine that failed it is
    not picked for it again while there are others.

    ``scheduling`` has the profiles that picks may name. ``clock`` is monotonic, in seconds. An engine's report older
    than ``stale_after`` seconds counts as unknown, and an engine without progress for ``stuck_after_s`` is stuck.
    ``seed`` makes random picks repeatable. ``knowledge`` holds the engines' reports and events, which their connections
    pass to it; ``costs`` the observed cost of serving, and the work in flight. ``on_proposal`` receives each move that
    an engine passes on, with the engine's name, and ``on_report`` each of its reports.
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
        self.liveness = Liveness(stuck_after_s)
        self.on_proposal: Callable[[str, MoveProposal], object] = lambda engine, proposal: None
        self.on_report: Callable[[str, EngineLoad], object] = lambda engine, load: None
        self._clock = clock
        self._members = {member.name: member for member in members}
        self._open = list[Member]()
        self._trace = Trace()
        self._failed: dict[str, TercetError] | None = None
        self._lost: set[str] = set()
        self._on_generate: Callable[[Generation], object] = lambda _: None
        self._request: Request | None = None
        self._declared: Declared = ()
        random = Random(seed)
        self.knowledge = FleetKnowledge(clock, stale_after)
        self._picking = Picking[Member](self.knowledge, random, scheduling or Scheduling())
        self.costs = Costs(clock, random)
        self.hits = PrefixHits()
        for member in members:
            self._follow(member)
        self._reopen()

    @property
    def members(self) -> Sequence[Member]:
        """All engines, including those that are being drained."""
        return list(self._members.values())

    @property
    def open(self) -> Sequence[Member]:
        """Engines that may be picked now; the returned list changes, so do not keep it."""
        return self._open

    def traced(
        self,
        trace: Trace,
        on_generate: Callable[[Generation], object] = lambda _: None,
        request: Request | None = None,
    ) -> EngineFleet:
        """Return a view of this fleet whose engines record their calls in ``trace``.

        ``on_generate`` is called with each generation that begins on one of them. ``request`` is the view's request: a
        role is offered only by engines with its adapter.
        """
        view = EngineFleet.__new__(EngineFleet)
        view.__dict__.update(self.__dict__)  # as copy() does, but ten times faster
        view._trace, view._failed, view._on_generate = trace, {}, on_generate
        view._request = request
        return view

    @property
    def scheduling(self) -> Scheduling:
        """Profiles that picks may name; set it to change them for later picks."""
        return self._picking.scheduling

    @scheduling.setter
    def scheduling(self, scheduling: Scheduling) -> None:
        self._picking.scheduling = scheduling
        self._picking.forget_candidates()

    @property
    def without_role(self) -> WithoutRole:
        """What happens to picks while no engine of their role answers."""
        return self._picking.without_role

    @without_role.setter
    def without_role(self, without_role: WithoutRole) -> None:
        self._picking.without_role = without_role

    def report(self, name: str, load: EngineLoad) -> None:
        """Record an engine's load report; a report of an engine that is not a member is ignored."""
        self.knowledge.loads.report(name, load)
        self.heard(name, load.stalled_s)
        self._note_stopping(name, load.stopping)
        member = self._members.get(name)
        if member is not None and load.adapters is not None:
            member.said_stamp = load.adapters.stamp
        self.on_report(name, load)

    @property
    def model_dtype(self) -> str:
        """The dtype in which all engines that reported it compute; empty if they differ."""
        said = {member.model_dtype for member in self._members.values() if member.model_dtype}
        return said.pop() if len(said) == 1 else ""

    # ---- adapters --------------------------------------------------------------------------------------------

    @property
    def adapters(self) -> Mapping[str, AdapterReport]:
        """LoRA adapters that this fleet serves, by name: those of its engines, and those that operators declared."""
        return self._picking.adapters

    @property
    def declared(self) -> Declared:
        """The adapters that every engine of this fleet should have; set it to change them."""
        return self._declared

    @declared.setter
    def declared(self, declared: Declared) -> None:
        self._declared = declared
        self._agree_on_adapters()

    def has_adapters(self, member: Member, status: EngineStatus) -> None:
        """Record an engine's LoRA adapters, and the number of them that one step may serve."""
        member.adapters = {report.name: report for report in status.adapters}
        member.max_adapters = status.max_adapters
        self._agree_on_adapters()
        for engine, report in differing({member.name: member.adapters}, self.adapters):
            wanted = self.adapters[report.name].digest
            why = f"its digest is {report.digest}, and the digest in this fleet is {wanted}"
            log_events.ADAPTER_DIFFERS.tell(engine=engine, adapter=report.name, reason=why)

    def pinned(self, request: Request) -> Request:
        """Return the request, pinned to the adapter that its adapter name stands for in this fleet now.

        Raises :class:`~tercet.protocol.UnknownAdapter` for a name that the fleet does not know.
        """
        if request.adapter is None or request.adapter_digest:
            return request
        found = self.adapters.get(request.adapter)
        if found is None:
            raise UnknownAdapter(f"model: this fleet has no adapter {request.adapter!r}", "model")
        return msgspec.structs.replace(request, adapter_digest=found.digest)

    def require_adapter(self, name: str, request: Request) -> None:
        """Raise :class:`~tercet.protocol.UnknownAdapter` if an engine lacks the adapter of the request."""
        if request.adapter is not None and not has(self.member(name).adapters, wanted_by(request, self.adapters)):
            raise UnknownAdapter(f"destination: {name} does not have the adapter {request.adapter!r}", "destination")

    def _agree_on_adapters(self) -> None:
        everyone = [member.adapters for member in self._members.values() if member.adapters]
        if everyone or self._declared or self._picking.adapters:
            self._picking.adapters = agreed(everyone, self._declared)

    def started_anew(self, name: str) -> None:
        """Drop all knowledge of an engine: it was restarted."""
        log_events.ENGINE_RESTARTED.tell(engine=name, reason="it was restarted")
        self.knowledge.cleared(name)
        self._note_stopping(name, False)

    def _note_stopping(self, name: str, stopping: bool) -> None:
        member = self._members.get(name)
        if member is not None and member.stopping is not stopping:
            member.stopping = stopping
            if stopping:
                log_events.ENGINE_STOPPING.tell(engine=name, reason="it is stopping")
            else:
                log_events.ENGINE_BACK.tell(engine=name, reason="it is no longer stopping")
            self._reopen()

    def proposed(self, name: str, proposal: MoveProposal) -> None:
        """Pass on an engine's proposal to move a sequence that it generates."""
        self.on_proposal(name, proposal)

    def heard(self, name: str, stalled_s: float) -> None:
        """Record for how many seconds an engine has made no progress; an engine that is not a member is ignored."""
        if self.knowledge.loads.row(name) is not None:
            self.liveness.heard(name, self._clock(), stalled_s)

    def heard_within(self, name: str, seconds: float) -> bool:
        """Whether an engine has sent anything in the last ``seconds``."""
        return self.liveness.heard_within(name, seconds, self._clock())

    def stand_still(self, interval: float) -> list[Stuck]:
        """Engines that are stuck now and were not ``interval`` seconds ago.

        Everything that waits for a stuck engine fails, even if it began to wait after that was found.
        """
        new = self.liveness.look(self._clock(), interval)
        for engine, why in self.liveness.stuck:
            self.lose(engine, why)
        return new

    def member(self, name: str) -> Member:
        """Return the engine of that name; raises :class:`~tercet.protocol.UnknownEngine`."""
        found = self._members.get(name)
        if found is None:
            known = ", ".join(self._members) or "none"
            raise UnknownEngine(f"name: this fleet has no engine {name!r}; it has {known}", "name")
        return found

    def add(self, member: Member) -> None:
        """Add an engine, which may be picked at once; raises :class:`~tercet.protocol.Conflict` for a name in use."""
        if member.name in self._members:
            raise Conflict(f"name: an engine called {member.name!r} is in this fleet already", "name")
        self._members[member.name] = member
        self._follow(member)
        self._reopen()

    def _follow(self, member: Member) -> None:
        """Update the columns that picks use when the member changes."""
        self.knowledge.add(member.name)
        self.knowledge.loads.count(member.name, member.in_flight, member.in_flight_tokens)
        member.on_change = self._changed

    def _changed(self, member: Member, field: str) -> None:
        if field in COUNTS:
            self.knowledge.loads.count(member.name, member.in_flight, member.in_flight_tokens)
        else:
            self._picking.forget_candidates()

    def remove(self, name: str) -> Member:
        """Remove an engine. Programs that use it continue with it; ``in_flight`` of the returned member counts them."""
        member = self.member(name)
        del self._members[name]
        member.on_change = None
        self.knowledge.remove(name)
        self.liveness.forget(name)
        self.costs.forget(name)
        self.hits.forget(name)
        self._lost.discard(name)
        self._agree_on_adapters()
        self._reopen()
        return member

    def drain(self, name: str, draining: bool = True) -> None:
        """Stop or resume picking an engine; its sequences continue. Raises :class:`~tercet.protocol.UnknownEngine`."""
        self.member(name).draining = draining
        self._reopen()

    def _reopen(self) -> None:
        # In place: views share this list.
        self._open[:] = [member for member in self._members.values() if not member.leaving]
        self._picking.reopen(self._open, [member for member in self._members.values() if member.leaving])

    @contextmanager
    def pick(
        self,
        role: Role = "both",
        by: str = "round_robin",
        other_than: Engine | None = None,
        request: Request | None = None,
    ) -> Generator[Engine]:
        """See :meth:`tercet.protocol.Fleet.pick`; profiles are those of :attr:`scheduling`."""
        partner = None if other_than is None else other_than.name
        member = self._picking.pick(role, by, self._without(other_than), request, partner)
        if not member.can(role):
            why = f"{role} -> {member.role}: {self._picking.why_without(role)}"
            self._trace.events.append(TraceEvent(FALLBACK, member.name, reason=why))
        with self._counted(member, request) as engine:
            yield engine

    def ranked(
        self,
        role: Role,
        request: Request,
        most: int = 1,
        among: Collection[str] | None = None,
        other_than: str | None = None,
    ) -> tuple[list[Member], int]:
        """Return at most ``most`` engines in the order to try them, by the profile of the role; none is counted.

        The second value is the number of the prompt's tokens that the first engine probably has in its cache. Plugins
        count the first engine as picked; the others are alternatives if it fails. ``among`` are the names that may be
        picked, all if not given; ``other_than`` is a name that is avoided while there are others: the engine that this
        one works with.

        Raises :class:`~tercet.protocol.EngineUnreachable` if no engine that answers may be picked,
        :class:`~tercet.protocol.RoleUnavailable`, and :class:`~tercet.protocol.BadRequest` without a profile.
        """
        without = () if other_than is None else (other_than,)
        return self._picking.ranked(role, request, most, among, without, other_than)

    @contextmanager
    def engine(self, name: str) -> Generator[Engine]:
        """The engine of that name, counted while entered; raises :class:`~tercet.protocol.UnknownEngine`."""
        with self._counted(self.member(name), None) as engine:
            yield engine

    @contextmanager
    def route(
        self, request: Request, ttft: float | None = None, tpot: float | None = None, explore: float = 0.01
    ) -> Generator[Route]:
        """See :meth:`tercet.protocol.Fleet.route`; the decision is recorded in the trace."""
        targets = Targets(ttft, tpot)
        if not 0 <= explore <= 1:
            raise BadRequest(f"explore: is {explore}, and must be between 0 and 1", "explore")
        serving = self._picking.serving(request, self._open)
        able = [member for member in serving if member.reachable] or serving
        able = [member for member in able if member.name not in (self._failed or ())] or able
        if not able:
            raise self._picking.nobody()
        matched = self._picking.matched(request, able)
        decision = self.costs.decide(request, [member.name for member in able], matched, targets, explore)
        self._trace.decision, chosen = decision, decision.chosen
        with ExitStack() as stack:
            stack.enter_context(self.costs.promised(request, decision, matched))
            predicted = matched.get(chosen.decode, 0)
            decode = stack.enter_context(self._counted(self.member(chosen.decode), request, predicted))
            prefill = None
            if chosen.prefill:
                predicted = matched.get(chosen.prefill, 0)
                prefill = stack.enter_context(self._counted(self.member(chosen.prefill), request, predicted))
            self._picking.note_routed(request, [chosen.decode, chosen.prefill])
            yield Route(decode, prefill, chosen.split)

    @contextmanager
    def _counted(self, member: Member, request: Request | None, predicted: int | None = None) -> Generator[Engine]:
        counted = Counted(member, request.num_tokens if request is not None else 0)
        if predicted is None and request is not None:
            predicted = self._picking.believed.get((request.seq_id, member.name))
        try:
            yield TracedEngine(member, counted, self._tracing(), predicted)
        finally:
            counted.end()
            if request is not None:
                self._picking.believed.pop((request.seq_id, member.name), None)

    def _tracing(self) -> Tracing:
        return Tracing(self._trace, self.costs, self._on_generate, self._note_failure, self._calls_of, self.hits)

    def destination(self, generation: Generation, name: str) -> TracedEngine:
        """Return the engine of that name as destination of a running sequence, with the sequence's trace and counts."""
        return generation.engine.instead(self.member(name))

    @property
    def answers(self) -> bool:
        """Whether at least one engine that may be picked answers."""
        return any(member.reachable for member in self._open)

    def require_answers(self) -> None:
        """Raise :class:`~tercet.protocol.EngineUnreachable` if no engine that may be picked answers."""
        if not self._open:
            raise self._picking.nobody()
        if not self.answers:
            raise EngineUnreachable(self._why_none_answers())

    def _why_none_answers(self) -> str:
        refused = [member for member in self._open if member.refused]
        if not refused:
            return "no engine that may be picked answers"
        others = len(self._open) - len(refused)
        silent = f", and {others} of {len(self._open)} do not answer" if others else ""
        return (
            f"no engine serves what this router has promised its clients: {refused[0].name} answers, but "
            f"{refused[0].refused}{silent}. Put engines of this fleet's model there, or restart the router for "
            "the other model (with another state file, if it has one)"
        )

    def offers(self, role: Role) -> bool:
        """Whether there is an engine for the role that answers and has not failed this view's request."""
        failed = self._failed or ()
        able = (member for member in self._open if role == "both" or member.role in (role, "both"))
        if self._request is not None and self._request.adapter is not None:
            wanted = wanted_by(self._request, self.adapters)
            able = (member for member in able if has(member.adapters, wanted))
        return any(member.reachable and member.name not in failed for member in able)

    def _note_failure(self, name: str, error: TercetError) -> None:
        member = self._members.get(name)
        if member is not None and isinstance(error, EngineUnreachable):
            self.lost(member, error)
        if self._failed is not None and not isinstance(error, BadRequest):
            self._failed.pop(name, None)
            self._failed[name] = error

    def _calls_of(self, name: str) -> CallsInFlight:
        member = self._members.get(name)
        return member.calls if member is not None else CallsInFlight()  # the engine was removed, and is not watched

    def lose(self, name: str, why: str) -> None:
        """Fail everything that waits for a stuck engine, and do not pick it until it is reachable again."""
        member = self._members.get(name)
        if member is not None:
            error = EngineUnreachable(f"{name} is stuck: {why}")
            error.blames = name
            self.lost(member, error)
            member.calls.lose(error)

    def lost(self, member: Member, error: TercetError) -> None:
        """Stop picking a lost engine until :meth:`found_well`; only the first error is logged."""
        member.reachable = False
        if member.name not in self._lost and member is self._members.get(member.name):
            self._lost.add(member.name)
            log_events.ENGINE_LOST.tell(engine=member.name, code=error.code, reason=error.message)

    def refused(self, member: Member, error: TercetError) -> None:
        """Stop picking an engine that answers but does not fit, until :meth:`found_well`."""
        member.reachable = False
        self._lost.add(member.name)
        log_events.ENGINE_REFUSED.tell(engine=member.name, code=error.code, reason=error.message)

    def found_well(self, member: Member) -> None:
        """Pick an engine again: it answers, fits and makes progress."""
        member.reachable = True
        if member.name in self._lost:
            self._lost.discard(member.name)
            log_events.ENGINE_BACK.tell(engine=member.name, reason="it answers and makes progress")

    def at_fault(self, error: BaseException) -> tuple[str, BaseException]:
        """Name of the engine whose ``error`` failed this view's request, and its error; an empty name if there is none.

        An output that ends a sequence too early is reported twice: here, and by the code that runs the program.
        """
        failed = [*(self._failed or {}).items()]
        if isinstance(error, EngineError) and failed:
            return next(((name, found) for name, found in failed if found is error), failed[-1])
        return next(((name, found) for name, found in failed if found is error), ("", error))

    def disaggregates(self, request: Request, decode: Engine, by: str | PrefillRule | None = None) -> bool:
        return self._picking.disaggregates(request, decode.name, by)

    def splits(
        self,
        request: Request,
        decode: str,
        cached: int,
        among: Collection[str] | None = None,
        by: PrefillRule | None = None,
    ) -> bool:
        """Whether another engine ``among`` these should prefill, by the scheduling's decider or the rule ``by``.

        ``cached`` is the estimated number of the prompt's tokens in the cache of ``decode``.
        """
        return self._picking.disaggregates(request, decode, by, cached, among)

    def _without(self, other_than: Engine | None) -> Sequence[str]:
        """Names that are avoided while there are others; the last one matters least."""
        failed = tuple(self._failed) if self._failed else ()
        return failed if other_than is None else (other_than.name, *failed)
