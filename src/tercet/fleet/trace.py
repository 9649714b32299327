"""The trace of one request, with an event for each verb that its program called."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from tercet.decisions.cost import Costs, RouteDecision
from tercet.fleet.members import CallsInFlight, Counted, Member, until_lost
from tercet.protocol import (
    EngineError,
    EngineStatus,
    Output,
    OutputStream,
    Request,
    Reservation,
    Sent,
    TercetError,
    Usage,
    spans,
)
from tercet.protocol.spans import SpanContext, current_span, working_in
from tercet.protocol.trace import PickEvent, TraceEvent, VerbTrace
from tercet.settings import log_events

NEAR = 64
"""Difference in tokens that is ignored: block sizes may differ, and engines compute a prompt's last block again."""
LEAST_PICKS = 16
KEPT = 1 - 1 / 64
"""Factor for an engine's history at each further pick: about the last 64 picks decide."""
DRIFTS, AGREES = 0.25, 0.125
"""Missing shares of the predicted tokens: a drift begins at the first share, and ends below the second."""


@dataclass
class _Hits:
    """Weighted sums of tokens of an engine's latest picks; ``picks`` is their number, up to :data:`LEAST_PICKS`."""

    picks: int = 0
    predicted: float = 0.0
    missing: float = 0.0
    drifts: bool = False

    @property
    def share(self) -> float:
        return self.missing / self.predicted if self.predicted else 0.0

    @property
    def reason(self) -> str:
        return f"{self.share:.0%} of the predicted tokens of its latest picks were missing"


class PrefixHits:
    """Predicted and found tokens of each engine; a drift is logged when it begins and when it ends.

    Only missing tokens count: more tokens than predicted cost nothing.
    """

    def __init__(self) -> None:
        self._engines: dict[str, _Hits] = {}

    def found(self, engine: str, predicted: int, cached: int) -> None:
        """Record that a pick predicted ``predicted`` tokens of a prompt in the engine's cache, which had ``cached``."""
        if not predicted:
            return
        hits = self._engines.setdefault(engine, _Hits())
        hits.picks = min(hits.picks + 1, LEAST_PICKS)
        short = predicted - cached
        hits.predicted = KEPT * hits.predicted + predicted
        hits.missing = KEPT * hits.missing + (short if short > NEAR else 0)
        if hits.drifts:
            if hits.share < AGREES:
                hits.drifts = False
                log_events.PREFIX_AGREES.tell(engine=engine, reason=hits.reason)
        elif hits.picks == LEAST_PICKS and hits.share >= DRIFTS:
            hits.drifts = True
            log_events.PREFIX_DRIFT.tell(engine=engine, reason=hits.reason)

    @property
    def drifting(self) -> list[str]:
        """Engines whose caches have far fewer tokens than picks predict."""
        return [name for name, hits in self._engines.items() if hits.drifts]

    def forget(self, engine: str) -> None:
        """Drop the record of an engine that has left the fleet."""
        self._engines.pop(engine, None)


class Trace(VerbTrace):
    """The events of one request, and the latencies (seconds) that its client saw.

    ``decision`` is the choice of its route by :meth:`tercet.fleet.EngineFleet.route`, or None; ``picks`` are all other
    picks, and ``failed`` are the calls of verbs that failed.
    """

    ttft: float | None = None
    tpot: float | None = None
    decision: RouteDecision | None = None
    picks: list[PickEvent] = []
    failed: list[TraceEvent] = []


class Tracing(NamedTuple):
    """The recorders of one request's calls to engines.

    ``costs`` learn from the calls. ``on_generate`` is called with each generation that begins, ``on_failure`` with the
    name of the engine to blame and its error. ``calls_of`` returns the calls in flight of an engine by its name: a call
    fails when its engine, or the engine that receives its KV, is lost. ``require_exchange`` raises for a sender and a
    receiver that must not exchange KV. ``hits`` compares the cached tokens that picks predicted with those found.
    ``began`` is the start of the sequence by the costs' clock; ``place`` is its place in a distributed trace, or None.
    """

    trace: Trace
    costs: Costs
    on_generate: Callable[[Generation], object]
    on_failure: Callable[[str, TercetError], None]
    calls_of: Callable[[str], CallsInFlight]
    require_exchange: Callable[[str, str], None]
    hits: PrefixHits
    began: float
    place: SpanContext | None


