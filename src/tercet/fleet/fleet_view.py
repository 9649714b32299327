"""The fleet as a program sees it, for one request.

    FleetView ── pick, route ──▶ TracedEngine ── start_generate ──▶ Generation (observes the stream)

All of them write the request's trace, count its work at the members, and blame the engines that failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tercet.decisions.cost import Pull, RouteDecision, Targets
from tercet.decisions.scheduling.plugin import DEVICE
from tercet.fleet.adapters import has, wanted_by
from tercet.fleet.members import Counted, Member, UntilLost
from tercet.protocol import (
    BadRequest,
    DeadlineExceeded,
    Engine,
    EngineStatus,
    EngineUnreachable,
    Output,
    OutputStream,
    PrefillRule,
    Request,
    Reservation,
    Role,
    Route,
    Sent,
    Source,
    TercetError,
    spans,
)
from tercet.protocol.spans import FALLBACK, PickEvent, SpanContext, TraceEvent, VerbTrace, current_span, working_in

if TYPE_CHECKING:  # it makes the views
    from tercet.fleet.engine_fleet import EngineFleet

MOST_SCORES = 5  # number of engines whose scores a trace records
SESSION = "session"  # in a trace: the request's session decided the pick


class Trace(VerbTrace):
    """The events of one request."""

    ttft: float | None = None  # latencies that its client saw, in seconds; none in the background
    tpot: float | None = None
    decision: RouteDecision | None = None  # the choice of its route by :meth:`tercet.fleet.FleetView.route`
    picks: list[PickEvent] = []  # all other picks
    failed: list[TraceEvent] = []  # calls of verbs that failed


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


@dataclass(slots=True)
class StartedCall:
    """A call of a verb in progress."""

    started: float
    span: SpanContext | None = None  # in a distributed trace
    caller: SpanContext | None = None  # the parent of that span; None if the call has no span


class TracedEngine:
    """An :class:`~tercet.protocol.Engine` for the request of ``view``, which is ``counted`` there.

    Its calls are recorded in the view's trace, and a failed call blames an engine there. A call fails when its engine,
    or the engine that receives its KV, is lost.
    """

    def __init__(
        self, member: Member, counted: Counted, view: FleetView, predicted: int | None = None,
        patience: float | None = None,
    ) -> None:  # fmt: skip
        self._member = member
        self.engine = member.engine
        self.calls = member.calls  # the calls that wait for this engine
        self._counted = counted
        self.view = view
        self.costs = view.fleet.costs  # learn from the calls
        # The number of the prompt's tokens that its pick expected in its cache; None without a prediction.
        self._predicted = predicted
        self._patience = patience  # seconds for a send of cached KV; None for no limit

    def instead(self, member: Member) -> TracedEngine:
        """Return another engine for the same request, which counts there when that engine starts to generate."""
        return TracedEngine(member, self._counted, self.view)

    def generates(self, generation: Generation) -> None:
        # From here on the sequence is this engine's load, and no longer that of the engine it moved away from.
        self._counted.go_to(self._member)
        self.view.on_generate(generation)

    def failed(self, error: TercetError, receiver: str | None = None) -> None:
        """Report a failed call with the engine to blame, which is ``receiver`` if it did not accept the KV."""
        # A sender reports what its receiver refused: avoiding the sender would not help.
        by_receiver = receiver if error.param == "kv_addr_info" else None
        self.view.note_failure(error.blames or by_receiver or self.name, error)

    @contextmanager
    def _watched(self, verb: str, receiver: str | None = None, cached_only: bool = False) -> Generator[StartedCall]:
        call = self.called()
        try:
            with working_in(call.span):
                yield call
        except TercetError as error:
            self.failed(error, receiver)
            self.note_failed(TraceEvent(verb, self.name, to=receiver or "", cached_only=cached_only), call, error)
            raise

    def called(self) -> StartedCall:
        """Return a call that begins now; its caller is a move if the current task makes one, else the program."""
        started, program = self.costs.clock(), self.view.span
        # A span costs 50 us: only requests that are sampled have any, and only if spans go anywhere.
        if program is None or not program.sampled or spans.process.sink is None:  # no span of the call: the caller's
            return StartedCall(started, program)
        here = current_span()
        caller = here if here is not None and here.trace_id == program.trace_id else program
        return StartedCall(started, caller.child(), caller)

    def note_failed(self, event: TraceEvent, call: StartedCall, error: TercetError) -> None:
        event.code, event.reason = error.code, error.message
        self._fill(event, call)
        self.view.trace.failed.append(event)

    @property
    def name(self) -> str:
        return self.engine.name

    @asynccontextmanager
    async def prep_recv(self, request: Request, end: int | None = None) -> AsyncGenerator[Reservation]:
        async with AsyncExitStack() as stack:
            with self._watched("prep_recv") as call:
                # Only until the reservation is there: what the program does with it later has other calls to fail.
                async with UntilLost(self.calls):
                    reservation = await stack.enter_async_context(self.engine.prep_recv(request, end))
            event = TraceEvent("prep_recv", self.name, end=reservation.end, cached=reservation.matched_len)
            self.found(event)
            self.note(event, call)
            yield reservation

    async def extend_recv(self, reservation: Reservation, request: Request, end: int | None = None) -> Reservation:
        with self._watched("extend_recv") as call:
            async with UntilLost(self.calls):
                extended = await self.engine.extend_recv(reservation, request, end)
        self.note(TraceEvent("extend_recv", self.name, end=extended.end, cached=extended.matched_len), call)
        return extended

    async def remote_send(
        self, request: Request, to: Reservation, begin: int, end: int | None = None, sample: bool = False,
        cached_only: bool = False,
    ) -> Sent:  # fmt: skip
        stop = to.end if end is None else end
        receiver = to.kv_addr_info.engine
        self.view.fleet.require_exchange(self.name, receiver)
        if cached_only:
            return await self._pull(request, to, begin, stop)
        with (
            self._watched("remote_send", receiver) as call,
            self.costs.sending(self.name, request, begin, stop) as done,
        ):
            # Either end may be lost: a sender waits for a receiver that will never acknowledge.
            async with UntilLost(self.calls, self.view.fleet.calls_of(receiver)):
                sent = await self.engine.remote_send(request, to, begin, end, sample)
            done(sent.usage)
        event = self._sent(sent, receiver)
        self.found(event)
        self.note(event, call)
        return sent

    async def _pull(self, request: Request, to: Reservation, begin: int, end: int) -> Sent:
        """Have cached KV sent, at most for the time in which it could be computed; what is missing was a wrong belief.

        Raises :class:`~tercet.protocol.DeadlineExceeded` if it takes longer.
        """
        receiver, fleet = to.kv_addr_info.engine, self.view.fleet
        with (
            self._watched("remote_send", receiver, cached_only=True) as call,
            self.costs.pulling(self.name, begin) as reached,
        ):
            try:
                async with asyncio.timeout(self._patience), UntilLost(self.calls, fleet.calls_of(receiver)):
                    sent = await self.engine.remote_send(request, to, begin, end, cached_only=True)
            except TimeoutError as error:
                raise DeadlineExceeded(f"{self.name}: its cached KV did not come within {self._patience} s") from error
            reached(sent.end)
        event = self._sent(sent, receiver)
        event.cached_only = True
        if self._predicted is not None:
            event.predicted = end
            fleet.hits.found(self.name, end, event.cached)
        self.note(event, call)
        return sent

    def _sent(self, sent: Sent, receiver: str) -> TraceEvent:
        return TraceEvent(
            "remote_send", self.name, begin=sent.begin, end=sent.end, cached=sent.usage.cached,
            computed=sent.usage.computed, bytes=sent.bytes, chunks=sent.chunks, transport=sent.transport, to=receiver,
        )  # fmt: skip

    def start_generate(self, request: Request, begin: int = 0, output: Sequence[int] = ()) -> OutputStream:
        call = self.called()
        with working_in(call.span):
            stream = self.engine.start_generate(request, begin, output)
        cost = self.costs.generating(self.name, request, begin, len(output))
        if cost is not None:
            stream.subscribe(cost)
        event = TraceEvent("start_generate", self.name, begin=begin, end=request.num_tokens + len(output))
        stream.subscribe(Generation(self, request, output, event, call))
        return stream

    def found(self, event: TraceEvent) -> None:
        """Compare ``cached`` of the engine's first event with the prediction of its pick, within the event's tokens."""
        if self._predicted is not None:
            # Once: the engine's first event shows what it had; later ones also count what this request has put there.
            event.predicted, self._predicted = min(self._predicted, event.end), None
            self.view.fleet.hits.found(self.name, event.predicted, event.cached)

    def note(self, event: TraceEvent, call: StartedCall) -> None:
        self._fill(event, call)
        self.view.trace.events.append(event)

    def _fill(self, event: TraceEvent, call: StartedCall) -> None:
        event.seconds = self.costs.clock() - call.started
        event.at = call.started - self.view.began
        if call.span is not None and call.caller is not None:
            event.span, event.parent = call.span.span_id, call.caller.span_id

    async def status(self) -> EngineStatus:
        return await self.engine.status()


class Generation:
    """One ``start_generate`` call of an engine, as an observer of its stream: it records the start or failure."""

    def __init__(
        self, engine: TracedEngine, request: Request, output: Sequence[int], event: TraceEvent, call: StartedCall
    ) -> None:
        self.engine = engine
        self.request = request  # the engine's
        self.tokens = list(output)  # all output tokens so far, including those of earlier attempts
        self.begun = False  # true from the engine's first output on
        self.stream: OutputStream | None = None
        self._event, self._call = event, call
        self._noted: object = None

    @property
    def computed(self) -> int:
        """Number of tokens whose KV is certainly in the engine: 0 while it waits, then all tokens except the last."""
        return self.request.num_tokens + len(self.tokens) - 1 if self.begun else 0

    def on_start(self, stream: OutputStream) -> None:
        self.stream = stream
        # A stream starts when it is read, which may be long after it was made.
        self._call.started = self.engine.costs.clock()
        self._noted = self.engine.calls.note(stream.give_up, lambda: not self.begun)
        self.engine.generates(self)

    def on_output(self, output: Output) -> None:
        if not self.begun:
            self.begun = True
            if output.usage is not None:
                event, usage = self._event, output.usage
                event.cached, event.received, event.computed = usage.cached, usage.received, usage.computed
                self.engine.found(event)
                self.engine.note(event, self._call)
            if not self.engine.view.answered:
                self.engine.view.answered = True
                for call in self.engine.view.fleet.on_answered:
                    call(self)
        self.tokens += output.token_ids

    def on_end(self, error: BaseException | None) -> None:
        # First of all: a stream that has ended must not be made to fail by the loss of its engine.
        self.stream = None
        self.engine.calls.forget(self._noted)
        self._event.total = self.engine.costs.clock() - self._call.started
        if isinstance(error, TercetError):
            self.engine.failed(error)
            if self.begun:  # the trace has this event already
                self._event.code, self._event.reason = error.code, error.message
            else:
                self.engine.note_failed(self._event, self._call, error)