@dataclass(slots=True)
class StartedCall:
    """A call of a verb in progress: the time of its start, and its place in a distributed trace.

    ``caller`` is the parent of that place; None if the call has no separate place.
    """

    started: float
    place: SpanContext | None = None
    caller: SpanContext | None = None


class TracedEngine:
    """An :class:`~tercet.protocol.Engine` for one request, which is ``counted`` there; it records calls in ``tracing``.

    ``predicted`` is the number of the prompt's tokens that its pick expected in its cache; None without a prediction.
    """

    def __init__(self, member: Member, counted: Counted, tracing: Tracing, predicted: int | None = None) -> None:
        self._member = member
        self.engine = member.engine
        self._counted = counted
        self.tracing = tracing
        self.costs = tracing.costs
        self._predicted = predicted

    def instead(self, member: Member) -> TracedEngine:
        """Return another engine for the same request, which counts there when that engine starts to generate."""
        return TracedEngine(member, self._counted, self.tracing)

    def generates(self, generation: Generation) -> None:
        """Record that a generation begins here."""
        self._counted.go_to(self._member)
        self.tracing.on_generate(generation)

    @property
    def calls(self) -> CallsInFlight:
        """The calls that wait for this engine."""
        return self._member.calls

    def failed(self, error: TercetError, receiver: str | None = None) -> None:
        """Report a failed call with the engine to blame, which is ``receiver`` if it did not accept the KV."""
        by_receiver = receiver if error.param == "kv_addr_info" else None
        self.tracing.on_failure(error.blames or by_receiver or self.name, error)

    @contextmanager
    def _watched(self, verb: str, receiver: str | None = None) -> Generator[StartedCall]:
        call = self.called()
        try:
            with working_in(call.place):
                yield call
        except TercetError as error:
            self.failed(error, receiver)
            self.note_failed(TraceEvent(verb, self.name, to=receiver or ""), call, error)
            raise

    def called(self) -> StartedCall:
        """Return a call that begins now; its caller is a move if the current task makes one, else the program."""
        started, place = self.costs.clock(), self.tracing.place
        if place is None or not place.sampled or spans.process.sink is None:  # no span of the call: use the caller's
            return StartedCall(started, place)
        here = current_span()
        caller = here if here is not None and here.trace_id == place.trace_id else place
        return StartedCall(started, caller.child(), caller)

    def note_failed(self, event: TraceEvent, call: StartedCall, error: TercetError) -> None:
        """Add a failed call to the trace."""
        event.code, event.reason = error.code, error.message
        self._fill(event, call)
        self.tracing.trace.failed.append(event)

    @property
    def name(self) -> str:
        """The engine's name."""
        return self.engine.name

    @asynccontextmanager
    async def prep_recv(self, request: Request, end: int | None = None) -> AsyncGenerator[Reservation]:
        async with AsyncExitStack() as stack:
            with self._watched("prep_recv") as call:
                async with until_lost(self.calls):
                    reservation = await stack.enter_async_context(self.engine.prep_recv(request, end))
            event = TraceEvent("prep_recv", self.name, end=reservation.end, cached=reservation.matched_len)
            self.found(event)
            self.note(event, call)
            yield reservation

    async def extend_recv(self, reservation: Reservation, request: Request, end: int | None = None) -> Reservation:
        with self._watched("extend_recv") as call:
            async with until_lost(self.calls):
                extended = await self.engine.extend_recv(reservation, request, end)
        self.note(TraceEvent("extend_recv", self.name, end=extended.end, cached=extended.matched_len), call)
        return extended

    async def remote_send(
        self, request: Request, to: Reservation, begin: int, end: int | None = None, sample: bool = False
    ) -> Sent:
        stop = to.end if end is None else end
        receiver = to.kv_addr_info.engine
        self.tracing.require_exchange(self.name, receiver)
        with (
            self._watched("remote_send", receiver) as call,
            self.costs.sending(self.name, request, begin, stop) as done,
        ):
            async with until_lost(self.calls, self.tracing.calls_of(receiver)):
                sent = await self.engine.remote_send(request, to, begin, end, sample)
            done(sent.usage)
        event = TraceEvent(
            "remote_send",
            self.name,
            begin=sent.begin,
            end=sent.end,
            cached=sent.usage.cached,
            computed=sent.usage.computed,
            bytes=sent.bytes,
            chunks=sent.chunks,
            transport=sent.transport,
            to=receiver,
        )
        self.found(event)
        self.note(event, call)
        return sent

    def start_generate(self, request: Request, begin: int = 0, output: Sequence[int] = ()) -> OutputStream:
        call = self.called()
        with working_in(call.place):
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
            event.predicted, self._predicted = min(self._predicted, event.end), None
            self.tracing.hits.found(self.name, event.predicted, event.cached)

    def note(self, event: TraceEvent, call: StartedCall) -> None:
        """Add the event of a call that has ended."""
        self._fill(event, call)
        self.tracing.trace.events.append(event)

    def _fill(self, event: TraceEvent, call: StartedCall) -> None:
        event.seconds = self.costs.clock() - call.started
        event.at = call.started - self.tracing.began
        if call.place is not None and call.caller is not None:
            event.span, event.parent = call.place.span_id, call.caller.span_id

    async def abort(self, seq_id: str) -> None:
        await self.engine.abort(seq_id)

    async def status(self) -> EngineStatus:
        return await self.engine.status()


class Generation:
    """One ``start_generate`` call of an engine, as an observer of its stream.

    ``request`` is the engine's request, ``tokens`` are all output tokens so far, including those of earlier attempts.
    ``begun`` turns true with the engine's first output. The trace records its start, and its failure is reported.
    """

    def __init__(
        self, engine: TracedEngine, request: Request, output: Sequence[int], event: TraceEvent, call: StartedCall
    ) -> None:
        self.engine = engine
        self.request = request
        self.tokens = list(output)
        self.begun = False
        self.stream: OutputStream | None = None
        self._event = event
        self._call = call
        self._calls = engine.calls
        self._noted: object = None

    @property
    def computed(self) -> int:
        """Number of tokens whose KV is certainly in the engine: 0 while it waits, then all tokens except the last."""
        return self.request.num_tokens + len(self.tokens) - 1 if self.begun else 0

    def on_start(self, stream: OutputStream) -> None:
        self.stream = stream
        self._call.started = self.engine.costs.clock()
        self._noted = self._calls.note(stream.give_up, lambda: not self.begun)
        self.engine.generates(self)

    def on_output(self, output: Output) -> None:
        if not self.begun:
            self._begin(output.usage)
        self.tokens += output.token_ids
        if output.finish_reason is not None and output.broken_off:
            error = EngineError(f"{self.engine.name} ended the sequence: {output.finish_reason}")
            self.engine.failed(error)

    def on_end(self, error: BaseException | None) -> None:
        self.stream = None
        self._calls.forget(self._noted)
        self._event.total = self.engine.costs.clock() - self._call.started
        if isinstance(error, TercetError):
            self.engine.failed(error)
            if self.begun:  # the trace has this event already
                self._event.code, self._event.reason = error.code, error.message
            else:
                self.engine.note_failed(self._event, self._call, error)

    def _begin(self, usage: Usage | None) -> None:
        self.begun = True
        if usage is not None:
            event = self._event
            event.cached, event.received, event.computed = usage.cached, usage.received, usage.computed
            self.engine.found(event)
            self.engine.note(event, self._call)
